"""The GPT example learns with compressed gradients what it learns without, at equal steps."""

import json
from pathlib import Path

import pytest

from deepspeed_mcrdl.transforms.compression.codec import installed
from tests import launcher

SCRIPT = Path(__file__).with_name("compressed_gpt.py")
LOSSY = [name for name, kind in installed().items() if not kind.lossless]


# About 75 s on two free cores; fewer steps are not enough for what error feedback holds back to come through.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Return codec -> what the script says of it; "None" is the run without."""
    output = tmp_path_factory.mktemp("gpt") / "losses.json"
    root = str(SCRIPT.parents[2])
    run = launcher.deepspeed(SCRIPT, "--output", str(output), *LOSSY, timeout_s=500, PYTHONPATH=root)
    assert run.status == 0, run.output
    return json.loads(output.read_text())


@pytest.mark.parametrize("codec", LOSSY)
def test_the_held_out_loss_is_within_two_percent(losses, codec):
    (before, plain), (_, coded) = losses["None"]["losses"], losses[codec]["losses"]
    assert plain < before / 2
    assert coded == pytest.approx(plain, rel=0.02)
    assert coded != plain
    assert f"shm ({codec})" in losses[codec]["by"]
