"""The machine around simulated cards: healthy it moves, and its faults show where and while they hold."""

import pytest

from gpufleet.metric import Cell, Row
from gpufleet_agent.drivers.simulated import SimulatedHost
from gpufleet_agent.guard import GuardedHost
from gpufleet_agent.sampler import read_inventory
from gpufleet_agent.scenario import Scenario, parse

FAULT = "[fleet]\nnodes = 2\n[[fault]]\nat = 100\nnode = 'gpu-001'\n"


class Play:
    """Two hosts of a scenario, and the time there."""

    def __init__(self, text: str) -> None:
        self.t = 0.0
        self.scenario: Scenario = parse(text.encode())
        self.hosts = [self.scenario.host(node, lambda: self.t, 0) for node in self.scenario.node_names()]

    def host(self, at: float, number: int = 0) -> Row:
        self.t = at
        return self.hosts[number].read("host")

    def dimm(self, at: float, name: str = "mc0/dimm3", number: int = 0) -> dict[str, Cell]:
        self.t = at
        found = {row["dimm"]: dict(row) for row in self.hosts[number].rows("edac")}
        return found[name]


def grown(play: Play, name: str, host: SimulatedHost) -> float:
    values: list[float] = []
    for play.t in (10.0, 3610.0):
        cell = host.read("host")[name]
        assert isinstance(cell, int | float)
        values.append(cell)
    return values[1] - values[0]


def test_a_healthy_host_moves_and_has_nothing_to_complain_of() -> None:
    play = Play("[fleet]\nnodes = 2\n")
    one, other = play.hosts
    assert grown(play, "major_faults_total", one) > 0
    assert grown(play, "psi_io_some_s_total", one) > 0
    assert len({play.host(t)["cpu_clock_mhz"] for t in range(50)}) > 10
    assert len({play.host(t)["clock_error_max_s"] for t in range(50)}) > 10
    row = play.host(50)
    assert row["clock_synchronised"] is True
    assert (row["processes_stuck"], row["stuck_s"], row["kernel_taint"]) == (0, 0.0, 12289)
    assert play.host(50) == row, "the same at the same time"
    assert len(list(one.rows("edac"))) == len(list(other.rows("edac"))) == 18
    assert {row["uncorrectable_total"] for row in one.rows("edac")} == {0}


def test_modules_are_in_the_inventory() -> None:
    play = Play("[fleet]\nnodes = 1\ngpus = 1\n")
    items = {item.entity: item.attributes for item in read_inventory(GuardedHost(play.hosts[0])).items}
    assert items["dimm:mc1/dimm7"]["label"] == "P2-DIMMH1"
    assert sum(entity.startswith("dimm:") for entity in items) == 16
    assert items["node:"]["cpu_governor"] == "performance"


def test_a_virtual_machine_counts_no_memory_errors() -> None:
    host = Play('[fleet]\nnodes = 1\nmodel = "vGPU"\n').hosts[0]
    assert list(host.rows("edac")) == list(host.rows("dimm_item")) == []


@pytest.mark.parametrize(("kind", "column"), [("ce", "corrected"), ("ue", "uncorrectable")])
def test_dimm_errors_begin_at_once_grow_and_stay_counted(kind: str, column: str) -> None:
    play = Play(
        FAULT + f"until = 7300\nkind = 'dimm_errors'\nparams = {{ kind = '{kind}', per_hour = 60 }}\n"
    )
    other = {"ce": "uncorrectable", "ue": "corrected"}[kind]
    for at, count in ((99, 0), (100, 1), (100 + 3600, 61), (7300, 121), (10_000, 121)):
        row = play.dimm(at)
        assert (row[f"{column}_total"], row[f"{column}_day"], row[f"{other}_total"]) == (count, count, 0)
    assert play.dimm(100 + 86_400 + 3600)[f"{column}_day"] == 60
    assert play.dimm(500_000)[f"{column}_day"] == 0
    assert play.dimm(5000, "mc0/dimm2")[f"{column}_total"] == 0
    assert play.dimm(5000, number=1)[f"{column}_total"] == 0


def test_a_reboot_begins_the_counts_anew() -> None:
    text = FAULT + "kind = 'dimm_errors'\n[[fault]]\nat = 1000\nnode = 'gpu-001'\nkind = 'reboot'\n"
    play = Play(text)
    assert play.dimm(900)["corrected_total"] == 134
    assert play.dimm(1060)["corrected_total"] == 1


def test_a_clock_that_nothing_keeps() -> None:
    play = Play(FAULT + "until = 200\nkind = 'clock_unsynced'\nparams = { offset_s = -0.7 }\n")
    assert play.host(99)["clock_synchronised"] is True
    row = play.host(150)
    assert (row["clock_synchronised"], row["clock_offset_s"], row["clock_error_max_s"]) == (False, -0.7, 16.0)
    assert play.host(150, 1)["clock_synchronised"] is True
    assert play.host(200)["clock_synchronised"] is True


@pytest.mark.parametrize("killed", ["no", "yes"])
def test_a_stuck_process_is_as_old_as_was_said_and_ends_with_the_boot(killed: str) -> None:
    text = FAULT + f"kind = 'process_stuck'\nparams = {{ seconds = 600, killed = '{killed}' }}\n"
    play = Play(text + "[[fault]]\nat = 1000\nnode = 'gpu-001'\nkind = 'reboot'\n")
    columns = ("processes_stuck", "stuck_s", "stuck_comm", "processes_unkillable", "unkillable_s")

    def read(at: float) -> tuple[Cell, ...]:
        row = play.host(at)
        return tuple(row[name] for name in columns)

    assert read(99) == (0, 0.0, "", 0, 0.0)
    assert read(160) == (1, 660.0, "python3", int(killed == "yes"), 660.0 if killed == "yes" else 0.0)
    assert read(1100) == (0, 0.0, "", 0, 0.0)


def test_the_finding_is_expected_on_the_module() -> None:
    text = FAULT + "kind = 'dimm_errors'\nparams = { dimm = 'mc1/dimm5' }\n"
    expected = Play(text + "expect = { rule = 'dimm_errors', within_s = 120 }\n").scenario.faults_expected()
    assert [(one.node, one.entity) for one in expected] == [("gpu-001", "dimm:mc1/dimm5")]
