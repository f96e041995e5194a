"""The simulated host: what it says, that it says the same everywhere, and that it can play the drills."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpufleet.metric import Cell, Null, Reason, Row
from gpufleet_agent.drivers import DriverGone, Gpu, Hung, Lost
from gpufleet_agent.drivers.simulated import SimulatedHost
from gpufleet_agent.probe import run_probe
from gpufleet_agent.probes import PROBES
from gpufleet_agent.probes import gpu as gpu_probe
from gpufleet_agent.sampler import CARD_PROBES
from gpufleet_agent.scenario import KINDS, Scenario, load, parse

Play = Callable[..., SimulatedHost]
TOTALS = (
    "power_cap_s_total",
    "sw_thermal_s_total",
    "hw_thermal_s_total",
    "hw_brake_s_total",
    "energy_j_total",
)
SCENARIOS = Path(__file__).parents[2] / "fixtures" / "scenarios"
EVERYTHING = load(SCENARIOS / "everything.toml")


class Clock:
    t = 0.0

    def __call__(self) -> float:
        return self.t


def number(cell: Cell) -> float:
    assert isinstance(cell, int | float)
    return float(cell)


def seen(host: SimulatedHost) -> dict[str, Row | str]:
    """Every card by address: its row, or the class of its trouble."""
    rows: dict[str, Row | str] = {}
    for gpu in host.gpus():
        try:
            rows[gpu.pci] = gpu.read("gpu")
        except (Lost, Hung) as trouble:
            rows[gpu.pci] = type(trouble).__name__
    return rows


def card(host: SimulatedHost, index: int = 0) -> Row:
    return host.gpus()[index].read("gpu")


def test_every_probe_row_of_every_host_is_plausible_and_whole(clock: Clock) -> None:
    for node in EVERYTHING.node_names():
        host = EVERYTHING.host(node, clock, 0)
        for clock.t in (0.0, 12.0, 75.0):
            gone = node == "gpu-003" and clock.t == 12
            if not gone:
                gpu_probe.tick(host)
            for name, probe in PROBES.items():
                sweep = run_probe(name, probe, host, pytest.fail)
                asks = name in (*CARD_PROBES, "job")
                assert sweep.error == ("driver_not_loaded" if gone and asks else "")
                bad = {Reason.IMPLAUSIBLE, Reason.NOT_READ, Reason.NO_PERMISSION}
                if name == "port":  # one without a link has no rate
                    bad.remove(Reason.NOT_READ)
                assert not any(reason in bad for reasons in sweep.reasons for reason in reasons)


@given(st.sampled_from(EVERYTHING.node_names()), st.floats(0, 200), st.floats(0, 100))
@settings(max_examples=200, deadline=None)
def test_counters_never_fall_within_an_epoch(node: str, t: float, later: float) -> None:
    clock = Clock()
    host = EVERYTHING.host(node, clock, 0)
    if not EVERYTHING.gpu_count(node):
        return
    slots = range(EVERYTHING.gpu_count(node))
    first = [host.card(slot, t) for slot in slots]
    then = [host.card(slot, t + later) for slot in slots]
    for one, other in zip(first, then, strict=True):
        before, after = one.totals(t), other.totals(t + later)
        for name in ("power_cap_s", "sw_thermal_s", "hw_thermal_s", "hw_brake_s"):
            grown = getattr(after, name) - getattr(before, name)
            if one.epoch == other.epoch:
                assert -1e-9 <= grown <= later + 1e-6
        if one.epoch == other.epoch:
            assert -1e-6 <= after.energy_j - before.energy_j <= 720 * later + 1e-6


@given(st.integers(0, 2**40), st.floats(0, 1e6))
@settings(max_examples=50, deadline=None)
def test_load_and_idleness_are_coherent(seed: int, t: float) -> None:
    for model in ("H100", "H200", "A100", "RTX 4090", "T4"):
        text = f'[fleet]\nnodes=1\ngpus=4\nseed={seed}\nmodel="{model}"\n'
        text += '[[load]]\ngpu=[0,1]\n[[load]]\ngpu=2\nkind="idle"\n'
        clock = Clock()
        clock.t = t
        host = parse(text.encode()).host("gpu-001", clock, 0)
        busy, idle = card(host, 0), card(host, 2)
        limit = number(busy["power_limit_w"])
        assert 90 <= number(busy["util_pct"]) <= 100
        assert number(idle["util_pct"]) == 0
        assert 0.85 * limit < number(busy["power_w"]) <= limit
        assert number(idle["power_w"]) < 0.2 * limit
        assert number(busy["sm_clock_mhz"]) > 3 * number(idle["sm_clock_mhz"])
        assert number(busy["temperature_c"]) > number(idle["temperature_c"]) + 15
        assert idle["clock_reasons"] == 1
        assert busy["clock_reasons"] == (0 if model == "RTX 4090" else 4)
        assert busy["pcie_gen"] == busy["pcie_gen_max"] == idle["pcie_gen_max"]
        assert idle["pcie_gen"] == (1 if model in ("RTX 4090", "T4") else idle["pcie_gen_max"])
        assert idle["pcie_width"] == 16


def test_h100_under_load_looks_like_one(clock: Clock, play: Play) -> None:
    host = play("[fleet]\nnodes = 1\n[[load]]\n")
    rows = []
    for clock.t in range(600):
        rows += [gpu.read("ring") for gpu in host.gpus()]
    assert 670 < mean(number(row["power_w"]) for row in rows) < 700
    assert 94 < mean(number(row["util_pct"]) for row in rows) < 96
    baseline = {1740.0, 1755.0, 1770.0}
    assert {number(row["sm_clock_mhz"]) for row in rows} <= {
        clock + step for clock in baseline for step in (-15, 0, 15)
    }
    assert len({(row["power_w"], row["util_pct"]) for row in rows}) > 1000  # it lives


def test_the_busy_clock_and_h2d_match_the_baselines(clock: Clock, play: Play) -> None:
    text = "[fleet]\nnodes = 1\ngpus = 3\nseed = 5\n[[load]]\n"
    lines = [line.split(",") for line in parse(text.encode()).baseline_csv().splitlines()[1:]]
    want = {(entity, key.partition("/")[0]): float(value) for _, entity, key, value, _, _ in lines}
    host = play(text)
    for gpu in host.gpus():
        clocks, rates = [], []
        for clock.t in range(0, 3000, 10):
            clocks.append(number(gpu.read("ring")["sm_clock_mhz"]))
            result = host.run_bench("h2d", {"gpu_uuid": gpu.uuid})
            assert (result.status, result.unit, len(result.samples)) == ("ok", "GB/s", 5)
            assert result.value == median(result.samples)
            rates.append(result.value or 0.0)
        assert mean(clocks) == pytest.approx(want[f"gpu:{gpu.uuid}", "sm_clock_busy_mhz"], rel=0.002)
        assert mean(rates) == pytest.approx(want[f"gpu:{gpu.uuid}", "h2d"], rel=0.002)
        spread = (sum((rate / mean(rates) - 1) ** 2 for rate in rates) / len(rates)) ** 0.5
        assert 0.005 < spread < 0.009


def test_two_processes_see_the_same_machine(clock: Clock, everything: Scenario) -> None:
    script = (
        "import sys, json\nfrom pathlib import Path\nfrom gpufleet_agent.scenario import load\n"
        "fleet = load(Path(sys.argv[1]))\nout = []\n"
        "for node in ('gpu-004', 'gpu-013', 'gpu-015'):\n"
        "    host = fleet.host(node, lambda: 83.25, 1_700_000_000_000_000)\n"
        "    out.append([dict(host.node().attributes), dict(host.read('host'))])\n"
        "    out.append([[gpu.uuid, repr(gpu.read('gpu')), dict(gpu.identity())] for gpu in host.gpus()])\n"
        "print(json.dumps(out))\n"
    )
    command = [sys.executable, "-c", script, str(SCENARIOS / "everything.toml")]
    there = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    clock.t = 83.25
    here: list[object] = []
    for node in ("gpu-004", "gpu-013", "gpu-015"):
        host = everything.host(node, clock, 1_700_000_000_000_000)
        here.append([dict(host.node().attributes), dict(host.read("host"))])
        here.append([[gpu.uuid, repr(gpu.read("gpu")), dict(gpu.identity())] for gpu in host.gpus()])
    assert json.loads(json.dumps(here)) == there


def test_seed_and_node_make_the_boards(play: Play) -> None:
    def boards(seed: int, node: str) -> list[str]:
        return [gpu.uuid for gpu in play(f"[fleet]\nnodes = 2\nseed = {seed}\n", node).gpus()]

    assert boards(1, "gpu-001") == boards(1, "gpu-001")
    assert not set(boards(1, "gpu-001")) & set(boards(1, "gpu-002"))
    assert not set(boards(1, "gpu-001")) & set(boards(2, "gpu-001"))


def test_about_one_card_in_ten_idles_but_none_that_has_a_fault(clock: Clock, play: Play) -> None:
    fleet = parse(
        b'[fleet]\nnodes = 60\n[[fault]]\nnode = "gpu-[001-030]"\ngpu = "*"\nkind = "clock_pinned"\n'
    )
    idle = [
        node
        for node in fleet.node_names()
        for gpu in fleet.host(node, clock, 0).gpus()
        if gpu.read("gpu")["clock_reasons"] == 1
    ]
    assert min(idle) > "gpu-030"
    assert 10 < len(idle) < 40


# ---- faults: before, while, after ----


WINDOW = 'at = 10\nuntil = 70\nnode = "gpu-001"\ngpu = 1\n'


def faulty(kind: str, params: str = "", more: str = "[[load]]\n") -> str:
    return (
        f"[fleet]\nnodes = 1\ngpus = 3\n{more}[[fault]]\n{WINDOW}kind = '{kind}'\nparams = {{ {params} }}\n"
    )


@pytest.mark.parametrize(
    ("kind", "params", "column", "normal", "hit"),
    [
        ("hw_thermal", "", "clock_reasons", 4, 104),
        ("hw_brake", "", "clock_reasons", 4, 136),
        ("clock_pinned", "mhz = 1005", "sm_clock_mhz", None, 1005),
        ("clock_pinned", "", "clock_reasons", 4, 0),
        ("sw_power_cap", "limit_w = 500", "power_limit_w", 700, 500),
        ("sw_power_cap", "", "clock_reasons", 4, 4),
        ("pcie_width", "width = 4", "pcie_width", 16, 4),
        ("pcie_gen", "gen = 3", "pcie_gen", 5, 3),
    ],
)
def test_a_fault_is_there_in_its_window_and_on_its_card_only(
    clock: Clock, play: Play, kind: str, params: str, column: str, normal: float | None, hit: float
) -> None:
    host = play(faulty(kind, params))
    for clock.t in (0, 9.9, 10, 11, 69.9, 70, 1000):
        inside = 10 <= clock.t < 70
        values = [card(host, index)[column] for index in range(3)]
        assert (values[1] == hit) == (inside or normal == hit)
        if normal is not None:
            assert values[0] == values[2] == normal
            assert inside or values[1] == normal


@pytest.mark.parametrize(
    ("kind", "column"), [("hw_thermal", "hw_thermal_s_total"), ("hw_brake", "hw_brake_s_total")]
)
@pytest.mark.parametrize("duty", [1.0, 0.7, 0.3])
def test_slowed_time_grows_by_the_duty_and_the_clock_is_cut(
    clock: Clock, play: Play, kind: str, column: str, duty: float
) -> None:
    host = play(faulty(kind, f"duty = {duty}, ratio = 0.4"))
    rows = []
    for clock.t in range(81):
        rows.append(card(host, 1))
    grown = [number(row[column]) for row in rows]
    assert grown[10] == 0
    assert grown[70] == grown[80] == pytest.approx(60 * duty)
    cut = [row for row in rows if number(row["sm_clock_mhz"]) < 900]
    assert len(cut) == round(60 * duty)
    assert all(number(row["clock_reasons"]) >= 64 for row in cut)
    assert all(number(row["power_w"]) < 500 for row in cut)
    assert number(rows[80]["power_cap_s_total"]) - number(rows[0]["power_cap_s_total"]) == pytest.approx(
        80 - 60 * duty
    )


def test_heat_comes_and_goes_slowly(clock: Clock, play: Play) -> None:
    host = play(faulty("hw_thermal"))
    heat = []
    for clock.t in range(0, 400):
        heat.append(number(card(host, 1)["temperature_c"]))
    assert heat[0] == heat[9] < 70
    assert 88 <= heat[69] <= 92
    assert max(abs(b - a) for a, b in pairwise(heat)) <= 5
    assert heat[399] == heat[0]
    assert number(card(host, 1)["temperature_margin_c"]) > 15


def test_an_idle_card_does_not_overheat_but_a_brake_shows(clock: Clock, play: Play) -> None:
    clock.t = 20
    idle = "[[load]]\nkind = 'idle'\n"
    assert card(play(faulty("hw_thermal", more=idle)), 1)["clock_reasons"] == 1
    braked = card(play(faulty("hw_brake", more=idle)), 1)
    assert (braked["clock_reasons"], braked["hw_brake_s_total"]) == (137, 10.0)


@pytest.mark.parametrize(
    ("kind", "params", "left"),
    [("h2d_drop", "loss = 0.2", 0.8), ("pcie_width", "", 0.5), ("pcie_gen", "gen=4", 0.484)],
)
def test_what_a_link_fault_leaves_of_the_bandwidth(
    clock: Clock, play: Play, kind: str, params: str, left: float
) -> None:
    host = play(faulty(kind, params))

    def rate(t: float) -> float:
        clock.t = t
        return host.run_bench("h2d", {"pci": "0000:43:00.0"}).value or 0.0

    assert rate(20) / rate(5) == pytest.approx(left, abs=0.04)
    assert rate(75) / rate(5) == pytest.approx(1, abs=0.05)
    if kind == "h2d_drop":
        clock.t = 20
        assert card(host, 1)["pcie_width"] == 16


def test_benches_that_cannot_run_say_why(clock: Clock, play: Play) -> None:
    host = play(faulty("card_lost"))
    assert host.run_bench("matmul", {}).status == "unsupported"
    assert host.run_bench("h2d", {"pci": "0000:00:00.0"}).status == "failed"
    clock.t = 20
    lost = host.run_bench("h2d", {"pci": "0000:43:00.0"})
    assert (lost.status, lost.value) == ("failed", None)
    assert play(faulty("driver_hang")).run_bench("h2d", {"pci": "0000:43:00.0"}).status == "hung"
    gone = play("[fleet]\nnodes = 1\n[[fault]]\nnode = '*'\nkind = 'driver_not_loaded'\n")
    assert gone.run_bench("h2d", {"pci": "0000:43:00.0"}).reason.startswith("driver_not_loaded")


@pytest.mark.parametrize("bus", ["all_ones", "absent"])
def test_a_lost_card_on_the_bus(clock: Clock, play: Play, bus: str) -> None:
    host = play(faulty("card_lost", f"bus = '{bus}'"))
    clock.t = 10
    assert seen(host)["0000:43:00.0"] == "Lost"
    assert host.gpus()[1].uuid
    rows = {row["pci"]: row for row in host.pci_devices()}
    if bus == "absent":
        assert "0000:43:00.0" not in rows
    else:
        gone = rows["0000:43:00.0"]
        assert gone["present"] is False
        assert gone["pcie_width"] == Null(Reason.FAILED, "EIO")
    clock.t = 70
    assert isinstance(seen(host)["0000:43:00.0"], dict)
    assert all(row["present"] is True for row in host.pci_devices())


@pytest.mark.parametrize("code", KINDS["driver_not_loaded"].params["code"].words)
def test_a_driver_that_is_gone(clock: Clock, play: Play, code: str) -> None:
    host = play(
        "[fleet]\nnodes = 1\ngpus = 2\n[[fault]]\nat = 10\nuntil = 70\nnode='*'\nkind = 'driver_not_loaded'\n"
        f"params = {{ code = '{code}' }}\n"
    )
    before = number(card(host)["energy_j_total"])
    assert host.epoch == 1
    clock.t = 10
    with pytest.raises(DriverGone) as caught:
        host.gpus()
    assert caught.value.code == code
    assert "simulated" not in host.node().attributes["driver"]
    assert "driver_version" not in host.node().attributes
    drivers = {row["bound_driver"] for row in host.pci_devices()}
    assert drivers == {"" if code == "driver_not_loaded" else "nvidia"}
    clock.t = 70
    assert host.epoch == 2
    assert number(card(host)["energy_j_total"]) < before


def test_a_reboot_is_another_boot_with_new_counters_and_a_cool_card(clock: Clock, play: Play) -> None:
    host = play("[fleet]\nnodes = 1\ngpus = 2\n[[load]]\n[[fault]]\nat = 10\nnode = '*'\nkind = 'reboot'\n")
    boot, up = host.boot_id, number(host.read("host")["uptime_s"])
    assert up > 3 * 86400
    warm = number(card(host)["temperature_c"])
    assert host.running()
    clock.t = 10
    assert not host.running()
    clock.t = 75
    assert host.running()
    assert host.boot_id != boot
    assert host.node().attributes["boot_id"] == host.boot_id
    assert host.epoch == 2
    assert host.read("host")["uptime_s"] == 5
    row = card(host)
    assert number(row["temperature_c"]) < warm - 10
    assert row["power_cap_s_total"] == 5
    assert 3000 < number(row["energy_j_total"]) < 3500
    assert (
        host.node().attributes["machine_id"] == play("[fleet]\nnodes = 1\n").node().attributes["machine_id"]
    )


def test_a_swapped_board_sits_in_the_same_slot(clock: Clock, play: Play) -> None:
    host = play(f"[fleet]\nnodes = 1\ngpus = 3\n[[fault]]\n{WINDOW}kind = 'board_swap'\n")
    old = host.gpus()
    before = [dict(gpu.identity()) for gpu in old]
    clock.t = 10
    after = [dict(gpu.identity()) for gpu in host.gpus()]
    assert (after[0], after[2]) == (before[0], before[2])
    assert {key for key in after[1] if after[1][key] != before[1][key]} == {"uuid", "serial"}
    assert host.epoch == 2
    with pytest.raises(Lost):
        old[1].read("gpu")


def test_a_host_keeps_its_cards_between_sweeps(clock: Clock, play: Play) -> None:
    host = play("[fleet]\nnodes = 1\n")
    first = host.gpus()
    clock.t = 30
    assert all(one is other for one, other in zip(first, host.gpus(), strict=True))
    gpu_probe.tick(host)
    assert first[0].ring.values["power_w"]


# ---- drills ----


def test_A01_idle_consumer_card_drops_to_gen_1(play: Play) -> None:
    host = play(
        '[fleet]\nnodes = 1\ngpus = 2\nmodel = "RTX 4090"\n[[load]]\n[[load]]\ngpu = 1\nkind = "idle"\n'
    )
    busy, idle = card(host, 0), card(host, 1)
    assert (idle["util_pct"], idle["pstate"], idle["clock_reasons"]) == (0, 8, 1)
    assert (idle["pcie_gen"], idle["pcie_gen_max"], idle["pcie_width"], idle["pcie_width_max"]) == (
        1,
        4,
        16,
        16,
    )
    assert (busy["pcie_gen"], busy["pcie_gen_max"]) == (4, 4)
    bus = {row["pci"]: row["pcie_gen"] for row in host.pci_devices()}
    assert list(bus.values()) == [4, 1]


def test_B01_one_card_lost_leaves_seven_full_rows(clock: Clock, play: Play) -> None:
    host = play('[fleet]\nnodes = 1\n[[fault]]\nat = 120\nnode = "gpu-001"\ngpu = 3\nkind = "card_lost"\n')
    clock.t = 121
    gpu_probe.tick(host)
    sweep = run_probe("gpu", gpu_probe, host, pytest.fail)
    names = [metric.name for metric in gpu_probe.METRICS]
    states = [row[names.index("state")] for row in sweep.rows]
    assert (sweep.error, states) == ("", ["ok"] * 3 + ["lost"] + ["ok"] * 4)
    fan = names.index("fan_pct")  # such cards are cooled by their host
    assert all(None not in row[:fan] + row[fan + 1 :] for index, row in enumerate(sweep.rows) if index != 3)
    uuid = names.index("gpu_uuid")
    assert str(sweep.rows[3][uuid]).startswith("GPU-")


def test_B03_indices_shift_after_a_reboot_and_identities_do_not(clock: Clock, play: Play) -> None:
    host = play(
        '[fleet]\nnodes = 1\ngpus = 4\n[[fault]]\nat = 10\nnode = "*"\ngpu = 1\nkind = "card_lost"\n'
        '[[fault]]\nat = 60\nnode = "*"\nkind = "reboot"\n'
    )

    def table() -> list[tuple[int, str, str]]:
        return [(gpu.index, gpu.uuid, gpu.pci) for gpu in host.gpus()]

    before = table()
    clock.t = 30
    assert table() == before
    clock.t = 130
    left = [before[0], before[2], before[3]]
    assert table() == [(index, uuid, pci) for index, (_, uuid, pci) in enumerate(left)]
    assert len(list(host.pci_devices())) == 3


def test_B05_the_five_hosts(play: Play) -> None:
    text = (
        '[fleet]\nnodes = "gpu-a02,gpu-a03,gpu-a04,cpu-01,gpu-new"\n[[node]]\nnode = "cpu-01"\ngpus = 0\n'
        '[[node]]\nnode = "gpu-new"\ngpus = 7\n'
        '[[fault]]\nnode = "gpu-a02"\ngpu = 5\nkind = "card_absent"\nparams = { where = "driver" }\n'
        '[[fault]]\nnode = "gpu-a03"\ngpu = 5\nkind = "card_absent"\nparams = { where = "bus" }\n'
        '[[fault]]\nnode = "gpu-a04"\nkind = "driver_not_loaded"\n'
    )
    found: dict[str, tuple[int | str, int]] = {}
    for node in ("gpu-a02", "gpu-a03", "gpu-a04", "cpu-01", "gpu-new"):
        host = play(text, node)
        try:
            listed: int | str = len(host.gpus())
        except DriverGone as gone:
            listed = gone.code
        found[node] = (listed, len(list(host.pci_devices())))
    assert found == {
        "gpu-a02": (7, 8),
        "gpu-a03": (7, 7),
        "gpu-a04": ("driver_not_loaded", 8),
        "cpu-01": (0, 0),
        "gpu-new": (7, 7),
    }
    assert play(text, "cpu-01").node().attributes["driver"] == "no NVIDIA driver"


class Watch:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.inside = False

    def enter(self, card: str, call: str) -> None:
        self.calls.append((card, call))
        self.inside = True

    def leave(self) -> None:
        self.inside = False


HANG = (
    '[fleet]\nnodes = 1\n[[fault]]\nat = 10\nuntil = 70\nnode = "gpu-001"\ngpu = 5\nkind = "driver_hang"\n'
    'params = { call = "temperature" }\n'
)


def test_B07_a_hang_in_one_process_is_a_virtual_time_out(clock: Clock) -> None:
    watch = Watch()
    host = parse(HANG.encode()).host("gpu-001", clock, 0, watch)
    clock.t = 10
    rows = seen(host)
    assert [pci for pci, row in rows.items() if row == "Hung"] == ["0000:c3:00.0"]
    assert ("0000:c3:00.0", "temperature") in watch.calls
    clock.t = 70
    assert "Hung" not in seen(host).values()


def test_B07_a_blocked_call_is_named_and_does_not_return(clock: Clock) -> None:
    watch = Watch()
    host = SimulatedHost(parse(HANG.encode()), "gpu-001", 0, clock, watch, hang="block")
    clock.t = 10
    hung: Gpu = host.gpus()[5]
    done: list[Row] = []
    thread = threading.Thread(target=lambda: done.append(hung.read("gpu")))
    thread.start()
    deadline = time.monotonic() + 90
    while not (watch.inside and watch.calls[-1] == ("0000:c3:00.0", "temperature")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.3)
    assert not done
    assert watch.inside
    clock.t = 70
    thread.join(90)
    assert len(done) == 1
    assert not watch.inside


# ---- health, and kinds of cards ----


def health(host: SimulatedHost, index: int = 1) -> Row:
    return host.gpus()[index].read("gpu_health")


@pytest.mark.parametrize(
    ("kind", "params", "column", "normal", "hit"),
    [
        ("sram_threshold", "", "ecc_sram_threshold_exceeded", False, True),
        ("remap_pending", "", "remap_pending", False, True),
        ("remap_failed", "", "remap_failed", False, True),
        ("remap_failed", "", "remap_banks_none", 0, 1),
        ("recovery_action", "action = 'node_reboot'", "recovery_action", "none", "node_reboot"),
        ("mig_on", "", "mig_enabled", False, True),
        ("mig_on", "", "remap_failed", False, Null(Reason.NOT_SUPPORTED, "NVML 3")),
        ("mig_on", "", "ecc_uncorrectable_total", 0, Null(Reason.NOT_SUPPORTED, "NVML 3")),
        ("persistence_off", "", "persistence_enabled", True, False),
        ("fabric_stuck", "state = 'not_started'", "fabric_state", "completed", "not_started"),
        ("sw_power_cap", "limit_w = 400", "power_limit_requested_w", 700, 400),
    ],
)
def test_an_ailment_is_there_in_its_window_and_on_its_card_only(
    clock: Clock, play: Play, kind: str, params: str, column: str, normal: Cell, hit: Cell
) -> None:
    host = play(faulty(kind, params))
    for clock.t in (0, 9.9, 10, 69.9, 70, 1000):
        values = [health(host, index)[column] for index in range(3)]
        assert values == [normal, hit if 10 <= clock.t < 70 else normal, normal]


def test_uncorrectable_errors_come_once_and_the_lifetime_count_outlives_a_reload(
    clock: Clock, play: Play
) -> None:
    reboot = '[[fault]]\nat = 30\nnode = "*"\nkind = "reboot"\n'
    host = play(faulty("ecc_uncorrectable", "count = 3, where = 'sram'") + reboot)

    def counts() -> list[Cell]:
        names = ("ecc_uncorrectable_total", "ecc_sram_uncorrectable_total", "ecc_dram_uncorrectable_total",
                 "ecc_uncorrectable_lifetime_total")  # fmt: skip
        return [health(host)[name] for name in names]

    seen = []
    for clock.t in (9, 10, 29, 95, 200):
        seen.append(counts())
    assert seen == [[0, 0, 0, 0], [3, 3, 0, 3], [3, 3, 0, 3], [0, 0, 0, 3], [0, 0, 0, 3]]


@pytest.mark.parametrize(
    ("kind", "params", "column", "rate"),
    [
        ("ecc_corrected", "per_hour = 7200", "ecc_dram_corrected_total", 2.0),
        ("ecc_corrected", "per_hour = 7200, where = 'sram'", "ecc_corrected_lifetime_total", 2.0),
        ("pcie_replays", "per_minute = 30", "pcie_replay_total", 0.5),
    ],
)
def test_errors_that_trickle_grow_by_their_rate_and_stay(
    clock: Clock, play: Play, kind: str, params: str, column: str, rate: float
) -> None:
    host = play(faulty(kind, params))
    seen = []
    for clock.t in (0, 10, 40, 70, 500):
        seen.append(health(host)[column])
    assert seen == [0, 0, 30 * rate, 60 * rate, 60 * rate]
    assert health(host, 0)[column] == 0


def test_a_swapped_board_has_a_clean_life(clock: Clock, play: Play) -> None:
    swap = '[[fault]]\nat = 30\nnode = "*"\ngpu = 1\nkind = "board_swap"\n'
    host = play(faulty("ecc_uncorrectable") + swap)
    clock.t = 20
    assert health(host)["ecc_uncorrectable_lifetime_total"] == 1
    clock.t = 31
    assert health(host)["ecc_uncorrectable_lifetime_total"] == 0


def test_A07_a_card_split_by_mig_has_no_utilisation_but_a_clock(clock: Clock, play: Play) -> None:
    host = play(faulty("mig_on"))
    clock.t = 20
    gpu_probe.tick(host)
    sweep = run_probe("gpu", gpu_probe, host, pytest.fail)
    names = [metric.name for metric in gpu_probe.METRICS]
    split, whole = (dict(zip(names, sweep.rows[index], strict=True)) for index in (1, 0))
    for name in ("util_pct", "util_pct_min", "util_pct_p10", "mem_util_pct"):
        assert split[name] is None
        assert whole[name] is not None
    assert set(sweep.reasons[1]) == {Reason.NOT_SUPPORTED}
    assert split["sm_clock_mhz"] is not None


@pytest.mark.parametrize(
    ("model", "kind", "absent"),
    [
        ("GB10", "integrated", {"mem_used_bytes", "mem_total_bytes", "pcie_gen", "pcie_width"}),
        ("vGPU", "vgpu", {"temperature_c", "power_w", "power_limit_w", "pcie_gen", "energy_j_total"}),
        ("RTX 6000 Ada", "workstation", {"mem_temperature_c", "sm_active_pct"}),
        ("L40S", "datacenter", {"mem_temperature_c", "fan_pct", "mem_active_pct"}),
        ("GH200", "datacenter", {"fan_pct"}),
        ("RTX 4090", "consumer", {"mem_temperature_c"}),
    ],
)
def test_A05_A12_kinds_of_cards(clock: Clock, play: Play, model: str, kind: str, absent: set[str]) -> None:
    host = play(f'[fleet]\nnodes = 1\ngpus = 1\nmodel = "{model}"\n[[load]]\n')
    row, identity = card(host), host.gpus()[0].identity()
    assert identity["card_kind"] == kind
    missing = {name for name, cell in row.items() if isinstance(cell, Null)}
    assert absent <= missing
    if model == "GH200":
        assert missing == absent
    assert {cell.reason for cell in row.values() if isinstance(cell, Null)} <= {Reason.NOT_SUPPORTED}
    assert number(row["util_pct"]) > 80
    assert number(row["sm_clock_mhz"]) > 1000
    for name in ("gpu", "gpu_health", "pci"):
        sweep = run_probe(name, PROBES[name], host, pytest.fail)
        assert (sweep.error, len(sweep.rows)) == ("", 1)
        assert {reason for reasons in sweep.reasons for reason in reasons} <= {Reason.NOT_SUPPORTED}


@pytest.mark.parametrize("code", ["gpu_is_lost", "unknown_error", "reset_required"])
def test_cards_are_lost_in_several_ways(clock: Clock, play: Play, code: str) -> None:
    host = play(faulty("card_lost", f"code = '{code}', bus = 'ok'"))
    clock.t = 20
    with pytest.raises(Lost) as caught:
        card(host, 1)
    assert caught.value.code == code
    assert all(row["present"] is True for row in host.pci_devices())


def test_an_excluded_card_is_listed_by_the_bus_alone(clock: Clock, play: Play) -> None:
    host = play(faulty("card_absent", "where = 'excluded'"))
    clock.t = 20
    assert len(host.gpus()) == 2
    assert [row["excluded"] for row in host.pci_devices()] == [False, True, False]
    assert [row["bound_driver"] for row in host.pci_devices()] == ["nvidia"] * 3


def test_B09_an_upgraded_library_beside_an_old_driver(clock: Clock, play: Play) -> None:
    host = play(
        "[fleet]\nnodes = 1\ngpus = 1\n[[fault]]\nat = 10\nnode = '*'\nkind = 'library_upgraded'\n"
        "params = { version = '570.144.03' }\n"
    )
    before = health(host, 0)
    assert before["driver_version"] == before["library_version"] == host.node().attributes["library_version"]
    clock.t = 10
    after = health(host, 0)
    assert (after["driver_version"], after["library_version"]) == (before["driver_version"], "570.144.03")
    assert "570.144.03" in host.node().attributes["driver"]
    assert number(card(host)["temperature_c"]) > 0  # what runs goes on
