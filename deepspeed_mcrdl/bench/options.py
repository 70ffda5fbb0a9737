"""Types of command-line options that benchmarks share; a wrong value is argparse's one-line error."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from deepspeed_mcrdl.errors import ConfigError, suggest

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_RANGE_FACTOR = 4


def at_least(least: int) -> Callable[[str], int]:
    """Return a type for whole numbers from `least` on."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
        return int(text)

    return parse


def names(text: str) -> list[str]:
    """Return the words of a comma-separated list."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of names")
    return words


def sizes(text: str) -> list[int]:
    """Return bytes: ``256,64K,1M``, or a range ``256:16M`` in steps of 4 times."""
    if ":" not in text:
        return [size(part) for part in text.split(",")]
    first, last = (size(part) for part in text.split(":", 1))
    result = [first]
    while result[-1] * _RANGE_FACTOR <= last:
        result.append(result[-1] * _RANGE_FACTOR)
    return result


def size(text: str) -> int:
    """Return bytes: ``256``, ``64K`` or ``1M``."""
    found = re.fullmatch(r"([1-9]\d*)([KMG]?)", text.strip().upper())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in bytes such as 256, 64K or 16M")
    return int(found[1]) * _UNITS[found[2]]


def seconds(text: str) -> float:
    """Return a time: ``90``, ``90s``, ``10m`` or ``1h``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip().lower())
    if found is None or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90s or 10m")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def known(what: str, word: str, words: Iterable[str]) -> None:
    """Raise ConfigError, with the right word, if `word` is none of `words`."""
    words = list(words)
    if word not in words:
        raise ConfigError(f'unknown {what} "{word}".{suggest(word, words)}')


def output_file(text: str) -> Path:
    """Return a path in a folder that exists, so that a long run doesn't end without a place for its result."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def require_matplotlib() -> None:
    """Raise ConfigError if `--plot` can't draw."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'deepspeed_mcrdl[plot]'") from None
