"""Which calls are compressed: decided at their first call from the config and what all ranks know alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.backends.base import Backend
from deepspeed_mcrdl.config import Compression
from deepspeed_mcrdl.errors import ConfigError, MCRDLError, suggest
from deepspeed_mcrdl.groups import Group, Groups
from deepspeed_mcrdl.messages import logger, warn_once
from deepspeed_mcrdl.operations import Operation
from deepspeed_mcrdl.routing.router import Key
from deepspeed_mcrdl.safety import Progress
from deepspeed_mcrdl.streams import DEVICE_TYPES
from deepspeed_mcrdl.transforms.compression.calibration import Figures, calibrate, confirm, largest
from deepspeed_mcrdl.transforms.compression.cast import Cast
from deepspeed_mcrdl.transforms.compression.codec import GRADIENTS, Codec, installed
from deepspeed_mcrdl.transforms.compression.compressed import STEPS, Compressed
from deepspeed_mcrdl.transforms.compression.plan import MARGIN, Plan, choose
from deepspeed_mcrdl.transforms.contiguous import through_contiguous
from deepspeed_mcrdl.transforms.steps import Fit
from deepspeed_mcrdl.work import Pending

Method = Callable[..., Pending]


def codec_of(config: Compression) -> Codec:
    """Return the codec that the config names, made with its options.

    Raises:
        ConfigError: if there is no such codec, it has no such option, or it may not do what the config asks of it.
        MCRDLError: if a library that it needs isn't installed.
    """
    known = installed()
    if config.codec not in known:
        raise ConfigError(f'unknown codec "{config.codec}" in "mcrdl.compression".{suggest(str(config.codec), known)}')
    cls = known[config.codec]
    options = inspect.signature(cls).parameters
    for name in config.options:
        if name not in options:
            if not options:
                raise ConfigError(f'the codec "{cls.name}" has no options, so no "{name}"')
            raise ConfigError(f'the codec "{cls.name}" has no option "{name}".{suggest(name, options)}')
    codec = cls(**{name: _whole(value) for name, value in config.options.items()})
    if ops.ALL_TO_ALL_SINGLE.name in config.operations:
        if codec.wants_feedback:
            raise ConfigError(
                f'the codec "{cls.name}" needs error feedback, and what all_to_all_single sends, such as activations, '
                'is another tensor in each step: take "all_to_all_single" out of "mcrdl.compression.operations", or '
                'use another codec, such as "lossless" or "bf16"'
            )
        if not (codec.lossless or isinstance(codec, Cast) or config.lossy_activations):
            raise ConfigError(
                f'all_to_all_single sends activations, and nothing makes up for what the codec "{cls.name}" loses of '
                'them: use "lossless" or "bf16", or insist with "lossy_activations": true'
            )
    return codec


def why_no_codec(config: Compression) -> str | None:
    """Return what is wrong with the codec that the config names, None if nothing is or there is none."""
    if config.codec is None:
        return None
    try:
        codec_of(config)
    except MCRDLError as error:
        return str(error)
    return None


def described(config: Compression) -> str:
    """Return in words what is compressed."""
    if config.codec is None:
        return "none"
    where = f"{', '.join(config.operations)} on {', '.join(config.groups)} groups, from {config.min_bytes} bytes"
    when = f", after {config.warmup_steps} steps" if config.warmup_steps else ""
    return f"{config.codec}, {where}{when}, {'where it is faster' if config.mode == 'plan' else 'always'}"


class Policy:
    """Decides for each key of a call whether it is compressed, and how.

    Attributes:
        compressed: what carries the calls.

    Args:
        config: the "compression" block, whose codec is right.
        ways: the backends in use and their pairs.
        groups: the groups of the job.
        progress: who waits.
        join: makes the communicator of a part of a group.
        fit: gives a backend's method.
    """

    def __init__(
        self,
        config: Compression,
        ways: Mapping[str, Backend],
        groups: Groups,
        progress: Progress,
        join: Callable[[Backend, Group], None],
        fit: Fit,
    ) -> None:
        self._config = config
        self._ways = ways
        self._progress = progress
        self._fit = fit
        self.compressed = Compressed(codec_of(config), groups, join, fit, config.feedback_bytes)
        self._figures: dict[tuple[Any, ...], Figures] = {}
        self._plans: dict[tuple[Group, Key, str], Plan] = {}

    def __str__(self) -> str:
        return described(self._config)

    def close(self) -> None:
        """Hear of no more training steps."""
        self.compressed.close()

    def leave(self, group: Group) -> tuple[Group, ...]:
        """Forget a group; return its parts, whose communicators are to be freed."""
        self._figures = {key: figures for key, figures in self._figures.items() if key[0] is not group}
        self._plans = {key: plan for key, plan in self._plans.items() if key[0] is not group}
        return self.compressed.leave(group)

    def method(
        self, backend: Backend, operation: Operation, group: Group, args: tuple[Any, ...], key: Key
    ) -> tuple[Method, str] | None:
        """Return how calls like this one are compressed and by what, None if they aren't; all members come to the same.

        Args:
            backend: what carries the call uncompressed.
            operation: the operation.
            group: its group.
            args: its arguments.
            key: what the ranks agree on.
        """
        if not self._is_for(key) or group.size == 1:
            return None
        inputs, outputs = operation.tensors(*args)
        device = next(iter((*inputs, *outputs))).device
        carriers = self._carriers(group, device)
        if not carriers:
            warn_once(f"{key}: not compressed: no backend in use carries what a compressed call is made of")
            return None
        if self._config.mode == "plan":
            # What makes one rank ask again, such as another way to name the group, the others need not share.
            known = group, key, backend.name
            if known not in self._plans:
                self._plans[known] = self._plan(carriers, backend, operation, group, key, device)
            plan = self._plans[known]
            if not plan.compress:
                return None
            carrier, partitions = carriers[plan.carrier], plan.partitions
        else:
            carrier, partitions = carriers.get(backend.name, next(iter(carriers.values()))), 1
        self.compressed.prepare(carrier, group, device)
        method: Method
        if operation is ops.ALL_REDUCE:
            method = partial(self.compressed.all_reduce, carrier, partitions)
        else:
            method = partial(self.compressed.all_to_all_single, carrier)
        if not all(tensor.is_contiguous() for tensor in (*inputs, *outputs)):
            method = through_contiguous(operation, method)
        if self._config.warmup_steps:
            method = self._after_warmup(self._fit(backend, operation, group, args), method)
        return method, f"{carrier.name} ({self._config.codec})"

    def _after_warmup(self, plain: Method, method: Method) -> Method:
        steps, warmup = self.compressed.identities.steps, self._config.warmup_steps

        def call(group: Group, *args: Any) -> Pending:
            return (plain if steps(group) < warmup else method)(group, *args)

        return call

    def _is_for(self, key: Key) -> bool:
        return (
            key.operation.name in self._config.operations
            and key.kind in self._config.groups
            and key.dtype in GRADIENTS
            and key.device in DEVICE_TYPES
            and key.op in (None, "sum", "avg")
            and key.bytes is not None
            and key.bytes >= self._config.min_bytes
        )

    def _carriers(self, group: Group, device: torch.device) -> dict[str, Backend]:
        """Return what can carry the steps of compressed calls, in order of preference."""
        return {name: way for name, way in self._ways.items() if _able(way, group, device)}

    def figures(
        self, backend: Backend, operation: Operation, group: Group, dtype: torch.dtype, device: torch.device
    ) -> Figures:
        """Return what plans of calls that `backend` would carry go by, measured once; every member calls it."""
        known = group, operation, dtype, backend.name, device
        if known not in self._figures:
            self._figures[known] = calibrate(
                self.compressed,
                self._carriers(group, device),
                backend,
                operation,
                group,
                dtype,
                device,
                self._progress,
                self._fit,
            )
        return self._figures[known]

    def _plan(
        self,
        carriers: Mapping[str, Backend],
        backend: Backend,
        operation: Operation,
        group: Group,
        key: Key,
        device: torch.device,
    ) -> Plan:
        """Return what is to be done, predicted and then measured; every member calls it at the same place."""
        assert key.dtype is not None
        assert key.bytes is not None
        figures = self.figures(backend, operation, group, key.dtype, device)
        plan = choose(*figures, key.bytes, group.size, operation is ops.ALL_REDUCE)
        if group.rank == 0:
            logger.info(
                "%s of %d bytes: predicted %.0f us compressed by %s, partitions: %d; uncompressed by %s %.0f us%s",
                key,
                key.bytes,
                plan.us,
                plan.carrier,
                plan.partitions,
                backend.name,
                plan.plain_us,
                ", to be measured" if plan.compress else ", so it is not compressed",
            )
        # The first rank's: another kind of processor may round a prediction otherwise.
        names = list(carriers)
        mine = [plan.compress, names.index(plan.carrier), plan.partitions] if group.rank == 0 else [0, 0, 0]
        compress, place, partitions = largest(mine, backend, group, device, self._progress, self._fit)
        plan = plan._replace(compress=bool(compress), carrier=names[int(place)], partitions=int(partitions))
        pays = plan.compress and self._pays(plan, carriers[plan.carrier], backend, group, key, device)
        return plan._replace(compress=pays)

    def _pays(
        self, plan: Plan, carrier: Backend, backend: Backend, group: Group, key: Key, device: torch.device
    ) -> bool:
        """Return whether what was predicted to be faster is measured to be."""
        self.compressed.prepare(carrier, group, device)
        us, plain_us = confirm(
            self.compressed, carrier, plan.partitions, backend, key, group, device, self._progress, self._fit
        )
        pays = us < MARGIN * plain_us
        if group.rank == 0:
            so = "" if pays else "not "
            logger.info(
                "%s of %d bytes: measured %.0f us, uncompressed %.0f us, so it is %scompressed",
                *(key, key.bytes, us, plain_us, so),
            )
        return pays


def _able(way: Backend, group: Group, device: torch.device) -> bool:
    # Payloads of a GPU go through host memory to a backend that takes only that.
    place = device.type if device.type in way.devices else "cpu"
    lacks = (way.lacks(step, dtype, place, None) for step in STEPS for dtype in (torch.uint8, torch.int64))
    return way.misfit(group.mesh) is None and all(lack is None for lack in lacks)


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value
