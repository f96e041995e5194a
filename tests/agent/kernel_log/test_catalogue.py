"""The catalogue: every entry is complete, a site's changes are checked, the texts say what they must."""

import ast
import re
import sys
from pathlib import Path

import pytest

import gpufleet.catalogue
from gpufleet import catalogue
from gpufleet.catalogue import CatalogueError, Entry

SHIPPED = catalogue.load()
ENTRIES = [
    *((f"xid {entry.number}", entry) for entry in SHIPPED.xids.values()),
    *((f"sxid {entry.number}", entry) for entry in SHIPPED.sxids.values()),
]


def write(path: Path, text: str) -> Path:
    file = path / "catalogue.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(("name", "entry"), ENTRIES, ids=[name for name, _ in ENTRIES])
def test_every_entry_is_complete(name: str, entry: Entry) -> None:
    assert entry.severity in catalogue.SEVERITIES
    assert entry.scope in catalogue.SCOPES
    assert entry.action in catalogue.ACTIONS
    assert entry.basis in ("vendor", "judgement")
    assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_/ -]*", entry.name)
    assert 12 <= len(entry.meaning) <= 160
    assert entry.meaning[0].isupper()
    assert entry.meaning.endswith(".")
    assert entry.meaning.isascii()
    assert "_" not in entry.meaning  # plain words, not the vendor's symbol


def test_what_is_critical_says_what_to_do() -> None:
    for name, entry in ENTRIES:
        if entry.level == "crit":
            assert entry.action in ("reset_gpu", "reboot", "drain_rma", "contact"), name
        if entry.scope == "app" and entry.severity == "warning":
            assert entry.action in ("restart_app", "none"), name


def test_the_numbers_that_matter_most() -> None:
    assert len(SHIPPED.xids) == 177
    assert len(SHIPPED.sxids) == 92
    wanted = {
        79: "crit",
        48: "crit",
        95: "crit",
        119: "crit",
        74: "crit",
        64: "crit",
        63: "warn",
        94: "warn",
        31: "warn",
        45: "",
        43: "",
    }
    for number, level in wanted.items():
        entry = catalogue.xid(number)
        assert entry is not None
        assert entry.level == level, number


def test_an_unknown_number_is_kept_as_a_warning() -> None:
    assert catalogue.xid(999) is None
    assert catalogue.sxid(1) is None
    entry = catalogue.unknown(999)
    assert (entry.level, entry.action) == ("warn", "contact")
    assert "999" in catalogue.explain_xid(999)
    assert "not in the catalogue" in catalogue.explain_xid(999)
    assert "NVSwitch" in catalogue.explain_sxid(1)


def test_the_explanation_fits_a_terminal_and_says_everything() -> None:
    for number in SHIPPED.xids:
        text = catalogue.explain_xid(number)
        assert max(map(len, text.splitlines())) <= 100
        entry = SHIPPED.xids[number]
        for word in (f"Xid {number}", entry.name, entry.severity, entry.action):
            assert word in text
        assert " ".join(entry.meaning.split()) in " ".join(text.split())
    assert "a finding: crit" in catalogue.explain_xid(79)
    assert "no finding" in catalogue.explain_xid(45)
    assert "SXid 12028" in catalogue.explain_sxid(12028)


def test_a_site_changes_and_adds_entries(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        '[xid.94]\nseverity = "critical"\naction = "reset_gpu"\n'
        '[xid.999]\nmeaning = "Ours."\n[sxid.20001]\nseverity = "info"\n',
    )
    site = catalogue.load(file)
    changed = site.xid(94)
    assert changed is not None
    assert (changed.level, changed.action, changed.basis) == ("crit", "reset_gpu", "site")
    assert changed.meaning == SHIPPED.xids[94].meaning
    added, quiet = site.xid(999), site.sxid(20001)
    assert added is not None
    assert quiet is not None
    assert (added.meaning, added.level) == ("Ours.", "warn")
    assert quiet.level == ""
    assert site.version != SHIPPED.version
    assert catalogue.xid(94) == SHIPPED.xids[94]
    assert "changed by this site" in site.explain_xid(94)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[xid.79]\nseverity = 'mild'", "mild"),
        ("[xid.79]\naction = 'pray'", "pray"),
        ("[xid.79]\nscope = 7", "scope"),
        ("[xid.79]\nbasis = 'vendor'", "basis"),
        ("[xid.79]\nnumber = '80'", "number"),
        ("[xid.79]\nmeaning = ''", "meaning"),
        (f"[xid.79]\nmeaning = '{'x' * 161}'", "meaning"),
        ("[xid.79]\nmeaning = 'a\\u0007'", "meaning"),
        ("[xid.seventy]\nseverity = 'info'", "seventy"),
        ("[xid.'-1']\nseverity = 'info'", "-1"),
        ("xid = 3", "xid"),
        ("[xid]\n79 = 'info'", "79"),
        ("[yid.79]\nseverity = 'info'", "yid"),
        ("[xid.79", "TOML"),
    ],
)
def test_bad_changes_are_refused_with_the_place(tmp_path: Path, text: str, says: str) -> None:
    text = text.replace("'a\\u0007'", '"a\\u0007"')
    with pytest.raises(CatalogueError, match=re.escape(says)) as refused:
        catalogue.load(write(tmp_path, text))
    assert "catalogue.toml" in str(refused.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match="nowhere"):
        catalogue.load(tmp_path / "nowhere.toml")


def test_only_the_standard_library_is_needed() -> None:
    tree = ast.parse(Path(gpufleet.catalogue.__file__).read_text())
    names = {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {str(node.module).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names <= set(sys.stdlib_module_names)
