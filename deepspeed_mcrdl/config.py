"""The "mcrdl" block of ds_config.json: every key has a working default, and a wrong one is named with the right word.

`find` picks the block out of a DeepSpeed config; `MCRDLConfig` is its schema.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError, field_validator, model_validator

from deepspeed_mcrdl.errors import ConfigError, suggest
from deepspeed_mcrdl.groups import KINDS
from deepspeed_mcrdl.operations import (
    ALL_GATHER_INTO_TENSOR,
    ALL_REDUCE,
    ALL_TO_ALL_SINGLE,
    BROADCAST,
    REDUCE,
    RULE_NAMES,
)

SELECTING_KEY = "comm_backend"
BLOCK_KEY = "mcrdl"
NAME = "mcrdl"
AUTO = "auto"
PAIR = "+"  # "shm+mpi": shm within hosts, mpi between them

# The operations whose calls can be carried together.
FUSABLE = tuple(operation.name for operation in (ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER_INTO_TENSOR))
# The operations whose calls can be cut into chunks.
CUTTABLE = tuple(operation.name for operation in (ALL_REDUCE, ALL_TO_ALL_SINGLE))

# The command-line options by which DeepSpeed scripts are given their config.
CONFIG_OPTIONS = ("--deepspeed_config", "--deepspeed", "--ds_config", "--deepspeed-config", "--ds-config")


class SizeRule(BaseModel):
    """One step of a size list: calls of at most `max_bytes` take `backend`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_bytes: int | None = Field(default=None, ge=0, description="largest size in bytes; the last step has none")
    backend: str = Field(description='a backend\'s name, a pair such as "shm+mpi", or "auto"')


Rule = str | tuple[SizeRule, ...]


def check_size_list(name: str, rule: Rule) -> None:
    """Raise ValueError if a size list is empty, does not grow or does not end with a step for all the rest."""
    if isinstance(rule, str):
        return
    if not rule:
        raise ValueError(f'the size list of "{name}" is empty')
    limits = [step.max_bytes for step in rule]
    if limits[-1] is not None:
        raise ValueError(f'the last step of the size list of "{name}" must have no "max_bytes": it takes all the rest')
    bounded = [limit for limit in limits[:-1] if limit is not None]
    if len(bounded) != len(limits) - 1:
        raise ValueError(f'every step of the size list of "{name}" but the last needs "max_bytes"')
    if any(b <= a for a, b in itertools.pairwise(bounded)):
        raise ValueError(f'the size list of "{name}" is out of order: "max_bytes" must grow, got {bounded}')


def parts_of(names: Iterable[str]) -> set[str]:
    """Return the backends among `names`, those that pairs are made of included."""
    return {part for name in names for part in name.split(PAIR)}


class Rules(BaseModel):
    """Which backend carries which operation. Keys are operations; "default" is for all that have no rule."""

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, Rule] = {}

    default: Rule | None = None

    @model_validator(mode="after")
    def _known_operations(self) -> Rules:
        for name in self.operations:
            if name in ("send", "recv"):
                raise ValueError(f'"{name}": both ends of a message need one backend, so the rule is "send_recv"')
            if name not in RULE_NAMES:
                raise ValueError(f'unknown operation "{name}".{suggest(name, [*RULE_NAMES, "default", "groups"])}')
        for name, rule in self.all():
            check_size_list(name, rule)
        return self

    @property
    def operations(self) -> dict[str, Rule]:
        """The rules of single operations, by operation or family."""
        return self.__pydantic_extra__ or {}

    def all(self) -> Iterable[tuple[str, Rule]]:
        """Yield every (name, rule), the default among them."""
        if self.default is not None:
            yield "default", self.default
        yield from self.operations.items()

    def backends(self) -> set[str]:
        """Return what the rules name: backends, and pairs of them."""
        named = {
            name
            for _, rule in self.all()
            for name in ([rule] if isinstance(rule, str) else [step.backend for step in rule])
        }
        return named - {AUTO}


class Routing(Rules):
    """Rules for all groups, and in "groups" rules for the groups of one kind, which go before them."""

    groups: dict[str, Rules] = {}

    @field_validator("groups")
    @classmethod
    def _known_kinds(cls, groups: dict[str, Rules]) -> dict[str, Rules]:
        for kind in groups:
            if kind not in KINDS:
                raise ValueError(f'unknown kind of group "{kind}".{suggest(kind, KINDS)}')
        return groups

    def backends(self) -> set[str]:
        return super().backends().union(*(rules.backends() for rules in self.groups.values()))


class Block(BaseModel):
    """A block whose unknown keys are answered with the right word."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, block: Any) -> Any:
        if isinstance(block, Mapping):
            for key in block:
                if key not in cls.model_fields:
                    raise ValueError(f'unknown key "{key}".{suggest(str(key), cls.model_fields)}')
        return block


class Tuning(Block):
    """Which measured choices "auto" goes by, and whether it measures while the job runs."""

    table: str | None = Field(
        default=AUTO,
        description='path of a tuning table on rank 0; "auto": the newest one made on a machine like this; null: none',
    )
    strict: bool = Field(default=False, description="whether a named table that was made elsewhere is an error")
    mode: Literal["off", "online"] = Field(
        default="off", description='"online": try the backends in the job\'s own calls, then keep the best'
    )
    trials: int = Field(default=8, ge=1, description="timed calls of each backend for each kind of call, online")
    retune_every: int | None = Field(
        default=None, ge=1, description="try again after so many calls of a kind, online; null: never"
    )
    output: str | None = Field(
        default=None, description="where online tuning writes its table; null: the user's folder of tables"
    )
    record: str | None = Field(
        default=None, description="file for what calls the job makes, for `mcrdl tune --from-log`; null: none"
    )


class Observe(Block):
    """What is written down of the calls of a running job: docs/OBSERVE.md."""

    folder: str = Field(default="mcrdl_run", description="where all files go; an earlier run's are lost")
    log: bool = Field(default=False, description="calls, bytes, times and bandwidths, as lines of JSON")
    trace: bool = Field(default=False, description="a timeline of every call, for Perfetto")
    flight: bool = Field(default=False, description="the last calls of each rank, readable also of a job that hangs")
    stragglers: bool = Field(default=False, description="which rank comes last to the collectives, and how late")
    monitor: bool = Field(default=False, description="the log's figures to DeepSpeed's monitor, under Comm/")
    profiler: bool = Field(default=False, description="a range for each call in torch's profiler")
    summary: bool = Field(default=False, description="whether rank 0 prints the log's summary when the job ends")
    steps: Literal["engine", "manual"] = Field(
        default="engine", description='where steps end: in DeepSpeed\'s engine, or "manual": in mcrdl.log_step()'
    )
    every_steps: int = Field(default=10, ge=1, description="steps for each line of the log and of the monitor")
    flight_calls: int = Field(default=1024, ge=16, description="calls of each rank that the flight recorder keeps")
    max_mb: float = Field(default=64, gt=0, description="largest size in MB of the log, and of the trace, on a rank")

    @property
    def figures(self) -> bool:
        """Whether calls are counted."""
        return self.log or self.monitor or self.summary

    @property
    def anything(self) -> bool:
        """Whether calls are looked at."""
        return self.figures or self.trace or self.flight or self.stragglers or self.profiler


class FusionBlock(Block):
    """Which calls are collected and carried together, and when."""

    operations: tuple[str, ...] = Field(
        default=(ALL_REDUCE.name,), description=f"operations whose calls are fused, of {', '.join(FUSABLE)}"
    )
    max_call_bytes: int = Field(default=2**16, ge=0, description="larger calls go by themselves")
    max_bytes: int | None = Field(
        default=None,
        ge=1,
        description="a bucket of so many bytes is sent; null: what the tuning table says of the backend, which may be "
        "that calls go by themselves, else 1 MiB",
    )
    max_calls: int = Field(default=256, ge=1, description="a bucket of so many calls is sent")

    @field_validator("operations")
    @classmethod
    def _fusable(cls, operations: tuple[str, ...]) -> tuple[str, ...]:
        for name in operations:
            if name not in FUSABLE:
                raise ValueError(f'calls of "{name}" can\'t be fused.{suggest(name, FUSABLE)}')
        return operations

    @model_validator(mode="after")
    def _calls_fit(self) -> FusionBlock:
        if self.max_bytes is not None and self.max_call_bytes > self.max_bytes:
            raise ValueError(
                f'a call of "max_call_bytes" ({self.max_call_bytes}) does not fit into "max_bytes" ({self.max_bytes})'
            )
        return self


class Compression(Block):
    """Which calls are sent in fewer bytes, and by what codec. See docs/COMPRESSION.md before switching it on."""

    codec: str | None = Field(default=None, description="name of a codec; null: nothing is compressed")
    options: dict[str, Annotated[float, Strict()]] = Field(
        default={}, description='what the codec is made with, such as {"ratio": 0.01}'
    )
    groups: tuple[str, ...] = Field(default=("data_parallel",), description="kinds of groups whose calls it is for")
    operations: tuple[Literal["all_reduce", "all_to_all_single"], ...] = Field(
        default=("all_reduce",),
        description="all_reduce: sums and averages; all_to_all_single: even blocks",
    )
    min_bytes: int = Field(
        default=65536, ge=4096, description="smaller tensors are left as they are, such as norms and losses"
    )
    mode: Literal["plan", "on"] = Field(
        default="plan", description='"plan": only where measured costs predict that it is faster; "on": always'
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="steps of the optimizer with gradients as they are, before they are compressed"
    )
    lossy_activations: bool = Field(
        default=False, description="whether all_to_all_single may lose more than a cast to 16 bits does"
    )
    feedback_bytes: int = Field(
        default=2**30, ge=0, description="the most that error feedback may keep on a rank for each group"
    )

    @model_validator(mode="after")
    def _of_a_codec(self) -> Compression:
        if self.model_fields_set and "codec" not in self.model_fields_set:
            raise ValueError('names no "codec", so nothing would be compressed; null says that this is meant')
        return self

    @field_validator("groups")
    @classmethod
    def _known_kinds(cls, groups: tuple[str, ...]) -> tuple[str, ...]:
        for kind in groups:
            if kind not in KINDS:
                raise ValueError(f'unknown kind of group "{kind}".{suggest(kind, KINDS)}')
        return groups


class ChunkBlock(Block):
    """Which calls are carried in chunks."""

    operations: tuple[str, ...] = Field(
        default=(ALL_REDUCE.name,), description=f"operations whose calls are cut, of {', '.join(CUTTABLE)}"
    )
    min_call_bytes: int = Field(
        default=2**20,
        ge=0,
        description="smaller calls go whole, but all-to-alls with split sizes, which no rank knows all",
    )
    max_bytes: int | None = Field(
        default=None,
        ge=4096,
        description="size of a chunk; null: what the tuning table says of the backend, else 1 MiB by pairs of backends "
        "and no chunks by single ones",
    )

    @field_validator("operations")
    @classmethod
    def _cuttable(cls, operations: tuple[str, ...]) -> tuple[str, ...]:
        for name in operations:
            if name not in CUTTABLE:
                raise ValueError(f'calls of "{name}" can\'t be cut.{suggest(name, CUTTABLE)}')
        return operations


class MCRDLConfig(Block):
    """The "mcrdl" block."""

    backends: Literal["auto"] | tuple[str, ...] = Field(
        default="auto", description='backends to start; "auto": all that are usable on every rank'
    )
    routing: Routing = Routing()
    tuning: Tuning = Tuning()
    observe: Observe = Observe()
    fusion: FusionBlock | None = Field(
        default=None, description="carry small calls together; {}: with the defaults; null: don't"
    )
    compression: Compression = Compression()
    chunk: ChunkBlock | None = Field(
        default=None, description="carry large calls in chunks; {}: with the defaults; null: don't"
    )
    timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="seconds after which an unfinished call is an error; null: the timeout given when communication "
        "was started, which is 30 minutes by default",
    )
    checked: bool = Field(default=False, description="whether the ranks compare each call before data moves")
    banner: bool = Field(default=True, description="whether rank 0 prints backends and routes at the start")

    @model_validator(mode="after")
    def _routes_use_listed_backends(self) -> MCRDLConfig:
        if self.backends != AUTO:
            if not self.backends:
                raise ValueError('"backends" is empty: name one, or leave the key out')
            for name in sorted(parts_of(self.routing.backends()) - set(self.backends)):
                raise ValueError(
                    f'the routing names the backend "{name}", which is not in "backends".{suggest(name, self.backends)}'
                )
        return self


def parse(block: Any) -> MCRDLConfig:
    """Return the checked "mcrdl" block.

    Raises:
        ConfigError: one sentence for each mistake, with the place and the right word.
    """
    try:
        return MCRDLConfig.model_validate(block)
    except ValidationError as error:
        raise ConfigError("; ".join(dict.fromkeys(map(_sentence, error.errors())))) from None


def _sentence(mistake: Any) -> str:
    place = ".".join([BLOCK_KEY, *(str(part) for part in mistake["loc"] if _is_key(part))])
    text = str(mistake["msg"]).removeprefix("Value error, ")
    if mistake["type"] == "value_error":
        return f'in "{place}": {text}'
    if mistake["type"] == "model_type":
        text = "must be an object, {} for the defaults"
    return f'in "{place}": {text}, got {json.dumps(mistake["input"], default=str)}'


def _is_key(part: Any) -> bool:
    # pydantic puts the branch of a union it was trying among the keys
    return isinstance(part, int) or part.isidentifier()


def find(ds_config: Mapping[str, Any]) -> MCRDLConfig | None:
    """Return the block of a DeepSpeed config that selects this plugin, None if it doesn't.

    Raises:
        ConfigError: if "comm_backend" is misspelt or the block is wrong.
    """
    selected = ds_config.get(SELECTING_KEY)
    if selected is None:
        for key, value in ds_config.items():
            if value == NAME and key != SELECTING_KEY:
                raise ConfigError(f'unknown key "{key}": "{NAME}".{suggest(key, [SELECTING_KEY])}')
        return None
    if selected != NAME:
        hint = suggest(selected, [NAME]) if isinstance(selected, str) else f' The only value is "{NAME}".'
        raise ConfigError(f'unknown "{SELECTING_KEY}": {json.dumps(selected)}.{hint}')
    return parse(ds_config.get(BLOCK_KEY) or {})


def load(source: Any) -> dict[str, Any] | None:
    """Return the DeepSpeed config that `source` stands for: a dict, a path, JSON text or base64 of it; else None."""
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, str | Path):
        return None
    text = str(source)
    try:
        if Path(text).is_file():
            return _parse_json(Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # DeepSpeed reports a file that can't be read
    if text.lstrip().startswith("{"):
        return _parse_json(text)
    try:
        return _parse_json(base64.urlsafe_b64decode(text).decode("utf-8"))
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None


def _parse_json(text: str) -> dict[str, Any] | None:
    import hjson  # type: ignore[import-untyped]  # DeepSpeed's own reader: configs with comments are common

    try:
        config = hjson.loads(text)
    except hjson.HjsonDecodeError:
        return None
    return dict(config) if isinstance(config, Mapping) and config else None


def from_argv(argv: list[str] | None = None) -> dict[str, Any] | None:
    """Return the DeepSpeed config that the command line names, if it names one."""
    argv = sys.argv[1:] if argv is None else argv
    for place, argument in enumerate(argv):
        option, equals, value = argument.partition("=")
        if option in CONFIG_OPTIONS:
            if not equals:
                value = argv[place + 1] if place + 1 < len(argv) else ""
            config = load(value) if value else None
            if config is not None:
                return config
    return None
