"""Error feedback: what a codec loses of a gradient is added to the next one of the same tensor."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch

from deepspeed_mcrdl.errors import CallError
from deepspeed_mcrdl.transforms.compression.codec import Codec


class ErrorFeedback:
    """The residuals of all tensors that go through one codec.

    For a gradient g and the residual e of its key, the payload is that of p = g + e, and the new residual is p minus
    what the payload decodes to; all in float32. So nothing is lost, only late: Seide et al., "1-Bit Stochastic
    Gradient Descent and its Application to Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014;
    Karimireddy et al., arXiv 1901.09847, algorithm 2. Of a gradient with infinities or NaN those residuals that
    aren't finite become 0, so that one overflow doesn't stay in all later steps.

    Args:
        codec: what encodes.
        max_bytes: the most that all residuals may take together, 4 bytes for each element.
    """

    def __init__(self, codec: Codec, max_bytes: int) -> None:
        self.codec = codec
        self.max_bytes = max_bytes
        self._residuals: dict[Hashable, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """The memory that the residuals take."""
        return sum(residual.nbytes for residual in tuple(self._residuals.values()))

    def encode(self, key: Hashable, tensor: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Return the payload of a gradient and its residual, and keep the new residual. An error changes nothing.

        Args:
            key: what this tensor is called in every step, such as the name of its parameter with the number of its
                partition; one that is encoded twice in a step needs two. Strings, numbers and tuples of them can be
                saved.
            tensor: the gradient, flat and contiguous; it is left as it is.
            generator: for a stochastic codec.

        Raises:
            CallError: if there is no key, if it was another tensor's, or if its residual would go over `max_bytes`.
        """
        self.codec.check(tensor)
        residual = self._residual(key, tensor)
        corrected = tensor.detach().float() if residual is None else residual + tensor.detach()
        payload = self.codec.encode(corrected, generator)
        lost = corrected - self.codec.decode(payload, corrected.numel(), corrected.dtype)
        self._residuals[key] = lost.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return payload

    def reset(self, key: Hashable | None = None) -> None:
        """Forget the residual of `key`, or all."""
        if key is None:
            self._residuals.clear()
        else:
            self._residuals.pop(key, None)

    def state_dict(self) -> dict[Hashable, torch.Tensor]:
        """Return a copy of the residuals, for a checkpoint of this rank."""
        return {key: residual.clone() for key, residual in self._residuals.items()}

    def load_state_dict(self, state: Mapping[Hashable, torch.Tensor]) -> None:
        """Take the residuals of a checkpoint in place of the present ones.

        Raises:
            CallError: if they take more than `max_bytes`.
        """
        self._require(sum(residual.nbytes for residual in state.values()), "the residuals of this checkpoint")
        self._residuals = {key: residual.clone() for key, residual in state.items()}

    def _residual(self, key: Hashable, tensor: torch.Tensor) -> torch.Tensor | None:
        if key is None:
            raise CallError(
                "error feedback needs a key that a tensor keeps from step to step, such as the name of its parameter: "
                "without one its residual would be added to another tensor's gradient"
            )
        residual = self._residuals.get(key)
        if residual is None:
            self._require(self.nbytes + 4 * tensor.numel(), f"what is lost of {key!r}")
            return None
        if residual.numel() != tensor.numel():
            raise CallError(
                f"the residual of {key!r} has {residual.numel()} elements and this tensor {tensor.numel()}: a key must "
                "stay with one tensor; reset it where the tensor's size has changed"
            )
        return residual.to(tensor.device)

    def _require(self, nbytes: int, what: str) -> None:
        if nbytes > self.max_bytes:
            raise CallError(
                f'error feedback would keep {nbytes} bytes with {what}, more than its limit, "feedback_bytes", of '
                f"{self.max_bytes}: raise it, or see that the keys are the same in every step"
            )
