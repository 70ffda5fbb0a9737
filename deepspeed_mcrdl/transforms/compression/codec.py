"""What a codec is: a tensor to a payload of bytes and back, and a payload added to a tensor.

A codec is a class named by an entry point in the group "deepspeed_mcrdl.codecs"; a new one changes no other file. With
send and recv, encode, decode and merge are the five primitives of CaSync (HiPress, SOSP 2021, doi
10.1145/3477132.3483553), from which compressed collectives are composed.

What all of them promise:

- A payload is one flat uint8 tensor on the tensor's device. Where its size depends on the number of elements alone, as
  `payload_bytes` tells, it is a multiple of ALIGNMENT, so that payloads can stand one after the other in a buffer.
- The same tensor and the same state of the generator give the same payload.
- An infinity or NaN is never hidden: what is decoded has one too, so that a loss scaler sees the overflow. Codecs
  with a scale for each block give back a block that has one as nothing but infinities and NaN.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any, ClassVar

import torch

from deepspeed_mcrdl.errors import CallError, MCRDLError

ENTRY_POINT_GROUP = "deepspeed_mcrdl.codecs"
ALIGNMENT = 4

GRADIENTS = frozenset({torch.float32, torch.float16, torch.bfloat16})

Layout = Sequence[tuple[torch.dtype, int]]


class Codec(ABC):
    """One way to write a tensor in fewer bytes.

    A subclass has `_layout`, `_encode`, `_decode` and `_bound`; all but the first get tensors that were checked
    and aren't empty.

    Class attributes:
        name: what a config calls it.
        lossless: whether what is decoded equals what was encoded, bit for bit.
        wants_feedback: whether training needs what it loses to be added to the next gradient (feedback.py).
        stochastic: whether it draws random numbers, from the generator that `encode` is given.
        dtypes: dtypes of the tensors that it encodes and decodes.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = False
    wants_feedback: ClassVar[bool] = False
    stochastic: ClassVar[bool] = False
    dtypes: ClassVar[frozenset[torch.dtype]] = GRADIENTS

    def payload_bytes(self, numel: int) -> int | None:
        """Return the size of the payload of `numel` elements, or None if it depends on their values."""
        layout = self._layout(numel)
        return None if layout is None else layout_bytes(layout)

    def encode(self, tensor: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Return the payload of a flat contiguous tensor, which is left as it is.

        Args:
            tensor: one of the codec's dtypes; none, one or more elements.
            generator: on the tensor's device, for a stochastic codec. Ranks that average seed theirs differently.

        Raises:
            CallError: if the codec doesn't take such a tensor, or has no generator to draw from.
        """
        self.check(tensor)
        if self.stochastic and generator is None:
            raise CallError(
                f'the codec "{self.name}" draws random numbers: give it a torch.Generator seeded by you, so that a run '
                "can be repeated"
            )
        if tensor.numel() == 0:
            return torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return self._encode(tensor.detach(), generator)

    def decode(self, payload: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor of `numel` elements that `payload` stands for; for its errors see `decode_into`."""
        out = torch.empty(numel, dtype=dtype, device=payload.device)
        self.decode_into(payload, out)
        return out

    def decode_into(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Write what `payload` stands for to a flat contiguous tensor of as many elements as were encoded.

        A lossy codec rounds to any of its dtypes; a lossless one needs the dtype that was encoded.

        Raises:
            CallError: if the payload can't be one of such a tensor.
        """
        if self._accepts(payload, out):
            self._decode(payload, out)

    def merge(self, accumulator: torch.Tensor, payload: torch.Tensor) -> None:
        """Add what `payload` stands for to `accumulator`: what decode and add give. Sums are best kept in float32.

        Raises:
            CallError: if the payload can't be one of such a tensor.
        """
        if self._accepts(payload, accumulator):
            self._merge(accumulator, payload)

    def bound(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the largest error that each element of a flat tensor can have when it is decoded, in float64."""
        values = tensor.detach().double()
        return self._bound(values) if values.numel() else values

    def check(self, tensor: torch.Tensor) -> None:
        """Raise a CallError unless this is a tensor that the codec encodes."""
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise CallError(
                f'the codec "{self.name}" takes flat contiguous tensors; give it tensor.contiguous().view(-1)'
            )
        if tensor.dtype not in self.dtypes:
            known = ", ".join(sorted(str(dtype) for dtype in self.dtypes))
            raise CallError(f'the codec "{self.name}" takes no {tensor.dtype}; it takes {known}')

    @abstractmethod
    def _layout(self, numel: int) -> Layout | None:
        """Return the parts of the payload of `numel` elements, or None if its size depends on their values."""

    @abstractmethod
    def _encode(self, tensor: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        """Return the payload."""

    @abstractmethod
    def _decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Write what the payload stands for to `out`."""

    @abstractmethod
    def _bound(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest error of each element of a float64 tensor."""

    def _merge(self, accumulator: torch.Tensor, payload: torch.Tensor) -> None:
        accumulator.add_(self.decode(payload, accumulator.numel(), accumulator.dtype))

    def _accepts(self, payload: torch.Tensor, tensor: torch.Tensor) -> bool:
        """Check both; return whether there is anything to do."""
        self.check(tensor)
        if payload.dtype != torch.uint8 or payload.dim() != 1:
            raise CallError(f"a payload is a flat uint8 tensor; this one has {payload.dtype}, {tuple(payload.shape)}")
        expected = self.payload_bytes(tensor.numel()) if tensor.numel() else 0
        if expected not in (None, payload.numel()):
            raise CallError(
                f'the codec "{self.name}" makes {expected} bytes of {tensor.numel()} elements and this payload has '
                f"{payload.numel()}; decode with the codec and the number of elements that were encoded"
            )
        return tensor.numel() > 0


def layout_bytes(layout: Layout) -> int:
    """Return the size of a payload that has these parts: (dtype, number of elements), the widest dtypes first."""
    used = sum(dtype.itemsize * count for dtype, count in layout)
    return -(-used // ALIGNMENT) * ALIGNMENT


def new_payload(layout: Layout, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a payload and views of its parts, to be written."""
    payload = torch.empty(layout_bytes(layout), dtype=torch.uint8, device=device)
    payload[-ALIGNMENT:].zero_()  # what no part covers must not be chance
    return payload, parts(payload, layout)


def parts(payload: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Return views of the parts of a payload.

    Raises:
        CallError: if it starts where its numbers can't be read in place.
    """
    if payload.storage_offset() % ALIGNMENT:
        raise CallError(
            f"a payload starts at byte {payload.storage_offset()} of its buffer; it must be a multiple of {ALIGNMENT}"
        )
    found, start = [], 0
    for dtype, count in layout:
        end = start + dtype.itemsize * count
        found.append(payload[start:end].view(dtype))
        start = end
    return found


def installed() -> dict[str, type[Codec]]:
    """Return the codec classes that are installed, by name.

    Raises:
        MCRDLError: if a codec can't be imported, which names the one at fault, or if there is none.
    """
    found: dict[str, Any] = {}
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name):
        try:
            found[entry.name] = entry.load()
        except (ImportError, AttributeError) as error:
            raise MCRDLError(f'the codec "{entry.name}" ({entry.value}) can\'t be imported: {error}') from error
    if not found:
        raise MCRDLError("no codec is installed: deepspeed_mcrdl's entry points are missing; install it with pip")
    return found
