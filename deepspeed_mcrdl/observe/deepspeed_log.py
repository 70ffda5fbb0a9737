"""DeepSpeed's own communication log ("comms_logger") with the right figures, where the plugin is selected.

DeepSpeed 0.19.8 takes every group for the world, doubles the algorithm bandwidth of all_reduce, takes the whole input
of a reduce_scatter for a part of it, and ends the job with status 0 at an operation that it has no formula for
(all_gather_object). The formulas here are those of operations.py; times and message sizes are DeepSpeed's.
"""

from __future__ import annotations

import sys
from typing import Any

import deepspeed.comm as dist
from deepspeed.utils import comms_logging

from deepspeed_mcrdl.operations import OPERATIONS

_SAME = {"isend": "send", "irecv": "recv", "inference_all_reduce": "all_reduce", "all_reduce_coalesced": "all_reduce"}
_OF_ONE_RANK = {"all_gather", "all_gather_into_tensor", "gather", "scatter"}  # logged by the bytes of one rank's tensor
_BITS = 8
_MILLISECONDS_AND_GIGA = 1e6


def correct() -> None:
    """Make DeepSpeed's log compute with the formulas of operations.py; idempotent."""
    comms_logging.calc_bw_log = bandwidths


def bandwidths(comm_op: str, size: int, duration: float) -> tuple[float, float]:
    """Return algbw and busbw in Gbit/s, in place of DeepSpeed's calc_bw_log.

    Args:
        comm_op: name of a function of deepspeed.comm; one that is unknown counts as one message.
        size: the message size as DeepSpeed logs it, in bytes.
        duration: in milliseconds.
    """
    if not duration:
        return 0.0, 0.0
    ranks = dist.get_world_size(_group())
    operation = OPERATIONS.get(_SAME.get(comm_op, comm_op))
    if comm_op in _OF_ONE_RANK:
        size *= ranks
    algbw = size / duration * _BITS / _MILLISECONDS_AND_GIGA
    return algbw, algbw if operation is None else algbw * operation.busbw_factor(ranks)


def _group() -> Any:
    # The log hands no group on; the call that it times is two frames above: bandwidths < append < timed_op's wrapper.
    caller = sys._getframe(3)
    arguments = caller.f_locals.get("func_args") if caller.f_code.co_name == "log_wrapper" else None
    return (arguments or {}).get("group")
