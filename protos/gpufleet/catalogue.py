"""What an Xid or SXid number means: versioned data, read by the agent, the collector and the CLI alike.

`catalogue/xid.csv` and `catalogue/sxid.csv` hold one line per number. A site changes an entry, or adds one,
in a TOML file of its own::

    [xid.94]
    severity = "critical"
    action = "reset_gpu"

The number alone is never the whole truth: where the card says itself what it needs (recovery action, the
words Fatal or Nonfatal), that wins over the table, and a site's word wins over both. Standard library only:
the agent's children load this module.
"""

import csv
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from textwrap import wrap

SEVERITIES: dict[str, str] = {"info": "", "warning": "warn", "critical": "crit", "fault": "crit"}
"""Word of an entry -> severity of a finding; "" = no finding."""

SCOPES: dict[str, str] = {
    "app": "one program",
    "gpu": "one card",
    "fabric": "NVLink or NVSwitch, and with it the cards it joins",
    "node": "the host",
}

ACTIONS: dict[str, str] = {
    "none": "nothing by itself; read what came before and after",
    "restart_app": "restart the job; look at the card only if it is always the same one",
    "reset_gpu": "drain the card's jobs and reset it",
    "reboot": "drain the node and reboot it; power-cycle if the card stays away",
    "drain_rma": "drain the node and have the card, its cables and its slot inspected or replaced",
    "contact": "note it, and ask the vendor if it repeats",
}

BASES: dict[str, str] = {
    "vendor": "severity and action follow the vendor's published advice",
    "judgement": "the vendor publishes no advice; severity and action are our judgement",
    "site": "changed by this site",
    "unknown": "not in the catalogue; kept, and shown as a warning",
}

MEANING_CHARS = 160


class CatalogueError(Exception):
    """The data or a site's overrides cannot be used; the text names the file and the entry."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What one number means.

    Attributes:
        number: Xid or SXid.
        name: The vendor's symbol or short text.
        severity: A key of `SEVERITIES`.
        scope: A key of `SCOPES`: what it touches.
        action: A key of `ACTIONS`: what a person does.
        basis: A key of `BASES`: whose word this is.
        meaning: One or two plain sentences, at most `MEANING_CHARS`.
    """

    number: int
    name: str
    severity: str
    scope: str
    action: str
    basis: str
    meaning: str

    @property
    def level(self) -> str:
        """Severity of a finding: "", warn or crit."""
        return SEVERITIES[self.severity]


_Table = Mapping[int, Entry]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The two tables with a site's changes in them.

    Attributes:
        version: Of the data; "+site" is added when a site changed something. Recorded with every event.
        xids: By Xid number.
        sxids: By SXid number.
    """

    version: str
    xids: _Table
    sxids: _Table

    def xid(self, number: int) -> Entry | None:
        """The entry of an Xid; None when the number is not known."""
        return self.xids.get(number)

    def sxid(self, number: int) -> Entry | None:
        """The entry of an SXid; None when the number is not known."""
        return self.sxids.get(number)

    def explain_xid(self, number: int) -> str:
        """What an on-call wants to read about an Xid, known or not; several lines, no line end."""
        return _explain("Xid", number, self.xid(number) or unknown(number), self.version)

    def explain_sxid(self, number: int) -> str:
        """The same for an SXid."""
        return _explain("SXid", number, self.sxid(number) or unknown(number, "fabric"), self.version)


def unknown(number: int, scope: str = "gpu") -> Entry:
    """How a number that is not in the catalogue is treated: kept, a warning, ask the vendor."""
    return Entry(number, "", "warning", scope, "contact", "unknown", "This number is not in the catalogue.")


def load(overrides: Path | None = None) -> Catalogue:
    """The catalogue that came with this version, changed by a site's TOML file if one is given.

    Raises:
        CatalogueError: The file cannot be read or holds an entry, a key or a word that is not known.
    """
    shipped = _shipped()
    if overrides is None:
        return shipped
    try:
        raw = tomllib.loads(overrides.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CatalogueError(f"{overrides}: cannot be read as TOML: {error}") from error
    strange = set(raw) - {"xid", "sxid"}
    if strange:
        raise CatalogueError(f"{overrides}: unknown table {min(strange)}: use [xid.N] or [sxid.N]")
    return Catalogue(
        f"{shipped.version}+site",
        _changed(shipped.xids, raw.get("xid", {}), "gpu", f"{overrides}: xid"),
        _changed(shipped.sxids, raw.get("sxid", {}), "fabric", f"{overrides}: sxid"),
    )


def xid(number: int) -> Entry | None:
    """The shipped entry of an Xid; None when the number is not known."""
    return _shipped().xid(number)


def sxid(number: int) -> Entry | None:
    """The shipped entry of an SXid; None when the number is not known."""
    return _shipped().sxid(number)


def explain_xid(number: int) -> str:
    """The shipped text about an Xid, for `fleet explain xid N` without a collector."""
    return _shipped().explain_xid(number)


def explain_sxid(number: int) -> str:
    """The shipped text about an SXid."""
    return _shipped().explain_sxid(number)


@cache
def _shipped() -> Catalogue:
    data = files("gpufleet") / "catalogue"
    version, xids = _read((data / "xid.csv").read_text("utf-8").splitlines(), "xid.csv")
    other, sxids = _read((data / "sxid.csv").read_text("utf-8").splitlines(), "sxid.csv")
    return Catalogue(f"{version}.{other}", xids, sxids)


def _read(lines: Iterable[str], name: str) -> tuple[str, _Table]:
    """Version and entries of one CSV file; its first line is `# ... version N`."""
    head, *rest = lines
    _, found, version = head.partition("version ")
    if not head.startswith("#") or not found:
        raise CatalogueError(f"{name}: the first line does not say `# ... version N`")
    table: dict[int, Entry] = {}
    for row in csv.DictReader(rest):
        try:
            entry = Entry(int(row.pop("number")), **row)
        except (KeyError, TypeError, ValueError) as error:
            raise CatalogueError(f"{name}: bad row {row}: {error}") from error
        if entry.number in table:
            raise CatalogueError(f"{name}: {entry.number} is there twice")
        _check(entry, f"{name} {entry.number}")
        table[entry.number] = entry
    return version.strip(), table


def _changed(table: _Table, changes: object, scope: str, where: str) -> _Table:
    if not isinstance(changes, dict):
        raise CatalogueError(f"{where}: must be a table of numbers")
    changed = dict(table)
    allowed = {field.name for field in fields(Entry)} - {"number", "basis"}
    for key, change in changes.items():
        if not key.isdecimal() or not key.isascii() or len(key) > 9 or not isinstance(change, dict):
            raise CatalogueError(f"{where}.{key}: must be a table named by a number")
        for name, value in change.items():
            if name not in allowed or not isinstance(value, str):
                raise CatalogueError(
                    f"{where}.{key}.{name}: use a text for one of {', '.join(sorted(allowed))}"
                )
        number = int(key)
        entry = replace(table.get(number) or unknown(number, scope), **change, basis="site")
        _check(entry, f"{where}.{key}")
        changed[number] = entry
    return changed


def _check(entry: Entry, where: str) -> None:
    for name, words in (("severity", SEVERITIES), ("scope", SCOPES), ("action", ACTIONS), ("basis", BASES)):
        word = getattr(entry, name)
        if word not in words:
            raise CatalogueError(f"{where}: {name} {word!r} is none of {', '.join(words)}")
    if not 0 < len(entry.meaning) <= MEANING_CHARS or not entry.meaning.isprintable():
        raise CatalogueError(f"{where}: meaning must be one line of at most {MEANING_CHARS} characters")


def _explain(what: str, number: int, entry: Entry, version: str) -> str:
    level = SEVERITIES[entry.severity]
    out = [f"{what} {number}" + (f"  {entry.name}" if entry.name else ""), ""]
    out += wrap(entry.meaning, 78, break_on_hyphens=False)
    out += [
        "",
        f"severity  {entry.severity} ({f'a finding: {level}' if level else 'no finding'})",
        f"touches   {SCOPES[entry.scope]}",
        f"action    {entry.action}: {ACTIONS[entry.action]}",
        f"basis     {BASES[entry.basis]}; catalogue {version}",
    ]
    return "\n".join(out)
