import pytest

from deepspeed_mcrdl.errors import CallError
from deepspeed_mcrdl.groups import Group, Mesh, mesh_of


@pytest.mark.parametrize(
    ("ranks", "hosts", "mesh"),
    [
        ([0, 1, 2, 3], "aaaa", Mesh(1, 4, 1)),
        ([0, 1, 2, 3], "aabb", Mesh(2, 2, 1)),
        ([0, 2], "aabb", Mesh(2, 1, 2)),
        ([0, 2, 4, 6], "aaaabbbb", Mesh(2, 2, 2)),
        ([0, 1, 3], "aaab", Mesh(2, 0, 0)),
        ([1], "aa", Mesh(1, 1, 1)),
    ],
)
def test_a_mesh_tells_hosts_ranks_on_each_and_stride(ranks, hosts, mesh):
    assert mesh_of(ranks, hosts) == mesh


def test_a_group_translates_global_ranks_and_names_strangers():
    group = Group(ranks=(4, 6), rank=0, name="g", number=3, mesh=Mesh(1, 2, 2), torch_group=None)
    assert group.index(6) == 1
    with pytest.raises(CallError, match=r"rank 1 is not in group 'g' \(ranks 4, 6\)"):
        group.index(1)
