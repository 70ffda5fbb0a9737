"""Sets of ranks: what a group is (ranks, kind, mesh) and which torch process group it stands for.

Every backend keeps its own communicator for a Group; a Group itself only says who is in it.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from deepspeed_mcrdl.errors import CallError

# The kinds a routing rule may name, in the order in which a group that is of several kinds is taken to be one.
KINDS = (
    "expert_parallel",
    "expert_data_parallel",
    "tensor_parallel",
    "pipeline_parallel",
    "sequence_parallel",
    "data_parallel",
    "world",
)
OTHER_KIND = "other"

_ENDED = "communication has ended; start it again with deepspeed.init_distributed()"

# What Megatron-style `mpu` objects and DeepSpeed's own grids call their groups.
_MPU_GETTERS = {
    "tensor_parallel": ("get_tensor_model_parallel_group", "get_model_parallel_group"),
    "pipeline_parallel": ("get_pipeline_model_parallel_group", "get_pipe_parallel_group"),
    "sequence_parallel": ("get_sequence_parallel_group",),
    "data_parallel": ("get_data_parallel_group",),
}


@dataclass(frozen=True)
class Mesh:
    """How a group lies on the hosts.

    Attributes:
        nodes: number of hosts.
        ranks_per_node: ranks of the group on a host, 0 if that differs between hosts.
        stride: distance between neighbouring ranks, 0 if it is not constant.
    """

    nodes: int
    ranks_per_node: int
    stride: int

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}/{self.stride}"


class Group:
    """A set of ranks that this process is in.

    Attributes:
        ranks: global ranks in group order.
        rank: this process's place in `ranks`.
        size: number of ranks.
        name: a name that all members know the group by.
        number: a small number unique to the group in this job, the same on all members.
        mesh: how the ranks lie on the hosts.
        torch_group: the torch process group.
        calls: how many collectives of the group this rank has called.
    """

    __slots__ = ("_indices", "_kind", "calls", "mesh", "name", "number", "rank", "ranks", "size", "torch_group")

    def __init__(self, ranks: Sequence[int], rank: int, name: str, number: int, mesh: Mesh, torch_group: Any) -> None:
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.rank = rank
        self.name = name
        self.number = number
        self.mesh = mesh
        self.torch_group = torch_group
        self.calls = 0
        self._indices = {r: i for i, r in enumerate(self.ranks)}
        self._kind: str | None = None

    def index(self, global_rank: int) -> int:
        """Return the place of `global_rank` in the group."""
        try:
            return self._indices[global_rank]
        except KeyError:
            raise CallError(f"rank {global_rank} is not in {self}; src and dst are global ranks") from None

    @property
    def kind(self) -> str:
        """What the group is for: one of KINDS or "other". Read once, at the group's first call."""
        if self._kind is None:
            self._kind = kind_of(self.torch_group)
        return self._kind

    def __str__(self) -> str:
        return f"group {self.name!r} (ranks {in_words(self.ranks)})"


def in_words(ranks: Sequence[int]) -> str:
    """Return such as "0, 2, 3", or "0..63" of many."""
    return f"{ranks[0]}..{ranks[-1]}" if len(ranks) > 8 else ", ".join(map(str, ranks))


class Groups:
    """The groups of this process by torch process group; a group made elsewhere is adopted at its first call.

    Args:
        store: the job's store, from which groups get their numbers.
        rank: this process's global rank.
        hosts: hostname of every rank."""

    def __init__(self, store: Store, rank: int, hosts: Sequence[str]) -> None:
        self._store: Store | None = store
        self._rank = rank
        self.hosts = tuple(hosts)
        self._by_torch_group: dict[Any, Group] = {}
        self._names: Counter[str] = Counter()

    @property
    def world(self) -> Group:
        """The group of all ranks."""
        return self._by_torch_group[None]

    def add(self, torch_group: Any, ranks: Sequence[int], name: str) -> Group:
        """Make the Group of a torch process group; the first one is the world."""
        group = self.make(ranks, name, torch_group)
        self._by_torch_group.setdefault(None, group)
        self._by_torch_group[torch_group] = group
        return group

    def make(self, ranks: Sequence[int], name: str, torch_group: Any = None) -> Group:
        """Return a new Group, which every member makes; without a torch process group no call can name it."""
        # A name can come again after its group was destroyed, for all members alike.
        self._names[name] += 1
        return Group(
            ranks=ranks,
            rank=list(ranks).index(self._rank),
            name=name,
            number=_number(self.store, f"{name}/{self._names[name]}"),
            mesh=mesh_of(ranks, self.hosts),
            torch_group=torch_group,
        )

    def __len__(self) -> int:
        return len(set(self._by_torch_group.values()))

    def __iter__(self) -> Iterator[Group]:
        return iter(dict.fromkeys(self._by_torch_group.values()))

    def of(self, torch_group: Any) -> Group:
        """Return the Group for a torch process group (None: the world) that this rank is a member of."""
        group = self._by_torch_group.get(torch_group)
        if group is None:
            if torch_group is dist.GroupMember.NON_GROUP_MEMBER:
                raise CallError("a call on a group that this rank is not a member of")
            if self._store is None:
                raise CallError(_ENDED)
            group = self.add(torch_group, dist.get_process_group_ranks(torch_group), torch_group.group_name)
        return group

    @property
    def store(self) -> Store:
        """The job's store, as long as communication goes on."""
        if self._store is None:
            raise CallError(_ENDED)
        return self._store

    def close(self) -> None:
        """Let go of torch's groups and store, which keep the job's port open as long as somebody holds them."""
        for group in self:
            group.torch_group = None
        self._by_torch_group.clear()
        self._store = None

    def discard(self, torch_group: Any) -> Group | None:
        """Forget a destroyed group and return it."""
        return self._by_torch_group.pop(torch_group, None)


def _number(store: Store, name: str) -> int:
    # The first member to come draws the number; nobody waits for a call that is not already under way.
    if store.add(f"group/{name}/drawn", 1) == 1:
        store.set(f"group/{name}/number", str(store.add("groups", 1) - 1))
    return int(store.get(f"group/{name}/number"))


def mesh_of(ranks: Sequence[int], hosts: Sequence[str]) -> Mesh:
    """Return how `ranks` lie on `hosts` (hostname of every global rank)."""
    per_host: dict[str, int] = {}
    for rank in ranks:
        per_host[hosts[rank]] = per_host.get(hosts[rank], 0) + 1
    counts = set(per_host.values())
    strides = {b - a for a, b in itertools.pairwise(ranks)}
    return Mesh(
        nodes=len(per_host),
        ranks_per_node=counts.pop() if len(counts) == 1 else 0,
        stride=(strides.pop() if len(strides) == 1 else 0) if strides else 1,
    )


def kind_of(torch_group: Any) -> str:
    """Return what DeepSpeed, or the mpu object given to it, uses `torch_group` for."""
    if torch_group is dist.group.WORLD:
        return "world"
    found = {kind for kind, candidate in _known_groups() if candidate is torch_group}
    return next((kind for kind in KINDS if kind in found), OTHER_KIND)


def _known_groups() -> Iterator[tuple[str, Any]]:
    groups = sys.modules.get("deepspeed.utils.groups")
    if groups is None:
        return
    for kind, attribute in (
        ("expert_parallel", "_EXPERT_PARALLEL_GROUP"),
        ("expert_data_parallel", "_EXPERT_DATA_PARALLEL_GROUP"),
    ):
        for group in getattr(groups, attribute).values():
            yield kind, group
    yield "tensor_parallel", groups._TENSOR_MODEL_PARALLEL_GROUP
    yield "data_parallel", groups._DATA_PARALLEL_GROUP
    yield "data_parallel", groups._WORLD_GROUP
    mesh = groups.mesh_device
    if mesh is not None:
        for kind in set(KINDS) & set(mesh.mesh_dim_names or ()):
            yield kind, mesh.get_group(mesh_dim=kind)
    for kind, getters in _MPU_GETTERS.items():
        for getter in getters:
            try:
                yield kind, getattr(groups.mpu, getter)()
            except (AttributeError, AssertionError):
                continue  # this mpu has no such dimension
