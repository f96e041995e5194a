"""`fleet explain` as an on-call reads it: what is wrong first, with its numbers; the rest in a few lines."""

import pytest

from gpufleet_cli.settings import Settings
from gpufleet_cli.verbs import explain

SETTINGS = Settings("127.0.0.1:1", "", "", "", False, 5.0, "table", False, "never", False)


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def verdict(word: str, on: str, reason: str, code: str = "c", **more: object) -> dict[str, object]:
    said: dict[str, object] = {
        "verdict": word, "code": code, "place": on, "observed": None, "expected": None, "unit": "MHz",
        "evidence_age_s": 5.0, "reason": reason, "detail": None,
    }  # fmt: skip
    return said | more


def rule(name: str, *verdicts: dict[str, object], **more: object) -> dict[str, object]:
    item: dict[str, object] = {
        "rule": name, "title": f"Title of {name}", "for": "3 of 4", "clear_after_s": 300.0, "enabled": True,
        "runbook": f"docs/runbooks/{name}.md", "problem": None, "run_at": "2026-03-01T12:00:00Z",
        "last_run": {"ok": 7, "warn": 0, "crit": 1, "unknown": 0, "na": 3}, "limits": [], "peers": [],
        "verdicts": list(verdicts), "findings": [],
    }  # fmt: skip
    return item | more


def screen(*items: dict[str, object]) -> list[str]:
    text = explain._screen({"items": list(items)}, SETTINGS)
    assert all(len(line) <= 80 for line in text.splitlines())
    return text.splitlines()


SLOW = rule(
    "gpu_downclocked",
    verdict("crit", "gpu-001/3", "1100 of 1755 MHz", "slow", observed=1100.0, expected=1755.0,
            detail={"window_s": 60, "samples": 12, "peers": 7}),
    *(verdict("ok", f"gpu-001/{n}", "as it should be") for n in range(7)),
    limits=[{"name": "warn_ratio", "value": 0.93, "layer": "site", "source": "ann", "node": None,
             "model": None}],
)  # fmt: skip


def test_of_many_rules_those_that_find_something_come_first_and_whole() -> None:
    lines = screen(
        rule("disk_full", verdict("ok", "gpu-001", "20 % used")),
        SLOW,
        rule("ecc_corrected", verdict("ok", "gpu-001/0", "0"), verdict("n/a", "gpu-001/1", "no ECC")),
        rule("mount_hung", verdict("n/a", "gpu-001", "no network mount")),
        rule("port_down", verdict("unknown", "gpu-001", "no samples")),
        rule("port_rate", verdict("unknown", "gpu-001", "no samples")),
        rule("edac", problem="it took more than 5 s just now"),
    )
    assert lines[0].startswith("gpu_downclocked: ")
    text = "\n".join(lines)
    assert "judged everywhere at 2026-03-01 12:00:00: 7 ok, 1 crit, 3 n/a" in text
    assert "warn_ratio   0.93  site   all  ann" in text
    assert "window_s 60, samples 12, peers 7" in text
    assert text.count("gpu-001/") == 2, "the cards that are well are a number"
    assert "and 7 here that are ok or not applicable" in text
    assert lines[-4:] == [
        "2 rules ok: disk_full, ecc_corrected",
        "1 rule n/a, no network mount: mount_hung",
        "1 rule not judged, it took more than 5 s just now: edac",
        "2 rules unknown, no samples: port_down, port_rate",
    ]


def test_one_rule_is_shown_even_if_it_finds_nothing() -> None:
    lines = screen(rule("disk_full", verdict("ok", "gpu-001", "20 % used")))
    assert lines[0] == "disk_full: Title of disk_full"
    assert any("20 % used" in line for line in lines)


def test_a_rule_that_cannot_run_says_so() -> None:
    lines = screen(rule("edac", problem="waits for probe edac: no agent has described it yet"))
    assert "  not judged: waits for probe edac: no agent has described it yet" in lines
    assert not any("judged everywhere" in line for line in lines)
