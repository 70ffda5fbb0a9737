"""Whatever comes in on the MPI library's end: one answer for each line, bounded memory, nothing left behind."""

import os
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_mcrdl.bootstrap.pmi import MOST_KEYS, Meeting, Responder
from tests.programs import use

RIGHT = b"cmd=get kvsname=job key=PMI_process_mapping\n"
WORDS = ("cmd", "key", "value", "kvsname", "rc", "", "pmi_version", "=", "put", "get", "barrier_in", "init", "job")
COMMANDS = (
    "put",
    "get",
    "init",
    "get_maxes",
    "get_appnum",
    "get_my_kvsname",
    "get_universe_size",
    "barrier_in",
    "abort",
)


def responder(world_size=1, timeout_s=5.0):
    return Responder(Meeting(dist.HashStore(), "fuzz", 0, world_size, timeout_s), "job", ["host"] * world_size)


bytes_of_any_kind = st.binary(max_size=300)
pairs = st.lists(st.tuples(st.sampled_from(WORDS), st.text(max_size=40)), max_size=8)
nearly_right = st.builds(
    lambda command, rest: f"cmd={command} {' '.join(f'{key}={value}' for key, value in rest)}".encode(),
    st.sampled_from(COMMANDS),
    pairs,
)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.lists(st.one_of(bytes_of_any_kind, nearly_right), max_size=5))
def test_every_line_has_one_answer_and_the_next_right_question_is_answered(lines):
    ours = responder()
    for line in lines:
        answer = ours.answer(line.replace(b"\n", b" ") + b"\n")
        assert answer.endswith(b"\n")
        assert answer.count(b"\n") == 1
        assert len(answer) < 5000
    assert ours.answer(RIGHT) == b"cmd=get_result rc=0 msg=success value=(vector,(0,1,1))\n"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.one_of(bytes_of_any_kind, nearly_right.map(lambda line: line + b"\n")), max_size=6))
def test_a_connection_that_breaks_off_anywhere_ends_its_thread(parts):
    ours = responder()
    near, far = socket.socketpair()
    thread = threading.Thread(target=ours.serve, args=(near.fileno(),), daemon=True)
    thread.start()
    far.sendall(b"".join(parts))
    far.close()
    thread.join(5)
    assert not thread.is_alive()
    near.close()


def test_a_peer_that_reads_no_answers_blocks_nobody_else():
    ours = responder()
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    thread = threading.Thread(target=ours.serve, args=(near.fileno(),), daemon=True)
    thread.start()
    far.settimeout(0.2)
    with pytest.raises(TimeoutError):
        far.sendall(RIGHT * 100_000)
    assert responder().answer(RIGHT)  # another one is not held up
    far.close()
    thread.join(5)
    assert not thread.is_alive()
    near.close()


def test_a_rank_can_put_a_bounded_number_of_keys():
    ours = responder()
    for number in range(MOST_KEYS):
        assert b" rc=0 " in ours.answer(b"cmd=put kvsname=job key=k%d value=v\n" % number)
    assert b"rc=-1" in ours.answer(b"cmd=put kvsname=job key=one_more value=v\n")
    assert b"rc=-1" in ours.answer(b"cmd=get kvsname=job key=one_more\n")
    assert b"value=v" in ours.answer(b"cmd=get kvsname=job key=k7\n")


def test_keys_of_another_job_are_not_seen():
    store = dist.HashStore()
    mine = Responder(Meeting(store, "one", 0, 1, 5), "job_1", ["host"])
    other = Responder(Meeting(store, "two", 0, 1, 5), "job_2", ["host"])
    assert b" rc=0 " in other.answer(b"cmd=put kvsname=job_2 key=card value=secret\n")
    for kvs in (b"job_1", b"job_2"):
        assert b"rc=-1" in mine.answer(b"cmd=get kvsname=%s key=card\n" % kvs)


def test_a_barrier_that_a_rank_does_not_reach_ends_in_time():
    ours = responder(world_size=2, timeout_s=0.3)
    near, far = socket.socketpair()
    thread = threading.Thread(target=ours.serve, args=(near.fileno(),), daemon=True)
    thread.start()
    far.sendall(b"cmd=barrier_in\n")
    began = time.monotonic()
    thread.join(5)
    assert not thread.is_alive()
    assert time.monotonic() - began < 2
    assert "did not come to a barrier" in str(ours.error)
    near.close()
    far.close()


def test_a_job_after_the_other_leaves_no_descriptor_and_no_thread():
    def round_trip():
        ours = responder()
        with socket.socket(fileno=ours.start()) as far:
            far.sendall(b"cmd=init pmi_version=1 pmi_subversion=1\n" + RIGHT + b"cmd=finalize\n")
            received = b""
            while b"finalize_ack" not in received:
                received += far.recv(4096)
        os.close(ours._fd)  # MPI reads from its end until the process is gone, so that ours stays open

    round_trip()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        round_trip()
    assert len(os.listdir("/proc/self/fd")) == before
    deadline = time.monotonic() + 5
    while any(thread.name == "mcrdl-pmi" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _listening():
    """Return the TCP ports that this process listens on."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        inodes.add(target.removeprefix("socket:[").rstrip("]"))
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as file:
            for line in list(file)[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    address, _, port = fields[1].rpartition(":")
                    ports.add((address, int(port, 16)))
    return ports


def _listeners_with(backends):
    cdb = use({"default": backends[0]})
    cdb.all_reduce(torch.ones(4))
    return sorted(_listening()), os.environ.get("MASTER_PORT")


def test_mpi_under_the_plain_launcher_listens_for_no_stranger(ranks):
    # The start-up protocol runs over a socketpair; what listens is torch's store on rank 0 and gloo, on loopback.
    for rank, (ports, store) in enumerate(ranks(2).run(_listeners_with, ["mpi"])):
        others = [(address, port) for address, port in ports if port != int(store)]
        assert all(address.endswith(("0100007F", "0000000001000000")) for address, _ in others), (rank, ports)
