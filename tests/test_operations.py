import pytest
import torch

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.errors import CallError
from deepspeed_mcrdl.groups import Group, Mesh


@pytest.fixture
def group():
    return Group(ranks=(0, 1, 2, 3), rank=1, name="g", number=0, mesh=Mesh(1, 4, 1), torch_group=None)


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather_into_tensor", 0.75),
        ("reduce_scatter_tensor", 0.75),
        ("all_to_all_single", 0.75),
        ("broadcast", 1),
        ("reduce", 1),
        ("send", 1),
    ],
)
def test_busbw_factors_are_those_of_nccl_tests(name, factor):
    assert ops.OPERATIONS[name].busbw_factor(4) == factor


def test_one_gigabyte_in_a_second_on_four_ranks(group):
    # deepspeed calc_bw_log doubles all_reduce's algbw and takes the world's size for a sub-group
    tensor = torch.empty(250_000_000, dtype=torch.float32, device="meta")
    algbw = ops.ALL_REDUCE.size(group, tensor, "sum") / 1e9 / 1.0
    assert algbw == 1.0
    assert algbw * ops.ALL_REDUCE.busbw_factor(4) == 1.5
    assert algbw * ops.ALL_REDUCE.busbw_factor(2) == 1.0


def test_gathers_and_scatters_are_routed_by_their_total(group):
    block, whole = torch.empty(10), torch.empty(40)
    assert ops.ALL_GATHER_INTO_TENSOR.routed_bytes(group, (whole, block)) == 160
    assert ops.REDUCE_SCATTER_TENSOR.routed_bytes(group, (block, whole, "sum")) == 160
    assert ops.GATHER.routed_bytes(group, (None, block, 0)) == 160
    uneven = [torch.empty(n) for n in (1, 10, 3, 4)]
    assert ops.ALL_GATHER.routed_bytes(group, (uneven, block)) == 72


def test_bytes_that_only_one_rank_knows_route_nothing(group):
    tensor = torch.empty(8)
    assert ops.ALL_TO_ALL_SINGLE.routed_bytes(group, (tensor, tensor, None, None)) == 32
    assert ops.ALL_TO_ALL_SINGLE.routed_bytes(group, (tensor, tensor, [2] * 4, [2] * 4)) is None
    assert ops.ALL_TO_ALL.routed_bytes(group, ([tensor] * 4, [tensor] * 4)) is None


def wrong_calls():
    t = torch.empty
    return [
        (ops.ALL_GATHER_INTO_TENSOR, (t(9), t(2)), "4 x the input's 2 elements, got 9"),
        (ops.ALL_GATHER_INTO_TENSOR, (t(8), t(2, dtype=torch.int32)), "one dtype"),
        (ops.REDUCE_SCATTER_TENSOR, (t(2), t(7), "sum"), "4 x the output's 2 elements, got 7"),
        (ops.ALL_GATHER, ([t(2)] * 3, t(2)), "each of 4 ranks, got 3"),
        (ops.ALL_GATHER, ([t(3)] * 4, t(2)), "entry 1"),
        (ops.GATHER, (None, t(2), 1), "root rank must give"),
        (ops.GATHER, ([t(2), t(2), t(3), t(2)], t(2), 1), "equal sizes"),
        (ops.SCATTER, (t(2), [t(2)] * 5, 1), "got 5"),
        (ops.SCATTER, (t(2), [t(2)] * 4, 9), "rank 9 is not in"),
        (ops.REDUCE_SCATTER, (t(2), [t(3)] * 4, "sum"), "entry 1"),
        (ops.ALL_TO_ALL_SINGLE, (t(6), t(6), None, None), "can't be divided by 4"),
        (ops.ALL_TO_ALL_SINGLE, (t(8), t(4), None, None), "equally large"),
        (ops.ALL_TO_ALL_SINGLE, (t(4), t(4), [1, 1, 1], None), "output split sizes"),
        (ops.ALL_TO_ALL_SINGLE, (t(4), t(4), [1] * 4, [2, 0, 1, 1]), "sends itself 0 elements, but expects 1"),
        (ops.ALL_TO_ALL_SINGLE, (t(4), t(4), [2, 2, 2, -2], None), "output split sizes"),
        (ops.ALL_TO_ALL, ([t(1)] * 4, [t(1)] * 3), "inputs for each of 4 ranks, got 3"),
        (ops.ALL_REDUCE, (torch.eye(2).to_sparse(), "sum"), "sparse"),
    ]


@pytest.mark.parametrize(("operation", "args", "text"), wrong_calls())
def test_a_wrong_call_is_refused_with_its_numbers(group, operation, args, text):
    with pytest.raises(CallError, match=text):
        operation.check(group, *args)


def test_rules_name_both_ends_of_a_message_at_once():
    assert "send_recv" in ops.RULE_NAMES
    assert not {"send", "recv"} & ops.RULE_NAMES
