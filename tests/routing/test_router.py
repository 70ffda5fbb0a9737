import pytest
import torch

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.backends.c10d import GlooBackend, NCCLBackend
from deepspeed_mcrdl.backends.mpi import MPIBackend
from deepspeed_mcrdl.config import parse
from deepspeed_mcrdl.errors import UnsupportedError
from deepspeed_mcrdl.routing.router import ONE_HOST, Key, Router
from deepspeed_mcrdl.routing.table import Fingerprint, Lookup, Table

BACKENDS = {"mpi": MPIBackend, "gloo": GlooBackend}


def decide(
    routing, operation, kind="world", size=1000, dtype=torch.float32, op=None, backends=BACKENDS, device="cpu", **more
):
    router = Router(parse({"routing": routing}).routing, backends, **more)
    op = op or ("sum" if operation.reduces else None)
    return router.decide(Key(operation, kind, dtype, device, op, size))


def test_auto_takes_the_backend_that_prefers_itself_most():
    assert decide({}, ops.ALL_REDUCE).backend == "mpi"
    assert decide({"default": "auto"}, ops.ALL_REDUCE).backend == "mpi"


def test_the_narrowest_rule_counts():
    routing = {
        "default": "gloo",
        "all_to_all": "mpi",
        "groups": {"expert_parallel": {"all_to_all_single": "gloo", "broadcast": "mpi"}},
    }
    assert decide(routing, ops.ALL_REDUCE).backend == "gloo"
    assert decide(routing, ops.ALL_TO_ALL_SINGLE).backend == "mpi"
    assert decide(routing, ops.ALL_TO_ALL_SINGLE, kind="expert_parallel").backend == "gloo"
    assert decide(routing, ops.BROADCAST, kind="expert_parallel").backend == "mpi"
    assert decide(routing, ops.REDUCE, kind="expert_parallel").backend == "gloo"


def test_a_family_covers_all_its_forms_and_both_ends_of_a_message():
    routing = {"default": "mpi", "all_gather": "gloo", "all_gather_into_tensor": "mpi", "send_recv": "gloo"}
    assert decide(routing, ops.ALL_GATHER).backend == "gloo"
    assert decide(routing, ops.ALL_GATHER_INTO_TENSOR).backend == "mpi"
    assert decide(routing, ops.SEND).backend == decide(routing, ops.RECV).backend == "gloo"


@pytest.mark.parametrize(("size", "backend"), [(0, "mpi"), (64, "mpi"), (65, "gloo"), (None, "gloo")])
def test_a_size_list_includes_its_limits_and_ends_with_the_unknown(size, backend):
    routing = {"all_reduce": [{"max_bytes": 64, "backend": "mpi"}, {"backend": "gloo"}]}
    assert decide(routing, ops.ALL_REDUCE, size=size).backend == backend


def test_a_backend_that_cannot_do_a_call_is_passed_over():
    decision = decide({"default": "gloo"}, ops.ALL_REDUCE, dtype=torch.int16)
    assert decision.backend == "mpi"
    assert "has no sum of torch.int16" in decision.why


def test_a_call_that_nobody_can_do_names_all_that_was_tried():
    with pytest.raises(UnsupportedError, match=r"all_reduce band float32 cpu on a world group: mpi .*; gloo "):
        decide({}, ops.ALL_REDUCE, op="band")


def table_of(*steps, operation="all_reduce"):
    entry = {
        "operation": operation,
        "dtype": "float",
        "device": "cpu",
        "mesh": ONE_HOST,
        "unsized": steps[-1]["backend"],
    }
    return Lookup(
        Table(
            made="2026-12-02",
            how="a test",
            fingerprint=Fingerprint.here({}),
            entries=({**entry, "steps": steps},),
        )
    )


def test_a_table_speaks_where_no_rule_does():
    table = table_of({"max_bytes": 999, "backend": "mpi"}, {"backend": "gloo"})
    assert decide({}, ops.ALL_REDUCE, table=table).backend == "gloo"
    assert decide({}, ops.ALL_REDUCE, table=table).why == "table, above 999 bytes"
    assert decide({}, ops.ALL_REDUCE, table=table, size=999).backend == "mpi"
    assert decide({"all_reduce": "mpi"}, ops.ALL_REDUCE, table=table).backend == "mpi"
    assert decide({"all_reduce": "auto"}, ops.ALL_REDUCE, table=table).backend == "gloo"


def test_what_the_table_names_but_cannot_do_a_call_is_passed_over_in_silence(caplog):
    decision = decide({}, ops.ALL_REDUCE, table=table_of({"backend": "gloo"}), dtype=torch.int16)
    assert decision.backend == "mpi"
    assert not caplog.records


def test_the_map_of_sizes_follows_rules_and_table():
    table = table_of({"max_bytes": 999, "backend": "gloo"}, {"backend": "mpi"})
    router = Router(parse({}).routing, BACKENDS, table)
    ranges = router.ranges(Key(ops.ALL_REDUCE, "world", torch.float32, "cpu", "sum"))
    assert [(first, last, decision.backend) for first, last, decision in ranges] == [
        (0, 999, "gloo"),
        (1000, None, "mpi"),
    ]
    assert router.map("cpu", ONE_HOST)["gloo"] == ["all_reduce up to 999 B"]
    pinned = Router(parse({"routing": {"all_reduce": "mpi"}}).routing, BACKENDS, table)
    assert [r[2].why for r in pinned.ranges(Key(ops.ALL_REDUCE, "world", torch.float32, "cpu", "sum"))] == [
        "routing.all_reduce"
    ]


def test_gpu_tensors_go_to_who_takes_them_or_through_host_memory():
    on_gpu = {"nccl": NCCLBackend, **BACKENDS}
    assert decide({}, ops.ALL_REDUCE, device="cuda", backends=on_gpu).backend == "nccl"
    assert decide({"all_reduce": "mpi"}, ops.ALL_REDUCE, device="cuda", backends=on_gpu).backend == "mpi"
    assert decide({}, ops.ALL_REDUCE, device="cuda").backend == "mpi"
    assert decide({}, ops.ALL_REDUCE, device="cpu", backends=on_gpu).backend == "mpi"
    # what NCCL can't compute
    decision = decide({}, ops.ALL_REDUCE, device="cuda", dtype=torch.int32, op="bxor", backends=on_gpu)
    assert decision.backend == "mpi"
    assert "nccl has no bxor of torch.int32" in decision.why
