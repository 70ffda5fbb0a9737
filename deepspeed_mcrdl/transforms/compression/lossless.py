"""Lossless: Zstandard, for traffic of which no bit may change, such as activations of model parallelism."""

from __future__ import annotations

import torch

from deepspeed_mcrdl.backends.base import MOVABLE
from deepspeed_mcrdl.errors import CallError, MCRDLError
from deepspeed_mcrdl.transforms.compression.codec import Codec


class Lossless(Codec):
    """Zstandard (RFC 8878) over the bytes of a tensor: all first bytes of its elements, all second ones, and so on.

    Signs and exponents then stand together, which is what can be compressed in a float: 0.84 instead of 0.92 of the
    bytes of normally distributed float32, 0.68 instead of 0.78 of bfloat16. Lossless compression for model
    parallelism, lossy for data parallelism: Xu et al., "Accelerating Large Language Model Training with Hybrid
    GPU-based Compression", arXiv 2409.02423. It works in host memory; the size of the payload depends on the values,
    and can be a little above that of the tensor.

    Args:
        level: Zstandard's compression level. Higher ones take longer and win nothing on float tensors.

    Raises:
        MCRDLError: if zstandard isn't installed.
    """

    name = "lossless"
    lossless = True
    dtypes = MOVABLE

    def __init__(self, level: int = 1) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise MCRDLError(
                "the codec \"lossless\" needs the library zstandard: pip install 'deepspeed-mcrdl[compression]'"
            ) from error
        self.level = level
        self._zstandard = zstandard

    def _layout(self, numel: int) -> None:
        return None

    def _encode(self, tensor: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        elements = tensor.cpu().view(torch.uint8).view(tensor.numel(), -1)
        planes = torch.empty(elements.shape[::-1], dtype=torch.uint8)
        for plane, column in zip(planes, elements.unbind(1), strict=True):  # faster than one transposition
            plane.copy_(column)
        # A compressor of each call's own: they can't be shared between threads.
        frame = self._zstandard.ZstdCompressor(level=self.level).compress(planes.numpy().data)
        return torch.frombuffer(bytearray(frame), dtype=torch.uint8).to(tensor.device)

    def _decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        host = torch.empty_like(out, device="cpu")
        elements = host.view(torch.uint8).view(out.numel(), -1)
        planes = torch.empty(elements.shape[::-1], dtype=torch.uint8)
        frame = payload.cpu().numpy().data
        try:
            size = self._zstandard.frame_content_size(frame)
            if size == out.nbytes:
                size = self._zstandard.ZstdDecompressor().stream_reader(frame).readinto(planes.numpy().data)
        except self._zstandard.ZstdError as error:
            raise CallError(f'this is no payload of the codec "{self.name}": {error}') from error
        if size != out.nbytes:
            raise CallError(
                f"this payload has {size} bytes of a tensor and not {out.nbytes}: all of it is needed, with the number "
                "of elements and the dtype that were encoded"
            )
        for plane, column in zip(planes, elements.unbind(1), strict=True):
            column.copy_(plane)
        out.copy_(host)

    def _bound(self, values: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(values)
