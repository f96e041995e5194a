"""S01 S02 S05 S07: the file, who holds it, what becomes of a damaged one, its clock and its size."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import numpy as np
import pytest

from gpufleet.metric import Type
from gpufleet_collector.config import RetentionConfig
from gpufleet_collector.frame import Frame
from gpufleet_collector.retention import Retention
from gpufleet_collector.store import Column, Store, StoreBroken, StoreLocked, StoreUnusable

if TYPE_CHECKING:
    from tests.collector.ingest.conftest import Kit


def column(name: str, kind: Type = Type.F64) -> Column:
    return Column(name, kind, "", "gauge", "", None, None, "")


def test_S01_a_second_collector_says_who_holds_the_file_and_exits(kit: Kit) -> None:
    first = kit.process()
    second = subprocess.run(
        [
            sys.executable,
            "-m",
            "gpufleet_collector.main",
            "serve",
            "--data",
            str(kit.tmp),
            "--listen",
            "127.0.0.1:0",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == 1
    assert len(second.stderr.strip().splitlines()) == 1
    assert str(first.popen.pid) in second.stderr
    assert "stop what holds it" in second.stderr
    assert first.popen.poll() is None


def test_S01_a_shell_left_open_on_the_file_is_named_too(tmp_path: Path) -> None:
    path = tmp_path / "fleet.duckdb"
    Store.open(path).close()
    shell = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import duckdb\nc = duckdb.connect({str(path)!r}, read_only=True)\n"
            "print(1, flush=True)\ninput()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "1\n"
        with pytest.raises(StoreLocked, match=f"process {shell.pid}"):
            Store.open(path)
    finally:
        shell.communicate("\n", timeout=20)
    Store.open(path).close()


def _killed(path: Path, *statements: str) -> None:
    """Run statements in a process that dies by SIGKILL between commit and checkpoint."""
    script = (
        "import os, sys, duckdb\n"
        "from pathlib import Path\n"
        "from gpufleet_collector.store import Store\n"
        "store = Store.open(Path(sys.argv[1]))\n"
        "for statement in sys.argv[2:]:\n"
        "    with store.transaction() as write: write.execute(statement)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path), *statements], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL


def test_S02_changes_of_tables_survive_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "fleet.duckdb"
    _killed(
        path,
        "CREATE TABLE live.t (a INTEGER)",
        "CREATE UNIQUE INDEX i ON live.t (a)",
        "INSERT INTO live.t VALUES (1), (2)",
        "ALTER TABLE live.judge_state ADD COLUMN b INTEGER",
        "DELETE FROM live.t WHERE a = 1",
        "INSERT INTO live.t VALUES (1)",
    )
    store = Store.open(path)
    assert store.replaced == ""
    with store.reader() as read:
        assert read.execute("SELECT count(*) FROM live.t").fetchall() == [(2,)]
    store.close()


def _spoil_head(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(bytes(byte ^ 0xA5 for byte in data[:64]) + data[64:])


@pytest.mark.parametrize("damage", ["wal", "head", "short", "foreign", "empty"])
def test_S02_a_damaged_pair_is_put_aside_and_kept(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "fleet.duckdb"
    rows = [f"INSERT INTO live.judge_state VALUES ('2026-01-01 00:00:{n:02}')" for n in range(30)]
    _killed(path, *rows)
    wal = tmp_path / "fleet.duckdb.wal"
    assert wal.exists()
    if damage == "wal":
        data = wal.read_bytes()
        wal.write_bytes(data.replace(b"judge_state", b"judge_stale"))
    elif damage == "head":
        _spoil_head(path)
    elif damage == "short":
        os.truncate(path, path.stat().st_size // 3)
    else:
        path.write_bytes(b"" if damage == "empty" else b"not a database " * 1000)
    broken = path.read_bytes()
    store = Store.open(path)
    assert "kept as" in store.replaced
    aside = [item for item in tmp_path.iterdir() if "damaged" in item.name]
    assert {item.name.endswith(".wal") for item in aside} == {True, False}
    assert broken in [item.read_bytes() for item in aside]
    with store.transaction() as write:
        write.execute("INSERT INTO live.judge_state VALUES ('2026-01-01')")
    store.close()
    assert Store.open(path).replaced == ""


def test_S02_a_replaced_store_is_a_loud_event_and_agents_send_again(kit: Kit) -> None:
    first = kit.start()
    agent = kit.agent(first.address).hello()
    agent.send(1, kit.body(kit.gpu_rows()))
    agent.wait(1)
    first.stop()
    first.store.close()
    path = kit.tmp / "fleet.duckdb"
    _spoil_head(path)
    again = kit.start()
    assert again.query("SELECT kind, message LIKE '%kept as%' FROM live.event") == [("store_replaced", True)]
    agent = kit.agent(again.address).hello()
    agent.send(2, kit.body(kit.gpu_rows()))
    agent.wait(2)
    assert again.one("SELECT count(*) FROM live.gpu") == 1


@pytest.mark.parametrize(
    ("table", "name"),
    [("ledger", "number"), ("metric", "name")],  # read by the committer, read by `Store.open`
)
def test_S02_a_bad_block_in_the_middle_is_found_and_put_aside(kit: Kit, table: str, name: str) -> None:
    path = kit.tmp / "fleet.duckdb"
    store = Store.open(path)
    with store.transaction() as write:
        write.execute(
            "INSERT INTO live.ledger SELECT 'n' || (i % 50), 's' || (i % 50), hash(i), md5(i::VARCHAR), 'b', "
            "now()::TIMESTAMP, 0, 'live', 1 FROM range(60000) t(i)"
        )
        write.execute(
            "INSERT INTO live.metric SELECT 'p' || (i % 50), 'm' || i, 'f64', '', '', NULL, NULL, "
            "md5(i::VARCHAR), '', i, now()::TIMESTAMP FROM range(30000) t(i)"
        )
    store.close()
    with duckdb.connect(str(path), read_only=True) as read:
        blocks = read.execute(
            f"SELECT max(block_id) FROM pragma_storage_info('live.{table}') "
            f"WHERE column_name = '{name}' AND segment_type != 'VALIDITY' AND persistent"
        ).fetchall()
    data = bytearray(path.read_bytes())
    block = blocks[0][0]
    at = 3 * 4096 + block * 262_144 + 131_072
    data[at : at + 4096] = bytes(byte ^ 0xA5 for byte in data[at : at + 4096])
    path.write_bytes(data)
    running = kit.start()
    assert running.query("SELECT kind, message LIKE '%kept as%' FROM live.event") == [
        ("store_replaced", True)
    ]
    agent = kit.agent(running.address).hello()
    agent.send(1, kit.body(kit.gpu_rows()))
    agent.wait(1)
    kept = [item.read_bytes() for item in kit.tmp.glob("*.damaged-*") if item.suffix != ".wal"]
    assert [content[at : at + 4096] for content in kept] == [bytes(data[at : at + 4096])]


def test_S02_what_a_new_file_would_not_cure_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable):
        Store.open(tmp_path / "no such directory" / "fleet.duckdb")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreUnusable):
        Store.open(tmp_path / "folder")
    assert (tmp_path / "folder").is_dir()


def test_the_log_is_empty_after_tables_changed(kit: Kit) -> None:
    running = kit.start()
    kit.agent(running.address).hello()
    wal = kit.tmp / "fleet.duckdb.wal"
    kit.until(lambda: not wal.exists() or wal.stat().st_size < 4096)
    assert "gpu" in running.collector.store.tables, "tables did change"


def _fail_after_making_a_table(store: Store) -> None:
    with store.transaction() as write:
        store.ensure_probe(write, "p", [column("a")])
        raise ZeroDivisionError


def test_a_rolled_back_table_is_not_remembered() -> None:
    store = Store.open(None)
    with pytest.raises(ZeroDivisionError):
        _fail_after_making_a_table(store)
    assert store.tables == {}
    with store.transaction() as write:
        assert store.ensure_probe(write, "p", [column("a")])
        assert not store.ensure_probe(write, "p", [column("a")])
        assert store.ensure_probe(write, "p", [column("a"), column("b", Type.STRING)])
    assert store.tables == {"p": {"a": Type.F64, "b": Type.STRING}}
    assert store.refused("p", [column("a", Type.I64), column("c")]) == {"a": "type_conflict"}
    assert store.refused("ledger", []) == {"": "reserved_name"}
    wrong = [column("util_pct", Type.STRING), column("power_w"), column("site_own", Type.STRING)]
    assert store.refused("gpu", wrong) == {"util_pct": "type_conflict"}, "also when it is the first to say so"
    store.close()


def test_a_fatal_error_breaks_the_store_until_it_is_opened_again(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "fleet.duckdb")
    with store.transaction() as write:
        write.execute("INSERT INTO live.judge_state VALUES ('2026-01-01')")
    with pytest.raises(StoreBroken, match="boom"), store.transaction():
        raise duckdb.FatalException("boom")
    with pytest.raises(StoreBroken), store.transaction():
        raise AssertionError("not reached")
    version = store.schema_version
    store.reopen()
    assert store.schema_version > version
    with store.reader() as read:
        assert read.execute("SELECT count(*) FROM live.judge_state").fetchall() == [(1,)]
    store.close()


def test_S05_times_are_naive_utc_whatever_the_zone(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        "from gpufleet_collector.frame import Frame\n"
        "from gpufleet_collector.state import State, from_us, now_us\n"
        "from gpufleet_collector.store import Store\n"
        "import time\n"
        "assert time.tzname[0] == 'EST'\n"
        "store = Store.open(Path(sys.argv[1]))\n"
        # noon; both 01:00 of the autumn night
        "at = [1772366400000000, 1762063200000000, 1762066800000000]\n"
        "with store.transaction() as write:\n"
        "    frame = Frame()\n"
        "    frame.times('last_pass_at', np.array(at, np.int64))\n"
        "    frame.insert(write, 'live.judge_state')\n"
        "    write.execute('INSERT INTO live.judge_state VALUES (?)', [from_us(at[0])])\n"
        "with store.reader() as read:\n"
        "    print(read.execute('SELECT epoch_us(last_pass_at), last_pass_at::VARCHAR, last_pass_at FROM '\n"
        "                       'live.judge_state ORDER BY ALL').fetchall())\n"
        "    print(read.execute(\"SELECT current_setting('TimeZone')\").fetchall())\n"
        "print(abs(now_us() / 1e6 - time.time()) < 1)\n"
        "store.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a.duckdb")],
        env={**os.environ, "TZ": "America/New_York"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    rows, zone, close = done.stdout.splitlines()
    assert rows == repr(
        [
            (1762063200000000, "2025-11-02 06:00:00", datetime(2025, 11, 2, 6, 0)),
            (1762066800000000, "2025-11-02 07:00:00", datetime(2025, 11, 2, 7, 0)),
            (1772366400000000, "2026-03-01 12:00:00", datetime(2026, 3, 1, 12, 0)),
            (1772366400000000, "2026-03-01 12:00:00", datetime(2026, 3, 1, 12, 0)),
        ]
    )
    assert zone == "[('UTC',)]"
    assert close == "True"


def _day(store: Store, day: datetime, rows: int) -> None:
    frame = Frame()
    start = int((day - datetime(1970, 1, 1)).total_seconds() * 1e6)
    at = start + np.arange(rows, dtype=np.int64) * (86_400_000_000 // rows)
    frame.times("ts", at)
    frame.times("received_at", at)
    frame.texts("node", ["n"] * rows)
    frame.texts("boot_id", ["b"] * rows)
    frame.numbers("value", np.random.default_rng(start % 1000).normal(1000, 10, rows).round(1))
    with store.transaction() as write:
        store.ensure_probe(write, "p", [column("value")])
        frame.insert(write, "live.p")


def test_S07_the_file_stays_in_bounds_and_history_stays(tmp_path: Path) -> None:
    path = tmp_path / "fleet.duckdb"
    store = Store.open(path)
    retention = Retention(store, RetentionConfig(hot_hours=72))
    sizes = []
    for number in range(12):
        day = datetime(2026, 1, 1) + timedelta(days=number)
        _day(store, day, 86_400)
        with store.transaction() as write:
            write.execute(
                "INSERT INTO live.event VALUES (?, ?, 'n', '', 0, '', 'xid', '', 1, '', NULL)", [day, day]
            )
            write.execute(
                "INSERT INTO live.ledger VALUES ('n', 's', ?, '', '', ?, 0, 'live', 1)", [number, day]
            )
        retention.expire(day + timedelta(days=1))
        sizes.append(path.stat().st_size)
    with store.reader() as read:
        assert read.execute("SELECT count(*) FROM live.p").fetchall() == [(3 * 86_400,)]
        assert read.execute("SELECT count(*) FROM live.event").fetchall() == [(12,)]
        assert read.execute("SELECT count(*) FROM live.ledger").fetchall() == [(8,)]
        keys = "SELECT count(*) FROM duckdb_constraints() WHERE constraint_type IN ('PRIMARY KEY', 'UNIQUE')"
        assert read.execute(keys).fetchall() == [(0,)]
    live_bytes = 3 * 86_400 * 16
    assert max(sizes[3:]) < 2 * live_bytes
    assert max(sizes[8:]) <= 1.25 * max(sizes[3:8])
    retention.expire(datetime(2026, 6, 1))
    with store.reader() as read:
        assert read.execute(
            "SELECT (SELECT count(*) FROM live.p) + (SELECT count(*) FROM live.event)"
        ).fetchall() == [(0,)]
    store.close()
    assert path.stat().st_size < max(sizes)


def test_expiry_does_not_forget_which_batches_are_in(kit: Kit) -> None:
    running = kit.start()
    agent = kit.agent(running.address).hello()
    content = kit.body(kit.gpu_rows())
    agent.send(1, content)
    agent.wait(1)
    deleted = Retention(running.store, RetentionConfig()).expire(datetime.now() + timedelta(days=7))
    assert deleted == 1
    agent.send(1, content)
    agent.until(lambda: agent.acked.count(1) == 2)
    assert running.one("SELECT count(*) FROM live.gpu") == 0


def test_readers_and_the_judge_do_not_stop_expiry(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "fleet.duckdb")
    _day(store, datetime(2026, 1, 1), 10_000)
    with store.reader() as read:
        read.execute("BEGIN")
        assert read.execute("SELECT count(*) FROM live.p").fetchall() == [(10_000,)]
        assert Retention(store, RetentionConfig()).expire(datetime(2026, 2, 1)) == 10_000
        assert read.execute("SELECT count(*) FROM live.p").fetchall() == [(10_000,)]
        read.execute("COMMIT")
    store.checkpoint()
    store.close()


def test_opening_is_quick_when_the_log_is_long(tmp_path: Path) -> None:
    path = tmp_path / "fleet.duckdb"
    _killed(
        path,
        *[
            f"INSERT INTO live.judge_state SELECT '2026-01-01'::TIMESTAMP FROM range({n})"
            for n in range(2000, 2040)
        ],
    )
    started = time.perf_counter()
    store = Store.open(path)
    assert time.perf_counter() - started < 20
    with store.reader() as read:
        assert read.execute("SELECT count(*) FROM live.judge_state").fetchall() == [(sum(range(2000, 2040)),)]
    store.close()
