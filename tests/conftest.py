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
def ranks() -> Iterator[Callable[..., Ranks]]:
    """Return (world size, hosts of the ranks) -> Ranks, started at first use and again where a test has broken them."""
    started: dict[tuple[int, str], Ranks] = {}

    def get(world_size: int, hosts: str = "") -> Ranks:
        key = world_size, hosts
        if key not in started or not started[key].alive:
            started[key] = Ranks(world_size, hosts)
        return started[key]

    yield get
    for pool in started.values():
        pool.close()
