"""Byte-level text as a torch dataset; by default the source text of Python's own standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import Dataset

VOCABULARY = 256
_HELD_OUT_EVERY = 10


class ByteText(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of text; the target of each byte is the next one.

    Args:
        length: bytes of a window.
        files: what to read, in this order; None: the standard library.
        held_out: every tenth window, which the rest leaves out.

    Items:
        (input, target), int64 tensors of shape [length] with values 0..255.
    """

    def __init__(self, length: int, files: Sequence[str | Path] | None = None, held_out: bool = False) -> None:
        paths = standard_library() if not files else [Path(file) for file in files]
        text = b"".join(path.read_bytes() for path in paths)
        windows = (len(text) - 1) // length
        if windows < _HELD_OUT_EVERY:
            raise ValueError(f"{len(text)} bytes of text are too few: {_HELD_OUT_EVERY * length + 1} are needed")
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._length = length
        self._windows = [w for w in range(windows) if (w % _HELD_OUT_EVERY == 0) == held_out]

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = self._windows[index] * self._length
        window = self._bytes[start : start + self._length + 1].long()
        return window[:-1], window[1:]


def standard_library() -> list[Path]:
    """Return the modules of Python's standard library that are single files, sorted by name."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
