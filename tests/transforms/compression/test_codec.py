"""What every codec promises."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_mcrdl.errors import CallError
from deepspeed_mcrdl.transforms.compression.blocks import BLOCK
from deepspeed_mcrdl.transforms.compression.codec import ALIGNMENT, installed
from tests.transforms.compression.cases import (
    BY_BLOCKS,
    CODECS,
    DTYPES,
    LOSSY,
    SIZES,
    bound,
    codec,
    generator,
    normal,
    tensors,
)

OF_ANY_SIZE = ["graddrop", "lossless"]

every_codec = pytest.mark.parametrize("name", CODECS)


def test_codecs_are_found_by_their_own_names():
    assert {name: kind.name for name, kind in installed().items()} == {name: name for name in CODECS}
    assert len(CODECS) == 9


@every_codec
@settings(max_examples=60, deadline=None)
@given(tensor=tensors(), seed=st.integers(0, 100))
def test_round_trips_stay_within_the_bound(name, tensor, seed):
    before = tensor.clone()
    payload = codec(name).encode(tensor, generator(seed))
    decoded = codec(name).decode(payload, tensor.numel(), torch.float32 if name in LOSSY else tensor.dtype)
    assert torch.equal(tensor, before)
    assert ((decoded.double() - tensor.double()).abs() <= bound(name, tensor)).all()


@every_codec
@settings(max_examples=20, deadline=None)
@given(tensor=tensors())
def test_decoding_to_another_dtype_is_decoding_and_a_cast(name, tensor):
    payload = codec(name).encode(tensor, generator())
    if name in LOSSY:
        exact = codec(name).decode(payload, tensor.numel(), torch.float32)
        for dtype in DTYPES:
            assert torch.equal(codec(name).decode(payload, tensor.numel(), dtype), exact.to(dtype))


@every_codec
@settings(max_examples=30, deadline=None)
@given(tensor=tensors(), seed=st.integers(0, 100))
def test_payloads_are_flat_bytes_of_the_declared_size_and_can_be_repeated(name, tensor, seed):
    payload = codec(name).encode(tensor, generator(seed))
    assert payload.dtype == torch.uint8
    assert payload.dim() == 1
    assert payload.is_contiguous()
    expected = codec(name).payload_bytes(tensor.numel())
    assert (expected is None) == (name in OF_ANY_SIZE)
    assert expected in (None, payload.numel())
    assert torch.equal(codec(name).encode(tensor, generator(seed)), payload)


@pytest.mark.parametrize(
    ("name", "numel", "nbytes"),
    [
        ("fp16", 1000, 2000),
        ("bf16", 1001, 2004),
        ("int8", 1024, 1024 + 2 * 4),
        ("int8", 1, 4 + 4),
        ("onebit", 1024, 128 + 2 * 4),
        ("tbq", 1024, 256 + 2 * 4),
        ("terngrad", 1025, 260 + 3 * 4),
        ("dgc", 1000, 10 * 8),
        ("dgc", 1001, 11 * 8),
    ],
)
def test_sizes(name, numel, nbytes):
    assert codec(name).payload_bytes(numel) == nbytes


@every_codec
def test_nothing_is_encoded_as_no_bytes(name):
    payload = codec(name).encode(torch.empty(0), generator())
    assert payload.numel() == 0
    assert codec(name).payload_bytes(0) in (None, 0)
    assert codec(name).decode(payload, 0, torch.float32).numel() == 0
    codec(name).merge(torch.empty(0), payload)


@every_codec
@pytest.mark.parametrize("numel", SIZES)
def test_zeros_stay_zeros(name, numel):
    payload = codec(name).encode(torch.zeros(numel), generator())
    assert codec(name).decode(payload, numel, torch.float32).count_nonzero() == 0


@every_codec
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("numel", SIZES)
def test_infinities_and_nan_are_not_hidden(name, value, numel):
    tensor = normal(numel)
    where = numel // 2
    tensor[where] = value
    decoded = codec(name).decode(codec(name).encode(tensor, generator()), numel, torch.float32)
    assert not decoded[where].isfinite()
    hit = torch.arange(numel) // BLOCK == where // BLOCK if name in BY_BLOCKS else torch.arange(numel) == where
    assert not decoded[hit].isfinite().any()
    assert decoded[~hit].isfinite().all()


def test_a_large_tensor_with_nan_keeps_it_in_dgc():
    tensor = normal(2**17)
    tensor[70000] = float("nan")
    assert codec("dgc").decode(codec("dgc").encode(tensor), 2**17, torch.float32)[70000].isnan()


@every_codec
@settings(max_examples=30, deadline=None)
@given(tensor=tensors(), seed=st.integers(0, 100))
def test_merging_is_decoding_and_adding(name, tensor, seed):
    accumulator = normal(tensor.numel(), seed).to(torch.float32 if name in LOSSY else tensor.dtype)
    payload = codec(name).encode(tensor, generator(seed))
    expected = accumulator + codec(name).decode(payload, tensor.numel(), accumulator.dtype)
    codec(name).merge(accumulator, payload)
    assert torch.equal(accumulator, expected)


@every_codec
@pytest.mark.parametrize("numel", [1, 999, 5000])
def test_a_sum_is_reduced_by_partitions(name, numel):
    """What a compressed all_reduce of three ranks does, without the messages in between."""
    ranks, kind = 3, codec(name)
    inputs = [normal(numel, seed) for seed in range(ranks)]
    outputs = [torch.empty(numel) for _ in range(ranks)]
    for start in range(0, numel, 600):
        part = slice(start, min(start + 600, numel))
        payloads = [kind.encode(tensor[part], generator(seed)) for seed, tensor in enumerate(inputs)]
        decoded = [kind.decode(payload, part.stop - start, torch.float32) for payload in payloads]
        total = torch.zeros(part.stop - start)
        for payload in payloads:
            kind.merge(total, payload)
        assert torch.equal(total, sum(decoded))
        sent = kind.encode(total, generator(9))
        for output in outputs:
            kind.decode_into(sent, output[part])
        assert ((outputs[0][part] - sum(decoded)).abs() <= bound(name, total)).all()
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@every_codec
def test_payloads_stand_in_one_buffer(name):
    tensors = [normal(numel) for numel in (5, 700, 33)]
    payloads = [codec(name).encode(tensor, generator()) for tensor in tensors]
    if name != "lossless":  # whose payload has no numbers to be read in place
        assert all(payload.numel() % ALIGNMENT == 0 for payload in payloads)
    buffer = torch.cat(payloads)
    slices = buffer.split([payload.numel() for payload in payloads])
    for tensor, payload, piece in zip(tensors, payloads, slices, strict=True):
        expected = codec(name).decode(payload, tensor.numel(), torch.float32)
        assert torch.equal(codec(name).decode(piece, tensor.numel(), torch.float32), expected)


# --- mistakes ---


@every_codec
def test_a_tensor_that_is_not_flat_is_refused(name):
    with pytest.raises(CallError, match="takes flat contiguous tensors"):
        codec(name).encode(torch.zeros(2, 2), generator())
    with pytest.raises(CallError, match="takes flat contiguous tensors"):
        codec(name).encode(torch.zeros(8)[::2], generator())


@pytest.mark.parametrize("name", LOSSY)
def test_indices_and_counts_are_refused(name):
    with pytest.raises(CallError, match=r"takes no torch.int64; it takes torch.bfloat16, torch.float16, torch.float32"):
        codec(name).encode(torch.zeros(4, dtype=torch.int64), generator())


@pytest.mark.parametrize("name", [name for name, kind in CODECS.items() if kind.stochastic])
def test_random_numbers_come_from_the_caller(name):
    with pytest.raises(CallError, match=f'"{name}" draws random numbers: give it a torch.Generator'):
        codec(name).encode(torch.zeros(4))


@pytest.mark.parametrize("name", [name for name in CODECS if name not in OF_ANY_SIZE])
def test_a_payload_of_another_size_is_refused(name):
    payload = codec(name).encode(normal(2000), generator())
    with pytest.raises(CallError, match=f"of 1000 elements and this payload has {payload.numel()}"):
        codec(name).decode(payload, 1000, torch.float32)
    with pytest.raises(CallError, match="a payload is a flat uint8 tensor"):
        codec(name).merge(torch.zeros(2000), payload.view(torch.int8))


def test_a_payload_that_starts_between_numbers_is_refused():
    payload = torch.cat([torch.zeros(1, dtype=torch.uint8), codec("int8").encode(normal(10))])[1:]
    with pytest.raises(CallError, match="starts at byte 1 of its buffer; it must be a multiple of 4"):
        codec("int8").decode(payload, 10, torch.float32)


# --- the same on a GPU ---


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", [name for name, kind in CODECS.items() if not kind.stochastic])
def test_a_gpu_decodes_what_the_host_does(name):
    tensor = normal(5000)
    payload = codec(name).encode(tensor.cuda())
    assert payload.is_cuda
    decoded = codec(name).decode(payload, 5000, torch.float32).cpu()
    assert torch.allclose(decoded, codec(name).decode(codec(name).encode(tensor), 5000, torch.float32), rtol=1e-5)
