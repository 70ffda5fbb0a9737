"""Tensors to encode, codecs, and how far each may be off."""

import torch
from hypothesis import strategies as st

from deepspeed_mcrdl.transforms.compression.blocks import BLOCK, PIECE
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
    """Return the largest error of each element, as float64."""
    return codec(name).bound(tensor)
