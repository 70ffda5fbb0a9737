import json

from tests import launcher
from tests.test_hosts import MCRDL, hosts, on_a_cluster


def _bench(*options):
    return launcher.run([str(launcher.BIN / "mcrdl"), "bench", "compression", "--ranks", "2", *options])


def test_predicted_and_measured_stand_side_by_side_with_what_is_lost(tmp_path):
    run = _bench(
        *("--codecs", "int8,onebit,lossless", "--sizes", "64K", "--seconds", "0.2"),
        *("--json", str(tmp_path / "x.json")),
    )
    assert run.status == 0, run.output
    rows = {row["codec"]: row for row in json.loads((tmp_path / "x.json").read_text())["rows"]}
    assert list(rows) == ["int8", "onebit", "lossless"]
    for row in rows.values():
        assert row["plain_wire_bytes"] == 65536
        assert row["error"] <= row["bound"] + 1e-6
        assert min(row[key] for key in ("predicted_us", "measured_us", "plain_predicted_us", "plain_us")) > 0
        assert row["plan"] in ("on", "off", "off, measured")
        assert row["wrong"] == 0
    # a byte an element and a scale for each block of 512; a bit an element
    assert rows["int8"]["wire_bytes"] == 16384 + 2 * 16 * 4
    assert rows["onebit"]["wire_bytes"] == 2048 + 2 * 16 * 4
    assert rows["lossless"]["error"] < 1e-7
    assert rows["onebit"]["error"] > rows["int8"]["error"] > 1e-4


@on_a_cluster
def test_over_a_slow_link_the_plan_is_to_compress_and_it_pays(tmp_path):
    run = hosts(
        *(MCRDL, "bench", "compression", "--codecs", "int8", "--sizes", "1M", "--seconds", "0.5"),
        *("--json", str(tmp_path / "x.json")),
        options=["--nodes", "2", "--ranks-per-node", "1", "--rate", "300mbit"],
    )
    assert run.status == 0, run.output
    (row,) = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert row["plan"] == "on"
    assert row["plain_us"] > 8e6 * row["plain_wire_bytes"] / 300e6 * 0.9  # what the link allows
    assert row["ratio"] > 1.5


def test_a_codec_that_is_none_is_named_with_the_right_one():
    run = _bench("--codecs", "int9")
    assert run.status == 2
    assert 'unknown codec "int9". Did you mean "int8"?' in run.output
