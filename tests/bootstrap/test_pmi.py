"""The PMI-1 responder, spoken to as an MPI library would and as one never would."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from deepspeed_mcrdl.bootstrap.pmi import BootstrapError, Meeting, Responder, process_mapping

_names = itertools.count()


class Client:
    """The MPI library's end of the line."""

    def __init__(self, responder: Responder) -> None:
        self.socket = socket.socket(fileno=responder.start())
        self.socket.settimeout(10)
        self.answers = self.socket.makefile("rb")

    def ask(self, line: bytes) -> str:
        self.socket.sendall(line + b"\n")
        return self.answers.readline().decode().strip()

    def close(self) -> None:
        self.answers.close()
        self.socket.close()


@pytest.fixture(scope="module")
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def client(store: HashStore) -> Iterator[Client]:
    client = Client(Responder(Meeting(store, f"one/{next(_names)}", 0, 1, timeout_s=5), "space", ["h"]))
    yield client
    client.close()


def two_ranks(store: HashStore, timeout_s: float = 5) -> tuple[list[Meeting], list[Responder]]:
    name = f"two/{next(_names)}"
    meetings = [Meeting(store, name, rank, 2, timeout_s) for rank in range(2)]
    return meetings, [Responder(meeting, "space", ["a", "b"]) for meeting in meetings]


@pytest.mark.parametrize(
    ("hosts", "mapping"),
    [
        (["a"], "(vector,(0,1,1))"),
        (["a", "a"], "(vector,(0,1,2))"),
        (["a", "b"], "(vector,(0,2,1))"),
        (["a", "a", "b", "b"], "(vector,(0,2,2))"),
        (["a", "a", "b"], "(vector,(0,1,2),(1,1,1))"),
        (["a", "b", "a", "b"], "(vector,(0,2,1),(0,2,1))"),
        (["b", "a", "a", "b"], "(vector,(0,1,1),(1,1,2),(0,1,1))"),
    ],
)
def test_process_mapping(hosts: list[str], mapping: str) -> None:
    assert process_mapping(hosts) == mapping


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_process_mapping_places_every_rank(hosts: list[str]) -> None:
    placed: list[int] = []
    for block in process_mapping(hosts).removeprefix("(vector,(").removesuffix("))").split("),("):
        first, nodes, ppn = map(int, block.split(","))
        placed += [node for node in range(first, first + nodes) for _ in range(ppn)]
    assert placed == [list(dict.fromkeys(hosts)).index(host) for host in hosts]


def test_start_of_a_library(client: Client) -> None:
    assert client.ask(b"cmd=init pmi_version=1 pmi_subversion=1").startswith("cmd=response_to_init")
    assert client.ask(b"cmd=get_maxes") == "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024"
    assert client.ask(b"cmd=get_appnum") == "cmd=appnum appnum=0"
    assert client.ask(b"cmd=get_my_kvsname") == "cmd=my_kvsname kvsname=space"
    assert client.ask(b"cmd=get_universe_size") == "cmd=universe_size size=1"
    assert client.ask(b"cmd=get kvsname=space key=PMI_process_mapping").endswith("value=(vector,(0,1,1))")
    assert client.ask(b"cmd=get kvsname=space key=absent") == "cmd=get_result rc=-1 msg=key_not_found"
    assert client.ask(b"cmd=barrier_in") == "cmd=barrier_out rc=0"
    assert client.ask(b"cmd=finalize") == "cmd=finalize_ack rc=0"


def test_ranks_read_what_others_put_before_a_barrier(store: HashStore) -> None:
    clients = [Client(responder) for responder in two_ranks(store)[1]]
    for rank, client in enumerate(clients):
        put = f"cmd=put kvsname=space key=card-{rank} value=tcp=1;rank={rank}"
        assert client.ask(put.encode()) == "cmd=put_result rc=0 msg=success"
    answers = [""] * 2
    for _ in range(3):
        threads = [
            threading.Thread(target=lambda r=rank: answers.__setitem__(r, clients[r].ask(b"cmd=barrier_in")))
            for rank in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == ["cmd=barrier_out rc=0"] * 2
    for rank, client in enumerate(clients):
        got = client.ask(f"cmd=get kvsname=space key=card-{1 - rank}".encode())
        assert got == f"cmd=get_result rc=0 msg=success value=tcp=1;rank={1 - rank}"
        client.close()


@pytest.mark.parametrize(
    "line",
    [
        b"cmd=spawn nprocs=2",
        b"cmd=put kvsname=other key=k value=v",
        b"cmd=put kvsname=space key= value=v",
        b"cmd=put kvsname=space key=" + b"k" * 65 + b" value=v",
        b"cmd=put kvsname=space key=k value=" + b"v" * 1025,
        b"cmd=get kvsname=other key=k",
        b"x" * 100_000,
        b"",
    ],
)
def test_what_is_wrong_is_answered_with_an_error(client: Client, line: bytes) -> None:
    assert "rc=-1" in client.ask(line)
    assert client.ask(b"cmd=get_appnum") == "cmd=appnum appnum=0"


# Hypothesis also tries words of the source; after a finalize the library has nothing more to say.
_garbage = st.one_of(
    st.binary(max_size=200),
    st.text("cmd=putge kvsname=space key value", max_size=60).map(str.encode),
).filter(lambda line: b"finalize" not in line)


@given(st.lists(_garbage))
@settings(max_examples=50, deadline=None)
def test_garbage_is_survived(store: HashStore, lines: list[bytes]) -> None:
    responder = Responder(Meeting(store, f"fuzz/{next(_names)}", 0, 1, timeout_s=5), "space", ["h"])
    client = Client(responder)
    for line in lines:
        answer = client.ask(line.replace(b"\n", b" "))
        assert answer.startswith("cmd=")
    assert client.ask(b"cmd=finalize") == "cmd=finalize_ack rc=0"
    assert responder.error is None
    client.close()


def test_a_library_that_leaves_without_a_word_ends_the_thread(store: HashStore) -> None:
    before = threading.active_count()
    client = Client(Responder(Meeting(store, "left", 0, 1, timeout_s=5), "space", ["h"]))
    client.close()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_a_farewell_is_there_before_it_is_asked_for(store: HashStore) -> None:
    responder = Responder(Meeting(store, "farewell", 0, 1, timeout_s=5), "space", ["h"])
    client = Client(responder)
    responder.farewell()
    assert client.answers.readline() == b"cmd=finalize_ack rc=0\n"
    client.close()
    responder.farewell()


def test_a_barrier_that_a_rank_does_not_come_to_becomes_an_error(store: HashStore) -> None:
    responder = two_ranks(store, timeout_s=0.3)[1][0]
    client = Client(responder)
    client.socket.settimeout(1)
    with pytest.raises(TimeoutError):
        client.ask(b"cmd=barrier_in")
    assert isinstance(responder.error, BootstrapError)
    assert "did not come" in str(responder.error)


def test_a_failure_reaches_a_rank_that_waits(store: HashStore) -> None:
    meetings, _ = two_ranks(store, timeout_s=20)
    threading.Timer(0.2, meetings[1].fail, ["rank 1: no room"]).start()
    began = time.monotonic()
    with pytest.raises(BootstrapError, match="rank 1: no room"):
        meetings[0].barrier()
    assert time.monotonic() - began < 5


def test_the_first_failure_stays(store: HashStore) -> None:
    meetings, _ = two_ranks(store)
    meetings[0].fail("first")
    meetings[1].fail("second")
    with pytest.raises(BootstrapError, match="first"):
        meetings[1].raise_if_failed()


def test_an_exchange_names_the_rank_that_is_missing(store: HashStore) -> None:
    meeting = Meeting(store, "missing", 1, 3, timeout_s=0.2)
    with pytest.raises(BootstrapError, match="rank 0, 2 did not come to a test"):
        meeting.exchange("a test", None)
