"""The rules: `sql/rules/<rule>.sql`, read, checked and put into the store as macros `find_<rule>(as_of)`.

Files that begin with a digit hold macros that rules share. A macro binds its tables when it is made, so all
are made again after each change of a table; one that cannot be made yet is `n/a: no such probe` and stops no
other.
"""

import logging
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from importlib.resources.abc import Traversable

import duckdb
import msgspec

from gpufleet.config import ConfigError
from gpufleet.metric import Type
from gpufleet_collector.standard import STANDARD
from gpufleet_collector.store import LIVE, SQL_TYPES, Store

log = logging.getLogger(__name__)

NO_PROBE = "n/a: no such probe"
"""Status of a rule whose table or column does not exist yet."""

WAITS = "waits for"
"""How the error of a rule begins that needs no person: what it reads comes with an agent."""

DESCRIBED = frozenset(STANDARD)
"""Tables that come to be when an agent describes its probe."""

SCOPES = ("gpu", "node", "pci", "port", "dimm", "disk", "mount", "job", "rule")
"""Kinds of entity that a rule may judge."""

_MAKE = "rules,live"
"""search_path while macros are made: they belong to `rules`, they read `live`."""

GPU_COLUMNS = {
    "gpu_uuid": Type.STRING,
    "gpu_index": Type.I64,
    "pci": Type.STRING,
    "state": Type.STRING,
    "util_pct": Type.F64,
    "sm_clock_mhz": Type.F64,
    "mem_clock_mhz": Type.F64,
    "power_w": Type.F64,
    "power_limit_w": Type.F64,
    "temperature_c": Type.F64,
    "mem_used_bytes": Type.U64,
    "mem_total_bytes": Type.U64,
    "pstate": Type.U64,
    "clock_reasons": Type.U64,
    "pcie_gen": Type.U64,
    "pcie_width": Type.U64,
}
"""What the state of a card shows; NULL where no agent has sent the column yet."""

JOB_COLUMNS = STANDARD["job"]
"""What says whose work a card does."""

MOUNT_COLUMNS = {
    "mount": Type.STRING,
    "canary_state": Type.STRING,
    "nfs_read_ops_total": Type.U64,
    "nfs_read_rtt_s_total": Type.F64,
    "nfs_getattr_ops_total": Type.U64,
    "nfs_getattr_rtt_s_total": Type.F64,
    "nfs_lookup_ops_total": Type.U64,
    "nfs_lookup_rtt_s_total": Type.F64,
    "nfs_retransmits_total": Type.U64,
}
"""What the diagnosis of waiting for data takes from mounts, where there are such rows."""

_SAMPLES = {
    "gpu": GPU_COLUMNS,
    "job": JOB_COLUMNS,
    "mount": MOUNT_COLUMNS,
    "agent": {"probe": Type.STRING, "ok": Type.BOOL},
    "bench": STANDARD["bench"],
}
"""Tables that are read before they or all their columns exist, through a macro `<table>_samples()`."""


class DefaultLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A threshold in a rule's header, and where it comes from."""

    value: float
    source: str


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The TOML block in a rule's leading comment.

    Attributes:
        title: What people see.
        runbook: Page in docs/runbooks, without `.md`.
        every: How often it runs.
        for_: "k of n": distinct evidence that must be bad before it fires.
        for_code: The same for single codes that need less.
        also: Names under which people look for it, besides its own and those of `for_code`.
        scope: What it judges: one of `SCOPES`.
        covers: What its finding explains besides itself (one cause, one incident): "", "card", "driver" (the
            same, and what says that cards are missing, once it is critical) or "node".
        clear_after: How long the evidence must be clean.
        min_duration: How long it must have been bad before it fires.
        boot_grace: Bad evidence this soon after a boot does not count.
        max_severity: The worst it may become.
        latch: Never clears by itself.
        weight: What a run costs, in runs of an ordinary rule: by it rules take turns.
        each_sample: Counts also a sample that the next one overtook before a pass saw it: its samples come as
            often as it runs.
        absence: Judges that something did not arrive; bad verdicts do not count while the collector warms up.
        shadow: Judged and recorded, but changes no state and opens no incident.
        limits: Default thresholds.
    """

    title: str
    runbook: str
    every: str
    for_: str = msgspec.field(name="for")
    for_code: dict[str, str] = {}
    also: list[str] = []
    scope: str = "gpu"
    covers: str = ""
    clear_after: str = "0s"
    min_duration: str = "0s"
    boot_grace: str = "0s"
    max_severity: str = "crit"
    latch: bool = False
    weight: float = 1
    each_sample: bool = False
    absence: bool = False
    shadow: bool = False
    limits: dict[str, DefaultLimit] = {}


@dataclass(frozen=True, slots=True)
class Need:
    """k of n."""

    k: int
    n: int

    @classmethod
    def parse(cls, text: str) -> "Need":
        """Read "3 of 4"."""
        found = re.fullmatch(r"(\d{1,3}) of (\d{1,3})", text)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise ValueError(f'{text!r} is not "k of n" with 1 <= k <= n')
        return cls(int(found[1]), int(found[2]))


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule as its file says."""

    name: str
    header: Header
    sql: str


def seconds(text: str) -> float:
    """Read "90s", "5m", "2h" or "1d".

    Raises:
        ValueError: It is none of these.
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)(s|m|h|d)", text)
    if not found:
        raise ValueError(f'{text!r} is not a duration like "90s", "5m", "2h" or "1d"')
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def quoted(text: str) -> str:
    """`text` as an SQL string."""
    return "'" + text.replace("'", "''") + "'"


def load_rules(folder: Traversable | None = None) -> tuple[Rule, ...]:
    """Read every rule file.

    Raises:
        ConfigError: A header is missing or wrong; the text names the file and the key.
    """
    return tuple(
        parse_rule(item.name.removesuffix(".sql"), item.read_text())
        for item in _files(folder)
        if not item.name[0].isdigit()
    )


@lru_cache(256)
def parse_rule(name: str, text: str) -> Rule:
    """Read one rule file's text."""
    found = re.match(r"\s*/\*(.*?)\*/", text, re.DOTALL)
    if not found:
        raise ConfigError(f"rule {name}: no header: the file must begin with /* TOML */")
    try:
        header = msgspec.convert(tomllib.loads(found[1]), Header)
        for need in (header.for_, *header.for_code.values()):
            Need.parse(need)
        for duration in (header.every, header.clear_after, header.min_duration, header.boot_grace):
            seconds(duration)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"rule {name}: header: {error}") from error
    closed = {
        "scope": (header.scope, SCOPES),
        "covers": (header.covers, ("", "card", "driver", "node")),
        "max_severity": (header.max_severity, ("warn", "crit")),
    }
    for key, (value, allowed) in closed.items():
        if value not in allowed:
            raise ConfigError(f"rule {name}: header: {key} = {value!r} is none of {', '.join(allowed)}")
    if not header.runbook:
        raise ConfigError(f"rule {name}: header: runbook is empty")
    if not re.search(rf"\bmacro\s+find_{re.escape(name)}\s*\(\s*as_of\s*\)", text):
        raise ConfigError(f"rule {name}: the file does not make find_{name}(as_of)")
    return Rule(name, header, text)


@dataclass(frozen=True, slots=True)
class Reads:
    """What a rule may read, by its text and the shared macros it uses; too much rather than too little.

    Attributes:
        words: Every word; the tables are among them.
        lookback_s: The longest time that is written there, or that a default limit gives.
    """

    words: frozenset[str]
    lookback_s: float


def reads(rule: Rule) -> Reads:
    """What `rule` may read."""
    words, longest = _words(rule.sql)
    for name, limit in rule.header.limits.items():
        for suffix, size in (("_s", 1), ("_minutes", 60), ("_hours", 3600), ("_days", 86400)):
            if name.endswith(suffix):
                longest = max(longest, limit.value * size)
    return Reads(words, longest)


@lru_cache(256)
def _words(sql: str) -> tuple[frozenset[str], float]:
    """Every word of a rule's text and of the shared macros it uses, and the longest time written there."""
    macros = _macros()
    words: set[str] = set()
    todo, longest = [_code(sql)], 0.0
    while todo:
        text = todo.pop()
        for count, unit in re.findall(r"\b(\d{1,6})\s+(second|minute|hour|day)s?\b", text, re.IGNORECASE):
            longest = max(longest, float(count) * _UNITS[unit.lower()])
        fresh = set(re.findall(r"\w+", re.sub(r"'[^']*'", "", text))) - words
        words |= fresh
        todo += [macros[word] for word in fresh & macros.keys()]
    return frozenset(words | {word.removesuffix("_samples") for word in words}), longest


@cache
def _macros() -> Mapping[str, str]:
    """The shared macros: name -> text."""
    macros: dict[str, str] = {}
    for item in _files(None):
        if item.name[0].isdigit():
            parts = re.split(r"create or replace macro\s+(\w+)", _code(item.read_text()))
            macros |= dict(zip(parts[1::2], parts[2::2], strict=True))
    return macros


_UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}


def _code(text: str) -> str:
    return re.sub(r"/\*.*?\*/|--[^\n]*", "", text, flags=re.DOTALL)


def install(store: Store, rules: Sequence[Rule], extra: Sequence[str] = ()) -> dict[str, str]:
    """Make every macro again; returns rule -> "" or why it could not be made.

    Args:
        store: Where.
        rules: What `load_rules` gave.
        extra: Statements to run before the rules (the limits each joins).
    """
    shared = [item.read_text() for item in _files(None) if item.name[0].isdigit()]
    status = {rule.name: _waits_for(rule, store) for rule in rules}
    waiting = [name for name, waits in status.items() if waits]
    with _making(store) as write:
        samples = [_samples(table, store.tables.get(table)) for table in _SAMPLES]
        for text in (*samples, *shared, *extra, *map(_gone, waiting)):
            write.execute(text)
    for rule in rules:
        if status[rule.name]:
            continue  # the engine would refuse it too, late: that was half of the start with a new store
        try:
            with _making(store) as write:
                write.execute(_gone(rule.name))
                write.execute(rule.sql)
            with store.reader(LIVE) as read:  # making a macro does not always bind its body
                read.execute(f"DESCRIBE SELECT * FROM find_{rule.name}(TIMESTAMP '2000-01-01')").fetchall()
        except (duckdb.CatalogException, duckdb.BinderException) as error:
            status[rule.name] = one_line(error)
            with _making(store) as write:
                write.execute(_gone(rule.name))
    return status


def _gone(name: str) -> str:
    return f"DROP MACRO TABLE IF EXISTS find_{name}"


def _waits_for(rule: Rule, store: Store) -> str:
    """Which probes a rule lacks, in plain words; "" = none, so the rule itself is wrong."""
    read = set(re.findall(r"\b(?:from|join)\s+(\w+)\b(?!\s*\()", _code(rule.sql)))
    absent = sorted((read & DESCRIBED) - store.tables.keys())
    return f"{WAITS} probe {', '.join(absent)}: no agent has described it yet" if absent else ""


def one_line(error: Exception) -> str:
    """The first line of what went wrong."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:500]


@contextmanager
def _making(store: Store) -> Iterator[duckdb.DuckDBPyConnection]:
    """A cursor whose new macros land in `rules` and see `live`, alone with the store while it is open."""
    with store.transaction(), store.reader(_MAKE) as cursor:
        yield cursor


def _samples(table: str, columns: Mapping[str, Type] | None) -> str:
    """Macro <table>_samples(): what is needed of a table, also before it or every column exists."""
    cells = ", ".join(
        name if columns and name in columns else f"NULL::{SQL_TYPES[kind]} AS {name}"
        for name, kind in _SAMPLES[table].items()
    )
    head = (
        "ts, received_at, node"
        if columns
        else "NULL::TIMESTAMP AS ts, NULL::TIMESTAMP AS received_at, '' AS node"
    )
    source = table if columns else "(SELECT 1) WHERE false"
    return f"CREATE OR REPLACE MACRO {table}_samples() AS TABLE SELECT {head}, {cells} FROM {source}"


def _files(folder: Traversable | None) -> list[Traversable]:
    here = folder or resources.files("gpufleet_collector") / "sql" / "rules"
    return sorted((item for item in here.iterdir() if item.name.endswith(".sql")), key=lambda item: item.name)
