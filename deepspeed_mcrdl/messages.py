"""What the plugin says while it runs: short lines on stderr, each said once."""

from __future__ import annotations

import functools
import logging
import os
import sys

logger = logging.getLogger("deepspeed_mcrdl")


def set_up(rank: int) -> None:
    """Write the plugin's messages to stderr, with the rank; idempotent and quiet for a host with its own handlers."""
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"[mcrdl rank {rank}] %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(os.environ.get("MCRDL_LOG_LEVEL", "INFO").upper())
    logger.propagate = False


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning the first time that it is given."""
    logger.warning(message)
