"""The job's store: a second connection to it, and an exchange of values between all ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Store

from deepspeed_mcrdl.errors import CallTimeoutError

_POLL_S = 0.002


def second_connection(store: Store) -> Store:
    """Return another connection to `store`, for callers that never wait in it.

    A connection serves one call at a time, so that whoever waits for a key holds up all others. There is one more for
    each process and no others: torch looks up each new connection's name, for seconds where name service is slow.
    """
    clone: Store = store.clone()  # type: ignore[attr-defined]
    return clone


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
    deadline = time.monotonic() + timeout_s
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = [key.rpartition("/")[2] for key in keys if not store.check([key])]
            who = "another rank" if missing == ["all"] else f"rank {', '.join(missing)}"
            raise CallTimeoutError(f"{who} did not come to the start ({what}) within {timeout_s:g} s; see its output")
        time.sleep(_POLL_S)
