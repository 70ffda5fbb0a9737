"""The errors that a user can meet, and how one is shown: a user's mistake is a sentence, never a traceback."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable
from types import TracebackType


class MCRDLError(RuntimeError):
    """Base of all errors raised by deepspeed_mcrdl."""


class ConfigError(MCRDLError):
    """The "mcrdl" block, or what the ranks make of it together, is wrong."""


class TableError(ConfigError):
    """A tuning table can't be read, is none, or was made elsewhere and "strict" is set."""


class CallError(MCRDLError):
    """A communication call that no backend could carry out rightly: wrong shapes, dtypes, ranks or splits."""


class UnsupportedError(MCRDLError):
    """No backend in use can do this operation on this dtype, device and reduce operation."""


class CallFailedError(MCRDLError):
    """A backend could not finish a call, in most cases because another rank has ended."""


class CallTimeoutError(MCRDLError, TimeoutError):
    """A call was not done in time; the text names the call and the ranks that did not come to it."""


class MismatchError(MCRDLError):
    """The ranks of a group made calls that don't fit together ("checked" mode)."""


def failed(call: object, error: Exception) -> MCRDLError:
    """Return the error to raise for what a backend has raised in `call`."""
    if isinstance(error, MCRDLError):
        return error
    wrapped = CallFailedError(f"{call} failed: {str(error).strip()}")
    wrapped.__cause__ = error
    return wrapped


def suggest(word: str, known: Iterable[str]) -> str:
    """Return ``' Did you mean "x"?'`` for the known word nearest to `word`, else the list of known words."""
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f' Did you mean "{near[0]}"?'
    return f" Known: {', '.join(known)}."


def rank_label() -> str:
    """Return ``"rank 3: "`` as far as the launcher has told it, else an empty string."""
    rank = os.environ.get("RANK")
    return f"rank {rank}: " if rank is not None else ""


def install_excepthook() -> None:
    """Show an uncaught MCRDLError as one sentence; MCRDL_TRACEBACK=1 keeps the traceback. Idempotent."""
    if getattr(sys.excepthook, "shows_mcrdl_errors", False) or os.environ.get("MCRDL_TRACEBACK") == "1":
        return
    previous = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, MCRDLError):
            print(f"deepspeed_mcrdl: error: {rank_label()}{error}", file=sys.stderr, flush=True)
        elif _called_before_init(error, trace):
            print(
                f"deepspeed_mcrdl: error: {rank_label()}deepspeed.comm.{getattr(error, 'name', '')} was called before "
                "communication was started; call deepspeed.init_distributed() or deepspeed.initialize() first",
                file=sys.stderr,
                flush=True,
            )
        else:
            previous(kind, error, trace)

    show.shows_mcrdl_errors = True  # type: ignore[attr-defined]
    sys.excepthook = show


def _called_before_init(error: BaseException, trace: TracebackType | None) -> bool:
    # deepspeed.comm looks its backend up in a module global that is None until init; DeepSpeed itself compares that
    # global with None, so nothing else can stand in for it and the mistake shows as an attribute of None.
    if not isinstance(error, AttributeError) or getattr(error, "obj", 0) is not None or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_globals.get("__name__") == "deepspeed.comm.comm"
