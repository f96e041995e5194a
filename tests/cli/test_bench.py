"""Benches at the prompt: screens at 80 columns, exit codes of a run, one line for what cannot be done."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import Result

from gpufleet.v1 import ingest_pb2 as pb
from gpufleet_collector.bench_runs import Listening
from gpufleet_collector.store import LIVE

if TYPE_CHECKING:
    from tests.cli.conftest import Seed

Run = Callable[..., Result]
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def ana(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ana")


@pytest.fixture
def run(run: Run) -> Run:
    """No test here is about a collector that is slow to answer."""
    return lambda *words, **more: run("--timeout", "60", *words, **more)


def same(name: str, result: Result, exit_code: int = 0) -> None:
    """Compare with the golden file; GPUFLEET_GOLDEN=update writes it."""
    assert result.exit_code == exit_code, result.output
    path = GOLDEN / f"bench_{name}.txt"
    if os.environ.get("GPUFLEET_GOLDEN") == "update":
        path.write_text(result.stdout, encoding="utf-8")
    assert result.stdout == path.read_text(encoding="utf-8")
    assert max(map(len, result.stdout.split("\n"))) <= 80


def fleet(seed: "Seed", nodes: int = 4) -> None:
    """Cards with a day of runs and frozen baselines; gpu-001/2 lost a tenth."""
    for number in range(1, nodes + 1):
        name = f"gpu-{number:03}"
        seed.node(name, gpus=4)
        for index in range(4):
            true = 55.0 + 0.1 * index
            seed.baseline(name, index, true)
            for age in (60.0, 3600.0, 7200.0):
                slow = 0.9 if (name, index, age) == ("gpu-001", 2, 60.0) else 1.0
                seed.bench(name, index, true * slow, age + number)
    seed.limits()


def suspect(seed: "Seed") -> None:
    seed.finding(
        "bandwidth_regression", "gpu-001", seed.entity("gpu-001", 2), "warn", "slower",
        "h2d: 49.68 GB/s, 10.0 % below its frozen baseline of 55.2", state="pending",
    )  # fmt: skip
    with seed.store.transaction() as write:
        write.execute('UPDATE live.finding SET detail = \'{"bench": "h2d"}\'')


def audit(seed: "Seed") -> list[tuple[object, ...]]:
    with seed.store.reader(LIVE) as read:
        return read.execute("SELECT actor, verb, target, args FROM audit ORDER BY rowid").fetchall()


def agent(seed: "Seed", *values: float | None, **more: object) -> None:
    """gpu-001 runs what it is asked for: each value one card's, None = the card is busy."""

    def say(node: str, directive: pb.Directive) -> Iterator[str | pb.DirectiveResult]:
        wanted = directive.run_bench
        yield f"{wanted.bench}: runs"
        for index, value in enumerate(values):
            if wanted.entity in ("", seed.entity(node, index)):
                why = "" if value is not None else "in use by process 4711"
                row = {"lease": wanted.lease, "bench": wanted.bench, "reason": why, **more}
                seed.bench(node, index, value, 0.5, **row)
        rows = len(values) if not wanted.entity else 1
        yield pb.DirectiveResult(id=directive.id, outcome=pb.OUTCOME_DONE, message="done", rows=rows)

    seed.agents.say["gpu-001"] = say


def test_overview_shows_who_is_measured_and_who_is_suspected(seed: "Seed", run: Run) -> None:
    assert run("bench").output == "no nodes yet\n\nno suspects\n"
    fleet(seed)
    seed.node("gpu-009", gpus=2)
    seed.bench("gpu-009", 0, None, 30.0, reason="in use by process 4711")
    suspect(seed)
    same("overview", run("bench"))


def test_history_shows_values_and_what_gave_none(seed: "Seed", run: Run) -> None:
    fleet(seed, 1)
    seed.bench("gpu-001", 2, None, 1800.0, reason="in use by process 4711")
    seed.bench("gpu-001", 2, None, 900.0, status="preempted", reason="a job came: process 4711")
    seed.bench("gpu-001", 2, 55.3, 40.0, driver="590.12")
    seed.bench("gpu-001", 2, 49.0, 10.0, driver="590.12", lease="retest-1")
    same("history", run("bench", "history", "gpu-001/2"))
    items = json.loads(run("bench", "history", "gpu-001", "h2d", "-o", "json").output)["items"]
    assert len(items) == 16
    assert [item["value"] for item in items if item["epoch_changed"]] == [55.3]
    assert {item["status"]: item["value"] for item in items if item["status"] != "ok"} == {
        "skipped": None, "preempted": None,
    }  # fmt: skip


def test_compare_sorts_by_what_is_worst(seed: "Seed", run: Run) -> None:
    fleet(seed)
    same("compare", run("bench", "compare", "gpu-001"))
    items = json.loads(run("bench", "compare", "H100", "--by", "z", "-o", "json").output)["items"]
    assert len(items) == 16
    assert (items[0]["place"], items[0]["down"]) == ("gpu-001/2", True)
    assert items[0]["own_ratio"] == pytest.approx(0.9)
    assert items[0]["siblings_ratio"] < 0.91
    assert items[0]["n_peers"] == 12
    zs = [item["worst_z"] for item in items]
    assert zs == sorted(zs)


def test_compare_shows_all_that_a_node_measures(seed: "Seed", run: Run) -> None:
    for number in range(1, 8):
        name = f"gpu-{number:03}"
        seed.node(name, gpus=2)
        slow = 0.8 if number == 1 else 1.0
        host = {"link": "", "params_hash": "cd34", "driver": ""}
        for numa in (0, 1):
            memory = {**host, "entity": f"numa:{numa}", "bench": "memcpy", "convention": "read_plus_write"}
            value = 180.0 * (slow if numa else 1.0)
            seed.bench(name, None, value, 30.0, **memory)
        seed.bench(name, None, 3.1, 50.0, **{**host, "bench": "disk_read", "convention": "direct_sequential"})
        for way, value in (("read", 2.9), ("write", 1.4)):
            seed.bench(name, None, value, 60.0, **{**host, "bench": "fio", "convention": way})
        if number != 2:
            stream = {**host, "bench": "tcp", "convention": "one_stream", "lease": f"run-{number}"}
            seed.bench(name, None, 2.5 * slow, 70.0, **stream | {"peer": "gpu-002", "link": "tcp:gpu-002"})
        pair = {"bench": "p2p", "peer": seed.entity(name, 1), "link": "nvlink:1b:00>43:00"}
        seed.bench(name, 0, 380.0, 40.0, **pair)
    seed.bench("gpu-001", None, 11.7, 600.0, bench="tcp", peer="gpu-003", link="tcp:gpu-003", lease="run-9")
    key = "memcpy/1/read_plus_write/cd34/"
    seed.baseline("gpu-001", 0, 180.0, entity="numa:1", key=key, spread=0.01)
    seed.limits()
    same("compare_host", run("bench", "compare", "gpu-001"))
    items = json.loads(run("bench", "compare", "gpu-001", "-o", "json").output)["items"]
    found = {(item["place"], item["bench"], item["link"]): item for item in items}
    slow_memory = found["gpu-001 numa:1", "memcpy", ""]
    assert slow_memory["own_ratio"] == pytest.approx(0.8)
    assert slow_memory["siblings_ratio"] == pytest.approx(0.8), "the other node's memory"
    assert (slow_memory["peers_ratio"], slow_memory["n_peers"]) == (pytest.approx(0.8), 12)
    stream = found["gpu-001", "tcp", "tcp:gpu-002"]
    assert stream["peers_ratio"] == pytest.approx(0.8), "beside the streams of others to that node"
    assert (stream["siblings"], stream["n_siblings"], stream["n_peers"]) == (None, 0, 5)
    alone = found["gpu-001", "tcp", "tcp:gpu-003"]
    assert (alone["peers"], alone["n_peers"], alone["own_ratio"]) == (None, 0, None)
    assert {item["convention"] for item in items if item["bench"] == "fio"} == {"read", "write"}
    cards = json.loads(run("bench", "compare", "H100", "-o", "json").output)["items"]
    assert {item["bench"] for item in cards} == {"p2p"}, "a model has cards, not hosts"


def test_a_card_without_past_has_siblings_and_peers_all_the_same(seed: "Seed", run: Run) -> None:
    fleet(seed)
    with seed.store.transaction() as write:
        write.execute("DELETE FROM live.baseline WHERE node = 'gpu-002'")
    items = json.loads(run("bench", "compare", "gpu-002", "-o", "json").output)["items"]
    assert [item["own_ratio"] for item in items] == [None] * 4
    assert all(item["peers_ratio"] and item["siblings_ratio"] for item in items)


def test_baselines_are_shown_and_accepted_with_a_reason(seed: "Seed", run: Run) -> None:
    fleet(seed, 1)
    seed.bench("gpu-001", 3, 55.3, 5.0, driver="590.12")
    with seed.store.transaction() as write:
        write.execute("UPDATE live.baseline SET state = 'learning', n = 11 WHERE entity LIKE '%-0000'")
    same("baseline", run("bench", "baseline", "gpu-001"))
    done = run("bench", "baseline", "accept", "gpu-001/1", "h2d", "--reason", "riser by design", "-o", "json")
    [item] = json.loads(done.output)["items"]
    assert (item["state"], item["set_by"], item["reason"], item["n"]) == (
        "accepted", "ana", "riser by design", 3,
    )  # fmt: skip
    [(actor, verb, target, args)] = audit(seed)
    assert (actor, verb) == ("ana", "bench baseline accept")
    assert seed.entity("gpu-001", 1) in str(target)
    assert json.loads(str(args))["reason"] == "riser by design"


def test_a_slow_state_is_not_accepted_unless_forced(seed: "Seed", run: Run) -> None:
    fleet(seed, 1)
    suspect(seed)
    refused = run("bench", "baseline", "accept", "gpu-001", "h2d", "--reason", "fine")
    assert refused.exit_code == 6
    assert "bandwidth_regression is open on gpu-001" in refused.output
    assert audit(seed) == []
    other = run("bench", "baseline", "accept", "gpu-001/1", "--reason", "fine")
    assert other.exit_code == 0, "another card is not in trouble"
    done = run("bench", "baseline", "accept", "gpu-001/2", "--reason", "meant", "--force", "-o", "json")
    assert done.exit_code == 0
    assert "slower" in str(json.loads(str(audit(seed)[-1][3]))["overruled"]) or "below" in str(
        audit(seed)[-1]
    )


@pytest.mark.parametrize(
    ("words", "exit_code", "text"),
    [
        (("history", "gpu-404"), 5, "no node or card 'gpu-404'"),
        (("history", "gpu-001", "nonsense"), 5, "no bench 'nonsense' has ever run"),
        (("compare", "gpu-404"), 5, "no node or card model 'gpu-404'"),
        (("baseline", "gpu-404"), 5, "no node or card 'gpu-404'"),
        (("baseline", "accept", "gpu-001"), 2, "accept needs"),
        (("baseline", "gpu-001", "h2d"), 2, "give a node or card"),
        (("baseline", "accept", "gpu-001", "gemm", "--reason", "x"), 5, "no result of bench gemm on gpu-001"),
        (("run", "gpu-404"), 5, "no node 'gpu-404'"),
        (("run", "gpu-001"), 6, "no agent of gpu-001 is connected"),
        (("run", "gpu-001", "--gpu", "17"), 5, "no card 'gpu-001/17'"),
        (("run", "gpu-001", "rm -rf /"), 5, "no bench 'rm -rf /'"),
        (("run", "gpu-001", "-w"), 2, "not watched"),
        (("run", "gpu-001", "tcp"), 2, "give --peer NODE"),
        (("run", "gpu-001", "--peer", "gpu-002"), 2, "only tcp goes to another node"),
        (("run", "gpu-001", "tcp", "--peer", "gpu-404"), 5, "no node 'gpu-404'"),
        (("run", "gpu-001", "tcp", "--peer", "gpu-001"), 2, "no peer of itself"),
    ],
)
def test_what_cannot_be_is_one_line(
    seed: "Seed", run: Run, words: tuple[str, ...], exit_code: int, text: str
) -> None:
    fleet(seed, 1)
    result = run("bench", *words)
    assert result.exit_code == exit_code, result.output
    assert text in result.output
    assert "Traceback" not in result.output


def test_a_run_shows_how_it_gets_on_and_its_verdict(seed: "Seed", run: Run) -> None:
    fleet(seed, 1)
    agent(seed, 55.0, 55.1, 55.2, 55.3)
    done = run("bench", "run", "gpu-001", "h2d")
    same("run", done)
    assert done.stderr == "gpu-001: h2d: queued\ngpu-001: h2d: runs\n"
    [(actor, verb, target, args)] = audit(seed)
    assert (actor, verb, target) == ("ana", "bench run", "gpu-001")
    assert json.loads(str(args))["benches"] == ["h2d"]


def test_exit_codes_of_a_run(seed: "Seed", run: Run) -> None:
    fleet(seed, 1)
    agent(seed, 55.0, 49.0, 55.2, None)
    same("run_bad", run("bench", "run", "gpu-001", "h2d"), 1)
    one = run("bench", "run", "gpu-001", "h2d", "--gpu", "2", "-o", "json")
    assert one.exit_code == 0
    [item] = json.loads(one.stdout)["items"]
    assert (item["gpu_index"], item["verdict"], item["floor"]) == (2, "good", 48.0)
    busy = run("bench", "run", "gpu-001", "h2d", "--gpu", "3")
    assert busy.exit_code == 12
    assert "in use by process 4711" in busy.stdout
    with seed.store.transaction() as write:
        write.execute("DELETE FROM live.baseline")
    agent(seed, 1980.0, unit="MHz", params_hash="c1")
    new = run("bench", "run", "gpu-001", "clock", "--gpu", "0", "-o", "json")
    assert new.exit_code == 12
    assert [item["code"] for item in json.loads(new.stdout)["items"]] == ["learning"]
    agent(seed, None, status="hung")
    assert run("bench", "run", "gpu-001", "h2d", "--gpu", "0").exit_code == 1


def test_without_a_bench_the_quick_ones_are_run(seed: "Seed", run: Run) -> None:
    fleet(seed, 1)
    agent(seed, 55.0)
    run("bench", "run", "gpu-001", "--gpu", "0")
    assert [wanted.bench for _, wanted in seed.agents.asked] == ["h2d", "clock"]
    assert {wanted.entity for _, wanted in seed.agents.asked} == {seed.entity("gpu-001", 0)}


@pytest.mark.parametrize(
    ("outcome", "message", "text"),
    [
        (pb.OUTCOME_UNSUPPORTED, "this agent cannot do run_bench", "it may be older than this collector"),
        (pb.OUTCOME_REFUSED, "no bench gemm: there is h2d", "the agent of gpu-001 refused: no bench gemm"),
    ],
)
def test_what_an_agent_does_not_do_is_one_line(
    seed: "Seed", run: Run, outcome: "pb.Outcome.ValueType", message: str, text: str
) -> None:
    fleet(seed, 1)
    seed.agents.say["gpu-001"] = lambda node, directive: [
        pb.DirectiveResult(id=directive.id, outcome=outcome, message=message)
    ]
    result = run("bench", "run", "gpu-001", "gemm")
    assert result.exit_code == 6
    assert text in result.output


def test_a_stream_to_another_node_is_the_senders(seed: "Seed", run: Run) -> None:
    fleet(seed, 2)

    def receiver(node: str, directive: pb.Directive) -> list[str | pb.DirectiveResult]:
        assert directive.receive_tcp.peer == "gpu-001"
        done = pb.DirectiveResult(id=directive.id, outcome=pb.OUTCOME_DONE, message="ok")
        return ["tcp: runs", Listening("192.0.2.2:40001"), done]

    def sender(node: str, directive: pb.Directive) -> list[str | pb.DirectiveResult]:
        wanted = directive.send_tcp
        assert (wanted.peer, wanted.address) == ("gpu-002", "192.0.2.2:40001")
        more = {"lease": wanted.lease, "bench": "tcp", "peer": "gpu-002", "link": "tcp:gpu-002"}
        seed.bench(node, None, 11.7, 0.5, convention="one_stream", **more)
        return [pb.DirectiveResult(id=directive.id, outcome=pb.OUTCOME_DONE, message="1 ok", rows=1)]

    seed.agents.say |= {"gpu-001": sender, "gpu-002": receiver}
    done = run("bench", "run", "gpu-001", "tcp", "--peer", "gpu-002")
    same("pair", done, 12)
    assert done.stderr == (
        "gpu-001: gpu-002: tcp: queued\ngpu-001: gpu-002: tcp: runs\ngpu-001: tcp: queued\n"
    )
    [(actor, verb, target, args)] = audit(seed)
    assert (actor, verb, target) == ("ana", "bench run", "gpu-001 gpu-002")
    assert json.loads(str(args)).keys() <= {"benches", "leases", "claimed"}
    assert "tcp > gpu-002" in run("bench", "history", "gpu-001", "tcp").stdout
