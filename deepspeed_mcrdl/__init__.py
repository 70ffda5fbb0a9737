"""Mix-and-match communication backends for DeepSpeed (MCR-DL, arXiv 2303.08374).

Importing this package wakes the plugin up where TORCH_DEVICE_BACKEND_AUTOLOAD=0 has kept torch from doing so.
"""

from deepspeed_mcrdl.autoload import install as _install

__version__ = "0.1.0"

_install()
