"""Wakes the plugin up: waits for deepspeed and torch.distributed, and hooks the places where it can be selected.

Runs at the end of `import torch` (entry point torch.backends), in launchers too, so: standard library only, under a
millisecond, and nothing that raises. Nothing else is imported until a config selects the plugin.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import Any


def install() -> None:
    """Hook deepspeed's modules, those already imported too. Idempotent."""
    if any(isinstance(finder, _PostImport) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _PostImport())
    for name, hook in _HOOKS.items():
        if name in sys.modules:
            hook(sys.modules[name])


class _PostImport(importlib.abc.MetaPathFinder):
    """Lets the other finders find a module and calls its hook after it was executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        hook = _HOOKS.get(name)
        if hook is None:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _HookedLoader(spec.loader, hook)
                return spec
        return None


class _HookedLoader(importlib.abc.Loader):
    def __init__(self, loader: Any, hook: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._hook = hook

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._hook(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # get_source, get_data, ... for pickling, tracebacks and resources


def _hook_comm(comm: ModuleType) -> None:
    """deepspeed.comm.comm: a config on the command line or in deepspeed.initialize, or dist_backend="mcrdl"."""
    original = comm.init_distributed

    @functools.wraps(original)
    def init_distributed(dist_backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        from deepspeed_mcrdl.config import NAME, from_argv

        selected = _select(_config_of_initialize(sys._getframe(1))) or _select(from_argv())
        if dist_backend == NAME:
            dist_backend = None
            if not selected and comm.cdb is None:
                _select({"comm_backend": NAME})
        return original(dist_backend, *args, **kwargs)

    # deepspeed and deepspeed.comm have taken or will take the function from comm.comm by name.
    for name in ("deepspeed.comm.comm", "deepspeed.comm", "deepspeed"):
        module = sys.modules.get(name)
        if getattr(module, "init_distributed", None) is original:
            module.init_distributed = init_distributed  # type: ignore[union-attr]
    if "RANK" in os.environ:  # a rank, not a launcher
        from deepspeed_mcrdl.errors import install_excepthook

        install_excepthook()


def _config_of_initialize(caller: FrameType) -> Any:
    """Return the config given to deepspeed.initialize if that is the caller, else None.

    initialize() starts communication before it reads its config, and it can't be wrapped: `import deepspeed` imports
    torch, which imports us, so that its module is half made when we see it and gives no sign when it is done.
    """
    if caller.f_globals.get("__name__") != "deepspeed" or caller.f_code.co_name != "initialize":
        return None
    given = caller.f_locals
    for source in (given.get("config"), given.get("config_params")):
        if source is not None:
            return source
    return getattr(given.get("args"), "deepspeed_config", None)


def _hook_config(config: ModuleType) -> None:
    """deepspeed.runtime.config: a config that reaches DeepSpeed in any other way, after communication was started."""
    original = config.DeepSpeedConfig.__init__

    @functools.wraps(original)
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        _select(config)
        original(self, config, *args, **kwargs)

    config.DeepSpeedConfig.__init__ = init


def _hook_c10d(c10d: ModuleType) -> None:
    """torch.distributed: the backend name "mcrdl"."""
    if not hasattr(c10d.Backend, "MCRDL"):
        c10d.Backend.MCRDL = _BackendName()


class _BackendName:
    """Registers the c10d backend when torch first reads its name.

    Not before: with any other backend registered torch takes another way for strings such as "cpu:gloo", and without
    our name nothing must change.
    """

    def __get__(self, instance: Any, owner: Any) -> str:
        owner.MCRDL = "mcrdl"
        owner.register_backend("mcrdl", _create_process_group, extended_api=True, devices=["cpu", "cuda"])
        return "mcrdl"


def _create_process_group(*args: Any) -> Any:
    from deepspeed_mcrdl.faces.process_group import create

    return create(*args)


def _select(source: Any) -> bool:
    """Select the plugin if the DeepSpeed config `source` asks for it; return whether it does."""
    from deepspeed_mcrdl.config import load

    ds_config = load(source)
    if ds_config is None or not _concerns_us(ds_config):
        return False
    from deepspeed_mcrdl.faces.select import select

    return select(ds_config)


def _concerns_us(ds_config: dict[str, Any]) -> bool:
    return "comm_backend" in ds_config or "mcrdl" in ds_config.values()


_HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "deepspeed.comm.comm": _hook_comm,
    "deepspeed.runtime.config": _hook_config,
    "torch.distributed.distributed_c10d": _hook_c10d,
}
