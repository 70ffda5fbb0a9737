"""The job's store: waiting in it without holding it up, and exchanging values between all ranks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from deepspeed_mcrdl.errors import CallTimeoutError

_POLL_S = 0.002
_thread = threading.local()


def second_connection(store: Store) -> Store:
    """Return another connection to `store`, for callers that never wait in it.

    A connection serves one call at a time, so that whoever waits for a key holds up all others. There is one more for
    each process and no others: torch looks up each new connection's name, for seconds where name service is slow.
    """
    clone: Store = store.clone()  # type: ignore[attr-defined]
    return clone


def waits_end_with(given_up: threading.Event) -> None:
    """Let the waits of this thread in a Patient end with an error when `given_up` is set."""
    _thread.given_up = given_up


class Patient(Store):
    """A store whose waits leave its connection to other threads: they ask again and again.

    Two threads of a rank that wait in one connection can wait for each other through the threads of another rank: the
    one that would set the key stands behind the one that waits for another.

    Whoever gives it to torch keeps it: torch holds the C++ half alone, which can do nothing without this one.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit: timedelta = timeout or self._store.timeout  # type: ignore[attr-defined]
        limit_s = limit.total_seconds()
        if not _appeared(self._store, keys, limit_s):
            raise CallTimeoutError(f"no rank has set {', '.join(keys)} in the job's store within {limit_s:g} s")

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)


def exchange(store: Store, key: str, rank: int, world_size: int, value: Any, timeout_s: float) -> list[Any]:
    """Return every rank's `value` (JSON), in rank order; a collective of the world over the job's store.

    Raises:
        CallTimeoutError: after `timeout_s`; on rank 0 it names the missing ranks.
    """
    prefix = f"exchange/{key}"
    store.set(f"{prefix}/{rank}", json.dumps(value))
    if rank == 0:
        keys = [f"{prefix}/{r}" for r in range(world_size)]
        _wait(store, keys, key, timeout_s)
        everything = [json.loads(text) for text in store.multi_get(keys)]
        store.set(f"{prefix}/all", json.dumps(everything))
        return everything
    _wait(store, [f"{prefix}/all"], key, timeout_s)
    result: list[Any] = json.loads(store.get(f"{prefix}/all"))
    return result


def from_rank_0(store: Store, key: str, rank: int, make: Callable[[], Any], timeout_s: float) -> Any:
    """Return on every rank what `make` returns on rank 0 (JSON).

    Raises:
        CallTimeoutError: after `timeout_s` without it.
    """
    name = f"exchange/{key}/all"
    if rank == 0:
        value = make()
        store.set(name, json.dumps(value))
        return value
    _wait(store, [name], key, timeout_s)
    return json.loads(store.get(name))


def _wait(store: Store, keys: list[str], what: str, timeout_s: float) -> None:
    if not _appeared(store, keys, timeout_s):
        missing = [key.rpartition("/")[2] for key in keys if not store.check([key])]
        who = "another rank" if missing == ["all"] else f"rank {', '.join(missing)}"
        raise CallTimeoutError(f"{who} did not come to the start ({what}) within {timeout_s:g} s; see its output")


def _appeared(store: Store, keys: list[str], timeout_s: float) -> bool:
    """Return whether all `keys` are there before `timeout_s` has passed, or this thread's waits have to end."""
    deadline = time.monotonic() + timeout_s
    given_up: threading.Event | None = getattr(_thread, "given_up", None)
    while not store.check(keys):
        if time.monotonic() > deadline or (given_up is not None and given_up.is_set()):
            return False
        time.sleep(_POLL_S)
    return True
