"""Segments of shared memory that the ranks of a host make together, and whether one of these ranks has died."""

from __future__ import annotations

import atexit
import errno
import itertools
import json
import mmap
import os
import secrets
import select
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from torch._C._distributed_c10d import Store

from deepspeed_mcrdl.errors import MCRDLError

FOLDER = Path("/dev/shm")


def make_segment(
    store: Store, rank: int, key: str, ranks: Sequence[int], size: Callable[[int], int], choices: Sequence[int]
) -> tuple[int, int]:
    """Make a segment of shared memory with `ranks`; all of them call it.

    Args:
        store: the job's store, in which waits hold up nobody.
        rank: this process's global rank.
        key: a name that all of them know it by.
        ranks: global ranks on this host.
        size: choice -> bytes of the segment.
        choices: what to try, as long as there is no room, in this order.

    Returns:
        A file descriptor of it, and the choice that was taken.
    """
    if rank != ranks[0]:
        told = json.loads(store.get(key))
        if "error" in told:
            raise MCRDLError(told["error"])
        try:
            return os.open(told["path"], os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW), told["choice"]
        except FileNotFoundError:
            raise MCRDLError(f"rank {ranks[0]} has the same host name, but another {FOLDER}") from None
        finally:
            store.set(f"{key}/{rank}", "has tried to open it")
    path = FOLDER / f"mcrdl_{secrets.token_hex(12)}"
    remove = partial(path.unlink, missing_ok=True)
    atexit.register(remove)  # a process that ends while a thread still waits here
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        choice = allocate(descriptor, size, choices)
        store.set(key, json.dumps({"path": str(path), "choice": choice}))
        store.wait([f"{key}/{other}" for other in ranks[1:]])
    except Exception as error:
        store.set(key, json.dumps({"error": str(error)}))
        os.close(descriptor)
        raise
    finally:
        remove()  # from now on it lives as long as the processes that have it open
        atexit.unregister(remove)
    return descriptor, choice


def allocate(descriptor: int, size: Callable[[int], int], choices: Sequence[int]) -> int:
    """Give a file room for the first of `choices` for which there is some, and return it."""
    for choice in choices:
        try:
            os.posix_fallocate(descriptor, 0, size(choice))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            os.ftruncate(descriptor, 0)
        else:
            return choice
    free = os.statvfs(FOLDER)
    raise MCRDLError(
        f"{FOLDER} has {free.f_bavail * free.f_frsize} bytes free, where {size(choices[-1])} are needed: remount it "
        "larger (docker run --shm-size=1g), or leave the backend shm out"
    )


def halves(most: int, least: int) -> list[int]:
    """Return `most`, its half, and so on, down to `least`."""
    sizes = itertools.takewhile(lambda size: size > least, (most >> step for step in range(64)))
    return [*sizes, least]


class Peers:
    """The other ranks on this host, and whether one has ended without a word.

    Args:
        roster: shared memory with a byte for each place; 1: the rank has closed the backend.
        ranks: global ranks by place.
        place: this rank's place.
        pids: process ids by place, 0 where they mean nothing here.
    """

    def __init__(self, roster: mmap.mmap, ranks: Sequence[int], place: int, pids: Sequence[int]) -> None:
        self._roster = roster
        self._place = place
        self._places = {rank: index for index, rank in enumerate(ranks)}
        self._watched: dict[int, int] = {}
        self._poll = select.poll()
        self._lock = threading.Lock()  # a poll object serves one thread at a time
        for index, pid in enumerate(pids):
            if index == place or not pid:
                continue
            try:
                descriptor = os.pidfd_open(pid)
            except OSError:
                continue  # an old kernel, or it has ended: the time limit remains
            self._watched[descriptor] = index
            self._poll.register(descriptor, select.POLLIN)

    def gone(self, ranks: Sequence[int]) -> int | None:
        """Return one of `ranks` whose process has ended without closing the backend."""
        with self._lock:
            ended = {self._watched[descriptor] for descriptor, _ in self._poll.poll(0)}
        return next((r for r in ranks if (i := self._places[r]) in ended and not self._roster[i]), None)

    def close(self) -> None:
        """Tell the others that this rank ends in order."""
        self._roster[self._place] = 1
        with self._lock:
            for descriptor in self._watched:
                os.close(descriptor)
            self._watched.clear()
            self._poll = select.poll()
