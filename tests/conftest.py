"""Fixtures: real ranks that stay up for the whole run, one set for each world size."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Return world size -> Ranks, started at first use and again after a test has left them unusable."""
    started: dict[int, Ranks] = {}

    def get(world_size: int) -> Ranks:
        if world_size not in started or not started[world_size].alive:
            started[world_size] = Ranks(world_size)
        return started[world_size]

    yield get
    for pool in started.values():
        pool.close()
