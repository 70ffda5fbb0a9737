"""Mix-and-match communication backends for DeepSpeed (MCR-DL, arXiv 2303.08374).

Importing this package wakes the plugin up where TORCH_DEVICE_BACKEND_AUTOLOAD=0 has kept torch from doing so. The
paper's interface, `deepspeed_mcrdl.init()`, `deepspeed_mcrdl.all_reduce(...)` and the rest of `faces.api`, is loaded at
first use, since this package is imported whenever torch is.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from deepspeed_mcrdl.autoload import install as _install

if TYPE_CHECKING:
    from deepspeed_mcrdl.faces.api import *  # noqa: F403

__version__ = "0.1.0"

_install()


def __getattr__(name: str) -> Any:
    # Not where a module of ours asks for another one: the interface imports nearly all of them.
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is None:
        from deepspeed_mcrdl.faces import api

        if name in api.__all__:
            return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
