"""The CPU backends that work here, most preferred first: what the tests of all backends go through; and their pairs."""

from deepspeed_mcrdl.backends.base import installed
from deepspeed_mcrdl.transforms.hierarchical import pairs

_USABLE = {name: cls for name, cls in installed().items() if "cpu" in cls.devices and not cls.unusable()}
BACKENDS = tuple(_USABLE)
PAIRS = tuple(pairs(_USABLE))
