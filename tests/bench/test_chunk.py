import json

from tests import launcher
from tests.backends import BACKENDS


def test_calls_in_chunks_are_measured_beside_whole_ones(tmp_path):
    command = [str(launcher.BIN / "mcrdl"), "bench", "chunk", "--ranks", "2", "--sizes", "64K,256K", "--chunks", "64K",
               "--small", "4K", "--rounds", "2", "--json", str(tmp_path / "x.json")]  # fmt: skip
    run = launcher.run(command)
    assert run.status == 0, run.output
    assert "all-to-all of 4096 bytes beside an all_reduce of 262144" in run.output
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    reaching = [name for name in BACKENDS if name != "oneccl"]
    for name in reaching:
        own = [row for row in rows if row["backend"] == name]
        assert [row.get("bytes") for row in own] == [65536, 262144, 65536, 262144, None]
        assert [list(row["ways"]) for row in own] == [["whole"], ["whole", "65536"]] * 2 + [["whole", "65536"]]
        assert all(row["wrong"] == 0 for row in own)
        assert own[-1]["ways"]["65536"]["first_us"]["median"] < own[-1]["ways"]["65536"]["both_us"]["median"]
