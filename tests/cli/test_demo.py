"""The demo: its expectations, its real processes, and what is left when it ends."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpufleet_agent import scenario
from gpufleet_cli.demo import check, stage
from gpufleet_cli.errors import FleetError
from gpufleet_cli.main import fleet

SHIPPED = stage.shipped("scenario.toml")
RULES = ("gpu_missing", "gpu_downclocked", "bandwidth_regression", "agent_silent")


def test_the_command_expects_what_the_agent_plays() -> None:
    """The command reads the scenario by itself; it must mean the same faults and cards as the player."""
    played = scenario.load(SHIPPED)
    mine = check.expected(SHIPPED, played.inventory_csv().encode())
    theirs = played.faults_expected()
    assert [(one.node, one.entity, one.kind, one.at, one.rule, one.within_s) for one in mine] == [
        (one.node, one.entity, one.kind, one.at, one.rule, one.within_s) for one in theirs
    ]
    assert {one.rule for one in mine} == set(RULES)
    assert max(one.at + one.within_s for one in mine) <= 120


@pytest.mark.parametrize("gpu", ["3", "[1, 3]", '"*"'])
def test_hostlists_patterns_and_several_cards(tmp_path: Path, gpu: str) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(
        '[fleet]\nnodes = "a[01-03],b1"\ngpus = 4\n'
        f'[[fault]]\nnode = "a*,b1"\ngpu = {gpu}\nkind = "card_lost"\nat = 2\n'
        'expect = { rule = "gpu_missing", within_s = 9 }\n'
        '[[fault]]\nnode = "a[01-02]"\nkind = "agent_stopped"\n'
        'expect = { rule = "agent_silent", within_s = 9 }\n'
    )
    played = scenario.load(path)
    mine = check.expected(path, played.inventory_csv().encode())
    assert [(one.node, one.entity) for one in mine] == [
        (one.node, one.entity) for one in played.faults_expected()
    ]


@pytest.mark.parametrize("nodes", ["2", '"gpu-[001-002]"'])
@pytest.mark.parametrize("kind", ["agent_stopped", "reboot", "clock_skew"])
def test_a_fault_of_a_host_without_cards_is_expected(tmp_path: Path, nodes: str, kind: str) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(
        f'[fleet]\nnodes = {nodes}\ngpus = 0\n[[node]]\nnode = "gpu-002"\ngpus = 2\n'
        f'[[fault]]\nnode = "*"\nkind = "{kind}"\nexpect = {{ rule = "agent_silent", within_s = 9 }}\n'
    )
    mine = check.expected(path, scenario.load(path).inventory_csv().encode())
    assert [(one.node, one.entity) for one in mine] == [("gpu-001", "node:"), ("gpu-002", "node:")]


START = datetime(2026, 11, 30, 12)


def looked(
    monkeypatch: pytest.MonkeyPatch, findings: Sequence[Mapping[str, object]], seconds: float
) -> check.Outcome:
    faults = [
        check.Fault("a", "gpu:1", "a/0", "card_lost", 10, "gpu_missing", 20),
        check.Fault("b", "node:", "b", "agent_stopped", 30, "agent_silent", 20),
    ]
    looking = check.Check(None, faults, seconds)  # type: ignore[arg-type]
    began = [{"at": START.isoformat() + "Z"}]
    monkeypatch.setattr(looking, "_rows", lambda query: began if "min(ts)" in query else list(findings))
    looking.look()
    return looking.outcome


def finding(rule: str, node: str, entity: str, at: float) -> dict[str, object]:
    fired = START + timedelta(seconds=at)
    return {"rule": rule, "node": node, "entity": entity, "fired_at": fired.isoformat() + "Z", "reason": "x"}


GOOD = [finding("gpu_missing", "a", "gpu:1", 18), finding("agent_silent", "b", "node:", 44)]


def test_a_second_rule_in_the_same_incident_is_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    lost, xid = {**GOOD[0], "incident": 1}, {**finding("xid", "a", "gpu:1", 12), "incident": 1}
    assert looked(monkeypatch, [xid, lost, GOOD[1]], 100).passed
    apart = looked(monkeypatch, [{**xid, "incident": 2}, lost, GOOD[1]], 100)
    assert [page["rule"] for page in apart.false_pages] == ["xid"]


def test_found_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = looked(monkeypatch, GOOD, 100)
    assert outcome.passed
    assert [fault.delay_s for fault in outcome.faults] == [8, 14]


def test_a_fault_of_a_host_may_be_found_on_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    on_part = [GOOD[0], finding("agent_silent", "b", "dimm:mc0/dimm3", 44)]
    assert looked(monkeypatch, on_part, 100).passed
    on_card = looked(monkeypatch, [GOOD[0], finding("agent_silent", "b", "gpu:7", 44)], 100)
    assert [fault.verdict for fault in on_card.faults] == ["found", "missed"]


def test_a_fault_of_a_host_may_be_found_on_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked(monkeypatch, [GOOD[0], finding("agent_silent", "", "job:41778", 44)], 100).passed


def test_two_jobs_that_wait_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked again and again; the finding on a node comes last and is of the first fault."""
    faults = [check.Fault(name, "node:", name, "data_starved", 0, "data_starved", 60) for name in "abc"]
    looking = check.Check(None, faults, 100)  # type: ignore[arg-type]
    found = [finding("data_starved", *on, 9) for on in (("", "job:1"), ("", "job:2"), ("a", "node:"))]
    began = [{"at": START.isoformat() + "Z"}]
    monkeypatch.setattr(looking, "_rows", lambda query: began if "min(ts)" in query else found)
    for _ in range(2):
        looking.look()
        assert [fault.delay_s for fault in looking.outcome.faults] == [9, 9, 9]
        assert not looking.outcome.false_pages
    found.append(finding("data_starved", "", "job:1", 50))
    looking.look()
    assert not looking.outcome.false_pages


def test_a_card_that_waits_for_data_is_found_on_its_job_or_node(tmp_path: Path) -> None:
    path = tmp_path / "waits.toml"
    path.write_text(
        "[fleet]\nnodes = 2\ngpus = 2\n"
        '[[fault]]\nnode = "gpu-002"\ngpu = 1\nkind = "data_starved"\n'
        'expect = { rule = "data_starved", within_s = 300 }\n'
    )
    (mine,) = check.expected(path, scenario.load(path).inventory_csv().encode())
    assert (mine.node, mine.entity, mine.place) == ("gpu-002", "node:", "gpu-002/1")


@pytest.mark.parametrize(
    ("findings", "verdicts", "pages"),
    [
        (GOOD[:1], ["found", "missed"], 0),
        ([GOOD[0], finding("agent_silent", "b", "node:", 51)], ["found", "late"], 0),
        ([*GOOD, finding("gpu_missing", "a", "gpu:2", 20)], ["found", "found"], 1),  # another card
        ([*GOOD, finding("gpu_downclocked", "a", "gpu:1", 20)], ["found", "found"], 1),  # another rule
        ([*GOOD[:1], finding("agent_silent", "c", "node:", 44)], ["found", "missed"], 1),  # another node
        ([finding("gpu_missing", "a", "gpu:1", 5), GOOD[1]], ["missed", "found"], 1),  # before the fault
    ],
)
def test_what_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, findings: list[dict[str, object]], verdicts: list[str], pages: int
) -> None:
    outcome = looked(monkeypatch, findings, 100)
    assert not outcome.passed
    assert [fault.verdict for fault in outcome.faults] == verdicts
    assert len(outcome.false_pages) == pages


@pytest.mark.parametrize("rule", RULES)
def test_a_disabled_rule_is_disabled_in_valid_toml(rule: str) -> None:
    import tomllib

    text = stage._configuration([rule, "clock_skew"])
    found = tomllib.loads(text)["rule"]
    assert found[rule]["enabled"] is False
    assert found["clock_skew"]["enabled"] is False
    assert "enabled" not in next(found[other] for other in RULES if other != rule)


def test_a_rule_name_is_no_toml() -> None:
    with pytest.raises(FleetError):
        stage._configuration(["x]\n[tls"])


def test_a_wrong_scenario_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text("[fleet]\nnodes = 0\n")
    result = CliRunner().invoke(fleet, ["demo", "--scenario", str(path)])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"fleet: {path}: key fleet.nodes")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("fault", "key"),
    [
        ('kind = "agent_stoped"', "fault[0].kind"),
        ('kind = "card_lost"\ngpu = 7', "fault[0].gpu"),
        ('kind = "agent_stopped"\nexpect = { rule = "agent_silnt", within_s = 9 }', "fault[0].expect.rule"),
    ],
)
def test_a_wrong_fault_is_one_line_that_names_file_and_key(tmp_path: Path, fault: str, key: str) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(f'[fleet]\nnodes = 1\ngpus = 0\n[[fault]]\nnode = "*"\n{fault}\n')
    result = CliRunner().invoke(fleet, ["demo", "--check", "--scenario", str(path)])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"fleet: {path}: key {key}")
    assert len(result.stderr.splitlines()) == 1


def test_a_rule_that_does_not_exist_is_one_line() -> None:
    result = CliRunner().invoke(fleet, ["demo", "--disable-rule", "gpu_mising"])
    assert result.exit_code == 2
    assert result.stderr.startswith("fleet: --disable-rule: no rule 'gpu_mising'; there are ")
    assert len(result.stderr.splitlines()) == 1


def start(*words: str, tmp: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "gpufleet_cli.main", "demo", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp)},
    )  # fmt: skip


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread may end while we look
            found += [int(word) for word in task.read_text().split()]
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_when_it_ends(tmp_path: Path, number: int) -> None:
    demo = start(tmp=tmp_path)
    try:
        assert demo.stdout is not None
        first = demo.stdout.readline()
        found = re.search(r"GPUFLEET_SERVER=(127\.0\.0\.1:\d+)", first)
        assert found, first
        children = children_of(demo.pid)
        assert len(children) == 2
        assert list(tmp_path.iterdir())
        result = CliRunner().invoke(fleet, ["--server", found[1], "status", "-o", "json"])
        assert json.loads(result.output)["gpus"]["expected"] == 60
        demo.send_signal(number)
        _, complaint = demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert demo.returncode == 0, complaint
    assert complaint == ""
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert not list(tmp_path.iterdir())


def test_a_demo_whose_collector_dies_says_so(tmp_path: Path) -> None:
    demo = start("--check", tmp=tmp_path)
    try:
        deadline = time.monotonic() + 90
        while len(children := children_of(demo.pid)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(children[0], signal.SIGKILL)
        _, complaint = demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert demo.returncode == 1
    assert "the demo's collector ended with status -9" in complaint
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_scripted_fault_is_flagged_and_nothing_else(tmp_path: Path) -> None:
    demo = start("--check", "-o", "json", tmp=tmp_path)
    try:
        out, complaint = demo.communicate(timeout=240)
    finally:
        demo.kill()
    assert demo.returncode == 0, out + complaint
    document = json.loads(out)
    assert document["passed"]
    assert document["false_pages"] == []
    assert {item["result"] for item in document["items"]} == {"found"}
    assert document["seconds"] <= 120


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_its_rule_a_fault_is_missed(tmp_path: Path) -> None:
    demo = start("--check", "--disable-rule", "bandwidth_regression", "-o", "json", tmp=tmp_path)
    try:
        out, complaint = demo.communicate(timeout=240)
    finally:
        demo.kill()
    assert demo.returncode == 1, complaint
    results = {item["rule"]: item["result"] for item in json.loads(out)["items"]}
    assert results.pop("bandwidth_regression") == "missed"
    assert set(results.values()) == {"found"}
