import csv
import json

from deepspeed_mcrdl.observe.files import lines_of
from deepspeed_mcrdl.observe.summary import events
from tests.observe.programs import trained


def test_the_engines_steps_are_seen_and_the_figures_are_in_its_monitor(ranks, tmp_path):
    assert ranks(2).run(trained, str(tmp_path)) == ["_take_model_step"] * 2
    for rank in (0, 1):
        steps = [step for line in lines_of(tmp_path, "log", rank) for step in json.loads(line).get("steps", ())]
        assert len(steps) == 6  # of seven; the first begins nowhere
        assert {samples for _, _, samples in steps} == {16}
        assert all(step_ns > communicated_ns > 0 for step_ns, communicated_ns, _ in steps)
    files = {path.name for path in (tmp_path / "csv" / "job").glob("Comm_*.csv")}
    assert {"Comm_ms_per_step.csv", "Comm_share_of_step.csv"} <= files
    name = next(name for name in files if name.startswith("Comm_all_reduce") and name.endswith("_calls_per_step.csv"))
    with (tmp_path / "csv" / "job" / name).open() as file:
        header, *rows = list(csv.reader(file))
    assert header == ["step", "calls_per_step"]
    assert [int(row[0]) for row in rows] == [16 * 3, 16 * 5, 16 * 7]  # samples so far, as in DeepSpeed's own figures
    assert all(float(row[1]) >= 1 for row in rows)


def test_a_monitors_figures_are_means_of_the_steps():
    times = {"issued_ns": 2_000_000, "waited_ns": 2_000_000, "latency_ns": 4_000_000, "latencies": []}
    counts = {"calls": 4, "bytes": 8_000_000, "done": 4, "done_bytes": 8_000_000}
    row = {"operation": "all_reduce", "backend": "shm", **counts, **times}
    line = {"steps": [(10_000_000, 3_000_000, 8), (10_000_000, 1_000_000, 8)], "rows": [row]}
    assert dict(events(line)) == {
        "Comm/ms_per_step": 2.0,
        "Comm/share_of_step": 0.2,
        "Comm/all_reduce/shm/ms_per_step": 2.0,
        "Comm/all_reduce/shm/calls_per_step": 2.0,
        "Comm/all_reduce/shm/MB_per_step": 4.0,
        "Comm/all_reduce/shm/algbw_GBps": 2.0,
    }
