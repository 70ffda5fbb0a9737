import json

import pytest

from tests import launcher
from tests.backends import BACKENDS


@pytest.mark.skipif("shm" not in BACKENDS, reason="shm is not usable here")
def test_the_floor_is_printed_beside_calls_with_right_results(tmp_path):
    command = [str(launcher.BIN / "mcrdl"), "bench", "floor", "--ranks", "2", "--sizes", "256,300K"]
    run = launcher.run([*command, "--iterations", "5", "--json", str(tmp_path / "x.json")])
    assert run.status == 0, run.output
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [row["bytes"] for row in rows] == [256, 300 * 1024]
    for row in rows:
        assert row["wrong"] == 0
        assert row["all_reduce_ratio"] == row["all_reduce_us"] / row["floor_us"]
        assert str(row["bytes"]) in run.output
