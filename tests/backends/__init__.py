"""The CPU backends that work here, most preferred first: what the tests of all backends go through."""

from deepspeed_mcrdl.backends.base import installed

BACKENDS = tuple(name for name, backend in installed().items() if "cpu" in backend.devices and not backend.unusable())
