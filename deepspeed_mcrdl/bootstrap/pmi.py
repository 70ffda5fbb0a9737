"""PMI-1 for the MPI library of this process, answered from the job's store.

The library talks over a socketpair to a thread of its own process: nothing listens, so nothing needs a secret, and it
works on any number of hosts. What a rank waits for here it waits for in bounded time, and it hears of others' failures.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from deepspeed_mcrdl.errors import MCRDLError

_MAX_NAME = 256
_MAX_KEY = 64
_MAX_VALUE = 1024
_MAX_LINE = 4096
MOST_KEYS = 4096  # of one rank; MPICH puts about one for each of its ways to be reached
_POLL_S = (0.0005, 0.05)
_FINALIZE_ACK = b"cmd=finalize_ack rc=0\n"


class BootstrapError(MCRDLError):
    """MPI can't be had by this job; the text says why, on which rank, and what to do."""


class Meeting:
    """Where the ranks of a job meet: a corner of its store.

    Args:
        store: the job's store.
        name: the corner's name, the same on all ranks.
        rank: this rank.
        world_size: number of ranks.
        timeout_s: how long to wait for the other ranks.
    """

    def __init__(self, store: Store, name: str, rank: int, world_size: int, timeout_s: float) -> None:
        self.store = PrefixStore(name, store)
        self.rank = rank
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._barriers = 0

    def exchange(self, topic: str, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. Values go through JSON."""
        keys = [f"{topic}/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], json.dumps(value))
        self._wait(keys, topic)
        return [json.loads(text) for text in self.store.multi_get(keys)]

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self._barriers += 1
        name = f"barrier/{self._barriers}"
        if self.store.add(f"{name}/arrived", 1) == self.world_size:
            self.store.set(f"{name}/open", "1")
        self._wait([f"{name}/open"], "a barrier of MPI's start-up")

    def fail(self, message: str) -> None:
        """Tell the other ranks to give up; the first message stays."""
        if not self.store.check(["failed"]):
            self.store.set("failed", message)

    def raise_if_failed(self) -> None:
        """Raise what another rank has told by `fail`."""
        if self.store.check(["failed"]):
            raise BootstrapError(self.store.get("failed").decode())

    def _wait(self, keys: Sequence[str], what: str) -> None:
        # Polled, because a wait of the store's own that times out writes warnings to stderr.
        deadline = time.monotonic() + self._timeout_s
        pause, longest = _POLL_S
        while not self.store.check(list(keys)):
            self.raise_if_failed()
            if time.monotonic() > deadline:
                missing = [key.rpartition("/")[2] for key in keys if not self.store.check([key])]
                who = f"rank {', '.join(missing)}" if len(keys) > 1 else "another rank"
                raise BootstrapError(f"{who} did not come to {what} within {self._timeout_s:g} s; see its output")
            time.sleep(pause)
            pause = min(2 * pause, longest)


class Responder:
    """Answers PMI-1 for one rank, in a thread.

    Args:
        meeting: where the ranks meet.
        kvs: name of the key-value space, unique to the job: MPI names its shared memory after it.
        hosts: host name of each rank.
    """

    def __init__(self, meeting: Meeting, kvs: str, hosts: Sequence[str]) -> None:
        self.error: Exception | None = None
        self._meeting = meeting
        self._kvs = kvs
        self._put_keys: set[str] = set()
        self._known = {"PMI_process_mapping": process_mapping(hosts)}
        self._commands: dict[str, Callable[[dict[str, str]], str]] = {
            "init": lambda _: "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
            "get_maxes": lambda _: f"cmd=maxes kvsname_max={_MAX_NAME} keylen_max={_MAX_KEY} vallen_max={_MAX_VALUE}",
            "get_appnum": lambda _: "cmd=appnum appnum=0",
            "get_my_kvsname": lambda _: f"cmd=my_kvsname kvsname={self._kvs}",
            "get_universe_size": lambda _: f"cmd=universe_size size={meeting.world_size}",
            "put": self._put,
            "get": self._get,
            "barrier_in": self._barrier,
        }

    def start(self) -> int:
        """Start the thread and return the file descriptor to talk to it, which belongs to the caller."""
        ours, theirs = socket.socketpair()
        # Detached: MPI reads from its end until the process is gone, later than Python would close ours.
        self._fd = ours.detach()
        threading.Thread(target=self.serve, args=(self._fd,), name="mcrdl-pmi", daemon=True).start()
        return theirs.detach()

    def serve(self, fd: int) -> None:
        """Answer what is asked on the socket `fd` until MPI says goodbye or closes it."""
        try:
            with open(fd, "rb", closefd=False) as questions, open(fd, "wb", buffering=0, closefd=False) as answers:
                while line := questions.readline(_MAX_LINE):
                    if line.endswith(b"\n"):
                        answer = self.answer(line)
                    else:
                        _skip_line(questions)
                        answer = b"cmd=error rc=-1 msg=line_too_long\n"
                    answers.write(answer)
                    if answer == _FINALIZE_ACK:
                        return
        except (BrokenPipeError, ConnectionResetError):
            pass  # MPI has closed its end
        except Exception as error:
            # Left without an answer MPI waits, and whoever started it can raise; told of an error it ends the process.
            self.error = error

    def answer(self, line: bytes) -> bytes:
        """Return the answer to one line."""
        words = [word.partition("=") for word in line.decode("ascii", "replace").split()]
        arguments = {key: value for key, _, value in words}
        command = arguments.get("cmd", "")
        if command == "finalize":
            return _FINALIZE_ACK
        if command not in self._commands:
            return b"cmd=error rc=-1 msg=unknown_command\n"
        return f"{self._commands[command](arguments)}\n".encode("ascii", "replace")

    def farewell(self) -> None:
        """Answer MPI's goodbye ahead: MPICH 5 says it when the process exits, after Python's threads are gone."""
        with contextlib.suppress(OSError), socket.socket(fileno=self._fd) as ours:
            try:
                ours.sendall(_FINALIZE_ACK)
            finally:
                ours.detach()

    def _put(self, arguments: dict[str, str]) -> str:
        key, value = arguments.get("key", ""), arguments.get("value", "")
        if not key or len(key) > _MAX_KEY or len(value) > _MAX_VALUE or arguments.get("kvsname") != self._kvs:
            return "cmd=put_result rc=-1 msg=bad_put"
        if key not in self._put_keys and len(self._put_keys) >= MOST_KEYS:
            return "cmd=put_result rc=-1 msg=too_many_keys"
        self._put_keys.add(key)
        self._meeting.store.set(f"kvs/{key}", value)
        return "cmd=put_result rc=0 msg=success"

    def _get(self, arguments: dict[str, str]) -> str:
        key = arguments.get("key", "")
        value = self._known.get(key)
        if value is None and arguments.get("kvsname") == self._kvs and self._meeting.store.check([f"kvs/{key}"]):
            value = self._meeting.store.get(f"kvs/{key}").decode()
        # An overlong mapping (many hosts, no pattern) is left to MPI, which then compares host names itself.
        if value is None or len(value) > _MAX_VALUE:
            return "cmd=get_result rc=-1 msg=key_not_found"
        return f"cmd=get_result rc=0 msg=success value={value}"

    def _barrier(self, arguments: dict[str, str]) -> str:
        self._meeting.barrier()
        return "cmd=barrier_out rc=0"


def process_mapping(hosts: Sequence[str]) -> str:
    """Return PMI's ``(vector,(first_node,nodes,ppn),...)`` for the host name of each rank."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    blocks: list[tuple[int, int, int]] = []
    for host, members in itertools.groupby(hosts):
        node, ppn = numbers[host], len(list(members))
        if blocks and node == blocks[-1][0] + blocks[-1][1] and ppn == blocks[-1][2]:
            blocks[-1] = (blocks[-1][0], blocks[-1][1] + 1, ppn)
        else:
            blocks.append((node, 1, ppn))
    return f"(vector,{','.join(f'({first},{nodes},{ppn})' for first, nodes, ppn in blocks)})"


def _skip_line(stream: Any) -> None:
    while (rest := stream.readline(_MAX_LINE)) and not rest.endswith(b"\n"):
        pass
