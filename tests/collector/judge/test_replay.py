"""Replay gives what the live judge gives, reads nothing but rows, and refuses what is not one rule."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gpufleet.metric import Type
from gpufleet_collector import replay, sandbox
from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeSettings
from gpufleet_collector.replay import Replays, Request
from gpufleet_collector.replay_child import Job, run
from gpufleet_collector.rules import Rule, load_rules, parse_rule, reads
from gpufleet_collector.sandbox import Refused, TimedOut
from gpufleet_collector.store import LIVE, Column, Store

pytestmark = pytest.mark.slow  # each replay is a process of its own

T0 = datetime(2026, 3, 1, 12, 0, 0)

HEADER = """/*
title = "Hot"
scope = "gpu"
every = "10s"
for = "2 of 3"
clear_after = "20s"
runbook = "hot"
[limits]
hot_c = { value = 80, source = "made up" }
*/
"""
BODY = """
create or replace macro find_hot(as_of) as table
select g.node, 'gpu:' || g.gpu_uuid as entity, if(g.temperature_c > l.hot_c, 'warn', 'ok') as verdict,
       'hot' as code, g.temperature_c as observed, l.hot_c as expected, 'C' as unit, g.ts as evidence_at,
       'temperature' as reason, json_object('c', g.temperature_c) as detail
from (select node, gpu_uuid, max(ts) as ts, max_by(temperature_c, ts) as temperature_c from gpu
      where ts > as_of - interval 1 minute and ts <= as_of group by node, gpu_uuid) g
join limits_hot l on l.node = g.node and l.model = ''
"""
HOT = HEADER + BODY


@dataclass
class Place:
    """A collector's store on disk with one card that says its temperature every ten seconds."""

    store: Store
    judge: Judge
    at: datetime = T0

    def say(
        self, temperatures: list[float], late: Mapping[int, float] | None = None, live: bool = True
    ) -> None:
        """A sample and a pass every 10 s; `late` samples arrive so many seconds after their time."""
        waiting: list[tuple[datetime, datetime, float]] = []
        for n, value in enumerate(temperatures):
            self.at += timedelta(seconds=10)
            waiting.append((self.at, self.at + timedelta(seconds=(late or {}).get(n, 0.0)), value))
            self._arrive([one for one in waiting if one[1] <= self.at])
            waiting = [one for one in waiting if one[1] > self.at]
            if live:
                self.judge.run_pass(self.at)
        self._arrive(waiting)

    def _arrive(self, rows: list[tuple[datetime, datetime, float]]) -> None:
        with self.store.transaction() as write:
            for ts, received_at, value in rows:
                write.execute(
                    "INSERT INTO live.gpu (ts, received_at, node, boot_id, gpu_uuid, temperature_c) "
                    "VALUES (?, ?, 'n', 'b', 'G', ?)",
                    [ts, received_at, value],
                )

    def raised(self) -> list[tuple[object, ...]]:
        with self.store.reader(LIVE) as read:
            return read.execute(
                "SELECT node, entity, state, verdict, code, observed, began_at, fired_at, resolved_at "
                "FROM finding WHERE fired_at IS NOT NULL ORDER BY fired_at"
            ).fetchall()

    def replays(self) -> Replays:
        return Replays(self.store, JudgeSettings(), [hot()], self.judge.policies)

    def ask(self, **more: object) -> Request:
        given = {"rule": "hot", "text": "", "since": T0 - timedelta(days=30), "until": self.at, **more}
        return Request(**given)  # type: ignore[arg-type]

    def replay(self, **more: object) -> dict[str, object]:
        """The last document of a replay in a process of its own."""
        return asyncio.run(self._replay(self.ask(**more)))

    async def _replay(self, request: Request) -> dict[str, object]:
        said = [one async for one in self.replays().run(request, self.at)]
        assert isinstance(said[0], dict)
        assert said[0]["kind"] == "ReplayEstimate"
        last = said[-1]
        assert isinstance(last, dict)
        return last


def hot(text: str = HOT) -> Rule:
    return parse_rule("hot", text)


def new_place(folder: Path | None) -> Place:
    store = Store.open(folder / "fleet.duckdb" if folder else None)
    with store.transaction() as write:
        kinds = {"gpu_uuid": Type.STRING, "temperature_c": Type.F64}
        store.ensure_probe(
            write,
            "gpu",
            [Column(name, kind, "", "gauge", "", None, None, "") for name, kind in kinds.items()],
        )
        write.execute(
            "INSERT INTO live.node VALUES ('n', 'n', 'm', 'b', 's', '1', '', ?, ?)",
            [T0 - timedelta(hours=1)] * 2,
        )
    return Place(store, Judge(store, JudgeSettings(), rules=[hot()]))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = new_place(tmp_path)
    yield made
    made.store.close()


TROUBLE = [60.0, 85, 86, 87, 88, 70, 70, 70, 70, 60, 90, 60, 60, 91, 92, 93]


def fields(document: dict[str, object]) -> list[dict[str, object]]:
    items = document["items"]
    assert isinstance(items, list)
    return items


def test_a_replay_raises_what_the_judge_raised(place: Place) -> None:
    place.say(TROUBLE)
    assert len(place.raised()) == 2
    document = place.replay()
    assert document["totals"] == {"replayed": 2, "raised": 2, "both": 2, "replay_only": 0, "raised_only": 0}
    assert document["rows"] == len(TROUBLE) + 1
    for item, real in zip(fields(document), place.raised(), strict=True):
        assert (item["entity"], item["state"], item["verdict"], item["observed"]) == (
            real[1], real[2], real[3], real[5],
        )  # fmt: skip
        for key, value in zip(("began_at", "fired_at", "resolved_at"), real[6:], strict=True):
            assert item[key] == (value.isoformat() + "Z" if isinstance(value, datetime) else None)
    assert list(place.store.exchange.iterdir()) == [] if place.store.exchange else False


def test_another_limit_and_another_file_are_compared_with_what_was_raised(place: Place) -> None:
    place.say(TROUBLE)
    document = place.replay(limits={"hot_c": 90.5})
    assert document["limits"] == {"hot_c": 90.5}
    assert document["totals"] == {"replayed": 1, "raised": 2, "both": 1, "replay_only": 0, "raised_only": 1}
    document = place.replay(text=HOT.replace("find_hot", "find_warm").replace("limits_hot", "limits_warm"))
    assert (document["rule"], document["known_rule"]) == ("warm", False)
    assert document["totals"] == {"replayed": 2, "raised": 0, "both": 0, "replay_only": 2, "raised_only": 0}


def test_as_known_leaves_out_what_had_not_arrived(place: Place) -> None:
    place.say([60.0] * 3 + [85, 86, 87] + [60.0] * 8, late={3: 65, 4: 65, 5: 65})
    assert place.raised() == [], "the judge saw the hot samples too late"
    assert place.replay(as_known=True)["totals"] == {
        "replayed": 0, "raised": 0, "both": 0, "replay_only": 0, "raised_only": 0,
    }  # fmt: skip
    by_time = place.replay()["totals"]
    assert isinstance(by_time, dict)
    assert by_time["replay_only"] == 1


def test_time_without_rows_is_left_out_and_said(place: Place) -> None:
    place.say(TROUBLE)
    document = place.replay()
    assert document["since"] == (T0 + timedelta(seconds=10)).isoformat() + "Z"
    assert any("nothing older is stored" in note for note in document["notes"])  # type: ignore[attr-defined]


def test_without_rows_there_is_nothing_to_replay(place: Place) -> None:
    place.at += timedelta(minutes=1)
    with pytest.raises(Refused, match="no rows of gpu"):
        place.replay()


@settings(
    max_examples=4,
    phases=(Phase.explicit, Phase.generate),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.lists(st.sampled_from([60.0, 85.0, 95.0]), min_size=4, max_size=10),
    st.dictionaries(st.integers(0, 13), st.sampled_from([3.0, 25.0, 70.0]), max_size=4),
    st.integers(1, 13),
)
def test_restart_replay_and_live_give_the_same_findings(
    tmp_path_factory: pytest.TempPathFactory, temperatures: list[float], late: dict[int, float], cut: int
) -> None:
    """Live without a break; live with a restart at `cut`; a replay of the same rows as they were known."""
    live, restarted = new_place(tmp_path_factory.mktemp("live")), new_place(None)
    late = {n: seconds for n, seconds in late.items() if n + seconds / 10 < len(temperatures)}
    try:
        live.say(temperatures, late)
        first = {n: seconds for n, seconds in late.items() if n + seconds / 10 < cut}
        if first == {n: seconds for n, seconds in late.items() if n < cut}:
            restarted.say(temperatures[:cut], first)
            restarted.judge = Judge(restarted.store, JudgeSettings(), rules=[hot()])
            restarted.say(temperatures[cut:], {n - cut: s for n, s in late.items() if n >= cut})
            assert restarted.raised() == live.raised()
        assert in_process(live) == live.raised()
    finally:
        live.store.close()
        restarted.store.close()


def in_process(place: Place) -> list[tuple[object, ...]]:
    """What the child finds in the rows of `place`, as known; run here, to be quick."""
    replays = place.replays()
    asked = replays._prepare(place.ask(as_known=True), place.at)
    folder = replays._folder()
    replays._export(asked, folder, threading.Event())
    job = msgspec.json.decode((folder / "job.json").read_bytes(), type=Job)
    lines = list(run(folder, job))
    assert lines[-1].found is not None
    return [
        (one.node, one.entity, one.state, one.verdict, one.code, one.observed, one.began_at, one.fired_at,
         one.resolved_at)
        for one in lines[-1].found
    ]  # fmt: skip


# ---- what is no rule


HOSTILE = {
    "no header": ("select 1", "no header"),
    "bad header": (HOT.replace('every = "10s"', 'every = "often"'), "header"),
    "unknown key": (HOT.replace('every = "10s"', 'evry = "10s"'), "evry"),
    "two statements": (HOT + "; drop table live.gpu", "nothing else"),
    "a statement before": (HEADER + "delete from live.gpu;" + BODY, "nothing else"),
    "copy": (HEADER + "create macro find_hot(as_of) as table copy gpu to '/tmp/x'", "refused|syntax"),
    "file": (HOT.replace("from gpu", "from '/etc/passwd'"), "files cannot be read"),
    "read_csv": (HOT.replace("from gpu", "from read_csv('/etc/passwd')"), "read_csv is refused"),
    "read_parquet": (HOT.replace("from gpu", "from read_parquet('exchange/**')"), "read_parquet is refused"),
    "settings": (
        HOT.replace("'temperature'", "current_setting('memory_limit')"),
        "current_setting is refused",
    ),
    "scalar macro": (HEADER + "create macro find_hot(as_of) as 1", "error|Error|must"),
    "a built-in's name": (HOT + ";create macro read_csv(x) as 1", "name of a function"),
    "hidden in a helper": (HOT + ";create macro mine() as table select * from glob('/*')", "glob is refused"),
    "syntax": (HOT.replace("select g.node", "selct g.node"), "syntax"),
    "a name": (HOT.replace("find_hot", "find_HOT"), "no name for a rule|does not make"),
    "NUL": (HOT + "\0", "text of at most"),
    "huge": (HOT + " " * 100_001, "text of at most"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_one_line(place: Place, case: str) -> None:
    text, expected = HOSTILE[case]
    place.say([60.0] * 3, live=False)
    with pytest.raises(Refused, match=expected) as error:
        place.replay(text=text)
    assert len(str(error.value)) < 600
    with place.store.reader(LIVE) as read:
        assert read.execute("SELECT count(*) FROM gpu").fetchone() == (3,)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("g.temperature_c > l.hot_c", "g.temprature_c > l.hot_c"), "temprature_c"),
        (("from gpu", "from nothing_such"), "nothing_such"),
        (("'temperature' as reason, ", ""), "reason"),
        (("'temperature' as", "repeat('x', 10000000000 + g.ts.day()) as"), "emory|length|size|ended"),
        (("'warn'", "'burning'"), "'burning' is none of ok, warn"),
    ],
)
def test_a_broken_file_is_one_line(place: Place, change: tuple[str, str], expected: str) -> None:
    place.say([60.0, 85, 86], live=False)
    with pytest.raises(Refused, match=expected) as error:
        place.replay(text=HOT.replace(*change))
    assert "\n" not in str(error.value)


def test_every_rule_that_is_released_passes_as_a_file(store: Store, judge: Judge) -> None:
    with store.reader() as cursor:
        for rule in load_rules():
            again = parse_rule(rule.name, replay.checked(cursor, rule).sql)
            assert again.header == rule.header


def test_a_file_may_bring_macros_of_its_own(place: Place) -> None:
    place.say(TROUBLE)
    helper = "create macro too_hot(c, most) as if(c > most, 'warn', 'ok');"
    text = HEADER + helper + BODY.replace("if(g.temperature_c > l.hot_c, 'warn', 'ok')",
                                          "too_hot(g.temperature_c, l.hot_c)")  # fmt: skip
    totals = place.replay(text=text)["totals"]
    assert isinstance(totals, dict)
    assert totals["both"] == 2


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"rule": "nothing"}, "no rule 'nothing'"),
        ({"since": T0 + timedelta(days=9)}, "--since must be before"),
        ({"limits": {"hot": 1.0}}, "has no limit 'hot'"),
        ({"limits": {"hot_c": float("nan")}}, "must be a number"),
        ({"step_s": float("inf")}, "a step"),
        ({"step_s": 0.001, "timeout_s": 5.0}, "give --step"),
    ],
)
def test_what_makes_no_sense_is_refused(place: Place, more: Mapping[str, object], expected: str) -> None:
    place.say([60.0] * 4, live=False)
    with pytest.raises(Refused, match=expected):
        place.replay(**more)


def test_a_store_in_memory_has_no_place_for_it() -> None:
    place = new_place(None)
    try:
        with pytest.raises(Refused, match="in memory"):
            place.replay()
    finally:
        place.store.close()


# ---- bounds

SLOW = (
    HOT
    + """
where (select count(*) from range(300000) a, range(300000) b where hash(a.range, b.range) = 1) >= 0
"""
)


def children() -> set[int]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def test_a_slow_rule_ends_with_its_time_and_leaves_nothing(place: Place) -> None:
    place.say([60.0] * 4, live=False)
    before = children()
    with pytest.raises((TimedOut, Refused), match=r"time limit|takes more than"):
        place.replay(text=SLOW, timeout_s=3.0)
    assert children() <= before
    assert place.store.exchange is not None
    assert list(place.store.exchange.iterdir()) == []


def test_who_goes_away_ends_the_child(place: Place) -> None:
    place.say([60.0] * 4, live=False)

    async def leave() -> None:
        before = children()
        replays = place.replays()

        async def listen() -> None:
            async with aclosing(replays.run(place.ask(text=SLOW), place.at)) as said:
                async for _ in said:
                    pass

        task = asyncio.create_task(listen())
        while not children() - before:
            await asyncio.sleep(0.02)
        with pytest.raises(Refused, match="another replay is running"):
            async for _ in replays.run(place.ask(), place.at):
                pass
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert children() <= before

    asyncio.run(leave())
    assert place.store.exchange is not None
    assert list(place.store.exchange.iterdir()) == []


def test_too_many_rows_are_refused_with_a_time_that_fits(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.say([60.0] * 8, live=False)
    monkeypatch.setattr(replay, "MAX_ROWS", 4)
    with pytest.raises(Refused, match=r"8 rows in .* more than 4: narrow the time"):
        place.replay()


def test_the_engine_reaches_only_the_exchange_folder(place: Place, tmp_path: Path) -> None:
    assert place.store.exchange == tmp_path.resolve() / "exchange"
    place.store.exchange.mkdir(exist_ok=True)
    with place.store.reader() as cursor:
        cursor.execute(f"COPY (SELECT 1 AS a) TO '{place.store.exchange}/a.parquet'")
        for target in (tmp_path / "b.parquet", place.store.exchange / ".." / "b.parquet"):
            with pytest.raises(Exception, match="Permission"):
                cursor.execute(f"COPY (SELECT 1 AS a) TO '{target}'")
    with pytest.raises(Refused):
        sandbox.run(place.store, f"SELECT * FROM read_parquet('{place.store.exchange}/a.parquet')")


def test_reads_names_tables_and_how_far_back() -> None:
    rules = {rule.name: reads(rule) for rule in load_rules()}
    assert {"gpu", "baseline", "inventory"} <= rules["gpu_downclocked"].words
    assert {"agent", "pci", "gpu", "expected"} <= rules["gpu_missing"].words
    assert "gpu" not in rules["agent_silent"].words
    assert rules["agent_silent"].lookback_s >= 86400
    assert rules["bandwidth_regression"].lookback_s >= 7 * 86400
