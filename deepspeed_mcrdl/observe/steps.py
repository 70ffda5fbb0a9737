"""Where a step of DeepSpeed's engine ends, and its monitor, without a word in the training script."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


class EngineSteps:
    """Sees every step of every engine of this process, those with a pipeline too.

    Args:
        step: called with the samples of the step, of all ranks.
        events: called after it for what goes to the engine's monitor, (name, value); None: nothing goes there.
    """

    def __init__(self, step: Callable[[int], None], events: Callable[[], list[tuple[str, float]]] | None) -> None:
        self._step = step
        self._events = events
        self._class: Any = None
        self._original: Any = None

    def attach(self) -> None:
        """Begin, if DeepSpeed is there."""
        module = sys.modules.get("deepspeed.runtime.engine")
        if module is None:
            return
        self._class = module.DeepSpeedEngine
        # What an optimizer's step is, in plain engines and in those with a pipeline; micro-batches don't come here.
        self._original = original = self._class._take_model_step

        @functools.wraps(original)
        def take_model_step(engine: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(engine, *args, **kwargs)
            self._ended(engine)
            return result

        self._class._take_model_step = take_model_step

    def _ended(self, engine: Any) -> None:
        self._step(int(engine.train_batch_size()))
        if self._events is not None and engine.monitor.enabled and (events := self._events()):
            engine.monitor.write_events([(name, value, engine.global_samples) for name, value in events])

    def detach(self) -> None:
        """End."""
        if self._class is not None:
            self._class._take_model_step = self._original
            self._class = None
