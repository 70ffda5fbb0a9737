"""Compressed calls on real ranks: what they give, what error feedback makes good, what is refused."""

import pytest
import torch

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.bench.compression import bounds
from deepspeed_mcrdl.errors import CallError
from deepspeed_mcrdl.runtime import key_of
from deepspeed_mcrdl.safety import Call
from deepspeed_mcrdl.transforms.compression import policy
from deepspeed_mcrdl.transforms.compression.identity import CALLS_WITHOUT_STEP
from deepspeed_mcrdl.transforms.compression.plan import Plan, choose
from deepspeed_mcrdl.work import Work
from tests.backends import BACKENDS
from tests.programs import face, sub_group
from tests.transforms.compression.cases import CODECS, DTYPES, codec
from tests.transforms.compression.programs import (
    Seen,
    compressed,
    data_parallel,
    gradients,
    in_rank_order,
    plain,
    refused,
)

ODD = 5003  # no multiple of ranks, blocks or bytes
WITH_FEEDBACK = [name for name, kind in CODECS.items() if kind.wants_feedback]


def _sums(name, backend, numel, op, device="cpu"):
    cdb = compressed(name)
    rank, size = cdb.get_rank(), cdb.get_world_size()
    tensors = gradients(numel, size)
    exact, bound = bounds(codec(name), tensors)
    tensor = tensors[rank].to(device, copy=True)
    work = cdb.runtime.issue(ops.ALL_REDUCE, None, (tensor, op), async_op=True, backend=backend)
    work.wait()
    tensor = tensor.cpu()
    if op == "avg":
        exact, bound = exact / size, bound / size
    if name == "lossless":
        assert torch.equal(tensor, in_rank_order(tensors, op))
    rounding = 2**-20 * torch.stack(tensors).double().abs().sum(0)
    assert ((tensor.double() - exact).abs() <= bound + rounding).all()
    assert name == "lossless" or not torch.equal(tensor, in_rank_order(tensors, op)), "nothing was compressed"
    plain()
    return tensor


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CODECS)
def test_a_sum_is_within_the_codecs_bound_and_the_same_on_all_ranks(ranks, size, name):
    first, *others = ranks(size).run(_sums, name, "auto", ODD, "sum")
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("name", ["int8", "graddrop", "lossless"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_backend_carries_it(ranks, backend, name):
    first, second = ranks(2).run(_sums, name, backend, ODD, "avg")
    assert torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_of_gpu_tensors(ranks, backend, name):
    first, second = ranks(2).run(_sums, name, backend, ODD, "avg", "cuda:0")
    assert torch.equal(first, second)


def test_a_rank_may_own_nothing(ranks):
    # 1025 elements in partitions of 257: the last one is shorter; the payloads differ in size
    first, *others = ranks(4).run(_sums, "bf16", "auto", 1025, "sum")
    assert all(torch.equal(first, other) for other in others)


def _dtypes_and_shapes():
    cdb = compressed("lossless")
    rank, size = cdb.get_rank(), cdb.get_world_size()
    for dtype in DTYPES:
        tensors = gradients(ODD * 3, size, dtype)
        tensor = tensors[rank].clone()
        cdb.all_reduce(tensor)
        assert torch.equal(tensor, in_rank_order(tensors, "sum"))
        strided = tensors[rank].clone().view(3, ODD).t()
        cdb.all_reduce(strided)
        assert torch.equal(strided.t().reshape(-1), in_rank_order(tensors, "sum"))
    plain()


def test_floats_of_all_kinds_and_strided_ones(ranks):
    ranks(2).run(_dtypes_and_shapes)


def _many_at_once():
    rank, size = face().get_rank(), face().get_world_size()
    group, members = sub_group()
    with data_parallel(group):
        alone, together = (
            _rounds(rank, size, [None, group] if rank in members else [None], at_once) for at_once in (0, 1)
        )
    plain()
    for first, second in zip(alone, together, strict=True):
        assert torch.equal(first, second)
    return len(alone)


def _rounds(rank, size, torch_groups, at_once):
    cdb = compressed("graddrop", groups=["world", "data_parallel"])  # with its random numbers from the start
    results, works = [], []
    for number in range(12):
        for torch_group in torch_groups:
            results.append(gradients(ODD + number % 3, size)[rank])
            works.append(cdb.runtime.issue(ops.ALL_REDUCE, torch_group, (results[-1], "sum"), async_op=True))
            if not at_once:
                works.pop().wait()
    for work in works[:: -1 if rank % 2 else 1]:
        work.wait()
    return results


def test_calls_under_way_at_once_on_overlapping_groups_give_the_same(ranks):
    assert ranks(4).run(_many_at_once) == [12, 24, 24, 24]


def _of_a_sub_group():
    group, members = sub_group()
    with data_parallel(group):
        cdb = compressed("int8", groups=["data_parallel"])
        rank, size = cdb.get_rank(), cdb.get_world_size()
        tensors = gradients(ODD, size)
        of_all = tensors[rank].clone()
        cdb.all_reduce(of_all)
        off = (of_all.double() - torch.stack(tensors).double().sum(0)).abs().max()
        assert off < 1e-4, "the world was not named"
        if rank in members:
            tensor = tensors[rank].clone()
            cdb.all_reduce(tensor, group=group)
            exact, bound = bounds(codec("int8"), tensors[1:])
            off = (tensor.double() - exact).abs()
            assert off.max() > 1e-4, "nothing was compressed"
            assert (off <= bound + 1e-4).all()
        before = len(cdb.runtime.compression.compressed._halves)
        if rank in members:
            cdb.destroy_process_group(group)
        assert not cdb.runtime.compression.compressed._halves
    plain()
    return before


def test_only_groups_of_the_kinds_named_and_they_leave_nothing(ranks):
    assert ranks(4).run(_of_a_sub_group) == [0, 1, 1, 1]


def _left_alone():
    cdb = compressed("onebit")
    rank, size = cdb.get_rank(), cdb.get_world_size()
    exact = size * (size + 1) / 2
    for tensor in (
        torch.full((ODD,), rank + 1),
        torch.full((ODD,), rank + 1.0, dtype=torch.float64),
        torch.arange(1000.0) + rank + 1,  # too small
    ):
        expected = torch.full_like(tensor, exact)
        if tensor.numel() == 1000:
            expected = torch.arange(1000.0) * size + exact
        cdb.all_reduce(tensor)
        assert torch.equal(tensor, expected)
    tensors = gradients(ODD, size)
    tensor = tensors[rank].clone()
    cdb.runtime.issue(ops.ALL_REDUCE, None, (tensor, "max"))
    assert torch.equal(tensor, torch.stack(tensors).amax(0))
    tensor = tensors[rank].clone()
    cdb.broadcast(tensor, 0)  # as parameters come
    assert torch.equal(tensor, tensors[0])
    whole = torch.empty(size * ODD)
    cdb.all_gather_into_tensor(whole, tensors[rank])  # as the parameters of ZeRO do
    assert torch.equal(whole, torch.cat(tensors))
    part = torch.empty(ODD)
    cdb.all_to_all_single(part.new_empty(ODD // size * size), tensors[rank][: ODD // size * size])
    assert not cdb.runtime.compression.compressed._halves, "something was compressed"
    plain()


def test_integers_doubles_small_tensors_parameters_and_activations_are_left_alone(ranks):
    ranks(2).run(_left_alone)


def _activations(name, settings):
    cdb = compressed(name, operations=["all_to_all_single"], **settings)
    rank, size = cdb.get_rank(), cdb.get_world_size()
    for dtype in DTYPES:
        sent = [values[: 1500 * size] for values in gradients(1500 * size, size, dtype)]
        output = torch.empty_like(sent[rank])
        work = cdb.all_to_all_single(output, sent[rank], async_op=True)
        work.wait()
        blocks = [values[1500 * rank : 1500 * (rank + 1)] for values in sent]
        off = (output.double() - torch.cat(blocks).double()).abs()
        bound = torch.cat([codec(name).bound(block) for block in blocks])
        bound[1500 * rank : 1500 * (rank + 1)] = 0  # its own
        units = {torch.float32: 0, torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype]
        assert (off <= bound + (units * output.double().abs() if name == "int8" else 0)).all()
        uneven = torch.arange(3.0 * size * 1000)  # with split sizes: as it is
        other = torch.empty_like(uneven)
        cdb.all_to_all_single(other, uneven, [3000] * size, [3000] * size)
        assert torch.equal(other.view(size, -1)[rank], uneven.view(size, -1)[rank])
    assert cdb.runtime.compression.compressed._halves
    plain()


@pytest.mark.parametrize("name", ["lossless", "bf16", "int8"])
def test_activations_where_they_are_named(ranks, name):
    ranks(4).run(_activations, name, {"lossy_activations": True} if name == "int8" else {})


def _mean_of_a_constant(name):
    sparse = name in ("dgc", "graddrop")
    cdb = compressed(name, options={"ratio": 0.1} if sparse else {})  # or each element would take 100 steps
    rank, size = cdb.get_rank(), cdb.get_world_size()
    first, second = ([scale * tensor for tensor in gradients(ODD, size)] for scale in (1.0, -3.0))
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    means = torch.zeros(2, ODD, dtype=torch.float64)
    off = []
    for step in range(1, 161):
        for mean, tensors in zip(means, (first, second), strict=True):
            tensor = tensors[rank].clone()
            cdb.all_reduce(tensor)
            mean += tensor
        optimizer.step()
        if step in (10, 160):
            exact = torch.stack([torch.stack(tensors).double().sum(0) for tensors in (first, second)])
            off.append(float((means / step - exact).norm() / exact.norm()))
    plain()
    return off


@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_the_mean_of_a_gradient_that_repeats_becomes_right(ranks, name):
    (early, late), *_ = ranks(2).run(_mean_of_a_constant, name)
    assert late < early / 3
    assert late < 0.1


def _in_pieces(name, backend):
    cdb = compressed(name)
    runtime, rank, size = cdb.runtime, cdb.get_rank(), cdb.get_world_size()
    world, carrier = runtime.groups.world, runtime.ways[backend]
    carried = runtime.compression.compressed
    carried.prepare(carrier, world, torch.device("cpu"))
    tensors = gradients(ODD, size)
    results = [tensors[rank].clone() for _ in range(3)]
    works = [
        Work(
            carried.all_reduce(carrier, 4, world, tensor, "sum"),
            Call(ops.ALL_REDUCE, world, backend, 0),
            runtime.progress,
        )
        for tensor in results
    ]
    for work in works:
        work.wait()
    whole = [
        bounds(codec(name), pieces) for pieces in zip(*(torch.split(t, -(-ODD // 4)) for t in tensors), strict=True)
    ]
    exact, bound = (torch.cat(parts) for parts in zip(*whole, strict=True))
    rounding = 2**-20 * torch.stack(tensors).double().abs().sum(0)
    # with feedback only the first result is within its bound
    for tensor in results[: 1 if codec(name).wants_feedback else None]:
        assert ((tensor.double() - exact).abs() <= bound + rounding).all()
    plain()
    return torch.stack(results)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("name", ["int8", "onebit", "graddrop", "lossless"])
def test_calls_in_pieces_under_way_at_once(ranks, name, backend):
    first, *others = ranks(3).run(_in_pieces, name, backend)
    assert all(torch.equal(first, other) for other in others)


def _over_a_pair():
    cdb = compressed("int8")
    tensors = gradients(ODD, cdb.get_world_size())
    tensor = tensors[cdb.get_rank()].clone()
    seen = Seen()
    cdb.runtime.observe(seen)
    cdb.runtime.issue(ops.ALL_REDUCE, None, (tensor, "sum"), backend="shm+gloo")
    cdb.runtime.ignore(seen)
    exact, bound = bounds(codec("int8"), tensors)
    rounding = 2**-20 * torch.stack(tensors).double().abs().sum(0)
    assert ((tensor.double() - exact).abs() <= bound + rounding).all()
    plain()
    return seen.calls, tensor


def test_a_call_that_two_backends_share_is_compressed_too(ranks):
    (calls, first), *others = ranks(4, "aabb").run(_over_a_pair)
    ((_, carrier),) = calls
    assert carrier.endswith(" (int8)")
    assert all(torch.equal(first, other) for _, other in others)


def _with_all_else(folder):
    observe = {"log": True, "trace": True, "flight": True, "stragglers": True, "folder": folder}
    cdb = compressed("int8", {"fusion": {"max_call_bytes": 2048}, "checked": True, "observe": observe})
    rank, size = cdb.get_rank(), cdb.get_world_size()
    tensors = gradients(ODD, size)
    seen = Seen()
    cdb.runtime.observe(seen)
    results, works = [], []
    for number in range(12):
        results.append(tensors[rank][: 256 if number % 2 else ODD].clone())
        works.append(cdb.all_reduce(results[-1], async_op=True))
    for work in works[:: -1 if rank else 1]:
        work.wait()
    exact = torch.stack(tensors).sum(0)
    for number, result in enumerate(results):
        assert torch.equal(result, exact[:256]) if number % 2 else (result - exact).abs().max() > 1e-4
    rows, _ = cdb.runtime.session.rows()
    plain()
    return seen.calls, {(row["backend"], row["calls"], row["bytes"], row["why"]) for row in rows if row["bytes"]}


def test_with_fusion_checked_mode_and_all_that_observes(ranks, tmp_path):
    (calls, rows), *_ = ranks(2).run(_with_all_else, str(tmp_path))
    assert calls == 6 * [("all_reduce", "shm (int8)"), ("all_reduce", "shm")]
    coded = next(row for row in rows if row[0] == "shm (int8)")
    assert coded[1:3] == (6, 6 * 4 * ODD)
    assert coded[3].startswith("compressed: int8, all_reduce on world groups")


def _warmed_up():
    cdb = compressed("onebit", warmup_steps=2)
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    tensors = gradients(ODD, cdb.get_world_size())
    exact = torch.stack(tensors).sum(0)
    found = []
    for _ in range(4):
        results = [tensors[cdb.get_rank()].clone() for _ in range(2)]
        for result in results:
            cdb.all_reduce(result)
        optimizer.step()
        optimizer.step()  # of another group of parameters
        found.append([torch.equal(result, exact) for result in results])
    plain()
    return found


def test_the_first_steps_are_as_they_are_if_that_is_asked_for(ranks):
    assert ranks(2).run(_warmed_up) == 2 * [[[True, True], [True, True], [False, False], [False, False]]]


def _measured(name):
    cdb = compressed(name, mode="plan", operations=["all_reduce", *(["all_to_all_single"] if name == "bf16" else [])])
    runtime, world = cdb.runtime, cdb.runtime.groups.world
    decides, tensor = runtime.compression, torch.ones(2**18)
    policy.choose = lambda *args: Plan(True, "gloo", 2, 1.0, 2.0)  # foretold to be twice as fast
    try:
        for operation, args in (
            (ops.ALL_REDUCE, (tensor, "sum")),
            (ops.ALL_TO_ALL_SINGLE, (tensor, tensor.clone(), None, None)),
        )[: 2 if name == "bf16" else 1]:
            key = key_of(operation, world, args)
            assert decides.method(runtime.ways["shm"], operation, world, args, key) is None
    finally:
        policy.choose = choose
    kept, planned = decides.compressed._feedback, [plan.compress for plan in decides._plans.values()]
    plain()
    return planned, kept


@pytest.mark.parametrize("name", ["onebit", "bf16"])
def test_what_is_foretold_to_pay_and_does_not_is_left_as_it_is(ranks, name):
    assert ranks(2).run(_measured, name) == 2 * [([False] * (2 if name == "bf16" else 1), {})]


def _asked_again_on_one_rank():
    """A call that only one rank has to look up anew: there it is strided."""
    cdb = compressed("int8", {"timeout_s": 10}, mode="plan")
    policy.choose = lambda *args: Plan(True, "gloo", 1, 1.0, 2.0)  # foretold to be twice as fast
    try:
        for strided in (False, cdb.get_rank() == 1):
            tensor = torch.ones(2, 2**16).T if strided else torch.ones(2**16, 2)
            cdb.all_reduce(tensor)
            assert (tensor == 2).all()
    finally:
        policy.choose = choose
    plain()


def test_what_was_decided_is_not_measured_again_by_one_rank(ranks):
    ranks(2).run(_asked_again_on_one_rank, timeout_s=60)


def test_a_job_that_ends_and_starts_again_compresses_again(ranks):
    for _ in range(3):
        ranks(2).run(_sums, "int8", "auto", ODD, "sum")


def _no_identity():
    cdb = compressed("onebit")
    tensor = torch.ones(1024)
    for _ in range(CALLS_WITHOUT_STEP):
        cdb.all_reduce(tensor)
    with pytest.raises(CallError, match="without a step of a torch optimizer"):
        cdb.all_reduce(tensor)
    plain()


def test_a_codec_with_feedback_is_refused_where_no_tensor_has_an_identity(ranks):
    ranks(2).run(_no_identity)


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"codec": "int9"}, 'unknown codec "int9".*Did you mean "int8"'),
        ({"codec": "dgc", "options": {"ration": 0.1}}, 'no option "ration". Did you mean "ratio"'),
        ({"codec": "int8", "options": {"ratio": 0.1}}, "has no options"),
        ({"codec": "dgc", "options": {"ratio": 3}}, "ratio of dgc is 3"),
        ({"codec": "onebit", "operations": ["all_to_all_single"]}, "needs error feedback"),
        ({"codec": "int8", "operations": ["all_to_all_single"]}, '"lossy_activations"'),
    ],
)
def test_a_wrong_codec_is_an_error_on_all_ranks(ranks, block, text):
    first, second = ranks(2).run(refused, {"compression": block})
    assert first == second
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(first)


def _planned():
    cdb = compressed("int8", mode="plan")
    tensors = gradients(300_000, cdb.get_world_size())
    tensor = tensors[cdb.get_rank()].clone()
    cdb.all_reduce(tensor)
    decides = cdb.runtime.compression
    ((key, figures),) = decides._figures.items()
    backend = cdb.runtime.backends[key[3]]
    same = figures is decides.figures(backend, ops.ALL_REDUCE, cdb.runtime.groups.world, torch.float32, tensor.device)
    text = cdb.runtime.describe()
    plain()
    return figures, same, tensor, text


def test_ranks_plan_from_the_same_figures(ranks):
    first, second = ranks(2).run(_planned)
    assert first[0] == second[0]
    assert first[1]
    assert torch.equal(first[2], second[2])
    assert "compression: int8, all_reduce on world groups, from 4096 bytes, where it is faster" in first[3]
