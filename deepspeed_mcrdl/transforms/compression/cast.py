"""Casts: every element in 16 bits, rounded to nearest."""

from __future__ import annotations

from typing import ClassVar

import torch

from deepspeed_mcrdl.transforms.compression.codec import Codec, Layout, new_payload, parts


class Cast(Codec):
    """Each element as `carried`, the relative error of which is at most 2**-p with p bits of precision."""

    carried: ClassVar[torch.dtype]

    def _layout(self, numel: int) -> Layout:
        return ((self.carried, numel),)

    def _encode(self, tensor: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        payload, (values,) = new_payload(self._layout(tensor.numel()), tensor.device)
        values.copy_(tensor)
        return payload

    def _decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        (values,) = parts(payload, self._layout(out.numel()))
        out.copy_(values)

    def _merge(self, accumulator: torch.Tensor, payload: torch.Tensor) -> None:
        (values,) = parts(payload, self._layout(accumulator.numel()))
        accumulator.add_(values)


class FP16(Cast):
    """IEEE 754 binary16: p = 11. From 65520 on an element is infinite; below 2**-14 the error is at most 2**-25."""

    name = "fp16"
    carried = torch.float16

    def _bound(self, values: torch.Tensor) -> torch.Tensor:
        size = values.abs()
        return torch.where(size < 65520, size * 2**-11 + 2**-25, float("inf"))


class BF16(Cast):
    """The upper half of float32: p = 8, with the range of float32; below 2**-126 the error is at most 2**-134."""

    name = "bf16"
    carried = torch.bfloat16

    def _bound(self, values: torch.Tensor) -> torch.Tensor:
        return values.abs() * 2**-8 + 2**-134
