"""DeepSpeed's face: a backend class with the signatures that deepspeed.comm calls, one line from the runtime each."""

from __future__ import annotations

import importlib
from datetime import timedelta
from typing import Any

import torch
from deepspeed.comm.reduce_op import ReduceOp
from deepspeed.constants import default_pg_timeout

from deepspeed_mcrdl import composed
from deepspeed_mcrdl.config import MCRDLConfig
from deepspeed_mcrdl.faces.reduce_ops import know, op_name
from deepspeed_mcrdl.operations import (
    ALL_GATHER,
    ALL_GATHER_INTO_TENSOR,
    ALL_REDUCE,
    ALL_TO_ALL,
    ALL_TO_ALL_SINGLE,
    BARRIER,
    BROADCAST,
    GATHER,
    RECV,
    REDUCE,
    REDUCE_SCATTER,
    REDUCE_SCATTER_TENSOR,
    SCATTER,
    SEND,
)
from deepspeed_mcrdl.runtime import Runtime, for_torch
from deepspeed_mcrdl.work import Work

# By name: the attribute deepspeed.comm.torch is torch itself.
stock = importlib.import_module("deepspeed.comm.torch")

know(ReduceOp)


class MCRDLBackend(stock.TorchBackend):  # type: ignore[misc,name-defined]
    """DeepSpeed's communication backend on top of a Runtime; `config` is set on a subclass by `select`.

    Group management that only torch.distributed does (rank and size queries, world group) is inherited.
    """

    config = MCRDLConfig()
    runtime: Runtime

    def __init__(
        self,
        backend: str | None,
        timeout: timedelta,
        init_method: str | None,
        rank: int = -1,
        world_size: int = -1,
        name: str = "mcrdl",
    ) -> None:
        # TorchBackend's own start is left out: it compiles a shared-memory kernel that nothing here uses.
        self.all_gather_function = self.get_all_gather_function()
        self.reduce_scatter_function = self.get_reduce_scatter_function()
        self.single_gpu_mode = True
        self.init_process_group(backend, timeout, init_method, rank, world_size)
        self.start(name, timeout)

    def start(self, name: str = "mcrdl", timeout: timedelta = default_pg_timeout) -> None:
        """Start the runtime on the initialised torch.distributed; also makes a stock backend object one of ours."""
        self.name = name
        self.initialized = True
        self.using_mpi = False  # True makes DeepSpeed's logger call a world barrier after calls of sub-groups
        self.shm_comm_op = None
        self.has_all_reduce_coalesced = True
        self.has_coalescing_manager = False  # torch's manager would collect calls past the router
        self.runtime = for_torch(self.config, timeout)
        self._issue = self.runtime.issue

    def restart(self, config: MCRDLConfig) -> None:
        """Go on with another config, in every group made so far; every rank calls this at the same place."""
        self.config = config
        self.runtime.restart(config)

    def all_reduce(
        self, tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        return self._issue(ALL_REDUCE, group, (tensor, op_name(op)), async_op)

    def inference_all_reduce(self, tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None) -> torch.Tensor:
        self._issue(ALL_REDUCE, group, (tensor, op_name(op)))
        return tensor

    def all_reduce_coalesced(
        self, tensors: list[torch.Tensor], op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        return composed.all_reduce_coalesced(self.runtime, group, tensors, op_name(op), async_op)

    def reduce(
        self, tensor: torch.Tensor, dst: int, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if stock.DS_COMM_REDUCE_OFF:
            return super().reduce(tensor, dst, op, group, async_op)
        return self._issue(REDUCE, group, (tensor, dst, op_name(op)), async_op)

    def broadcast(self, tensor: torch.Tensor, src: int, group: Any = None, async_op: bool = False) -> Any:
        if stock.DS_COMM_BROADCAST_OFF:
            return super().broadcast(tensor, src, group, async_op)
        return self._issue(BROADCAST, group, (tensor, src), async_op)

    def broadcast_object_list(self, object_list: list[Any], src: int, group: Any = None, device: Any = None) -> None:
        composed.broadcast_object_list(self.runtime, group, object_list, src, device)

    def all_gather(
        self, tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if stock.DS_COMM_ALL_GATHER_OFF:
            return super().all_gather(tensor_list, tensor, group, async_op)
        return self._issue(ALL_GATHER, group, (tensor_list, tensor), async_op)

    def all_gather_into_tensor(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        return self._issue(ALL_GATHER_INTO_TENSOR, group, (output_tensor, input_tensor), async_op)

    all_gather_base = all_gather_into_tensor

    def all_gather_coalesced(
        self,
        output_tensors: list[torch.Tensor],
        input_tensors: list[torch.Tensor],
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return composed.all_gather_coalesced(self.runtime, group, output_tensors, input_tensors, async_op)

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        composed.all_gather_object(self.runtime, group, object_list, obj)

    def gather(
        self,
        tensor: torch.Tensor,
        gather_list: list[torch.Tensor] | None = None,
        dst: int = 0,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return self._issue(GATHER, group, (gather_list, tensor, dst), async_op)

    def scatter(
        self,
        tensor: torch.Tensor,
        scatter_list: list[torch.Tensor] | None = None,
        src: int = 0,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return self._issue(SCATTER, group, (tensor, scatter_list, src), async_op)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if stock.DS_COMM_REDUCE_SCATTER_OFF:
            return super().reduce_scatter(output, input_list, op, group, async_op)
        return self._issue(REDUCE_SCATTER, group, (output, input_list, op_name(op)), async_op)

    def reduce_scatter_tensor(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        op: Any = ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return self._issue(REDUCE_SCATTER_TENSOR, group, (output_tensor, input_tensor, op_name(op)), async_op)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        # torch takes an empty list of splits for none
        output_splits, input_splits = output_split_sizes or None, input_split_sizes or None
        return self._issue(ALL_TO_ALL_SINGLE, group, (output, input, output_splits, input_splits), async_op)

    def all_to_all(
        self,
        output_tensor_list: list[torch.Tensor],
        input_tensor_list: list[torch.Tensor],
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return self._issue(ALL_TO_ALL, group, (output_tensor_list, input_tensor_list), async_op)

    def send(self, tensor: torch.Tensor, dst: int, group: Any = None, tag: int = 0) -> None:
        self._issue(SEND, group, (tensor, dst, tag))

    def recv(self, tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0) -> int:
        """Receive into `tensor` and return the sender's global rank."""
        if src is not None:
            self._issue(RECV, group, (tensor, src, tag))
            return src
        work = self.irecv(tensor, src, group, tag)
        work.wait()
        return work.source_rank()

    def isend(self, tensor: torch.Tensor, dst: int, group: Any = None, tag: int = 0) -> Work:
        work = self._issue(SEND, group, (tensor, dst, tag), True)
        assert work is not None
        return work

    def irecv(self, tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0) -> Work:
        work = self._issue(RECV, group, (tensor, src, tag), True)
        assert work is not None
        return work

    def batch_isend_irecv(self, p2p_op_list: list[Any]) -> list[Work]:
        return composed.batch_isend_irecv(self.runtime, [(p.op, p.tensor, p.peer, p.group, p.tag) for p in p2p_op_list])

    def barrier(self, group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return self._issue(BARRIER, group, (), async_op)

    def monitored_barrier(
        self, group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        limit = (timeout or default_pg_timeout).total_seconds()
        self.runtime.monitored_barrier(self.runtime.groups.of(group), limit, wait_all_ranks)

    def new_group(self, ranks: Any) -> Any:
        return self.runtime.new_group(list(ranks))

    def init_device_mesh(self, mesh_shape: Any, mesh_dim_names: Any) -> Any:
        make = super().init_device_mesh
        everybody = range(self.runtime.world_size)
        mesh = self.runtime.make_group(everybody, lambda: make(mesh_shape, mesh_dim_names))
        # Every rank is in one group of each dimension and takes the dimensions in the same order: no cycle can form.
        for group in mesh.get_all_groups():
            self.runtime.adopt(group)
        return mesh

    def destroy_process_group(self, group: Any = None) -> Any:
        self.runtime.forget(group)
        return super().destroy_process_group(group)
