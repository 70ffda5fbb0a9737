"""The files of a run: lines that are written by a thread, in time and in bounded room.

Each rank has files of its own in one folder, `KIND.RANK.EXTENSION`, and nothing rewrites what is in them: whatever ends
the job, the lines written so far can be read. When a file has half of the room that it may take it becomes
`KIND.RANK.old.EXTENSION`, in place of the one before.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from deepspeed_mcrdl.errors import ConfigError
from deepspeed_mcrdl.messages import logger

KINDS = {"log": "jsonl", "trace": "json", "flight": "bin", "flight-dump": "json"}

_WRITE_EVERY_S = 0.25
_BATCH = 100  # entries between two chances for the other threads of the process
_MOST_WAITING = 200_000

_begun: set[tuple[str, int]] = set()


def path_of(folder: Path, kind: str, rank: int, old: bool = False) -> Path:
    """Return where a rank's file of a kind lies."""
    return folder / f"{kind}.{rank}{'.old' if old else ''}.{KINDS[kind]}"


def ranks_in(folder: Path, kind: str) -> list[int]:
    """Return the ranks that have a file of a kind.

    Raises:
        ConfigError: if there is none.
    """
    found = _ranks_in(folder, kind)
    if not found:
        raise ConfigError(
            f'there is no file {kind}.RANK.{KINDS[kind]} in {folder}: "observe": {{"{kind}": true}} makes them'
        )
    return found


def _ranks_in(folder: Path, kind: str) -> list[int]:
    names = (path.name.split(".") for path in folder.glob(f"{kind}.*.{KINDS[kind]}"))
    return sorted({int(name[1]) for name in names if name[1].isdigit()})


def begin(folder: Path, rank: int, everybody: bool) -> None:
    """Make the folder and remove what an earlier run has left of this rank's files, or of every rank's.

    Nothing is removed when communication starts again in a process whose files they are.

    Raises:
        ConfigError: if the folder can't be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f'the folder of "mcrdl.observe" can\'t be made: {error}') from None
    key = (str(folder.resolve()), rank)
    if key in _begun:
        return
    _begun.add(key)
    for kind in KINDS:
        for other in _ranks_in(folder, kind) if everybody else [rank]:
            for old in (False, True):
                path_of(folder, kind, other, old).unlink(missing_ok=True)


def lines_of(folder: Path, kind: str, rank: int) -> Iterator[str]:
    """Yield a rank's whole lines, the oldest first; a line that was cut off is left out."""
    for old in (True, False):
        with contextlib.suppress(FileNotFoundError), path_of(folder, kind, rank, old).open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    yield line


class LineFile:
    """A file that lines are added to, in bounded room.

    Args:
        folder: the folder of the run.
        kind: one of KINDS.
        rank: this process's rank.
        most_bytes: what this file and the one before it may take together.
        head: returns the lines that every file begins with.
    """

    def __init__(self, folder: Path, kind: str, rank: int, most_bytes: int, head: Callable[[], str]) -> None:
        self._path, self._old = path_of(folder, kind, rank), path_of(folder, kind, rank, old=True)
        self._most_bytes = most_bytes // 2
        self._head = head
        self._open()

    def _open(self) -> None:
        self._file = self._path.open("a", encoding="utf-8")
        self._file.write(self._head())
        self._file.flush()
        self._size = self._file.tell()

    def write(self, lines: Iterable[str]) -> None:
        """Add lines; they are the system's when this returns, so that the process may be killed."""
        for line in lines:
            if self._size + len(line) > self._most_bytes:
                self._file.close()
                self._path.replace(self._old)
                self._open()
            self._file.write(line)
            self._size += len(line)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Writer:
    """A thread that turns entries into lines and writes them.

    Args:
        file: where they go.
        lines: entry -> its lines.
        tick: called by the thread every quarter of a second.
    """

    def __init__(self, file: LineFile, lines: Callable[[Any], str], tick: Callable[[], None] | None = None) -> None:
        self._file = file
        self._lines = lines
        self._tick = tick
        self._waiting: deque[Any] = deque()
        self._lost = 0
        self._failed = False
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="mcrdl-observe", daemon=True)
        self._thread.start()

    def put(self, entry: Any) -> None:
        """Have an entry written; the newest are left out if more come than can be written."""
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(entry)
        else:
            self._lost += 1

    @property
    def lost(self) -> int:
        """How many entries were left out."""
        return self._lost

    def _serve(self) -> None:
        while not self._closed.wait(_WRITE_EVERY_S):
            if self._tick is not None:
                self._tick()
            self.drain()

    def drain(self) -> None:
        """Write all that waits. A full disk stops the writing and not the job."""
        with self._lock:
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
                if not self._failed:
                    try:
                        self._file.write(map(self._lines, batch))
                    except OSError as error:
                        self._failed = True
                        logger.warning("no more is written into the folder of mcrdl.observe: %s", error)
                time.sleep(0)  # the interpreter's lock is needed by those who compute

    def close(self) -> None:
        """Write what waits and end the thread."""
        self._closed.set()
        self._thread.join()
        self.drain()
        with contextlib.suppress(OSError):
            self._file.close()
