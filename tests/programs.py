"""Small programs that run on every rank of a `Ranks`; what several test modules use."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.comm import comm

from deepspeed_mcrdl.config import parse


def face() -> Any:
    """Return DeepSpeed's backend object, one of ours."""
    return comm.cdb


def use(routing: dict[str, Any], **more: Any) -> Any:
    """Go on with these routing rules and other keys of the config, and return the backend object."""
    face().restart(parse({"routing": routing, "banner": False, **more}))
    return face()


def sub_group() -> tuple[Any, list[int]]:
    """Return a group of all ranks but the first, made by every rank, and its ranks."""
    ranks = list(range(1, face().get_world_size()))
    return face().new_group(ranks), ranks


def filled(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return `count` small numbers whose sums and products on a few ranks are exact in `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 4, (count,), generator=generator).to(dtype)
