import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_mcrdl.errors import CallError
from deepspeed_mcrdl.transforms.compression.feedback import ErrorFeedback
from tests.transforms.compression.cases import CODECS, LOSSY, codec, generator, normal, tensors

ROOM = 2**20
WANTED = [name for name, kind in CODECS.items() if kind.wants_feedback]
# The error of these is a float32: it has no more digits than the element, or is the element, or 0.
EXACT = ["fp16", "bf16", "dgc", "graddrop", "lossless"]


def feedback(name, max_bytes=ROOM):
    return ErrorFeedback(codec(name), max_bytes)


def decode(name, payload, numel):
    return codec(name).decode(payload, numel, torch.float32)


def test_codecs_that_lose_much_want_it():
    assert WANTED == ["dgc", "graddrop", "onebit", "tbq"]


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=40, deadline=None)
@given(first=tensors(largest=2.0**15), seed=st.integers(0, 100))
def test_what_is_sent_and_what_is_kept_make_up_the_gradient(name, first, seed):
    """g + e_old = decoded + e_new, each step, up to the rounding of e_new: half a unit in its last place."""
    numel = first.numel()
    held = feedback(name)
    residual = torch.zeros(numel)
    for step, gradient in enumerate([first, normal(numel, seed, first.dtype), first]):
        sent = decode(name, held.encode("w", gradient, generator(step)), numel)
        kept = held.state_dict()["w"]
        corrected = (gradient.float() + residual).double()  # rounded to float32 before it is encoded
        off = (corrected - (sent.double() + kept.double())).abs()
        assert (off <= (0 if name in EXACT else kept.double().abs() * 2**-24)).all()
        residual = kept


@pytest.mark.parametrize("name", WANTED)
@pytest.mark.parametrize("numel", [1, 5, 3000])
def test_a_gradient_that_stays_arrives(name, numel):
    gradient = normal(numel) * 0.01
    held = feedback(name)
    steps = 1000
    draws = generator()
    mean = sum(decode(name, held.encode("w", gradient, draws), numel) for _ in range(steps)) / steps
    assert (mean - gradient).norm() < 0.05 * gradient.norm()
    assert held.state_dict()["w"].norm() < 0.05 * steps * gradient.norm()


def test_keys_are_apart():
    held = feedback("onebit")
    alone = feedback("onebit")
    for step in range(3):
        gradient = normal(100, step)
        held.encode(("v", 1), normal(50, step))
        assert torch.equal(held.encode(("w", 0), gradient), alone.encode("w", gradient))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", LOSSY)
def test_an_overflow_passes_on_and_does_not_stay(name, value):
    held = feedback(name)
    held.encode("w", normal(100), generator())
    overflown = normal(100)
    overflown[50] = value
    assert not decode(name, held.encode("w", overflown, generator()), 100)[50].isfinite()
    assert held.state_dict()["w"].isfinite().all()
    assert decode(name, held.encode("w", normal(100), generator()), 100).isfinite().all()


def test_the_gradient_is_left_as_it_is():
    gradient = normal(100)
    held = feedback("onebit")
    held.encode("w", gradient)
    held.encode("w", gradient)
    assert torch.equal(gradient, normal(100))


# --- saved and forgotten ---


@pytest.mark.parametrize("name", ["onebit", "graddrop"])
def test_a_job_goes_on_from_a_checkpoint(name, tmp_path):
    held = feedback(name)
    held.encode(("w", 0), normal(100), generator())
    torch.save(held.state_dict(), tmp_path / "state.pt")
    resumed = feedback(name)
    resumed.encode("old", normal(3), generator())
    resumed.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert resumed.nbytes == 400
    for step in range(3):
        payloads = [f.encode(("w", 0), normal(100, step), generator(step)) for f in (held, resumed)]
        assert torch.equal(*payloads)


def test_a_checkpoint_is_a_copy():
    held = feedback("onebit")
    held.encode("w", normal(100))
    state = held.state_dict()
    before = state["w"].clone()
    held.encode("w", normal(100, 1))
    assert torch.equal(state["w"], before)


def test_reset_forgets_one_or_all():
    held = feedback("onebit")
    for key in "abc":
        held.encode(key, normal(10))
    held.reset("b")
    assert list(held.state_dict()) == ["a", "c"]
    held.reset("never seen")
    held.reset()
    assert held.nbytes == 0


# --- mistakes ---


def test_a_tensor_without_a_key_is_refused():
    with pytest.raises(CallError, match="needs a key that a tensor keeps from step to step"):
        feedback("onebit").encode(None, normal(10))


def test_a_key_of_another_tensor_is_refused():
    held = feedback("onebit")
    held.encode("w", normal(10))
    with pytest.raises(CallError, match="the residual of 'w' has 10 elements and this tensor 11"):
        held.encode("w", normal(11))


def test_memory_is_bounded():
    held = feedback("onebit", max_bytes=100)
    held.encode("a", normal(20))
    with pytest.raises(
        CallError,
        match="would keep 120 bytes with what is lost of 'b', more than its limit, \"feedback_bytes\", of 100",
    ):
        held.encode("b", normal(10))
    held.encode("a", normal(20))
    assert held.nbytes == 80
    with pytest.raises(CallError, match="would keep 120 bytes with the residuals of this checkpoint"):
        held.load_state_dict({"a": normal(30)})
    assert held.nbytes == 80


def test_an_error_changes_nothing():
    held = feedback("graddrop")
    held.encode("w", normal(10), generator())
    before = held.state_dict()["w"]
    with pytest.raises(CallError, match="draws random numbers"):
        held.encode("w", normal(10, 1))
    with pytest.raises(CallError, match=r"takes no torch.float64"):
        held.encode("w", normal(10).double(), generator())
    assert torch.equal(held.state_dict()["w"], before)
