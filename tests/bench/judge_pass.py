"""One judge pass over a fleet of 1,000 nodes x 8 cards with two hours of samples, beside a writer.

`python tests/bench/judge_pass.py` prints one JSON document. Samples are made by SQL; the writer commits what
1,000 nodes bring in five commits a second (1,600 rows each), as ingest would. A pass is `Judge.run_pass`: the
rules that are due, which take turns, in two threads. `pass_s` is the median pass of two minutes, `pass_max_s`
the dearest.
`--rules` prints the CPU time of each rule instead, dearest first, and of a pass in which none is due.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

from gpufleet.metric import Metric
from gpufleet_agent import benches
from gpufleet_agent.drivers.simulated import SimulatedHost
from gpufleet_agent.probe import run_probe
from gpufleet_agent.probes import PROBES as SAMPLED
from gpufleet_agent.probes import agent
from gpufleet_agent.scenario import parse
from gpufleet_collector.judge import SHARED, Judge, shared
from gpufleet_collector.limits import JudgeSettings
from gpufleet_collector.store import LIVE, Column, Store

START = datetime(2026, 3, 1, 12, 0, 0)
PROBES: Mapping[str, Sequence[Metric]] = {
    **{name: probe.METRICS for name, probe in SAMPLED.items()},
    "agent": agent.METRICS,
    "bench": benches.METRICS,
}
AS_SIMULATED = ("port", "edac", "disk", "mount", "job", "loader")
"""Probes whose rows are those of one simulated host, given to every node."""
UUID = "format('GPU-{:04d}-{}', node, card)"
NAME = "format('gpu-{:04d}', node)"
PCI = "format('0000:{:02x}:00.0', card + 16)"


def measure(nodes: int = 1000, cards: int = 8, minutes: int = 120, passes: int = 24) -> dict[str, float]:
    """Seconds per pass, CPU seconds of all; milliseconds of the two state queries."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(Path(folder) / "bench.duckdb")
        _fill(store, nodes, cards, minutes)
        _fill_as_simulated(store, nodes)
        judge = Judge(store, JudgeSettings())
        judge.run_pass(START)
        stop = threading.Event()
        writer = threading.Thread(target=_write, args=(store, cards, stop), daemon=True)
        writer.start()
        walls: list[float] = []
        cpu = time.process_time()
        for number in range(1, passes + 1):
            walls.append(judge.run_pass(START + timedelta(seconds=5 * number)).seconds)
        cpu = time.process_time() - cpu
        at = START + timedelta(seconds=5 * passes)
        queries = {
            name: _query(store, f"SELECT * FROM {name}(TIMESTAMP '{at}', '2 minutes')")
            for name in ("cards_at", "nodes_at")
        }
        stop.set()
        writer.join()
        store.close()
    return {
        "nodes": nodes,
        "cards": nodes * cards,
        "rows": nodes * cards * minutes * 12,
        "pass_s": statistics.median(walls),
        "pass_max_s": max(walls),
        "cpu_s_per_pass_with_writer": cpu / passes,
        **{f"{name}_ms": value for name, value in queries.items()},
    }


def per_rule(nodes: int = 1000, cards: int = 8, minutes: int = 120) -> list[tuple[float, float, str]]:
    """CPU seconds of each rule's query (median of five) and how often it runs, s; dearest first.

    What a pass shares is there already. The last row is a pass in which no rule is due.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(Path(folder) / "bench.duckdb")
        _fill(store, nodes, cards, minutes)
        _fill_as_simulated(store, nodes)
        judge = Judge(store, JudgeSettings())
        judge.run_pass(START)
        costs = []
        with store.reader(LIVE) as read:
            for query in shared(SHARED, START):
                read.execute(query)
            for name, policy in judge.policies.items():
                said = f"CREATE OR REPLACE TEMP TABLE said AS FROM find_{name}(TIMESTAMP '{START}')"
                costs.append((_cpu_s(partial(read.execute, said)), policy.every_s, name))
        costs.sort(reverse=True)
        costs.append((_cpu_s(partial(judge.run_pass, START)), judge.every_s, "(nothing due)"))
        store.close()
    return costs


def _cpu_s(act: Callable[[], object], times: int = 5) -> float:
    spent = []
    for _ in range(times):
        began = time.process_time()
        act()
        spent.append(time.process_time() - began)
    return statistics.median(spent)


def _query(store: Store, query: str) -> float:
    times = []
    with store.reader(LIVE) as read:
        for _ in range(9):
            started = time.perf_counter()
            read.execute(query).fetchall()
            times.append((time.perf_counter() - started) * 1000)
    return statistics.median(times)


def _fill_as_simulated(store: Store, nodes: int) -> None:
    """The last ten minutes of `AS_SIMULATED`, each node as the one host that is simulated."""
    scenario = parse(b'[fleet]\nnodes = 1\ngpus = 8\n[[load]]\nkind = "train"\n', "bench")
    now = [0.0]
    host = SimulatedHost(scenario, scenario.node_names()[0], 0, lambda: now[0])
    for probe in AS_SIMULATED:
        names = [metric.name for metric in PROBES[probe]]
        rows: list[list[object]] = []
        every_s = SAMPLED[probe].EVERY
        for tick in range(int(600 / every_s)):
            now[0] = 600.0 + tick * every_s
            sweep = run_probe(probe, SAMPLED[probe], host, sys.exit)
            rows += ([now[0] - 1200.0, *cells] for cells in sweep.rows)
        marks = f"({', '.join('?' for _ in range(len(names) + 1))})"
        columns = ", ".join(
            "format('GPU-{:04d}-{}', n.node, gpu_index) AS gpu_uuid" if name == "gpu_uuid" else name
            for name in names
        )
        with store.transaction() as write:
            write.execute(f"CREATE TEMP TABLE host_{probe} AS SELECT 0.0::DOUBLE AS at_s, {', '.join(names)} "
                          f"FROM live.{probe} WHERE false")  # fmt: skip
            for first in range(0, len(rows), 500):
                some = rows[first : first + 500]
                write.execute(
                    f"INSERT INTO host_{probe} VALUES {', '.join([marks] * len(some))}",
                    [cell for row in some for cell in row],
                )
            ts = f"TIMESTAMP '{START}' + to_seconds(at_s)"
            write.execute(
                f"INSERT INTO live.{probe} BY NAME SELECT {ts} AS ts, {ts} AS received_at, "
                f"format('gpu-{{:04d}}', n.node) AS node, 'b' AS boot_id, {columns} "
                f"FROM host_{probe}, range({nodes}) n(node)"
            )
            write.execute(f"DROP TABLE host_{probe}")
            write.execute(f"INSERT INTO live.probe SELECT node, '{probe}', {every_s} FROM live.node")


def _write(store: Store, cards: int, stop: threading.Event) -> None:
    number = 0
    while not stop.wait(0.2):
        number += 1
        ts = f"TIMESTAMP '{START}' + INTERVAL {number} SECOND"
        with store.transaction() as write:
            write.execute(_insert("gpu", _GPU, ts, "range(200) n(node)", f"range({cards}) c(card)"))


def _fill(store: Store, nodes: int, cards: int, minutes: int) -> None:
    fleet = f"range({nodes}) n(node)"
    each = f"range({cards}) c(card)"
    day = f"TIMESTAMP '{START}' - INTERVAL 1 DAY"
    with store.transaction() as write:
        for probe, metrics in PROBES.items():
            store.ensure_probe(write, probe, [
                Column(m.name, m.type, str(m.unit), m.kind.name.lower(), m.help, m.low, m.high, m.rollup)
                for m in metrics
            ])  # fmt: skip
        for statement in (
            f"INSERT INTO live.node SELECT {NAME}, {NAME}, 'm' || node, 'b', 's', '1', '', {day}, {day} "
            f"FROM {fleet}",
            f"INSERT INTO live.inventory SELECT {NAME}, 'node:', 'node', NULL, NULL, NULL, NULL, NULL, NULL, "
            f"'{{}}', {day}, NULL FROM {fleet}",
            f"INSERT INTO live.inventory SELECT {NAME}, 'gpu:' || {UUID}, 'gpu', {UUID}, "
            f"'SN' || node || '-' || card, {PCI}, 'NVIDIA H100 80GB HBM3', NULL, card, "
            f"json_object('nvlinks_active', '18'), {day}, NULL FROM {fleet}, {each}",
            f"INSERT INTO live.inventory SELECT {NAME}, 'pci:' || {PCI}, 'pci', NULL, NULL, {PCI}, "
            "NULL, NULL, NULL, "
            '\'{"pcie_width_best": "16", "path_width_best": "16", "path_gen_best": "5"}\', '
            f"{day}, NULL FROM {fleet}, {each}",
            "INSERT INTO live.expected SELECT node, uuid, serial, pci, model, slot, 'accepted', 'me', "
            f"{day}, '' FROM live.inventory WHERE kind = 'gpu'",
            "INSERT INTO live.probe SELECT node, unnest(['gpu', 'pci', 'gpu_health', 'nvlink']), "
            "unnest([5, 60, 60, 30]) FROM live.node",
            "INSERT INTO live.baseline SELECT node, entity, 'h2d/1/copied_once/ab/pcie5x16', 55.5, 0.002, "
            f"48, '580', 'frozen', 'collector', {day}, '' FROM live.inventory WHERE kind = 'gpu'",
        ):
            write.execute(statement)
    for first in range(0, minutes * 12, 120):
        ticks = f"range({first}, {first + 120}) k(tick)"
        ts = f"TIMESTAMP '{START}' - INTERVAL 5 SECOND * ({minutes * 12} - 1 - tick)"
        with store.transaction() as write:
            write.execute(_insert("gpu", _GPU, ts, ticks, fleet, each))
            write.execute(
                f"INSERT INTO live.ledger SELECT {NAME}, 's', tick, 'd', 'b', {ts}, 0, 'live', {cards} "
                f"FROM {ticks}, {fleet}"
            )
    recent = "range(120) k(tick)"
    ts = f"TIMESTAMP '{START}' - INTERVAL 5 SECOND * (119 - tick)"
    minute = f"TIMESTAMP '{START}' - INTERVAL 1 MINUTE * (9 - tick)"
    hour = f"TIMESTAMP '{START}' - INTERVAL 1 HOUR * (71 - tick) - INTERVAL 3 SECOND * node"
    run = {"ok": "true", "error": "''", "rows": str(cards)}
    with store.transaction() as write:
        write.execute(_insert("agent", run | {"probe": "'gpu'"}, ts, recent, fleet))
        write.execute(_insert("agent", run | {"probe": "'pci'"}, minute, "range(10) k(tick)", fleet))
        write.execute(_insert("host", {"uptime_s": "1e6"}, ts, recent, fleet))
        write.execute(_insert("pci", _PCI, minute, "range(10) k(tick)", fleet, each))
        hour_ago = f"TIMESTAMP '{START}' - INTERVAL 1 MINUTE * (59 - tick)"
        write.execute(_insert("gpu_health", _HEALTH, hour_ago, "range(60) k(tick)", fleet, each))
        half = f"TIMESTAMP '{START}' + INTERVAL 120 SECOND - INTERVAL 30 SECOND * (119 - tick)"
        write.execute(_insert("nvlink", _NVLINK, half, "range(120) k(tick)", fleet, each))
        write.execute(
            f"INSERT INTO live.event SELECT {hour_ago}, {hour_ago}, {NAME}, 'b', NULL, 'pci:' || {PCI}, "
            f"'xid', '31', 1, 'NVRM: Xid', json_object('severity', 'warning', 'action', 'restart_app') "
            f"FROM range(60) k(tick), {fleet}, {each} WHERE (node * 480 + card * 60 + tick) % 4999 = 0"
        )
        for name in ("h2d", "memcpy"):
            write.execute(
                _insert("bench", _BENCH | {"bench": f"'{name}'"}, hour, "range(72) k(tick)", fleet, each)
            )


_GPU = {
    "gpu_uuid": UUID, "gpu_index": "card", "pci": PCI, "state": "'ok'",
    "util_pct": "95 + random() * 5", "sm_clock_mhz": "1950 + random() * 20",
    "power_w": "600 + random() * 20", "temperature_c": "60 + random() * 5",
    "temperature_margin_c": "20", "clock_reasons": "0",
    "hw_brake_s_total": "3.5", "hw_thermal_s_total": "1.5", "sw_thermal_s_total": "0.5",
    "power_cap_s_total": "100", "mem_used_bytes": "70000000000", "mem_total_bytes": "80000000000",
    "driver_epoch": "1", "pstate": "0",
    "pcie_gen": "5", "pcie_gen_max": "5", "pcie_width": "16", "pcie_width_max": "16",
}  # fmt: skip
_HEALTH = {
    "gpu_uuid": UUID, "gpu_index": "card", "pci": PCI, "state": "'ok'", "recovery_action": "'none'",
    "ecc_uncorrectable_total": "0", "ecc_sram_threshold_exceeded": "false", "remap_failed": "false",
    "remap_pending": "false", "memory_unrepairable": "false", "remap_banks_none": "0",
    "slowdown_margin_c": "-2", "driver_version": "'580'", "library_version": "'580'", "driver_epoch": "1",
}  # fmt: skip
_NVLINK = {
    "gpu_uuid": UUID, "gpu_index": "card", "pci": PCI, "state": "'ok'", "links": "18", "links_active": "18",
    "links_up": "262143", "links_most": "18", "crc_errors_total": "0", "replays_total": "0",
    "recoveries_total": "0", "ecc_errors_total": "0", "driver_epoch": "1",
}  # fmt: skip
_PCI = {
    "pci": PCI,
    "device_kind": "'gpu'",
    "present": "true",
    "gpu_uuid": UUID,
    "bound_driver": "'nvidia'",
    "path": "'0000:00:01.0/0000:01:00.0'",
    "path_links": "'5x16/5x16'",
    "slowest": PCI,
    "narrowest": PCI,
    **dict.fromkeys(("pcie_gen", "pcie_gen_max", "path_gen", "path_gen_max"), "5"),
    **dict.fromkeys(("pcie_width", "pcie_width_max", "path_width", "path_width_max"), "16"),
    **{
        f"{end}aer_{kind}_total": "tick * ((node + card) % 997 = 0)::INT"
        for end in ("", "port_")
        for kind in ("corrected", "nonfatal", "fatal")
    },
}
_BENCH = {
    "entity": f"'gpu:' || {UUID}", "peer": "''", "version": "'1'", "convention": "'copied_once'",
    "params_hash": "'ab'", "value": "55 + random()", "unit": "'GB/s'", "status": "'ok'", "reason": "''",
    "repeats": "5", "spread": "0.002", "seconds": "1", "link": "'pcie5x16'", "driver": "'580'",
}  # fmt: skip


def _insert(table: str, cells: Mapping[str, str], ts: str, *sources: str) -> str:
    """Rows of `table` for every combination of `sources`; columns without a cell are random where numeric."""
    body = []
    for metric in PROBES[table]:
        spare = "NULL" if metric.type.name in ("STRING", "BOOL") or table != "gpu" else "(random() * 15)::INT"
        body.append(f"{cells.get(metric.name, spare)} AS {metric.name}")
    head = f"{ts} AS ts, {ts} AS received_at, {NAME} AS node, 'b' AS boot_id"
    return f"INSERT INTO live.{table} BY NAME SELECT {head}, {', '.join(body)} FROM {', '.join(sources)}"


if __name__ == "__main__":
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--rules", action="store_true", help="CPU time of each rule")
    if given.parse_args().rules:
        for cpu_s, every_s, rule in per_rule():
            sys.stdout.write(f"{cpu_s * 1000:8.1f} ms  every {every_s:5g} s  {rule}\n")
    else:
        sys.stdout.write(json.dumps(measure(), indent=2) + "\n")
