"""The job's store: a connection of one's own, and an exchange of values between all ranks."""

from __future__ import annotations

import json
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store


def connection(store: Store, prefix: str) -> Store:
    """Return another connection to `store`, in a corner of it: a store serves one call at a time, and some are long."""
    clone: Store = PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
    return clone


def exchange(store: Store, key: str, rank: int, world_size: int, value: Any) -> list[Any]:
    """Return every rank's `value` (JSON), in rank order; a collective of the world over the job's store."""
    prefix = f"exchange/{key}"
    store.set(f"{prefix}/{rank}", json.dumps(value))
    if rank == 0:
        everything = [json.loads(store.get(f"{prefix}/{r}")) for r in range(world_size)]
        store.set(f"{prefix}/all", json.dumps(everything))
        return everything
    result: list[Any] = json.loads(store.get(f"{prefix}/all"))
    return result
