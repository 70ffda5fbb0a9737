import json
import subprocess
import sys

import pytest

from tests.backends import BACKENDS


@pytest.mark.skipif("shm" not in BACKENDS, reason="shm is not usable here")
def test_the_floor_is_printed_beside_calls_with_right_results(tmp_path):
    path = tmp_path / "floor.json"
    command = [sys.executable, "-m", "deepspeed_mcrdl", "bench", "floor", "--ranks", "2", "--sizes", "256,300K"]
    ran = subprocess.run(
        [*command, "--iterations", "5", "--json", str(path)], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [row["bytes"] for row in rows] == [256, 300 * 1024]
    for row in rows:
        assert row["wrong"] == 0
        assert row["all_reduce_ratio"] == row["all_reduce_us"] / row["floor_us"]
        assert str(row["bytes"]) in ran.stdout
