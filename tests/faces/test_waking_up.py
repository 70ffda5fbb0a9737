"""All ways by which a config reaches the plugin, under the plain launcher."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import launcher
from tests.backends import BACKENDS

SCRIPT = Path(__file__).with_name("wake.py")
CONFIG = {
    "train_batch_size": 2,
    "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
    "comm_backend": "mcrdl",
    "mcrdl": {"routing": {"broadcast": "gloo"}},
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def woken(run):
    assert run.status == 0, run.output
    results = [json.loads(text) for text in run.lines("WOKE ")]
    assert len(results) == 2, run.output
    for name, without_shm, carried in results:
        assert name == "MCRDLBackend"
        assert without_shm
        assert "broadcast:gloo" in carried
        assert {f"all_reduce:{BACKENDS[0]}", f"reduce_scatter_tensor:{BACKENDS[0]}"} & set(carried)
    return run


@pytest.mark.parametrize("way", ["path", "init first", "dist_backend", "torch initialised first"])
def test_a_config_on_the_command_line(config, way):
    run = woken(launcher.deepspeed(SCRIPT, "--deepspeed", "--deepspeed_config", config, WAY=way))
    assert run.output.count("2 ranks on 1 host") == 1  # one block, by rank 0
    assert "deepspeed_shm_comm" not in run.output  # no kernel was compiled


def test_a_config_behind_an_equals_sign(config):
    woken(launcher.deepspeed(SCRIPT, f"--deepspeed_config={config}", WAY="path"))


def test_a_config_as_base64():
    encoded = base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode()
    woken(launcher.deepspeed(SCRIPT, "--deepspeed_config", encoded, WAY="path"))


@pytest.mark.parametrize("way", ["dict", "config_params", "dict, dist_backend", "dict, torch initialised first"])
def test_a_config_as_a_dict(way):
    run = woken(launcher.deepspeed(SCRIPT, WAY=way))
    assert "deepspeed_shm_comm" not in run.output or "initialised" in way


def test_an_explicit_import_where_torch_loads_no_plugins(config):
    run = launcher.deepspeed(
        SCRIPT, "--deepspeed_config", config, WAY="explicit import", TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )
    woken(run)


def test_torch_imported_before_deepspeed(config):
    woken(launcher.deepspeed(SCRIPT, "--deepspeed_config", config, WAY="torch imported first"))


def test_waking_up_is_cheap_and_imports_nothing():
    code = (
        "import sys, time, importlib, importlib.abc\n"
        "before = set(sys.modules)\n"
        "start = time.perf_counter()\n"
        "from deepspeed_mcrdl import autoload\n"
        "autoload.install()\n"
        "elapsed = time.perf_counter() - start\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(elapsed, *sorted(new & {'torch', 'deepspeed', 'mpi4py', 'pydantic'}))\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    elapsed, *heavy = shown.stdout.split()
    assert not heavy
    assert float(elapsed) < 0.05  # a millisecond, and room for a cold disk


def test_the_launcher_itself_stays_quiet(config):
    run = launcher.run([str(launcher.BIN / "deepspeed"), "--help"])
    assert run.status == 0
    assert "mcrdl" not in run.output


def test_communication_ends_and_starts_again():
    run = launcher.deepspeed(SCRIPT.with_name("again.py"))
    assert len(run.lines("AGAIN ")) == 2, run.output
    assert run.status != 0
    assert "communication has ended; start it again with deepspeed.init_distributed()" in run.output
    assert "Traceback" not in run.output
