"""A user's mistake: a clear sentence on every rank, no traceback, a status that is not 0, and no hang."""

import json
from pathlib import Path

import pytest

from tests import launcher

SCRIPT = Path(__file__).with_name("mistakes.py")
MISTAKES = [
    ("block", {"routing": {"all_reduec": "mpi"}}, 'unknown operation "all_reduec". Did you mean "all_reduce"?'),
    ("block", {"backend": ["mpi"]}, 'unknown key "backend". Did you mean "backends"?'),
    ("block", {"routing": {"default": "mpy"}}, 'unknown backend "mpy". Did you mean "mpi"?'),
    ("block", {"backends": ["nccl"]}, 'the config asks for the backend "nccl", which can\'t be used'),
    (
        "block",
        {"routing": {"all_reduce": [{"max_bytes": 9, "backend": "mpi"}, {"max_bytes": 8, "backend": "gloo"},
                                    {"backend": "mpi"}]}},
        "out of order",
    ),
    ("misspelt selection", {}, 'unknown "comm_backend": "mcrld". Did you mean "mcrdl"?'),
    ("different configs", {}, '"mcrdl.routing" is {'),
    ("call before init", {}, "deepspeed.comm.all_reduce was called before communication was started"),
    ("mpi4py imported first", {"backends": ["mpi"]}, "mpi4py"),
]  # fmt: skip


@pytest.mark.parametrize(("mistake", "block", "text"), MISTAKES)
def test_a_mistake_is_a_sentence_on_every_rank(mistake, block, text):
    run = launcher.deepspeed(SCRIPT, timeout_s=60, MISTAKE=mistake, BLOCK=json.dumps(block))
    assert run.status != 0
    assert text in run.output
    assert "Traceback" not in run.output
    assert "trained" not in run.output
    assert "deepspeed_mcrdl: error: rank 0: " in run.output or "deepspeed_mcrdl: error: rank 1: " in run.output


def test_mpi_is_left_out_where_it_is_spoilt_and_nobody_asked_for_it():
    run = launcher.deepspeed(SCRIPT, timeout_s=60, MISTAKE="mpi4py imported first")
    assert run.status == 0, run.output
    assert "left out mpi: " in run.output
