"""What people may run, and what they may not, on a store with secrets beside it."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import duckdb
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpufleet_collector import sandbox
from gpufleet_collector.sandbox import Answer, Refused, TimedOut
from gpufleet_collector.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store.open(tmp_path / "fleet.duckdb")
    (tmp_path / "secret.csv").write_text("word\nswordfish\n")
    with made.transaction() as write:
        write.execute("CREATE VIEW main.event AS SELECT * FROM live.event")
        write.execute("CREATE MACRO rules.find_x(as_of) AS TABLE SELECT 'gpu-001' AS node, as_of AS at")
        write.execute("CREATE MACRO main.twice(x) AS x * 2")
        write.execute("CREATE SEQUENCE main.tickets")
        write.execute(
            "INSERT INTO live.event VALUES ('2026-11-30 12:00:00', '2026-11-30 12:00:00.5', 'gpu-001', 'b', "
            "1.5, 'gpu:GPU-1', 'xid', '79', 1, 'GPU has fallen off the bus', '{\"pci\": \"0000:1b:00.0\"}')"
        )
    yield made
    made.close()


def rows(answer: Answer) -> list[list[object]]:
    return [row for chunk in answer.chunks for row in msgspec.json.decode(chunk, type=list[list[object]])]


ALLOWED = [
    "select 1",
    "select 1;",
    "  -- what happened\n select node, count(*) from event group by all order by 2 desc; -- done",
    "from event",
    "table event",
    "values (1), (2)",
    "select * from rules.find_x(now())",
    "select * from find_x(now())",
    "select twice(21)",
    "with a as (select 1 as x), b as (select x from a) select * from b",
    "with recursive r as (select 1 as n union all select n + 1 from r where n < 3) select * from r",
    "select row_number() over (partition by node order by ts) from event qualify row_number() over () = 1",
    "select time_bucket(interval 1 minute, ts) as t, max(mono_s) from event group by t",
    "select list_transform([1], lambda x: x + 1), quantile_cont(range, [0.5]) from range(9) group by all",
    "select detail->>'$.pci', detail.pci from event",
    "select * exclude (detail) replace (upper(node) as node) from event",
    "select columns('.*_at') from event",
    "select a.node from event a asof join event b on a.node = b.node and a.ts >= b.ts",
    "select * from event where node in (select node from event) and exists (select 1)",
    "pivot event on kind in ('xid') using count(*) group by node",
    "unpivot (select 1 as a, 2 as b) on a, b into name k value v",
    "select case when 1 = 1 then 'a' end, coalesce(null, 1), 1 between 0 and 2, not true, 'a' ~ 'b'",
    "select unnest([1, 2]), {'a': 1}.a, [1, 2][1], map {'k': 'v'}",
    "select * from (describe event)",
    "describe event",
    "describe select 1",
    "show tables",
    "show all tables",
    "summarize event",
    "explain select * from event",
    "explain analyze select count(*) from event",
    "/* nested */ EXPLAIN /* a */ ANALYZE select 1",
    "select * from information_schema.tables",
    "select table_name from duckdb_tables()",
    "select * from range(3), generate_series(1, 2)",
]


@pytest.mark.parametrize("sql", ALLOWED)
def test_people_may(store: Store, sql: str) -> None:
    assert sandbox.run(store, sql).columns


REFUSED = [
    "",
    ";",
    "-- nothing",
    "select 1; select 2",
    "select repeat('x', 1500000000)",
    "select len(rpad('', 1500000000, 'x'))",
    "select len(lpad('', 1500000000, 'x'))",
    "select len(list_resize([1], 1500000000))",
    "select len(range(1500000000)), len(generate_series(1, 1500000000))",
    "select 1; drop table live.event",
    "insert into live.event select * from live.event",
    "delete from live.event",
    "update live.event set node = 'x'",
    "create table t (a int)",
    "create temp table t as select 1",
    "create or replace macro find_x(a) as table select 1",
    "drop view event",
    "alter table live.event add column x int",
    "truncate live.event",
    "copy event to '{dir}/out.csv'",
    "copy (select 1) to '{dir}/out.csv'",
    "export database '{dir}/out'",
    "import database '{dir}/out'",
    "attach '{dir}/other.duckdb' as other",
    "attach ':memory:' as other",
    "detach fleet",
    "use live",
    "set threads = 1",
    "set global enable_external_access = true",
    "set variable a = 1",
    "reset threads",
    "pragma database_list",
    "pragma enable_profiling",
    "call pragma_version()",
    "call duckdb_settings()",
    "checkpoint",
    "force checkpoint",
    "vacuum",
    "analyze",
    "begin",
    "commit",
    "rollback",
    "load json",
    "install httpfs",
    "prepare p as select 1",
    "execute p",
    "deallocate p",
    "explain delete from live.event",
    "explain analyze delete from live.event",
    "explain analyze copy event to '{dir}/out.csv'",
    "explain explain select 1",
    "explain",
    "with d as (delete from live.event returning *) select * from d",
    "with d as (insert into live.event select * from live.event returning *) select * from d",
    "with d as (update live.event set node = 'x' returning *) select * from d",
    "with d as (copy event to '{dir}/out.csv') select 1",
    "explain analyze with d as (delete from live.event returning *) select * from d",
    "select * from read_csv('{dir}/secret.csv')",
    "select * from read_csv_auto('{dir}/secret.csv')",
    "select * from read_text('{dir}/secret.csv')",
    "select * from read_blob('{dir}/secret.csv')",
    "select * from read_json('{dir}/secret.csv')",
    "select * from read_parquet('{dir}/secret.csv')",
    "select * from parquet_metadata('{dir}/secret.csv')",
    "select * from sniff_csv('{dir}/secret.csv')",
    "select * from glob('{dir}/*')",
    "select * from '{dir}/secret.csv'",
    'select * from "{dir}/secret.csv"',
    "describe '{dir}/secret.csv'",
    "summarize '{dir}/secret.csv'",
    "from '{dir}/secret.csv'",
    "select * from 'https://example.com/a.parquet'",
    "select * from event, read_text('{dir}/secret.csv')",
    "select (select content from read_text('{dir}/secret.csv'))",
    "select 1 where exists (from read_text('{dir}/secret.csv'))",
    "with f as (from read_text('{dir}/secret.csv')) select 1",
    "select 1 union all select length(content) from read_text('{dir}/secret.csv')",
    "select * from (pivot (from read_text('{dir}/secret.csv')) on filename in ('a') using count(*))",
    "select * from query('select 1')",
    "select * from query_table('event')",
    "select * from json_execute_serialized_sql('x')",
    "select * from system.main.read_text('{dir}/secret.csv')",
    "select system.main.getenv('HOME')",
    "select getenv('HOME')",
    "select current_setting('threads')",
    "select getvariable('a')",
    "select nextval('tickets')",
    "select list_transform([1], lambda x: nextval('tickets'))",
    "select max(nextval('tickets')) over () from event",
    "select count(*) filter (nextval('tickets') > 0) from event",
    "select 1 order by nextval('tickets')",
    "select 1 limit (select nextval('tickets'))",
    "select setseed(0.5)",
    "select write_log('x')",
    "select sleep_ms(10000)",
    "select * from duckdb_settings()",
    "select * from duckdb_secrets()",
    "select * from duckdb_logs()",
    "select * from duckdb_logs",
    "select * from pg_settings",
    "select * from pg_catalog.pg_settings",
    "select * from checkpoint()",
    "select * from enable_logging()",
    "select * from python_map_function()",
    "select * from pandas_scan(1)",
    "select * from seq_scan('event')",
    "select ?",
    "select $1",
    "select $name",
    "select no_such_function(1)",
    "select * from no_such_table",
    "select\0 1",
    "select " + "1 + " * 60_000 + "1",
]


@pytest.mark.parametrize("sql", REFUSED)
def test_people_may_not(store: Store, tmp_path: Path, sql: str) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(Refused) as caught:
        sandbox.run(store, sql.replace("{dir}", str(tmp_path)))
    assert str(caught.value)
    assert "swordfish" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert rows(sandbox.run(store, "select count(*) from event")) == [[1]]
    with store.transaction() as write:
        assert write.execute("SELECT nextval('main.tickets')").fetchone() == (1,)


def test_names_of_python_are_no_tables(store: Store) -> None:
    """DuckDB's Python client would read a variable of a caller's frame."""
    secret = duckdb.connect().sql("select 'swordfish' as word")
    with pytest.raises(Refused, match="does not exist"):
        sandbox.run(store, "select * from secret")
    assert secret is not None


def test_a_second_wall_stands_behind_the_tree(store: Store, tmp_path: Path) -> None:
    """Even what no list foresees meets locked settings and no file access."""
    with store.reader() as cursor:
        for sql in (
            f"select * from read_text('{tmp_path}/secret.csv')",
            f"copy event to '{tmp_path}/out.csv'",
            f"attach '{tmp_path}/other.duckdb' as other",
            "set global enable_external_access = true",
            "set threads = 1",
        ):
            with pytest.raises(duckdb.Error, match=r"disabled by configuration|has been locked"):
                cursor.execute(sql)


def test_the_store_still_lives_behind_the_wall(store: Store) -> None:
    with store.transaction() as write:
        write.execute("CREATE TABLE live.big AS SELECT range AS n FROM range(300000)")
        write.execute("ALTER TABLE live.big ADD COLUMN x INTEGER")
    with store.reader("live,rules") as cursor:
        cursor.execute("CHECKPOINT")
        assert cursor.execute("SELECT count(*) FROM big").fetchone() == (300000,)
    path = store.path
    store.close()
    reopened = Store.open(path)
    with reopened.reader("live") as cursor:
        assert cursor.execute("SELECT count(*) FROM big").fetchone() == (300000,)
    reopened.close()


def test_a_syntax_error_has_its_position(store: Store) -> None:
    with pytest.raises(Refused, match=r'syntax error at or near "selct"') as caught:
        sandbox.run(store, "selct 1")
    assert "^" in str(caught.value)


def test_a_wrong_column_has_its_position_in_the_text_as_written(store: Store) -> None:
    with pytest.raises(Refused) as caught:
        sandbox.run(store, "select nod from event")
    assert "LINE 1: select nod from event" in str(caught.value)
    assert "node" in str(caught.value)


def test_values_as_people_read_them(store: Store) -> None:
    answer = sandbox.run(
        store,
        "select ts, received_at, null as nothing, 'nan'::double as nan, '-inf'::double as inf, "
        "1.50::decimal(6,2) as money, [1, null] as list, {'a': ts} as struct, '\\xAB\\x01'::blob as blob, "
        "true as yes, date '2026-11-30' as day, interval '26 hours 1.5 seconds' as span, "
        "9223372036854775807::hugeint * 4 as huge, detail, map {1: 'x'} as map, 'é\"' as word, "
        "timestamptz '2026-11-30 12:00:00+02' as zoned, 'infinity'::timestamp as ever from event",
    )
    text = b"".join(answer.chunks).decode()
    assert (
        '"2026-11-30T12:00:00Z","2026-11-30T12:00:00.500000Z",null,"NaN","-Infinity",1.50,[1,null],' in text
    )
    assert (
        '{"a":"2026-11-30T12:00:00Z"},"ab01",true,"2026-11-30","1 day 02:00:01.5",36893488147419103228,'
        in text
    )
    assert '{"pci": "0000:1b:00.0"},{"1":"x"},"é\\"","2026-11-30T10:00:00Z","infinity"' in text
    assert answer.types[0] == "TIMESTAMP"


def test_columns_may_share_a_name(store: Store) -> None:
    answer = sandbox.run(store, "select now() as a, 2 as a")
    assert list(answer.columns) == ["a", "a"]
    assert rows(answer)[0][1] == 2


def test_rows_are_cut_and_said_to_be(store: Store) -> None:
    answer = sandbox.run(store, "select * from range(10)", limit=3)
    assert rows(answer) == [[0], [1], [2]]
    assert answer.truncated
    assert not sandbox.run(store, "select * from range(3)", limit=3).truncated


def test_no_caller_raises_the_cap(store: Store) -> None:
    answer = sandbox.run(store, "select * from range(250000)", limit=200_000)
    assert answer.rows == sandbox.MAX_ROWS
    assert answer.truncated


def test_bytes_are_capped_and_chunks_small(store: Store) -> None:
    answer = sandbox.run(
        store, "select s from (select string_agg('xxxxxxxxxx', '') as s from range(10000)), range(2000)"
    )
    assert answer.truncated
    assert sum(map(len, answer.chunks)) <= sandbox.MAX_BYTES + sandbox.CHUNK_BYTES
    assert max(map(len, answer.chunks)) <= sandbox.CHUNK_BYTES + 100_100


def test_memory_of_the_engine_is_bounded(store: Store) -> None:
    with store.reader() as read:
        limit = read.execute("SELECT current_setting('memory_limit')").fetchone()
    assert limit is not None
    number, unit = str(limit[0]).split()
    assert float(number) * {"MiB": 1, "GiB": 1024}[unit] <= 8192


@pytest.mark.parametrize(
    "sql",
    [
        "select count(*) from range(100000000000) a, range(1000) b",
        "select * from range(100000000000000) where range < 0",
        "explain analyze select count(*) from range(100000000000) a, range(1000) b",
        "with recursive r as (select 1 as n union all select n + 1 from r) select max(n) from r",
    ],
)
def test_a_runaway_query_is_stopped(store: Store, sql: str) -> None:
    started = time.monotonic()
    with pytest.raises(TimedOut, match=r"time limit of 0\.3 s reached: narrow the time range"):
        sandbox.run(store, sql, timeout_s=0.3)
    assert time.monotonic() - started < 20
    assert rows(sandbox.run(store, "select 1")) == [[1]]


def test_a_caller_who_left_stops_the_query(store: Store) -> None:
    gone = threading.Event()
    threading.Timer(0.2, gone.set).start()
    with pytest.raises(TimedOut):
        sandbox.run(store, "select count(*) from range(100000000000) a, range(1000)", cancelled=gone)


def test_nothing_stays_behind(store: Store) -> None:
    """A query leaves no transaction open: tables can be altered, and what is written afterwards is seen."""
    sandbox.run(store, "select * from event", limit=1)
    with pytest.raises(Refused):
        sandbox.run(store, "select error('x') from event")
    with store.transaction() as write:
        write.execute("ALTER TABLE live.event ADD COLUMN more INTEGER")
    with store.transaction() as write:
        write.execute("DELETE FROM live.event")
    assert rows(sandbox.run(store, "select count(*) from live.event")) == [[0]]


@pytest.fixture(scope="module")
def quiet() -> Iterator[Store]:
    made = Store.open(None)
    with made.transaction() as write:
        write.execute("CREATE TABLE main.t AS SELECT 1 AS a")
    yield made
    made.close()


_WORDS = """
    select from where with as ( ) * , ; delete insert copy to into returning t a 1 'x' '/etc/passwd'
    read_text( union all explain analyze describe -- /* */ $$ " \\ values set pragma attach x.csv range( 3 )
    update t set a = 2 drop table create or replace temp macro
"""
_PIECES = st.sampled_from(_WORDS.split())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(_PIECES | st.text(max_size=4), max_size=14))
def test_no_words_change_a_thing(quiet: Store, pieces: list[str]) -> None:
    text = ""
    try:
        sandbox.run(quiet, " ".join(pieces), limit=10, timeout_s=2)
    except (Refused, TimedOut) as error:
        text = str(error)
    assert "root:" not in text
    with quiet.reader() as cursor:
        assert cursor.execute("SELECT a FROM t").fetchall() == [(1,)]
        tables = cursor.execute(
            "SELECT table_name FROM duckdb_tables() WHERE schema_name = 'main'"
        ).fetchall()
        assert tables == [("t",)]


@pytest.mark.parametrize("depth", [65, 5000, 40_000])
def test_deeply_nested_json_is_given_as_text(store: Store, depth: int) -> None:
    text = "[" * depth + "]" * depth
    assert sandbox._json(text) == text
    assert sandbox._json("[" * 64 + "]" * 64) == msgspec.Raw(b"[" * 64 + b"]" * 64)
    brackets = '{"a": "' + "[{" * 500 + '"}'
    assert sandbox._json(brackets) == msgspec.Raw(brackets.encode())
    answer = sandbox.run(store, f"select json('{text}') as a")
    assert rows(answer) == [[text]]


@pytest.mark.parametrize("sql", ["select " + "1+" * 900 + "1", "select " + "not " * 900 + "true"])
def test_a_deeply_nested_statement_is_refused_in_words(store: Store, sql: str) -> None:
    with pytest.raises(Refused, match="nested too deeply"):
        sandbox.run(store, sql)
