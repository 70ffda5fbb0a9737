import json

from tests import launcher
from tests.backends import BACKENDS


def test_fused_calls_are_measured_beside_the_same_calls_apart(tmp_path):
    command = [str(launcher.BIN / "mcrdl"), "bench", "fusion", "--ranks", "2", "--sizes", "64,4K", "--calls", "20",
               "--rounds", "3", "--json", str(tmp_path / "x.json")]  # fmt: skip
    run = launcher.run(command)
    assert run.status == 0, run.output
    assert "pay" in run.output
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    wanted = [(name, size) for name in BACKENDS for size in (64, 4096)]
    assert [(row["backend"], row["bytes"]) for row in rows] == wanted
    for row in rows:
        assert row["wrong"] == 0
        assert row["operations"] < 5
        assert row["ratio"] == row["apart_us"] / row["fused_us"]
