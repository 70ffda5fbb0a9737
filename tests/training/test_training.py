"""Real DeepSpeed training under the plain launcher: the losses are those of stock DeepSpeed, bit for bit."""

import json
from pathlib import Path

import pytest

from tests import launcher

SCRIPT = Path(__file__).with_name("train.py")
CASES = [
    "zero0", "zero1", "zero2", "zero3", "bf16", "checkpointing", "moe_ep1", "moe_ep2", "moe_ep2_zero2", "pipeline",
]  # fmt: skip
MIXED = {"default": "gloo", "all_to_all": "mpi", "send_recv": "mpi", "all_gather": "mpi", "reduce": "mpi",
         "all_reduce": [{"max_bytes": 1024, "backend": "mpi"}, {"backend": "gloo"}]}  # fmt: skip


def train(output, *args, ranks=2, **env):
    output.mkdir(exist_ok=True)
    run = launcher.deepspeed(SCRIPT, "--output", str(output), *args, ranks=ranks, timeout_s=240, **env)
    assert run.status == 0, run.output
    return [json.loads((output / f"rank{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    return train(tmp_path_factory.mktemp("stock"), "--stock", *CASES)


def losses(results):
    return [{case: result["losses"] for case, result in rank.items()} for rank in results]


@pytest.mark.parametrize("routing", [{}, {"default": "gloo"}, MIXED], ids=["auto", "gloo", "mixed"])
def test_losses_are_those_of_stock_deepspeed(stock, tmp_path, routing):
    ours = train(tmp_path, "--routing", json.dumps(routing), *CASES)
    assert losses(ours) == losses(stock)
    for rank in ours:
        assert {r["backend"] for r in rank.values()} == {"deepspeed_mcrdl.faces.deepspeed_backend.MCRDLBackend"}


def test_groups_of_a_kind_have_rules_of_their_own(stock, tmp_path):
    groups = {"expert_parallel": {"all_to_all": "gloo"}, "expert_data_parallel": {"default": "gloo"}}
    cases = ["moe_ep1", "moe_ep2"]
    ours = train(tmp_path, "--routing", json.dumps({"default": "mpi", "groups": groups}), *cases)
    for ours_of_rank, stock_of_rank in zip(ours, stock, strict=True):
        assert all(ours_of_rank[case]["losses"] == stock_of_rank[case]["losses"] for case in cases)
        assert "all_to_all_single on expert_parallel: gloo" in ours_of_rank["moe_ep2"]["carried"]
        assert "all_reduce on data_parallel: mpi" in ours_of_rank["moe_ep2"]["carried"]
        assert "all_reduce on expert_data_parallel: gloo" in ours_of_rank["moe_ep1"]["carried"]


def test_moe_with_tensor_parallelism_is_the_same_on_each_backend(tmp_path):
    # Stock gloo can't run it: DeepSpeed gathers blocks whose shapes differ.
    runs = [train(tmp_path / name, "--routing", json.dumps({"default": name}), "moe_tp2") for name in ("mpi", "gloo")]
    assert losses(runs[0]) == losses(runs[1])


def test_moe_with_expert_and_tensor_parallelism_on_four_ranks(tmp_path):
    runs = [
        train(tmp_path / name, "--routing", json.dumps(routing), "moe_ep2", "moe_tp2", ranks=4)
        for name, routing in (("mixed", MIXED), ("gloo", {"default": "gloo"}))
    ]
    for mixed, gloo in zip(*runs, strict=True):
        for case in mixed:
            pairs = zip(mixed[case]["losses"], gloo[case]["losses"], strict=True)
            # four ranks are summed in another order by each backend
            assert all(float.fromhex(a) == pytest.approx(float.fromhex(b), rel=1e-4) for a, b in pairs)


def test_without_the_key_deepspeed_is_as_without_the_plugin(stock, tmp_path):
    asleep = train(tmp_path, "--stock", *CASES, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert asleep == stock  # classes, counts and losses
    assert {r["backend"] for rank in stock for r in rank.values()} == {"deepspeed.comm.torch.TorchBackend"}
