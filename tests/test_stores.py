import threading
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from deepspeed_mcrdl.errors import CallTimeoutError
from deepspeed_mcrdl.stores import Patient


@pytest.fixture
def connections():
    """One connection for each of two ranks."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    return server, TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=20))


def test_threads_that_wait_crosswise_do_not_hold_each_other_up(connections):
    # Each rank waits in one thread for what the other sets in another thread, by one connection a rank. In a plain
    # TCPStore the waits would stand before the sets on both ranks, for ever.
    waiting = threading.Barrier(4)
    found = []

    def wait(store, key):
        waiting.wait()
        found.append(store.get(key))

    def set_later(store, key):
        waiting.wait()
        threading.Event().wait(0.2)
        store.set(key, "here")

    stores = [Patient(connection) for connection in connections]
    threads = [
        threading.Thread(target=act, args=(store, key))
        for store, mine, others in ((stores[0], "a", "b"), (stores[1], "b", "a"))
        for act, key in ((set_later, mine), (wait, others))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == [b"here"] * 2


def test_gloo_meets_in_it(connections):
    stores = [Patient(connection) for connection in connections]
    made = []

    def make(rank):
        made.append(ProcessGroupGloo(PrefixStore("gloo", stores[rank]), rank, 2, timedelta(seconds=10)))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert sorted(group.rank() for group in made) == [0, 1]


def test_a_key_that_never_comes_ends_the_wait(connections):
    with pytest.raises(CallTimeoutError, match=r"no rank has set never in the job's store within 0\.05 s"):
        Patient(connections[0]).wait(["never"], timedelta(seconds=0.05))
