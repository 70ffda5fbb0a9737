"""What a tensor is called in every training step, so that error feedback adds to it what was lost of it before.

Neither a tensor's address nor its name can say it: DeepSpeed flattens the gradients of a bucket into fresh memory, and
a call has no name. What stays is the order: each step makes the same calls in the same order. So a tensor's identity is
its group and the place of its call among the compressed calls of the group since the last step of an optimizer; torch
tells of the steps of all its optimizers. The sequence of sizes and dtypes must be that of the step before. Where it is
not, what was kept for the group is forgotten and the log says so; where that happens again and again, or no optimizer
makes a step, there is no identity, and the call is refused.

Its limit: two calls of one size and dtype that change places from step to step are not told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from deepspeed_mcrdl.errors import CallError
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.messages import logger

CALLS_WITHOUT_STEP = 1000
CHANGES_IN_A_ROW = 8
REMEDY = 'use a codec that needs no feedback, such as "bf16", "int8" or "terngrad"'


class _Sequence:
    """The calls of one group: those of this step, and of the one before if they are known."""

    def __init__(self) -> None:
        self.now: list[Hashable] = []
        self.before: list[Hashable] | None = None
        self.changes = 0
        self.steps = 0
        self.called = False


class Identities:
    """Gives each compressed call of a group its place in the training step, and counts the steps.

    All ranks of a group make the same calls and steps, so a refusal comes on all of them at the same call.

    Args:
        forget: called with a group whose sequence has changed: what is kept for its places no longer holds.
    """

    def __init__(self, forget: Callable[[Group], None]) -> None:
        self._forget = forget
        self._of: dict[Group, _Sequence] = {}
        self._hook: Any = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self.end_step())

    def close(self) -> None:
        """Hear of no more steps."""
        self._hook.remove()

    def place(self, group: Group, signature: Hashable) -> int:
        """Return the place of this call in its step.

        Args:
            group: the call's group.
            signature: what a call at this place has in common in all steps: operation, size, dtype.

        Raises:
            CallError: if there are no steps, or each has other calls.
        """
        sequence = self._of.setdefault(group, _Sequence())
        place = len(sequence.now)
        before = sequence.before
        if before is None and place >= CALLS_WITHOUT_STEP:
            raise CallError(
                f"error feedback: {CALLS_WITHOUT_STEP} compressed calls on {group} without a step of a torch optimizer "
                f"or mcrdl.end_step(), so no tensor of one step is known in the next; {REMEDY}"
            )
        if sequence.changes >= CHANGES_IN_A_ROW:
            raise CallError(
                f"error feedback: the compressed calls on {group} have changed {CHANGES_IN_A_ROW} times from one step "
                f"to the next, so no tensor of one step is known in the next; {REMEDY}"
            )
        if before is not None and (place >= len(before) or before[place] != signature):
            self._changed(group, sequence)
        sequence.now.append(signature)
        return place

    def steps(self, group: Group) -> int:
        """Return how many steps have ended before this call, of those in which such calls were made on the group."""
        sequence = self._of.setdefault(group, _Sequence())
        sequence.called = True
        return sequence.steps

    def end_step(self) -> None:
        """A training step is over. Steps of several optimizers in a row count as one."""
        for group, sequence in self._of.items():
            sequence.steps += sequence.called
            sequence.called = False
            if not sequence.now:
                continue
            if sequence.before is not None:
                if len(sequence.now) == len(sequence.before):
                    sequence.changes = 0
                else:
                    self._changed(group, sequence)
            sequence.before, sequence.now = sequence.now, []

    def discard(self, group: Group) -> None:
        """Forget a group that is being destroyed."""
        self._of.pop(group, None)

    def _changed(self, group: Group, sequence: _Sequence) -> None:
        self._forget(group)
        sequence.before = None
        sequence.changes += 1
        logger.warning(
            "the compressed calls on %s are not those of the step before: what error feedback kept for them is dropped",
            group,
        )
