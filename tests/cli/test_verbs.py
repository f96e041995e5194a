"""Verbs against a real collector: what they print, in which format, and how they end."""

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest
from click.testing import Result

Run = Callable[..., Result]


class Seed(Protocol):
    def node(self, name: str, **more: object) -> None: ...

    def finding(self, *words: str, age: float = ..., incident: str = ...) -> int: ...

    def entity(self, node: str, index: int) -> str: ...


def fleet_of_two(seed: Seed) -> None:
    seed.node("gpu-001", lost=[3])
    seed.node("gpu-002")
    seed.finding(
        "gpu_missing", "gpu-001", seed.entity("gpu-001", 3), "crit", "lost_at_run_time",
        "no longer answers: 7 of 8 cards", incident="GPU missing", age=42,
    )  # fmt: skip


def items(result: Result) -> list[dict[str, object]]:
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    assert document["api_version"] == "fleet/v1"
    assert document["generated_at"].endswith("Z")
    found = document["items"]
    assert isinstance(found, list)
    return found


# ---- node and gpu


def test_node_list_has_a_line_per_node(seed: Seed, run: Run) -> None:
    fleet_of_two(seed)
    lines = run("node").output.splitlines()
    assert lines[0].split()[:2] == ["NODE", "STATE"]
    assert [line.split()[0] for line in lines[1:]] == ["gpu-001", "gpu-002"]
    assert [item["node"] for item in items(run("node", "-o", "json"))] == ["gpu-001", "gpu-002"]


def test_node_shows_cards_findings_and_facts(seed: Seed, run: Run) -> None:
    fleet_of_two(seed)
    screen = run("node", "gpu-001").output
    assert "✖ critical" in screen
    assert "7 of 8 expected GPUs ok" in screen
    assert "gpu_missing" in screen
    assert "INC-1" in screen
    assert "driver 580.65" in screen
    (item,) = items(run("node", "gpu-001", "-o", "json"))
    cards = item["gpus"]
    assert isinstance(cards, list)
    assert len(cards) == 8
    assert cards[3]["state"] == "critical"
    assert cards[3]["values"]["power_w"] is None
    assert cards[0]["values"]["power_w"] == 612.5


@pytest.mark.parametrize(
    "name",
    [
        "gpu-002/5",
        "gpu-002:0000:20:00.0",
        "gpu-002:20:00.0",
        "16005002",
        "GPU-70752d303032-0005",
        "gpu-70752D303032-0005",
    ],
)
def test_a_card_has_many_names(seed: Seed, run: Run, name: str) -> None:
    fleet_of_two(seed)
    (item,) = items(run("gpu", name, "-o", "json"))
    assert (item["node"], item["gpu_index"], item["serial"]) == ("gpu-002", 5, "16005002")


def test_a_beginning_of_the_uuid_must_be_unique(seed: Seed, run: Run) -> None:
    fleet_of_two(seed)
    result = run("gpu", "70752d303032")
    assert result.exit_code == 2
    assert "means 8 cards" in result.output
    (item,) = items(run("gpu", "70752d303032-0007", "-o", "json"))
    assert item["gpu_index"] == 7
    assert run("gpu", "70752d3").exit_code == 5  # fewer than 8 characters


def test_pci_alone_is_ambiguous_over_nodes(seed: Seed, run: Run) -> None:
    fleet_of_two(seed)
    result = run("gpu", "0000:20:00.0")
    assert result.exit_code == 2
    assert "gpu-001/5, gpu-002/5" in result.output


@pytest.mark.parametrize(
    "words", [("node", "gpu-00x"), ("gpu", "gpu-001/9"), ("gpu", "x"), ("incidents", "show", "9")]
)
def test_what_does_not_exist_is_5(seed: Seed, run: Run, words: tuple[str, ...]) -> None:
    fleet_of_two(seed)
    result = run(*words)
    assert result.exit_code == 5
    error = json.loads(run(*words, "-o", "json").stdout)["error"]
    assert error["code"] == "not_found"
    assert words[-1] in error["message"]


def test_a_near_miss_is_suggested(seed: Seed, run: Run) -> None:
    fleet_of_two(seed)
    assert "did you mean gpu-001, gpu-002" in run("node", "gpu-003").output


# ---- incidents and explain


def test_incidents_list_and_show(seed: Seed, run: Run) -> None:
    fleet_of_two(seed)
    assert run("incidents").output == run("incidents", "list").output
    (item,) = items(run("incidents", "-o", "json"))
    assert item["id"] == "INC-1"
    assert item["place"] == "gpu-001/3"
    for word in ("1", "INC-1", "inc-1"):
        screen = run("incidents", "show", word).output
        for part in (
            "no longer answers",
            "serial 16003001",
            "slot 4",
            "docs/runbooks/gpu_missing.md",
            "opened",
        ):
            assert part in screen
    assert run("incidents", "--exit-code").exit_code == 11


def test_an_incident_tells_what_happened_around_it(seed: Seed, run: Run) -> None:
    fleet_of_two(seed)
    from gpufleet_collector.store import Store

    store = seed.store  # type: ignore[attr-defined]
    assert isinstance(store, Store)
    with store.transaction() as write:
        for at, word in (("11:59:10", "79"), ("11:30:00", "13")):
            write.execute(
                "INSERT INTO live.event VALUES (?, ?, 'gpu-001', 'boot-1', 1, 'gpu:x', 'xid', ?, 1, ?, NULL)",
                [f"2026-11-30 {at}", f"2026-11-30 {at}", word, f"Xid {word}"],
            )
    (item,) = items(run("incidents", "show", "1", "-o", "json"))
    events = item["events"]
    assert isinstance(events, list)
    assert [event["code"] for event in events] == ["79"]
    assert "Xid 79" in run("incidents", "show", "1").output


@pytest.mark.parametrize("word", ["x", "-1", "INC-", "1.5", "0", "9" * 30, "１"])
def test_no_number_is_usage(run: Run, word: str) -> None:
    assert run("incidents", "show", "--", word).exit_code == 2


@pytest.mark.parametrize(
    "words",
    [
        ("rule", "gpu_missing"),
        ("gpu_missing",),
        ("incident", "1"),
        ("INC-1",),
        ("1",),
        ("node", "gpu-001"),
        ("gpu-001/3",),
    ],
)
def test_explain_takes_rule_incident_node_or_id(seed: Seed, run: Run, words: tuple[str, ...]) -> None:
    fleet_of_two(seed)
    found = items(run("explain", *words, "-o", "json"))
    assert [item["rule"] for item in found] == ["gpu_missing"]
    findings = found[0]["findings"]
    assert isinstance(findings, list)
    assert findings[0]["evidence"][0] == ["2026-11-30T11:59:55Z", "crit", "lost_at_run_time"]
    assert "gpu_missing" in run("explain", *words).output


@pytest.mark.parametrize("words", [("rule", "nope"), ("nope",), ("a", "b", "c"), ("incident", "77")])
def test_explain_what_is_not_there(seed: Seed, run: Run, words: tuple[str, ...]) -> None:
    fleet_of_two(seed)
    assert run("explain", *words).exit_code == 5


@pytest.fixture
def alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run` where no collector answers."""
    monkeypatch.setenv("GPUFLEET_SERVER", "127.0.0.1:1")
    return run


@pytest.mark.parametrize("word", ["xid", "XID", "sxid"])
def test_explain_an_error_number_needs_no_collector(alone: Run, word: str) -> None:
    number = "79" if word != "sxid" else "10001"
    (item,) = items(alone("explain", word, number, "-o", "json"))
    assert (item["error"], item["number"]) == (word.lower(), int(number))
    screen = alone("explain", word, number).output
    assert str(item["meaning"]).split()[0] in screen
    assert f"action    {item['action']}" in screen


def test_explain_a_number_that_nobody_knows_says_so(alone: Run) -> None:
    (item,) = items(alone("explain", "xid", "98765", "-o", "json"))
    assert item["basis"] == "unknown"
    assert "not in the catalogue" in alone("explain", "xid", "98765").output


@pytest.mark.parametrize("number", ["x", "-1", "1.5", "\u0661", "9" * 30])
def test_explain_what_is_no_error_number_is_usage(alone: Run, number: str) -> None:
    assert alone("explain", "--", "xid", number).exit_code == 2


# ---- sql


def test_sql_in_every_format(seed: Seed, run: Run) -> None:
    seed.node("gpu-001", gpus=2)
    query = (
        "select node, gpu_index, sm_clock_mhz, power_w, ts from live.gpu order by ts desc, gpu_index limit 5"
    )
    table = run("sql", query).output.splitlines()
    assert table[0].split() == ["node", "gpu_index", "sm_clock_mhz", "power_w", "ts"]
    assert table[1].split() == ["gpu-001", "0", "1755.0", "612.5", "2026-11-30T11:59:58Z"]
    rows = list(csv.reader(io.StringIO(run("sql", query, "-o", "csv").output)))
    assert rows[1] == ["gpu-001", "0", "1755.0", "612.5", "2026-11-30T11:59:58Z"]
    found = items(run("sql", query, "-o", "json"))
    assert found[1] == {
        "node": "gpu-001", "gpu_index": 1, "sm_clock_mhz": 1756.0, "power_w": 612.5,
        "ts": "2026-11-30T11:59:58Z",
    }  # fmt: skip
    lines = [json.loads(line) for line in run("sql", query, "-o", "jsonl").output.splitlines()]
    assert lines == found


def test_sql_null_and_text_with_commas(run: Run) -> None:
    query = "select null as a, 'x,\"y\"' as b, [1, null] as c, 'nan'::double as d"
    assert run("sql", query).output.splitlines()[1].split() == ["NULL", 'x,"y"', "[1,null]", "NaN"]
    assert run("sql", query, "-o", "csv").output == 'a,b,c,d\n,"x,""y""","[1,null]",NaN\n'
    assert items(run("sql", query, "-o", "json"))[0] == {"a": None, "b": 'x,"y"', "c": [1, None], "d": "NaN"}


def test_sql_from_stdin(run: Run) -> None:
    assert "42" in run("sql", "-", input="select 42 as answer").output
    assert run("sql", "-", input="  ").exit_code == 2


def test_sql_says_when_it_cut(run: Run) -> None:
    result = run("sql", "select * from range(10)", "--limit", "4")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 5
    assert "cut after 4 rows" in result.stderr


def test_sql_without_rows_still_has_its_header(run: Run) -> None:
    assert run("sql", "select 1 as a where false").output == "a\n"
    assert run("sql", "select 1 as a where false", "-o", "csv").output == "a\n"


def test_a_syntax_error_points_at_it(run: Run) -> None:
    result = run("sql", "selct 1")
    assert result.exit_code == 2
    assert 'syntax error at or near "selct"' in result.stderr
    assert "^" in result.stderr


def test_a_change_is_refused(run: Run) -> None:
    result = run("sql", "drop table live.gpu", "-o", "json")
    assert result.exit_code == 2
    assert "only one SELECT" in json.loads(result.stdout)["error"]["message"]


def test_a_slow_query_is_refused_and_named_so(run: Run) -> None:
    result = run("sql", "select count(*) from range(100000000000) a, range(1000)", "--max-seconds", "0.2")
    assert result.exit_code == 6
    assert "time limit of 0.2 s reached: narrow the time range" in result.stderr


def test_G02_an_answer_larger_than_a_message_comes_in_pieces(run: Run) -> None:
    result = run("sql", "select range as n, format('{:>1000}', 'x') as text from range(8000)", "-o", "jsonl")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert len(lines) == 8000
    assert len(result.output) > 8_000_000
    assert json.loads(lines[7999])["n"] == 7999


def test_G02_a_document_larger_than_a_message_comes_in_pieces(seed: Seed, run: Run) -> None:
    from gpufleet_collector.store import Store

    store = seed.store  # type: ignore[attr-defined]
    assert isinstance(store, Store)
    seed.node("gpu-001")
    with store.transaction() as write:
        write.execute(
            "INSERT INTO live.incident SELECT range, 'gpu_missing', 'gpu-001', 'node:', 'open', 'warn', "
            "repeat('x', 1000), '2026-11-30 11:00', '2026-11-30 11:00', NULL, NULL, 0 FROM range(1, 6001)"
        )
    result = run("incidents", "-o", "json")
    assert len(result.output) > 6_000_000
    assert len(items(result)) == 6000


def test_S01_a_database_file_is_answered_with_what_to_do(run: Run) -> None:
    result = run("sql", "/var/lib/gpufleet/fleet.duckdb")
    assert result.exit_code == 2
    assert "a running collector holds its database alone" in result.stderr
    assert "fleet sql" in result.stderr


def test_S01_a_second_process_is_locked_out_while_fleet_sql_answers(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """What happens to an analyst who opens the live file, with either right."""
    from gpufleet_collector import sandbox
    from gpufleet_collector.store import Store

    path = tmp_path_factory.mktemp("store") / "fleet.duckdb"
    store = Store.open(path)
    try:
        for read_only in (True, False):
            code = f"import duckdb; duckdb.connect({str(path)!r}, read_only={read_only})"
            other = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
            )
            assert other.returncode != 0
            assert "lock" in other.stderr
        assert sandbox.run(store, "select 1").rows == 1
    finally:
        store.close()


# ---- inventory


def test_inventory_list_and_diff(seed: Seed, run: Run) -> None:
    seed.node("gpu-001", gpus=8, lost=[3])
    seed.node("gpu-002", gpus=8, expected=7)
    seed.node("gpu-003", gpus=7, expected=8)
    found = items(run("inventory", "diff", "-o", "json"))
    assert [(item["node"], item["gpu_index"], item["match"]) for item in found] == [
        ("gpu-001", 3, "missing"),
        ("gpu-002", 7, "extra"),
        ("gpu-003", None, "missing"),
    ]
    assert found[2]["serial"] == "16007003"
    assert run("inventory", "diff", "--exit-code").exit_code == 11
    assert len(items(run("inventory", "-o", "json"))) == 24
    assert len(items(run("inventory", "list", "gpu-002", "-o", "json"))) == 8
    assert run("inventory", "list", "nope").exit_code == 5


def test_nothing_differs(seed: Seed, run: Run) -> None:
    seed.node("gpu-001")
    assert run("inventory", "diff").output == "nothing differs\n"
    assert run("inventory", "diff", "--exit-code").exit_code == 0


# ---- version, formats, options


def test_version(run: Run) -> None:
    found = items(run("version", "-o", "json"))
    assert [item["what"] for item in found] == ["fleet", "collector"]
    assert found[1]["ready"] is True
    assert "ready" in run("version").output


def test_options_stand_before_or_after_the_verb(seed: Seed, run: Run) -> None:
    fleet_of_two(seed)
    assert run("-o", "csv", "node").output == run("node", "-o", "csv").output
    assert run("-o", "csv", "node", "-o", "jsonl").output == run("node", "-o", "jsonl").output
    assert run("-o", "csv", "incidents", "list").output == run("incidents", "list", "-o", "csv").output


def test_unicode_falls_back_to_ascii(seed: Seed, run: Run) -> None:
    fleet_of_two(seed)
    from click.testing import CliRunner

    from gpufleet_cli import render
    from gpufleet_cli.main import fleet

    render._ascii_only.cache_clear()
    result = CliRunner(charset="ascii").invoke(fleet, ["status"])
    render._ascii_only.cache_clear()
    assert result.exit_code == 0
    assert result.output.isascii()
    assert "X critical" in result.output


def delivery(tmp_path: Path, text: str) -> str:
    path = tmp_path / "delivery.csv"
    path.write_text(text)
    return str(path)


def test_import_a_delivery_list(seed: Seed, run: Run, tmp_path: Path) -> None:
    seed.node("gpu-001", gpus=8, state="learned")
    path = delivery(tmp_path, "node,serial,model\ngpu-001,16000001,H100\ngpu-009,99,H100\n")
    result = run("inventory", "import", path, "--reason", "order 7")
    assert result.output == "accepted: 2 nodes, 2 GPUs, 0 baselines\ngpu-001: 1 expected, 7 no longer\n"
    found = items(run("inventory", "diff", "-o", "json"))
    assert {(item["node"], item["match"]) for item in found} == {("gpu-001", "extra"), ("gpu-009", "missing")}
    (audit,) = items(run("sql", "select verb, actor, args from live.audit", "-o", "json"))
    assert audit["verb"] == "inventory import"
    assert audit["args"]["reason"] == "order 7"  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("node,model\na,b\n", "line 2"),
        ("node,serial\n", "no cards"),
        ("node,serial,colour\na,b,red\n", "colour"),
        ("", "empty"),
    ],
)
def test_a_wrong_list_is_refused_whole(run: Run, tmp_path: Path, text: str, complaint: str) -> None:
    result = run("inventory", "import", delivery(tmp_path, text))
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert items(run("sql", "select * from live.expected", "-o", "json")) == []


def test_a_list_larger_than_a_message_says_how(run: Run, tmp_path: Path) -> None:
    result = run("inventory", "import", delivery(tmp_path, "node,serial\n" + "x" * 2_000_000))
    assert result.exit_code == 2
    assert "import it in parts" in result.stderr


def test_accept_takes_hostlists(seed: Seed, run: Run) -> None:
    for name in ("gpu-001", "gpu-002", "gpu-003"):
        seed.node(name, gpus=2, state="learned")
    result = run("inventory", "accept", "gpu-[001-002]", "gpu-003", "-o", "json")
    assert items(result) == [{"nodes": 3, "gpus": 6, "baselines": 0}]
    assert {item["expectation"] for item in items(run("node", "-o", "json"))} == {"accepted"}
    result = run("inventory", "accept", "gpu-001,nope,x[0001-9999]")
    assert (result.exit_code, result.stderr) == (5, "fleet: no such node: nope,x[0001-9999]\n")


def test_a_node_in_trouble_says_why(seed: Seed, run: Run) -> None:
    seed.node("gpu-001", gpus=3)
    seed.finding("gpu_downclocked", "gpu-001", seed.entity("gpu-001", 0), "warn", "x", "slow")
    seed.finding("gpu_missing", "gpu-001", seed.entity("gpu-001", 2), "crit", "lost", "gone")
    assert "gpu_missing on card 2, +1 card" in run("node").output


def test_an_accepted_node_without_cards_is_listed(seed: Seed, run: Run) -> None:
    seed.node("login-1", gpus=0, state="")
    assert run("inventory", "accept", "login-1").output == "accepted: 1 node, 0 GPUs, 0 baselines\n"
    listed = run("inventory").output
    assert "login-1" in listed
    assert "no GPUs expected" in listed
    assert run("inventory", "diff").output == "nothing differs\n"


@pytest.mark.parametrize(
    "words",
    [
        ("inventory",), ("node", "gpu-001"), ("explain", "rule", "gpu_missing"),
        ("sql", "select * from live.finding"), ("sql", "select node, reason, evidence from live.finding"),
    ],
)  # fmt: skip
def test_tables_fold_to_the_terminal_and_lose_nothing(seed: Seed, run: Run, words: tuple[str, ...]) -> None:
    seed.node("gpu-001", gpus=2)
    reason = "no longer answers " * 12 + "END"
    seed.finding("gpu_missing", "gpu-001", seed.entity("gpu-001", 1), "crit", "lost", reason, incident="x")
    output = run(*words).output
    assert max(map(len, output.splitlines())) <= 80
    assert words[0] not in ("sql", "node") or "END" in output


def test_errors_keep_the_hint_apart(seed: Seed, run: Run) -> None:
    seed.node("gpu-001")
    for words in (("node", "gpu-01"), ("gpu", "nosuch"), ("explain", "nosuch"), ("incidents", "show", "9")):
        error = json.loads(run(*words, "-o", "json").output)["error"]
        assert error["hint"]
        assert error["hint"] not in error["message"]


def test_status_begins_with_the_frame(seed: Seed, run: Run) -> None:
    seed.node("gpu-001")
    keys = list(json.loads(run("status", "-o", "json").output))
    assert keys[:3] == ["api_version", "kind", "generated_at"]
