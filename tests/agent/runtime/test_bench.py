import asyncio
import fcntl
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet.metric import Value
from gpufleet_agent import bench
from gpufleet_agent.bench import Settings, run_bench
from gpufleet_agent.bench_runner import BenchRunner
from gpufleet_agent.benches import BENCHES, METRICS, disk_read, memcpy
from gpufleet_agent.child import module_command
from gpufleet_agent.drivers import BenchResult
from gpufleet_agent.guard import HostSettings, SimulatedNode
from gpufleet_agent.measure import Place, params_hash
from gpufleet_agent.pipe import Skip
from gpufleet_agent.probe import Sweep, mono_us, wall_us

NAMES = [metric.name for metric in METRICS]
SMALL: Mapping[str, Value] = {
    "bytes": 4 << 20, "block_bytes": 1 << 20, "repeats": 3, "best_of": 2, "caches": 0,
}  # fmt: skip


def rows(sweep: Sweep) -> list[dict[str, Any]]:
    return [dict(zip(NAMES, row, strict=True)) for row in sweep.rows]


def settings(tmp: Path, name: str, driver: str = "none", **more: Any) -> Settings:
    host = more.pop("host", HostSettings(driver=driver))
    return Settings(bench=name, host=host, state_dir=str(tmp), lock=str(tmp / "lock"), **more)


def simulated(kit: Any, faults: str = "") -> HostSettings:
    node = SimulatedNode(
        scenario=str(kit.scenario(faults)), node="gpu-a01", started_us=wall_us(), started_mono_us=mono_us()
    )
    return HostSettings(driver="simulated", simulated=node)


@pytest.mark.parametrize("name", ["memcpy", "disk_read", "tcp_loopback"])
def test_a_host_bench_gives_one_whole_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(BENCHES[name], "PARAMS", SMALL)
    found = rows(run_bench(settings(tmp_path, name, force=True)))
    assert found
    for row in found:
        assert (row["status"], row["unit"], row["bench"]) == ("ok", "GB/s", name)
        assert row["entity"] == "node:" or (name == "memcpy" and row["entity"].startswith("numa:"))
        assert row["value"] > 0.001
        assert 0 <= row["spread"] < 10
        assert row["repeats"] == 3
        conventions = {
            "disk_read": "direct_sequential|fadvise_sequential",
            "memcpy": r"read_plus_write_\d+_threads(_in_[\d.]+_cpus)?(_anywhere)?",
            "tcp_loopback": r"one_stream(_in_[\d.]+_cpus)?",
        }
        assert re.fullmatch(conventions[name], row["convention"])
        assert row["params_hash"] == params_hash(SMALL)


def test_the_file_of_disk_read_is_made_once_and_made_anew_when_it_is_short(tmp_path: Path) -> None:
    place = Place(None, None, str(tmp_path))
    assert disk_read.run(place, SMALL)[0].status == "ok"
    path = tmp_path / "bench-read.dat"
    made = path.stat()
    assert disk_read.run(place, SMALL)[0].status == "ok"
    assert path.stat().st_ino == made.st_ino
    os.truncate(path, 1000)
    assert disk_read.run(place, SMALL)[0].status == "ok"
    assert path.stat().st_size == SMALL["bytes"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["bench-read.dat"]


def test_without_O_DIRECT_it_is_another_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    result, convention = disk_read.run(Place(None, None, str(tmp_path)), SMALL)
    assert (result.status, convention) == ("ok", disk_read.CACHED)


def test_a_disk_that_has_no_room_or_cannot_be_written_is_a_row_that_says_so(tmp_path: Path) -> None:
    result, _ = disk_read.run(Place(None, None, str(tmp_path)), {**SMALL, "bytes": 1 << 60})
    assert (result.status, result.value) == ("skipped", None)
    result, _ = disk_read.run(Place(None, None, str(tmp_path / "none")), SMALL)
    assert result.status == "failed"
    assert "No such file" in result.reason


def test_memcpy_reads_memory_and_not_the_page_of_zeros() -> None:
    for part in memcpy.run(Place(None, None, ""), SMALL):
        result = part.result
        assert result.value is not None
        assert min(result.samples) <= result.value <= max(result.samples)


def test_a_busy_host_is_left_alone_unless_someone_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memcpy, "PARAMS", SMALL)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.51 * (os.cpu_count() or 1), 0.0, 0.0))
    (row,) = rows(run_bench(settings(tmp_path, "memcpy")))
    assert (row["status"], row["value"]) == ("skipped", None)
    assert "host is busy" in row["reason"]
    found = rows(run_bench(settings(tmp_path, "memcpy", force=True)))
    assert {row["status"] for row in found} == {"ok"}
    monkeypatch.setattr(os, "getloadavg", lambda: (0.49 * (os.cpu_count() or 1), 9.0, 9.0))
    found = rows(run_bench(settings(tmp_path, "memcpy")))
    assert {row["status"] for row in found} == {"ok"}


def test_a_simulated_host_has_no_tools(kit: Any) -> None:
    made = kit.tmp / "made"
    asked = settings(kit.tmp, "fio", host=simulated(kit), command=["touch", str(made)], force=True)
    (row,) = rows(run_bench(asked))
    assert (row["status"], row["reason"]) == ("unsupported", "a simulated host has no tools")
    assert not made.exists()


def test_one_bench_at_a_time_on_a_host(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        (row,) = rows(run_bench(settings(tmp_path, "memcpy", force=True)))
    assert (row["status"], row["reason"]) == ("skipped", "another bench runs, or a scheduler holds the lock")


def test_h2d_of_simulated_cards_is_a_row_per_card_with_its_state(kit: Any) -> None:
    found = rows(run_bench(settings(kit.tmp, "h2d", host=simulated(kit))))
    assert len(found) == 8
    for row in found:
        assert row["status"] == "ok"
        assert row["value"] > 10
        assert row["link"].startswith("pcie5x16") or row["link"].startswith("pcie")
        assert row["driver"]
        assert row["temperature_c"] > 10
        assert row["entity"].startswith("gpu:GPU-")
    one = found[3]["entity"]
    assert [
        row["entity"] for row in rows(run_bench(settings(kit.tmp, "h2d", host=simulated(kit), entity=one)))
    ] == [one]


def test_a_lost_and_a_skipped_card_are_rows_that_say_so(kit: Any) -> None:
    fault = '[[fault]]\nnode = "gpu-a01"\ngpu = 2\nkind = "card_lost"\nat = 0\n'
    pci = kit_pci(kit, 4)
    found = rows(run_bench(settings(kit.tmp, "h2d", host=simulated(kit, fault), skip=[Skip(pci, "", 4)])))
    assert [row["status"] for row in found][:4] == ["ok", "ok", "failed", "ok"]
    assert found[2]["value"] is None
    assert len(found) == 8


def kit_pci(kit: Any, index: int) -> str:
    from gpufleet_agent import scenario

    return scenario.load(kit.scenario()).host("gpu-a01", lambda: 0.0, 0).gpus()[index].pci


def test_a_host_without_cards_has_no_rows_and_one_without_a_driver_says_so(tmp_path: Path) -> None:
    assert run_bench(settings(tmp_path, "h2d")).rows == []


def test_a_bench_that_raises_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(at: Place, params: Mapping[str, Value]) -> tuple[BenchResult, str]:
        raise MemoryError("no memory")

    monkeypatch.setattr(memcpy, "run", bad)
    sweep = run_bench(settings(tmp_path, "memcpy", force=True))
    (row,) = rows(sweep)
    assert (row["status"], sweep.error) == ("failed", "failed")
    assert "no memory" in row["reason"]


@given(st.lists(st.floats(0.001, 1e6), min_size=2, max_size=9))
def test_the_spread_is_a_part_of_the_middle(samples: list[float]) -> None:
    result = BenchResult("ok", sorted(samples)[len(samples) // 2], "GB/s", "", tuple(samples))
    row = bench._row(
        Settings(bench="memcpy", host=HostSettings(), state_dir="", lock=""), memcpy, "node:", result
    )
    spread = row["spread"]
    assert isinstance(spread, float)
    assert spread >= 0
    if len(set(samples)) == 1:
        assert spread == 0


class Told:
    def __init__(self, kit: Any, host: HostSettings, command: tuple[str, ...] = (), told: str = "") -> None:
        self.kit = kit
        self.sweeps: list[Sweep] = []
        self.told = told
        self.skip: list[Skip] = []
        self.runner = BenchRunner(
            host,
            str(kit.tmp),
            str(kit.tmp / "lock"),
            lambda: self.skip,
            self.sweeps.append,
            told,
            self.keep,
            command or module_command("gpufleet_agent.bench"),
        )

    def keep(self, text: str) -> None:
        self.told = text

    def statuses(self) -> list[str]:
        return [row["status"] for sweep in self.sweeps for row in rows(sweep)]


def play(make: Callable[[], Told], work: Callable[[Told], Any]) -> Told:
    async def run() -> Told:
        told = make()
        await work(told)
        return told

    return asyncio.run(run())


def child(kit: Any, text: str) -> tuple[str, ...]:
    program = kit.tmp / "bench.py"
    program.write_text(text)
    return sys.executable, str(program)


def test_unsupported_is_told_once_also_over_a_restart(kit: Any) -> None:
    text = (
        "import sys, msgspec\nfrom gpufleet_agent import bench\nfrom gpufleet_agent.benches import memcpy\n"
        "from gpufleet_agent.drivers import BenchResult\n"
        "memcpy.run = lambda at, params: (BenchResult('unsupported', None, '', 'no way'), '')\n"
        "bench.host_load = lambda rules: ''\nbench.main()\n"
    )
    command = child(kit, text)

    async def twice(told: Told) -> None:
        await told.runner.run("memcpy")
        await told.runner.run("memcpy")

    first = play(lambda: Told(kit, HostSettings(driver="none"), command), twice)
    assert first.statuses() == ["unsupported"]
    second = play(lambda: Told(kit, HostSettings(driver="none"), command, first.told), twice)
    assert second.statuses() == []

    async def asked(told: Told) -> None:
        await told.runner.run("memcpy", lease="l1")

    assert play(lambda: Told(kit, HostSettings(driver="none"), command, first.told), asked).statuses() == [
        "unsupported"
    ]


def test_a_bench_that_hangs_is_ended_and_is_a_row(kit: Any) -> None:
    async def work(told: Told) -> None:
        sweep = await told.runner.run("h2d", deadline_s=8.0)
        assert [row["status"] for row in rows(sweep)] == ["hung"]
        assert "h2d" in rows(sweep)[0]["reason"] or "0000:" in rows(sweep)[0]["reason"]

    told = play(lambda: Told(kit, simulated(kit, kit.hang(gpu=0, call="h2d"))), work)
    assert told.statuses() == ["hung"]


def test_a_bench_that_dies_is_a_row(kit: Any) -> None:
    async def work(told: Told) -> None:
        await told.runner.run("memcpy")

    told = play(lambda: Told(kit, HostSettings(), child(kit, "import os\nos.abort()\n")), work)
    assert told.statuses() == ["failed"]


def test_a_driver_that_hangs_as_a_whole_is_not_asked(kit: Any) -> None:
    async def work(told: Told) -> None:
        told.skip = [Skip("")]
        await told.runner.run("h2d")

    assert play(lambda: Told(kit, simulated(kit), child(kit, "raise SystemExit(9)")), work).statuses() == [
        "skipped"
    ]


def test_that_something_is_skipped_is_told_once_an_hour_or_when_asked(kit: Any) -> None:
    async def work(told: Told) -> None:
        told.skip = [Skip("")]
        for lease in ("", "", "l1", "", "l2"):
            await told.runner.run("h2d", lease=lease)

    told = play(lambda: Told(kit, simulated(kit), child(kit, "raise SystemExit(9)")), work)
    assert told.statuses() == ["skipped"] * 3


def test_a_tool_runs_only_where_it_is_enabled_and_ends_with_the_run(kit: Any) -> None:
    mark = kit.tmp / "pid"
    tool = ["sh", "-c", f"echo $$ >{mark}.new; mv {mark}.new {mark}; exec sleep 1000"]

    def make() -> Told:
        told = Told(kit, HostSettings(driver="none"), child(kit, UNLOADED))
        told.runner._tools = {"fio": (tool, 300.0)}
        return told

    async def work(told: Told) -> None:
        assert [told.runner.allowed(name) for name in ("fio", "dcgmi_diag", "h2d")] == [True, False, True]
        running = asyncio.create_task(told.runner.run("fio", lease="l1"))
        while not mark.exists():
            assert not running.done()
            await asyncio.sleep(0.01)
        told.runner.stop()
        (row,) = rows(await running)
        assert (row["status"], row["bench"]) == ("preempted", "fio")

    play(make, work)
    pid = int(mark.read_text())
    until = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()


UNLOADED = "from gpufleet_agent import bench\nbench.host_load = lambda rules: ''\nbench.main()\n"


def test_several_results_of_an_entity_are_one_outcome() -> None:
    from gpufleet_agent.bench_runner import _outcomes

    cells = dict.fromkeys(NAMES)
    sweep = Sweep("bench", 0, 0, 0.0, "", [], [])
    for entity, status, gpu_s in (("a", "unsupported", 3.0), ("a", "ok", 0.0), ("a", "failed", 0.0),
                                  ("b", "skipped", 0.0), ("b", "unsupported", 1.0)):  # fmt: skip
        row = {**cells, "entity": entity, "status": status, "gpu_seconds": gpu_s}
        sweep.rows.append(list(row.values()))
    assert _outcomes(sweep) == {"a": ("ok", 3.0), "b": ("unsupported", 1.0)}


def test_a_bench_that_is_stopped_is_preempted(kit: Any) -> None:
    async def work(told: Told) -> None:
        running = asyncio.create_task(told.runner.run("h2d"))
        while told.runner._child is None:
            await asyncio.sleep(0.01)
        told.runner.stop()
        (row,) = rows(await running)
        assert (row["status"], row["value"], row["reason"]) == ("preempted", None, "told to stop")

    told = play(lambda: Told(kit, simulated(kit), child(kit, "import time\ntime.sleep(60)\n")), work)
    assert told.statuses() == ["preempted"]


def test_benches_asked_for_at_once_run_one_after_the_other(kit: Any) -> None:
    async def work(told: Told) -> None:
        await asyncio.gather(*[told.runner.run("h2d", lease=f"l{at}") for at in range(3)])

    told = play(lambda: Told(kit, simulated(kit)), work)
    assert told.statuses() == ["ok"] * 24


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpufleet_agent.main", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_runs_one_bench_now(kit: Any) -> None:
    config = kit.config()
    done = command("bench", "h2d", "--config", str(config), "-o", "json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["kind"] == "Bench"
    assert len(document["items"]) == 8
    done = command("bench", "h2d", "--config", str(config))
    assert done.stdout.count("GB/s") == 8
    done = command("bench", "nonsense", "--config", str(config))
    assert done.returncode == 2
    assert "memcpy" in done.stderr
    done = command("bench", "--list", "--config", str(config))
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(BENCHES)
    assert re.search(r"^nvbandwidth +host +off ", done.stdout, re.MULTILINE)


def test_scan_shows_the_host_it_runs_on() -> None:
    done = command("scan", "-o", "json")
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert (document["api_version"], document["kind"]) == ("fleet/v1", "Scan")
    assert document["generated_at"].endswith("Z")
    node = document["items"][0]
    assert node["entity"] == "node:"
    assert node["attributes"]["hostname"] == os.uname().nodename
    assert node["attributes"]["kernel"] == os.uname().release
    assert node["host"]["cpus"] >= 1
    assert abs(node["host"]["uptime_s"] - mono_us() / 1e6) < 60
    assert document["items"][1:] == [item for item in document["items"] if item["entity"] != "node:"]
    text = command("scan")
    assert os.uname().release in text.stdout
    assert "memory" in text.stdout
    assert "uptime" in text.stdout


def test_scan_shows_simulated_cards_and_names_a_hung_one(kit: Any) -> None:
    done = command("scan", "--config", str(kit.config()))
    assert done.returncode == 0
    cards = done.stdout.partition("\ncards")[2].partition("\nbus")[0]
    assert cards.count("GPU-") == 8
    done = command("scan", "--config", str(kit.config(faults=kit.hang(gpu=1, call="temperature"))))
    assert done.returncode == 1
    assert f"the driver hangs: temperature of {kit_pci(kit, 1)} has not returned" in done.stdout
    assert "kernel" in done.stdout or "cores" in done.stdout
    done = command("scan", "-o", "json", "--config", str(kit.config(faults=kit.hang(gpu=1))))
    assert json.loads(done.stdout)["items"][0]["hung"]["pci"] == kit_pci(kit, 1)


def test_simulate_writes_what_should_be_there(kit: Any) -> None:
    inventory, baseline = kit.tmp / "inventory.csv", kit.tmp / "baseline.csv"
    done = command(
        "simulate", str(kit.scenario()), "--inventory-csv", str(inventory), "--baseline-csv", str(baseline)
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(inventory.read_text().splitlines()) == 9
    assert baseline.read_text().startswith("node,entity,key,value")
    assert command("simulate", str(kit.tmp / "none.toml")).returncode == 1
