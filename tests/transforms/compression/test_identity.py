import pytest
import torch

from deepspeed_mcrdl.errors import CallError
from deepspeed_mcrdl.groups import Group, Mesh
from deepspeed_mcrdl.transforms.compression.identity import CALLS_WITHOUT_STEP, CHANGES_IN_A_ROW, Identities


@pytest.fixture
def group():
    return Group([0, 1], 0, "dp", 1, Mesh(1, 2, 1), None)


@pytest.fixture
def made():
    forgotten = []
    identities = Identities(forgotten.append)
    yield identities, forgotten
    identities.close()


def step(identities, group, signatures):
    places = [identities.place(group, signature) for signature in signatures]
    identities.end_step()
    return places


def test_a_call_keeps_its_place_in_each_step(made, group):
    identities, forgotten = made
    for _ in range(3):
        assert step(identities, group, "aab") == [0, 1, 2]
        identities.end_step()  # of another optimizer
    assert not forgotten


@pytest.mark.parametrize("other", ["ab", "aba", "aabb", "baa"])
def test_another_sequence_forgets_what_was_kept_and_becomes_the_known_one(made, group, other):
    identities, forgotten = made
    step(identities, group, "aab")
    step(identities, group, other)
    assert forgotten == [group]
    step(identities, group, other)
    assert forgotten == [group]


def test_every_torch_optimizer_ends_a_step(made, group):
    identities, _ = made
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    for optimizer in (torch.optim.SGD([parameter], lr=0.1), torch.optim.Adam([parameter])):
        assert identities.place(group, "a") == 0
        optimizer.step()
    identities.close()
    assert identities.place(group, "a") == 0
    optimizer.step()
    assert identities.place(group, "a") == 1


def test_a_step_that_a_loss_scaler_skips_costs_what_was_kept_but_no_more(made, group):
    identities, forgotten = made
    for _ in range(20):
        step(identities, group, "ab")
        step(identities, group, "abab")
        step(identities, group, "ab")
        step(identities, group, "ab")
    assert set(forgotten) == {group}


def test_calls_without_steps_are_refused(made, group):
    identities, _ = made
    for _ in range(CALLS_WITHOUT_STEP):
        identities.place(group, "a")
    with pytest.raises(CallError, match=r"mcrdl.end_step\(\)"):
        identities.place(group, "a")


def test_steps_that_always_differ_are_refused(made, group):
    identities, forgotten = made
    for number in range(CHANGES_IN_A_ROW + 1):
        step(identities, group, [number])
    with pytest.raises(CallError, match="have changed"):
        identities.place(group, "another")
    assert len(forgotten) == CHANGES_IN_A_ROW
