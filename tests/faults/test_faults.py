"""When a rank is late, dies, or is told to end: an error in time that names it, and nothing left behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepspeed_mcrdl.bench.launch import free_port, rank_environment
from tests import launcher
from tests.backends import BACKENDS
from tests.faults.programs import LIMIT_S

PROGRAMS = Path(__file__).parent / "programs.py"
EXIT_S = 5  # beyond the limit of a call, for a process to be gone
# A thread stays in a late call of oneCCL's and takes part of a core, so that its process ends later: test_oneccl.py.
PROMPT = tuple(name for name in BACKENDS if name != "oneccl")


class Job:
    """Ranks without a launcher that would end them: each must end by itself."""

    def __init__(self, *arguments, ranks=3):
        self.shared_memory = set(os.listdir("/dev/shm"))
        port = free_port()
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(PROGRAMS), *arguments],
                env=launcher.environment(**rank_environment(rank, ranks, port)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            for rank in range(ranks)
        ]

    def wait(self, timeout_s=90):
        """Return each rank's status and output; fail if one is not done in time or something is left behind."""
        deadline = time.monotonic() + timeout_s
        results = []
        try:
            for process in self.processes:
                output, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
                results.append((process.returncode, output))
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"rank {len(results)} did not end: {error.output}") from None
        finally:
            for process in self.processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        assert not self._left_behind()
        return results

    def _left_behind(self):
        """Return what is new in /dev/shm. Other jobs on this machine may make some of ours too, for a moment."""
        own = [f"mpich_shm_{process.pid}_" for process in self.processes]
        new = set(os.listdir("/dev/shm")) - self.shared_memory
        deadline = time.monotonic() + 5
        while new and time.monotonic() < deadline:
            new = {name for name in new & set(os.listdir("/dev/shm")) if name.startswith(("mcrdl", *own))}
            time.sleep(0.05)
        return new

    def wait_for(self, line, rank):
        """Return when a rank has printed a line."""
        for printed in self.processes[rank].stdout:
            if printed.startswith(line):
                return
        raise AssertionError(f"rank {rank} ended without {line}")


@pytest.fixture(scope="module")
def late():
    """Return (rank, backend/kind) -> (seconds, error) of the program in which the last rank stays away."""
    lines = [line for _, output in Job("late").wait() for line in output.splitlines()]
    found = {}
    for line in lines:
        if line.startswith("LATE"):
            _, rank, what, seconds, *words = line.split(" ")
            found[int(rank), what] = float(seconds), " ".join(words)
    assert not [line for line in lines if line.startswith("NOT LATE")]
    return found


@pytest.mark.parametrize("kind", ["blocking", "asynchronous", "large", "barrier", "message", "silent"])
@pytest.mark.parametrize("backend", PROMPT)
def test_every_call_ends_in_time_and_names_who_is_missing(late, backend, kind):
    # DeepSpeed 5794: one rank skips a layer, and nobody hears of it
    for rank in (0, 1):
        seconds, error = late[rank, f"{backend}/{kind}"]
        assert LIMIT_S <= seconds < LIMIT_S + 1
        assert re.search(r"on group '\w+' \(ranks 0, 1, 2\)", error)
        assert f"by {backend} was not done after" in error
        if kind == "message":
            assert "recv from rank 2" in error
            assert "rank 2 did not take part" in error
        else:
            assert " #2 on" in error
            assert "rank 2 did not arrive" in error
            assert "rank 1 did" not in error
            assert "rank 0 did" not in error


def test_a_late_call_says_what_the_missing_rank_waits_in():
    results = Job("late_elsewhere").wait()
    assert all(status == 1 for status, _ in results)
    assert re.search(r"rank 2 did not arrive \(it waits in all_reduce #1 on group '\w+' .* by gloo\)", results[0][1])
    assert re.search(r"rank 0 did not arrive \(it waits in all_reduce #1 on group '\w+' .* by mpi\)", results[2][1])


def test_a_process_with_a_late_call_ends_by_itself_with_one_sentence():
    began = time.monotonic()
    results = Job("late_uncaught").wait(60)
    for rank in (0, 1):
        status, output = results[rank]
        assert status == 1
        assert output.count("deepspeed_mcrdl: error:") == 1, output
        assert "Traceback" not in output
    assert time.monotonic() - began < 40


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("on", r"all_reduce #2 on .* by mpi \(int8\) was not done .* rank 2 did not arrive"),
        (
            "plan",
            "communicator of group 'world/0 compressed int8 .* was not made within 1.5 s: .*rank 2 did not arrive",
        ),
    ],
)
def test_a_rank_that_stays_away_from_a_compressed_call(mode, text):
    results = Job("late_compressed", mode).wait(60)
    for status, output in results[:2]:
        assert status == 1
        assert re.search(f"deepspeed_mcrdl: error: .*{text}", output), output
        assert "Traceback" not in output


@pytest.mark.parametrize("face", ["mcrdl", "torch", "deepspeed"])
def test_a_rank_that_stays_away_when_a_group_is_made(face):
    for status, output in Job("late_to_a_group", face).wait(60)[:2]:
        assert status == 1, output
        assert re.search(r"a new group of ranks 0, 1, 2 was not made within 1.5 s: rank 2 did not arrive", output), (
            output
        )
        assert "rank 1 did" not in output
        assert "Traceback" not in output


@pytest.mark.parametrize("phase", [*PROMPT, "compressed", "between", "chunks"])
def test_the_others_end_by_themselves_when_a_rank_is_killed(phase):
    job = Job("killed", phase)
    job.processes[2].wait(60)
    died = time.monotonic()
    results = job.wait(60)
    assert time.monotonic() - died < LIMIT_S + EXIT_S
    assert all(status not in (0, None) for status, _ in results)
    assert all("deepspeed_mcrdl: error: rank" in output for _, output in results[:2]), results


@pytest.mark.parametrize("phase", ["start", *BACKENDS, "between"])
def test_the_launcher_ends_in_time_when_a_rank_is_killed(phase):
    shared_memory = set(os.listdir("/dev/shm"))
    run = launcher.deepspeed(PROGRAMS, "killed", phase, ranks=3, timeout_s=90)
    assert run.status != 0
    assert not {name for name in set(os.listdir("/dev/shm")) - shared_memory if "mpi" in name or "mcrdl" in name}
    assert not subprocess.run(["pgrep", "-f", f"{PROGRAMS} killed {phase}"], capture_output=True, text=True).stdout


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_rank_that_waits_in_mpi_hears_a_signal(name):
    job = Job("waiting")
    for rank in range(3):
        job.wait_for("UP", rank)
    time.sleep(0.5)
    began = time.monotonic()
    for process in job.processes:
        process.send_signal(getattr(signal, name))
    results = job.wait(30)
    assert time.monotonic() - began < 6
    assert all(status not in (0, None) for status, _ in results)


def test_starting_and_ending_again_and_again_leaks_nothing(tmp_path):
    for status, output in Job("again", str(tmp_path / "store"), ranks=2).wait(200):
        assert status == 0, output
        early, late = (list(map(int, part)) for part in _halves(output))
        assert late[0] <= early[0] + 1, "threads"
        assert late[1] <= early[1] + 4, "descriptors"
        assert late[2] <= early[2] + 20_000, "kilobytes"


def _halves(output):
    numbers = re.search(r"SEEN (.*)", output)[1].split()
    return numbers[:3], numbers[3:]
