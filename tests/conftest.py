"""Fixtures: real ranks that stay up for the whole run, one set for each world size."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from deepspeed_mcrdl.routing.shelf import ENVIRONMENT
from tests.ranks import Ranks


@pytest.fixture(scope="session", autouse=True)
def no_tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let no tuning table of this machine, the user's or a shipped one, have a say in the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT, str(tmp_path_factory.mktemp("tables")))
        yield


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
