"""Tensors to encode, codecs, and how far each may be off."""

import torch
from hypothesis import strategies as st

from deepspeed_mcrdl.transforms.compression.blocks import BLOCK, PIECE, SMALLEST
from deepspeed_mcrdl.transforms.compression.codec import installed

CODECS = installed()
BY_BLOCKS = ["int8", "onebit", "tbq", "terngrad"]
LOSSY = [name for name, kind in CODECS.items() if not kind.lossless]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [1, 2, 3, 7, 8, 9, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5, 5000, PIECE + 3]


def codec(name):
    return CODECS[name]()


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(numel, seed=0, dtype=torch.float32):
    return torch.randn(numel, generator=generator(seed)).to(dtype)


@st.composite
def tensors(draw, largest=2.0**50):
    """Flat tensors: a few odd numbers, or many whose magnitudes differ from block to block, some of them zero."""
    dtype = draw(st.sampled_from(DTYPES))
    if draw(st.booleans()):
        limit = min(largest, 2.0**15) if dtype == torch.float16 else largest
        return torch.tensor(draw(st.lists(st.floats(-limit, limit, width=32), max_size=20)), dtype=dtype)
    numel, seed = draw(st.sampled_from(SIZES)), draw(st.integers(0, 1000))
    scales = 2.0 ** torch.randint(-12, 10, (-(-numel // 100),), generator=generator(seed))
    values = normal(numel, seed) * scales.repeat_interleave(100)[:numel]
    zeros = draw(st.sampled_from([0.0, 0.5, 1.0]))
    return values.masked_fill(torch.rand(numel, generator=generator(seed)) < zeros, 0).to(dtype)


def per_block(values, function):
    """Return for each element what `function` gives of its block."""
    return torch.cat([function(block).expand(block.numel()) for block in values.split(BLOCK)])


def bound(name, tensor):
    """Return the largest error of each element that the codec's docstring allows, as float64."""
    x = tensor.double()
    size = x.abs()
    if not x.numel():
        return x
    if name == "lossless":
        return torch.zeros_like(x)
    if name == "fp16":
        return torch.where(size < 65520, size * 2**-11 + 2**-25, float("inf"))
    if name == "bf16":
        return size * 2**-8 + 2**-134
    if name == "int8":
        return per_block(size, lambda block: (block.max() / 127).clamp_min(SMALLEST)) * (0.5 + 1e-4)
    if name == "onebit":
        return (size - per_block(size, torch.mean)).abs() + 1e-6 * per_block(size, torch.max)
    if name == "tbq":
        limit = 0.9 * per_block(x, lambda block: block.square().mean().sqrt())
        return torch.maximum(limit, size - limit) + 1e-6 * size + 1e-22
    if name == "terngrad":
        return per_block(size, torch.max).clamp_min(SMALLEST)
    if name == "dgc":
        smallest_kept = size.topk(-(-x.numel() // 100)).values[-1]
        return torch.where(size > smallest_kept, 0.0, size)
    if name == "graddrop":
        return size
    raise KeyError(name)
