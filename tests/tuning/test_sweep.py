"""The sweep on real ranks: a table in time, that jobs go by, and that a killed sweep goes on to."""

import json
import os
import signal
import subprocess
import time

import pytest

from deepspeed_mcrdl.bench.launch import free_port
from deepspeed_mcrdl.routing.table import read_table
from tests import launcher
from tests.backends import BACKENDS

TUNE = (str(launcher.BIN / "mcrdl"), "tune", "--ranks")


def test_a_table_is_made_in_its_time_and_jobs_go_by_it(tmp_path):
    output = tmp_path / "table.json"
    began = time.monotonic()
    run = launcher.run([*TUNE, "2", "--budget", "20s", "--ops", "all_reduce,all_to_all_single,send_recv,barrier",
                        "--sizes", "256,64K,1M", "--output", str(output)])  # fmt: skip
    assert run.status == 0, run.output
    assert time.monotonic() - began < 20 + 3
    table = read_table(output)
    assert {entry.operation for entry in table.entries} == {"all_reduce", "all_to_all_single", "send_recv", "barrier"}
    for entry in table.entries:
        assert {measured.backend for measured in entry.measured} == set(BACKENDS)
        assert all(measured.p10_us <= measured.median_us <= measured.p90_us for measured in entry.measured)
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]
    assert table.version == 2
    assert table.chunks[0].operation == "all_reduce"
    assert table.chunks[0].backend == BACKENDS[0]
    assert all(size.gain > 0 for size in (*table.buckets, *table.chunks))

    bench = launcher.run([str(launcher.BIN / "mcrdl"), "bench", "ops", "--ranks", "2", "--ops", "all_reduce", "--sizes",
                          "256,1M", "--table", str(output), "--iterations", "20", "--json",
                          str(tmp_path / "ops.json")])  # fmt: skip
    assert bench.status == 0, bench.output
    rows = json.loads((tmp_path / "ops.json").read_text())["rows"]
    entry = next(entry for entry in table.entries if entry.operation == "all_reduce")
    for row in rows:
        if row["backend"] == "auto":
            assert row["route"] == entry.choose(row["bytes"], lambda name: True)[0]
        assert row["wrong"] == 0


def test_the_groups_of_a_job_are_measured_apart(tmp_path):
    output = tmp_path / "table.json"
    run = launcher.run([*TUNE, "4", "--budget", "25s", "--ops", "all_reduce", "--sizes", "256,64K", "--output",
                        str(output)])  # fmt: skip
    assert run.status == 0, run.output
    assert {str(entry.mesh) for entry in read_table(output).entries} == {"1x4/1", "1x2/1", "1x2/2"}


def test_a_killed_sweep_goes_on_where_it_was(tmp_path):
    output = tmp_path / "table.json"
    command = [*TUNE, "2", "--budget", "300s", "--sizes", "256:16M", "--output", str(output)]
    process = subprocess.Popen(command, env=launcher.environment(), stdout=subprocess.DEVNULL, start_new_session=True)
    partial = tmp_path / "table.json.partial"
    deadline = time.monotonic() + 60
    while not partial.is_file():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not output.exists()
    kept = len(json.loads(partial.read_text())["samples"])
    assert kept > 2
    command[command.index("300s")] = "12s"
    run = launcher.run(command)
    assert run.status == 0, run.output
    assert f"goes on with the {kept} cells" in run.output
    assert sum(len({m.bytes for m in entry.measured}) for entry in read_table(output).entries) >= kept
    assert not partial.exists()


def test_a_job_is_run_first_to_see_what_it_calls(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import torch, deepspeed_mcrdl as mcrdl\n"
        "mcrdl.init()\n"
        "for _ in range(5): mcrdl.all_reduce(torch.ones(1000)); mcrdl.broadcast(torch.ones(16), 0)\n"
        "mcrdl.finalize()\n"
    )
    output = tmp_path / "table.json"
    job = f"{launcher.BIN / 'torchrun'} --nproc-per-node 2 --master-port {free_port()} {script}"
    run = launcher.run([*TUNE, "2", "--budget", "15s", "--job", job, "--output", str(output)])
    assert run.status == 0, run.output
    measured = {(entry.operation, m.bytes) for entry in read_table(output).entries for m in entry.measured}
    assert measured == {("all_reduce", 4096), ("broadcast", 64)}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ops", "all_reduxe"], 'Did you mean "all_reduce"'),
        (["--budget", "soon"], "is not a time such as 90s or 10m"),
        (["--dtypes", "float23"], 'Did you mean "float32"'),
        (["--output", "/nowhere/table.json"], "there is no folder /nowhere"),
        (["--from-log", "/nowhere/calls.jsonl"], "is not a record of a job's calls"),
        (["--meshes", "3x3/3"], 'this job has no mesh "3x3/3"'),
        (["--job", "/nowhere/train.py"], "the job can't be started"),
        (["--job", "false"], "the job ended with status 1"),
        (["--job", "true"], 'is "comm_backend": "mcrdl" in its config'),
    ],
)
def test_a_wrong_option_is_one_sentence(tmp_path, arguments, text):
    run = launcher.run([*TUNE, "2", "--output", str(tmp_path / "t.json"), *arguments])
    assert run.status in (1, 2)
    assert text in run.output
    assert "Traceback" not in run.output
