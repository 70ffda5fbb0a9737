import json

from tests import launcher
from tests.backends import BACKENDS


def test_the_cost_of_routing_is_measured_on_checked_results(tmp_path):
    command = [str(launcher.BIN / "mcrdl"), "bench", "overhead", "--ranks", "2", "--iterations", "30", "--sizes", "256",
               "--json", str(tmp_path / "x.json")]  # fmt: skip
    run = launcher.run(command)
    assert run.status == 0, run.output
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert {row["backend"] for row in rows} == set(BACKENDS)
    keys = ["operation", "bytes", "backend", "direct_us", "routed_us", "extra_us", "ratio", "library", "library_us"]
    assert list(rows[0]) == keys
    assert {(row["backend"], row["library"]) for row in rows} == {
        (name, {"mpi": "mpi4py", "gloo": "torch:gloo"}.get(name)) for name in BACKENDS
    }


def test_it_asks_for_ranks():
    run = launcher.run([str(launcher.BIN / "mcrdl"), "bench", "overhead"])
    assert run.status == 2
    assert "give --ranks N" in run.output
