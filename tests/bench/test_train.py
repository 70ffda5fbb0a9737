import argparse
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from deepspeed_mcrdl import shipped
from deepspeed_mcrdl.bench import options, train
from deepspeed_mcrdl.bench.results import write_json
from deepspeed_mcrdl.errors import ConfigError, MCRDLError
from tests import launcher


def report(seconds, losses=(3.0, 2.5), world_size=2, communication_s=0.5):
    row = {"operation": "all_reduce", "backend": "mpi", "calls": 8, "bytes": 800}
    rank = {
        "step_seconds": [seconds] * 4,
        "losses": list(losses),
        "communication": [{**row, "seconds": communication_s * seconds * 4}],
    }
    return {"world_size": world_size, "tokens_per_step": 100, "held_out": (5.5, 2.4), "ranks": [rank] * world_size}


def test_rows_have_the_keys_that_programs_read():
    stock = train.summarise("stock", [report(0.2), report(0.25)])
    mixed = train.summarise("mixed", [report(0.1), report(0.1)])
    rows = train.make_rows("moe", "comm", [stock, mixed], equal=True)
    assert list(rows[0]) == [
        "workload", "preset", "backend", "world_size", "tokens_per_s_median", "tokens_per_s_min", "tokens_per_s_max",
        "communication_share", "ratio_to_stock", "losses_equal", "final_loss",
    ]  # fmt: skip
    assert rows[0]["tokens_per_s_median"] == 450
    assert rows[0]["communication_share"] == pytest.approx(0.5)
    assert rows[0]["ratio_to_stock"] == 1
    assert rows[1]["ratio_to_stock"] == pytest.approx(2.25)  # the median of the rounds' ratios 2 and 2.5
    assert mixed.communication == [
        {
            "operation": "all_reduce",
            "backend": "mpi",
            "calls_per_step": 2,
            "bytes_per_step": 200,
            "seconds_per_step": pytest.approx(0.05),
        }
    ]


def test_losses_must_agree_to_the_bit_on_two_ranks():
    assert train.losses_equal([report(1), report(2)])
    assert not train.losses_equal([report(1), report(1, losses=(3.0, 2.5000001))])
    four = [report(1, world_size=4), report(1, losses=(3.0, 2.5000001), world_size=4)]
    assert train.losses_equal(four)
    assert not train.losses_equal([four[0], report(1, losses=(3.0, 2.51), world_size=4)])


def test_a_codec_may_change_losses_by_two_percent():
    plain = train.summarise("auto", [report(1)])
    near, far = ({**report(1), "held_out": (5.5, loss)} for loss in (2.44, 2.46))
    assert train.held_out_near([plain, train.summarise("auto+int8", [near])])
    assert not train.held_out_near([plain, train.summarise("auto+int8", [far])])


def test_a_codec_is_compared_with_its_config(capsys):
    summaries = [train.summarise("auto", [report(0.2)]), train.summarise("auto+int8", [report(0.1)])]
    train.print_tables(train.make_rows("gpt", "comm", summaries, equal=True), summaries)
    assert "auto+int8 is 2.00 times as fast as auto." in capsys.readouterr().out


def test_no_ratio_is_shown_where_losses_differ(capsys):
    summaries = [train.summarise("stock", [report(0.2)]), train.summarise("mpi", [report(0.1)])]
    rows = train.make_rows("moe", "comm", summaries, equal=False)
    assert [row["ratio_to_stock"] for row in rows] == [None, None]
    train.print_tables(rows, summaries)
    assert "would be" not in capsys.readouterr().out


def test_json_carries_versions_hardware_and_config(tmp_path):
    write_json(tmp_path / "x.json", "train", [{"a": 1}], ranks=2)
    written = json.loads((tmp_path / "x.json").read_text())
    assert written["bench"] == "train"
    assert written["rows"] == [{"a": 1}]
    assert written["environment"]["config"] == {"ranks": 2}
    assert written["environment"]["cores"] == os.cpu_count()
    assert written["environment"]["versions"]["torch"]


@pytest.mark.parametrize(
    ("workload", "unit", "limit"),  # ln 256 = 5.55 and ln 2 = 0.693 are the losses of knowing nothing
    [("moe", "tokens/s", 5.0), ("gpt", "tokens/s", 5.0), ("dlrm", "samples/s", 0.685)],
)
def test_a_real_benchmark_of_two_backends(tmp_path, workload, unit, limit):
    options = f"--workload {workload} --backends gloo,mixed --rounds 1 --steps 12"
    files = ["--json", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.png")]
    command = [str(launcher.BIN / "mcrdl"), "bench", "train", *options.split(), *files]
    run = launcher.run(command, timeout_s=240)
    assert run.status == 0, run.output
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [row["backend"] for row in rows] == ["gloo", "mixed"]
    assert all(row["losses_equal"] for row in rows)
    assert all(row["final_loss"] < limit for row in rows)
    assert "mpi" in run.output
    assert unit in run.output
    assert (tmp_path / "x.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--backends", "mixd"], 'there is no config for "mixd". Did you mean "mixed"?'),
        (["--backends", "auto+int9"], 'unknown codec "int9" in "mcrdl.compression". Did you mean "int8"?'),
        (["--backends", "stock+int8"], "stock DeepSpeed is without the plugin"),
        (["--workload", "mo"], "invalid choice"),
        (["--ranks", "0"], "'0' is not a whole number of 1 or more"),
        (["--steps", "3"], "'3' is not a whole number of 4 or more"),
        (["--backends", ","], "is not a comma-separated list"),
        (["--json", "no/such/folder/x.json"], "there is no folder no/such/folder"),
    ],
)
def test_wrong_arguments_are_a_sentence(arguments, text):
    run = launcher.run([str(launcher.BIN / "mcrdl"), "bench", "train", *arguments])
    assert run.status == 2
    assert text in run.output
    assert "Traceback" not in run.output


def test_a_run_that_fails_shows_its_last_lines(tmp_path):
    run = launcher.run(
        [str(launcher.BIN / "mcrdl"), "bench", "train", "--backends", "gloo", "--ranks", "3", "--rounds", "1"]
    )
    assert run.status == 1
    assert "the run with gloo ended with status 1; it printed last:" in run.output


STUBBORN = """#!{python}
import subprocess, sys, time
rank = "import signal, time; signal.signal(15, signal.SIG_IGN); print('started', flush=True); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", rank])
time.sleep(60)
"""


@pytest.fixture
def stubborn_launcher(tmp_path):
    """A `python` beside a `deepspeed` whose rank does not end when it is asked to."""
    (tmp_path / "python").symlink_to(sys.executable)
    (tmp_path / "deepspeed").write_text(STUBBORN.format(python=sys.executable))
    (tmp_path / "deepspeed").chmod(0o755)
    return tmp_path / "python"


def test_a_run_past_its_limit_is_ended_with_ranks_that_ignore_signals(tmp_path, monkeypatch, stubborn_launcher):
    monkeypatch.setattr(sys, "executable", str(stubborn_launcher))
    monkeypatch.setattr(train, "_GRACE_S", 0.5)
    args = argparse.Namespace(ranks=2, hosts=1, workload="moe", preset="comm", steps=4, timeout=2.0)
    start = time.monotonic()
    with pytest.raises(train.RunFailed, match=r"the run with gloo was not done within 2 s; it printed last:\nstarted"):
        train._run_one(args, "gloo", train._config("moe", "gloo"), tmp_path / "report.json")
    assert time.monotonic() - start < 20


def test_ctrl_c_ends_the_ranks_and_shows_no_traceback():
    command = [sys.executable, "-m", "deepspeed_mcrdl", "bench", "train", "--backends", "gloo", "--steps", "100000"]
    bench = psutil.Popen(command, stderr=subprocess.PIPE, text=True, env=launcher.environment())
    end = time.monotonic() + 60
    while not (started := [child for child in bench.children(recursive=True) if "--local_rank=1" in child.cmdline()]):
        assert time.monotonic() < end
        time.sleep(0.1)
    launched = bench.children(recursive=True)
    bench.send_signal(signal.SIGINT)
    _, errors = bench.communicate(timeout=30)
    assert bench.returncode == 130
    assert errors == "mcrdl: interrupted\n"
    assert started[0] in launched
    assert not [child for child in launched if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_the_examples_are_found_where_pip_put_them(tmp_path, monkeypatch):
    share = tmp_path / "share" / "deepspeed_mcrdl" / "moe_examples"
    share.mkdir(parents=True)
    packages = tmp_path / "lib" / "site-packages"
    info = packages / "deepspeed_mcrdl-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: deepspeed-mcrdl\nVersion: 1\n")
    (info / "RECORD").write_text("../../share/deepspeed_mcrdl/moe_examples/train_moe.py,,\n")
    (packages / "configs").mkdir()  # another distribution's
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setattr(shipped, "__file__", str(packages / "deepspeed_mcrdl" / "shipped.py"))
    (share / "train_moe.py").touch()
    assert train.script_path("moe") == share / "train_moe.py"
    assert train.script_path("dlrm").is_file()  # in the package
    with pytest.raises(MCRDLError, match="the folder configs is missing"):
        shipped.folder("configs")


def test_stock_is_left_out_and_said_so_where_nothing_can_compile_it(monkeypatch, capsys):
    monkeypatch.setattr(train, "_needs_compiler", lambda: True)
    assert train._usable(["stock", "gloo"], "moe") == ["gloo"]
    assert "stock DeepSpeed is left out" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="--plot needs matplotlib: pip install"):
        options.require_matplotlib()
