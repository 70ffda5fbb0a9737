"""Puts MCRDLBackend in DeepSpeed's place for its backend, before or after DeepSpeed has made one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed.comm.comm as deepspeed_comm
import torch.distributed as dist
from deepspeed.comm.torch import TorchBackend

from deepspeed_mcrdl.config import MCRDLConfig, find
from deepspeed_mcrdl.errors import ConfigError, install_excepthook
from deepspeed_mcrdl.faces.deepspeed_backend import MCRDLBackend
from deepspeed_mcrdl.observe.deepspeed_log import correct


def select(ds_config: Mapping[str, Any]) -> bool:
    """Make DeepSpeed use this plugin if `ds_config` asks for it; return whether it does.

    Raises:
        ConfigError: if the config is wrong.
    """
    try:
        config = find(ds_config)
    except ConfigError:
        install_excepthook()
        raise
    if config is not None:
        select_config(config)
    return config is not None


def select_config(config: MCRDLConfig) -> None:
    """Make DeepSpeed use this plugin with `config`; if it already does so with another one, the new one counts."""
    install_excepthook()
    correct()
    current = deepspeed_comm.cdb
    if isinstance(current, MCRDLBackend) and current.is_initialized():
        if current.config != config:
            current.restart(config)
        return
    # A class of its own for the config: DeepSpeed makes the object itself and compares classes with isinstance.
    chosen = type("MCRDLBackend", (MCRDLBackend,), {"config": config, "__module__": MCRDLBackend.__module__})
    deepspeed_comm.TorchBackend = chosen
    if type(current) is TorchBackend and dist.is_initialized():
        # Already started: the object stays, so that groups and references to it stay true.
        current.__class__ = chosen
        current.start()
