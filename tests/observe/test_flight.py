"""The flight recorder, on jobs that hang, time out, don't fit together or are killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from deepspeed_mcrdl import cli
from deepspeed_mcrdl.bench.launch import free_port, rank_environment
from deepspeed_mcrdl.observe.files import lines_of, path_of
from deepspeed_mcrdl.observe.flight import read
from deepspeed_mcrdl.observe.trace import merge
from tests import launcher

PROGRAM = Path(__file__).parent / "jobs.py"


@contextlib.contextmanager
def job(what, folder, ranks):
    """Start a job and yield its processes; end them."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), what, str(folder)],
            env=launcher.environment(**rank_environment(rank, ranks, port)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def shown(folder, capsys, *options):
    capsys.readouterr()
    assert cli.main(["flight", "show", str(folder), *options]) == 0
    return capsys.readouterr().out


def wait_for(process, line="UP"):
    assert any(printed.startswith(line) for printed in process.stdout), "ended too early"


def test_a_timeout_leaves_what_every_rank_did(tmp_path, capsys):
    with job("late", tmp_path, 3) as processes:
        assert [process.wait(60) for process in processes][::2] == [3, 3]
    dump = json.loads(path_of(tmp_path, "flight-dump", 0).read_text())
    assert "all_reduce #2" in dump["reason"]
    assert "rank 1 did not arrive" in dump["reason"]
    assert [call["operation"] for call in dump["calls"]] == ["barrier", "all_reduce"]
    assert any("jobs.py" in line for stack in dump["stacks"].values() for line in stack)
    text = shown(tmp_path, capsys, "--last", "5")
    assert "calls and stacks at all_reduce #2 on group 'world'" in text
    assert "recv peer 2 on group" in text
    assert ": done" in text
    assert ": failed" in text


def test_of_a_job_that_hangs_it_says_where_and_who_is_missing(tmp_path, capsys):
    with job("hangs", tmp_path, 2) as processes:
        wait_for(processes[0])
        time.sleep(0.5)
        text = shown(tmp_path, capsys)
    rank_0, rank_1 = text.split("rank 1 (")[0], text.split("rank 1 (")[1]
    assert "running" in rank_0
    assert "in wait() for" in rank_0
    assert "all_reduce #2 on group 'world' (ranks 0, 1) by gloo, 200 bytes" in rank_0
    assert "rank 1 has made another call there: broadcast #2" in rank_0
    assert "in the call for" in rank_1 or "in no call" in rank_1


def test_what_was_written_is_read_after_a_kill(tmp_path, capsys):
    with job("hangs_elsewhere", tmp_path, 2) as processes:
        for process in processes:
            wait_for(process)
        time.sleep(1)
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait(10)
    text = shown(tmp_path, capsys)
    assert text.count("has ended") >= 2
    assert "in the call for" in text
    assert "all_reduce #2001 on group 'world'" in text
    assert "rank 1 is missing: it has ended, after barrier #2000" in text
    flight = read(path_of(tmp_path, "flight", 0))
    assert len(flight.calls) == 1024
    assert not flight.all_calls
    assert [call.number for call in flight.calls][-2:] == [2000, 2001]
    ranks, events = merge(tmp_path, tmp_path / "trace.json")
    assert ranks == 2
    assert events > 4000
    assert json.loads(next(lines_of(tmp_path, "log", 1)))["kind"] == "start"


def test_a_signal_leaves_calls_and_stacks_and_the_job_goes_on(tmp_path, capsys):
    with job("hangs_elsewhere", tmp_path, 2) as processes:
        wait_for(processes[0])
        os.kill(processes[0].pid, signal.SIGUSR1)
        path = path_of(tmp_path, "flight-dump", 0)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and not (path.is_file() and path.read_text().endswith("}")):
            time.sleep(0.05)
        dump = json.loads(path.read_text())
        assert processes[0].poll() is None
    assert dump["reason"] == "SIGUSR1"
    assert "in hangs_elsewhere\n" in "".join(dump["stacks"]["MainThread"])


def test_a_mismatch_leaves_its_calls(tmp_path):
    with job("mismatch", tmp_path, 2) as processes:
        assert [process.wait(60) for process in processes] == [3, 3]
    for rank in (0, 1):
        dump = json.loads(path_of(tmp_path, "flight-dump", rank).read_text())
        assert "the ranks' calls don't fit together" in dump["reason"]
        assert dump["calls"][-1]["bytes"] == 4 * (4 + rank)


def test_another_file_is_a_sentence(tmp_path, capsys):
    path_of(tmp_path, "flight", 0).write_bytes(b"x" * 100)
    assert cli.main(["flight", "show", str(tmp_path)]) == 2
    assert "is no flight record" in capsys.readouterr().err
