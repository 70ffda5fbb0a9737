import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from deepspeed_mcrdl import cli
from tests import launcher, on_hosts

PROGRAMS = str(Path(on_hosts.__file__))
MCRDL = str(launcher.BIN / "mcrdl")


def _allowed():
    tools = all(shutil.which(tool) for tool in ("unshare", "ip", "tc"))
    return tools and os.geteuid() == 0 and subprocess.run(["unshare", "--net", "--pid", "true"]).returncode == 0


on_a_cluster = pytest.mark.skipif(not _allowed(), reason="needs root, iproute2 and the right to make namespaces")


def hosts(*command, options=(), timeout_s=120, **env):
    return launcher.run([MCRDL, "hosts", *options, "--", *command], timeout_s, **env)


@on_a_cluster
def test_each_rank_is_on_its_host():
    known = "getent hosts node0 node1 >/dev/null && test -d /sys/class/net/eth0 && test $PWD -ef ."
    sees = "$(hostname) $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MCRDL_EMULATED_RATE $(ls -A /dev/shm | wc -l)"
    run = hosts(
        *("sh", "-c", f"{known} && echo SEES {sees} && echo x > /dev/shm/mine.$RANK"),
        options=["--nodes", "2", "--ranks-per-node", "1", "--rate", "1gbit"],
    )
    assert run.status == 0, run.output
    assert sorted(run.lines("SEES ")) == ["node0 0 0 2 1 1000000000 0", "node1 1 0 2 1 1000000000 0"]
    assert "node0 sent 0.0 MB over its link (1gbit)" in run.output
    assert not list(Path("/dev/shm").glob("mine.*"))


@on_a_cluster
def test_torchrun_and_gloo_with_no_settings():
    run = hosts(str(launcher.BIN / "torchrun"), PROGRAMS, "gloo")
    assert run.status == 0, run.output
    assert sorted(run.lines("SUM ")) == ["node0 0 0 [3.0]", "node1 1 0 [3.0]"], run.output


@on_a_cluster
def test_the_deepspeed_launcher_and_every_backend():
    command = [str(launcher.BIN / "deepspeed"), PROGRAMS, "plugin"]
    run = hosts(*command, options=["--nodes", "2", "--ranks-per-node", "2", "--rate", "1gbit"], timeout_s=200)
    assert run.status == 0, run.output
    assert "4 ranks on 2 hosts" in run.output
    got = [
        f"{rank} {backend} [10.0] [{float((rank - 1) % 4)}]" for rank in range(4) for backend in ("mpi", "gloo", "auto")
    ]
    assert sorted(run.lines("GOT ")) == sorted(f"node{line[0] in '23':d} {line}" for line in got), run.output
    assert sorted(run.lines("HERE ")) == ["0 [3.0]", "1 [3.0]", "2 [7.0]", "3 [7.0]"], run.output


@on_a_cluster
def test_the_benchmarks_measure_between_hosts():
    # Their own barriers must not go by shared memory, the most preferred backend.
    run = hosts(MCRDL, "bench", "ops", "--ops", "all_reduce", "--sizes", "256", "--iterations", "3")
    assert run.status == 0, run.output
    assert "2 ranks, mesh 2x1/1" in run.output


@on_a_cluster
def test_the_rate_is_kept():
    run = hosts(sys.executable, PROGRAMS, "rate", options=["--rate", "40mbit"])
    assert run.status == 0, run.output
    received, seconds = run.lines("TOOK ")[0].split()
    due = on_hosts.SENT_BYTES * 8 / 40e6
    assert int(received) == on_hosts.SENT_BYTES
    assert 0.97 * due < float(seconds) < 2 * due
    sent = next(float(line.split()[0]) for line in run.lines("node0 sent "))
    assert 4.0 <= sent < 4.2


@on_a_cluster
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_command_is_ended(number):
    devices = set(os.listdir("/sys/class/net"))
    # A process that leaves its parent and session, as daemons do.
    command = [MCRDL, "hosts", "--nodes", "2", "--", "sh", "-c", "setsid sleep 1000 & echo up; sleep 1000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert [process.stdout.readline() for _ in range(2)] == [b"up\n"] * 2
    time.sleep(0.2)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 6  # on each host its first process, a shell and a sleep at least
    networks = {_network(child.pid) for child in started}
    assert len(networks) == 2
    began = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=15)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    _, alive = psutil.wait_procs(started, timeout=5)
    assert alive == []
    assert time.monotonic() - began < 8
    assert not networks & {_network(pid) for pid in psutil.pids()}
    assert set(os.listdir("/sys/class/net")) == devices


def _network(pid):
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net")


@on_a_cluster
def test_a_rank_that_fails_ends_the_others():
    began = time.monotonic()
    # Rank 1 holds up its host's end, and rank 2 on the other one fails before it: rank 0 was still the first.
    acts = ["sleep 0.5; exit 3", "trap '' TERM; sleep 100", "sleep 1.5; exit 4", "sleep 100"]
    act = "; ".join(f"test $RANK = {rank} && {{ {act}; }}" for rank, act in enumerate(acts))
    run = hosts("sh", "-c", act, options=["--nodes", "2", "--ranks-per-node", "2"])
    assert run.status == 3, run.output
    assert time.monotonic() - began < 20


@on_a_cluster
def test_a_job_has_no_more_than_its_time():
    run = hosts("sleep", "100", options=["--timeout", "1"])
    assert run.status == 1
    assert "the ranks were not done within 1 s" in run.output


@on_a_cluster
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_root_without_the_right_to_make_namespaces():
    run = launcher.run(["setpriv", "--bounding-set=-sys_admin", MCRDL, "hosts", "--", "true"])
    assert run.status == 2
    assert run.output.startswith("mcrdl: error: this machine does not let root make namespaces")
    assert len(run.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--rate", "fast", "--", "true"], "'fast' is not a rate such as 1gbit or 100mbit"),
        (["--rate", "0gbit", "--", "true"], "'0gbit' is not a rate"),
        (["--nodes", "0", "--", "true"], "'0' is not a whole number of 1 or more"),
        (["--nodes", "251", "--", "true"], "251 hosts are too many"),
        (["--nodes", "2"], "there is no command to run"),
        (["--nodes", "2", "--"], "there is no command to run"),
    ],
)
def test_mistakes_are_sentences(capsys, arguments, text):
    try:
        status = cli.main(["hosts", *arguments])
    except SystemExit as exited:
        status = exited.code
    assert status == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("user", "tools", "command", "text"),
    [
        (1000, ("ip", "tc"), "true", "needs root"),
        (0, ("tc",), "true", "needs the command `ip`"),
        (0, ("ip",), "true", "needs the command `tc`"),
        (0, ("ip", "tc"), "no-such-command", "there is no command `no-such-command`"),
    ],
)
def test_what_is_missing_is_named(capsys, monkeypatch, tmp_path, user, tools, command, text):
    for tool in (*tools, "true"):
        (tmp_path / tool).touch(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["hosts", "--", command]) == 2
    assert text in capsys.readouterr().err
