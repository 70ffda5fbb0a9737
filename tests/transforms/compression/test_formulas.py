"""Each codec against the formula of its paper."""

import sys

import pytest
import torch
from hypothesis import assume, given, settings

from deepspeed_mcrdl.backends.base import MOVABLE
from deepspeed_mcrdl.errors import CallError, ConfigError, MCRDLError
from deepspeed_mcrdl.transforms.compression.blocks import BLOCK, SMALLEST
from deepspeed_mcrdl.transforms.compression.dgc import DGC, LARGE
from deepspeed_mcrdl.transforms.compression.graddrop import GradDrop
from deepspeed_mcrdl.transforms.compression.levels import pack
from deepspeed_mcrdl.transforms.compression.lossless import Lossless
from deepspeed_mcrdl.transforms.compression.tbq import TBQ
from tests.transforms.compression.cases import codec, generator, normal, per_block, tensors


def round_trip(kind, tensor, seed=0):
    return kind.decode(kind.encode(tensor, generator(seed)), tensor.numel(), torch.float32)


@settings(max_examples=60, deadline=None)
@given(tensors())
def test_casts_are_torchs(tensor):
    assert torch.equal(round_trip(codec("fp16"), tensor), tensor.half().float())
    assert torch.equal(round_trip(codec("bf16"), tensor), tensor.bfloat16().float())


def test_an_overflow_of_fp16_shows():
    assert round_trip(codec("fp16"), torch.tensor([65504.0, 65519.0, 65520.0])).tolist() == [65504, 65504, float("inf")]


def test_int8_keeps_the_largest_and_all_multiples_of_its_scale():
    codes = torch.randint(-127, 128, (3 * BLOCK,), generator=generator()).float()
    codes[::BLOCK] = 127
    scales = per_block(torch.arange(3 * BLOCK), lambda block: 2.0 ** (block[:1] // BLOCK))
    assert torch.equal(round_trip(codec("int8"), codes * scales), codes * scales)


@settings(max_examples=60, deadline=None)
@given(tensors())
def test_onebit_is_the_sign_times_the_mean_magnitude_and_contracts(tensor):
    x = tensor.double()
    assume(x.numel())
    decoded = round_trip(codec("onebit"), tensor).double()
    expected = torch.where(x >= 0, 1.0, -1.0) * per_block(x.abs(), torch.mean)
    assert torch.allclose(decoded, expected, rtol=1e-5, atol=1e-35)
    for before, after in zip(x.split(BLOCK), decoded.split(BLOCK), strict=True):
        left = (before - after).square().sum()
        assert left <= (1 - 1 / before.numel() + 1e-5) * before.square().sum() + 1e-30


@settings(max_examples=60, deadline=None)
@given(tensors())
def test_tbq_sends_the_threshold_and_contracts(tensor):
    x = tensor.double()
    assume(x.numel())
    decoded = round_trip(codec("tbq"), tensor).double()
    limits = 0.9 * per_block(x, lambda block: block.square().mean().sqrt())
    sent = torch.where(x.abs() >= limits, limits * x.sign(), 0.0)
    at_limit = (x.abs() - limits).abs() <= 1e-5 * limits + 1e-22
    assert torch.allclose(decoded[~at_limit], sent[~at_limit], rtol=1e-5, atol=1e-22)
    assert (x - decoded).square().sum() <= (1 + 1e-5) * x.square().sum() + 1e-30


@pytest.mark.parametrize("numel", [1, 3, BLOCK, BLOCK + 1])
def test_tbq_sends_something_of_equal_magnitudes(numel):
    assert round_trip(codec("tbq"), torch.full((numel,), 0.1)).count_nonzero() == numel


def test_tbq_loses_what_its_docstring_says():
    x = normal(100 * BLOCK)
    lost = {t: ((x - round_trip(TBQ(t), x)).square().sum() / x.square().sum()).item() for t in (0.6, 0.87, 1.2)}
    assert lost[0.87] == pytest.approx(0.34, abs=0.01)
    assert lost[0.87] < min(lost[0.6], lost[1.2])


def test_terngrad_is_right_in_the_mean_and_of_the_right_spread():
    x = torch.cat([normal(BLOCK), 1e-3 * normal(BLOCK, 1), torch.tensor([0.0, -1.0, 2.0, 1e-3])])
    scales = per_block(x.abs(), torch.max).double()
    draws = generator(5)
    trips = 4000
    kind = codec("terngrad")
    samples = [kind.decode(kind.encode(x, draws), x.numel(), torch.float32).double() for _ in range(trips)]
    for sample in samples[:100]:
        assert ((sample == 0) | (sample.abs() == scales)).all()
        assert (sample * x >= 0).all()
        assert (sample[x.abs() == scales] != 0).all()
        assert (sample[x == 0] == 0).all()
    spread = (scales * x.abs().double() - x.double().square()).clamp_min(0).sqrt()
    off = (sum(samples) / trips - x).abs()
    # Five standard deviations: each element is beyond with a probability of 6e-7.
    assert (off <= 5 * spread / trips**0.5 + 2**-16 * scales).all()
    assert (off / (spread / trips**0.5 + 1e-30))[spread > 0].square().mean() == pytest.approx(1, abs=0.2)


def test_terngrad_is_right_in_the_mean_for_numbers_whose_reciprocal_overflows():
    numel, size = 200 * BLOCK, SMALLEST / 8
    decoded = round_trip(codec("terngrad"), torch.full((numel,), size)) / SMALLEST
    assert set(decoded.unique().tolist()) == {0, 1}
    assert decoded.mean().item() == pytest.approx(1 / 8, abs=5 * (7 / 64 / numel) ** 0.5)


def test_terngrad_draws_by_the_generator_alone():
    x = normal(1000)
    assert not torch.equal(codec("terngrad").encode(x, generator(1)), codec("terngrad").encode(x, generator(2)))


@pytest.mark.parametrize("numel", [1, 10, 1000, LARGE - 1, LARGE, 3 * LARGE + 7])
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.5, 1.0])
def test_dgc_keeps_the_largest_exactly(numel, ratio):
    x = normal(numel)
    decoded = round_trip(DGC(ratio), x)
    kept = -(-numel * ratio // 1)
    order = x.abs().sort(descending=True).indices[: int(kept)]
    expected = torch.zeros(numel)
    expected[order] = x[order]
    assert torch.equal(decoded, expected)


@pytest.mark.parametrize("values", ["equal", "few", "in step with the sample"])
def test_dgc_is_exact_whatever_its_sample_says(values):
    x = torch.full((LARGE,), 0.5) if values == "equal" else torch.zeros(LARGE)
    if values == "few":
        x[1000:1100] = 1
    elif values == "in step with the sample":
        x[::97] = normal(len(x[::97]))
    decoded = round_trip(codec("dgc"), x)
    kept = -(-LARGE // 100)
    assert decoded.abs().sort(descending=True).values[:kept].equal(x.abs().sort(descending=True).values[:kept])
    assert decoded[decoded != 0].equal(x[decoded != 0])


@pytest.mark.parametrize("numel", [1, 50, 1024, 50_000, 2_000_000])
def test_graddrop_keeps_what_is_above_a_threshold(numel):
    x = normal(numel)
    decoded = round_trip(codec("graddrop"), x)
    kept = decoded != 0
    assert torch.equal(decoded[kept], x[kept])
    assert (x[~kept].abs() < x[kept].abs().min()).all()
    # The k-th largest of a sample of n has about k/n above it, give or take 1/sqrt(k) of that: k is 11 at least.
    assert kept.sum() <= 0.025 * numel + 1
    assert kept.sum() >= 0.003 * numel


def test_graddrop_keeps_ties_and_drops_zeros():
    assert round_trip(codec("graddrop"), torch.ones(5000)).equal(torch.ones(5000))
    x = torch.zeros(5000)
    x[7] = 1
    assert codec("graddrop").encode(x, generator()).numel() == 8


@pytest.mark.parametrize("kind", [DGC, GradDrop])
@pytest.mark.parametrize("ratio", [0, -1, 1.5, float("nan")])
def test_a_ratio_that_makes_no_sense_is_refused(kind, ratio):
    with pytest.raises(ConfigError, match=f"the ratio of {kind.name} is {ratio}; it must be above 0 and at most 1"):
        kind(ratio)


def test_a_threshold_that_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match="the threshold of tbq is 0; it must be above 0"):
        TBQ(0)


@pytest.mark.parametrize("dtype", sorted(MOVABLE, key=str), ids=str)
@pytest.mark.parametrize("numel", [1, 7, 5000])
def test_lossless_keeps_every_bit(dtype, numel):
    random = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator())
    tensor = (random & 1).view(dtype) if dtype == torch.bool else random.view(dtype)  # NaN of all kinds among them
    decoded = codec("lossless").decode(codec("lossless").encode(tensor), numel, dtype)
    assert torch.equal(decoded.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize(("dtype", "part"), [(torch.float32, 0.86), (torch.bfloat16, 0.71), (torch.float16, 0.87)])
def test_lossless_makes_normal_floats_smaller(dtype, part):
    tensor = normal(2**18, dtype=dtype)
    assert codec("lossless").encode(tensor).numel() < part * tensor.nbytes


def test_lossless_names_what_is_wrong_with_a_payload():
    payload = codec("lossless").encode(normal(1000))
    with pytest.raises(CallError, match="has 4000 bytes of a tensor and not 2000"):
        codec("lossless").decode(payload, 1000, torch.float16)
    with pytest.raises(CallError, match=r"bytes of a tensor and not 4000: all of it is needed|no payload of the codec"):
        codec("lossless").decode(payload[:-100], 1000, torch.float32)
    with pytest.raises(CallError, match='no payload of the codec "lossless"'):
        codec("lossless").decode(payload[20:], 1000, torch.float32)


def test_lossless_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MCRDLError, match=r"needs the library zstandard: pip install 'deepspeed-mcrdl\[compression\]'"):
        Lossless()


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("numel", [1, 3, 4, 7, 8, 9, 1000])
def test_codes_are_packed_from_the_lowest_bits(bits, numel):
    per_byte = 8 // bits
    codes = torch.randint(0, 2**bits, (numel,), generator=generator(), dtype=torch.uint8)
    expected = [
        sum(code << bits * i for i, code in enumerate(codes[start : start + per_byte].tolist()))
        for start in range(0, numel, per_byte)
    ]
    assert pack(codes, bits).tolist() == expected
