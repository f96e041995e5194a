"""Cards that are lost, asleep, handed over or in trouble, and a driver that is not there."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpufleet.metric import Cell, Null, Reason, Row
from gpufleet_agent.drivers import DriverGone, Gpu, Host, Hung, Lost
from gpufleet_agent.drivers.amdgpu import AmdHost
from gpufleet_agent.probe import Sweep
from gpufleet_agent.probes import gpu

Tree = Callable[[str], Path]
FIRST, SECOND = "0000:63:00.0", "0000:c3:00.0"
ASLEEP = Null(Reason.NOT_READ, "suspended")


class Watch:
    """Progress that remembers."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.inside = 0

    def enter(self, card: str, call: str) -> None:
        self.calls.append((card, call))
        self.inside += 1

    def leave(self) -> None:
        self.inside -= 1


def device(root: Path, pci: str) -> Path:
    return (root / "sys/bus/pci/devices" / pci).resolve()


def hwmon(root: Path, pci: str) -> Path:
    return next((device(root, pci) / "hwmon").iterdir())


def unplug(root: Path, pci: str) -> None:
    shutil.rmtree(device(root, pci))
    (root / "sys/bus/pci/devices" / pci).unlink()
    (root / "sys/bus/pci/drivers/amdgpu" / pci).unlink()


def unbind(root: Path, pci: str, to: str = "") -> None:
    (root / "sys/bus/pci/drivers/amdgpu" / pci).unlink()
    (device(root, pci) / "driver").unlink()
    if to:
        (root / "sys/bus/pci/drivers" / to).mkdir(exist_ok=True)
        (device(root, pci) / "driver").symlink_to(root / "sys/bus/pci/drivers" / to)


def memory_errors(card: Gpu) -> set[object]:
    row = card.read("gpu_health")
    return {row["ecc_corrected_total"], row["ecc_uncorrectable_total"]}


def states(found: Sweep) -> list[tuple[Cell | None, Cell | None, Cell | None]]:
    names = [metric.name for metric in gpu.METRICS]
    rows = [dict(zip(names, row, strict=True)) for row in found.rows]
    return [(row["pci"], row["state"], row["gpu_uuid"]) for row in rows]


def refuse(monkeypatch: pytest.MonkeyPatch, call: str, code: int, names: tuple[str, ...] = ()) -> None:
    """Let opening or reading of files with these names (none = all of the card's) fail."""
    opened: dict[int, str] = {}
    real_open, real_read = os.open, os.read

    def open_(path: Path, flags: int) -> int:
        name = Path(path).name
        if call == "open" and (not names or name in names):
            raise OSError(code, os.strerror(code))
        opened[file := real_open(path, flags)] = name
        return file

    def read(file: int, size: int) -> bytes:
        if call == "read" and (not names or opened.get(file) in names):
            raise OSError(code, os.strerror(code))
        return real_read(file, size)

    monkeypatch.setattr("gpufleet_agent.drivers.amdgpu_files.os.open", open_)
    monkeypatch.setattr("gpufleet_agent.drivers.amdgpu_files.os.read", read)


def test_card_gone_from_the_bus_is_lost_and_keeps_its_name(
    tree: Tree, sweep: Callable[[Host], Sweep]
) -> None:
    root = tree("amd-mi210")
    host = AmdHost(root)
    before = states(sweep(host))
    assert [state for _, state, _ in before] == ["ok", "ok"]
    unplug(root, FIRST)
    after = states(sweep(host))
    assert after == [(FIRST, "lost", "GPU-5e6a3b1c90d24f17"), (SECOND, "ok", "GPU-a8c1f0d2734b9e65")]
    with pytest.raises(Lost) as lost:
        host.gpus()[0].identity()
    assert lost.value.code == "gone_from_bus"
    # an agent that starts now never knew it
    assert states(sweep(AmdHost(root))) == after[1:]


def test_every_card_gone_at_run_time_is_every_card_lost(tree: Tree, sweep: Callable[[Host], Sweep]) -> None:
    root = tree("amd-mi210")
    host = AmdHost(root)
    sweep(host)
    for pci in (FIRST, SECOND):
        unplug(root, pci)
    assert [state for _, state, _ in states(sweep(host))] == ["lost", "lost"]


def test_card_that_reads_all_ones_is_lost(tree: Tree, sweep: Callable[[Host], Sweep]) -> None:
    root = tree("amd-mi210")
    (device(root, SECOND) / "config").write_bytes(b"\xff" * 64)
    host = AmdHost(root)
    assert [state for _, state, _ in states(sweep(host))] == ["ok", "lost"]
    for group in ("ring", "gpu", "gpu_health"):
        with pytest.raises(Lost) as lost:
            host.gpus()[1].read(group)
        assert lost.value.code == "all_ones"


def test_card_that_goes_in_the_middle_of_a_read_is_lost_not_poor_in_sensors(tree: Tree) -> None:
    root = tree("amd-mi210")

    class Puller(Watch):
        def enter(self, card: str, call: str) -> None:
            super().enter(card, call)
            if call == "temp2_input":
                unplug(root, FIRST)

    card = AmdHost(root, Puller()).gpus()[0]
    with pytest.raises(Lost):
        card.read("gpu")


def test_unbound_card_is_lost_and_one_handed_to_a_guest_is_none_of_ours(
    tree: Tree, sweep: Callable[[Host], Sweep]
) -> None:
    root = tree("amd-mi210")
    host = AmdHost(root)
    sweep(host)
    unbind(root, SECOND)
    assert [state for _, state, _ in states(sweep(host))] == ["ok", "lost"]
    with pytest.raises(Lost) as lost:
        host.gpus()[1].read("gpu")
    assert lost.value.code == "driver_unbound"
    (root / "sys/bus/pci/drivers/vfio-pci").mkdir()
    (device(root, SECOND) / "driver").symlink_to(root / "sys/bus/pci/drivers/vfio-pci")
    assert [pci for pci, _, _ in states(sweep(host))] == [FIRST]


def test_card_bound_anew_is_a_new_epoch_and_may_be_another_board(
    tree: Tree, sweep: Callable[[Host], Sweep]
) -> None:
    root = tree("amd-mi210")
    host = AmdHost(root)
    sweep(host)
    assert host.epoch == 1
    link = root / "sys/bus/pci/drivers/amdgpu" / SECOND
    target = os.readlink(link)
    unbind(root, SECOND)
    sweep(host)
    assert host.epoch == 1
    link.symlink_to(target)
    (device(root, SECOND) / "driver").symlink_to(root / "sys/bus/pci/drivers/amdgpu")
    (device(root, SECOND) / "unique_id").write_text("00000000000000ab\n")
    assert states(sweep(host))[1] == (SECOND, "ok", "GPU-00000000000000ab")
    assert host.epoch == 2


def test_reload_between_two_looks_is_seen_by_the_new_directories(
    tree: Tree, sweep: Callable[[Host], Sweep]
) -> None:
    root = tree("amd-mi210")
    host = AmdHost(root)
    sweep(host)
    cards = host.gpus()
    for pci in (FIRST, SECOND):
        drm = device(root, pci) / "drm"
        drm.rename(drm.with_name("old"))
        shutil.copytree(drm.with_name("old"), drm)
    assert host.gpus() != cards
    assert host.epoch == 2
    assert [card.uuid for card in host.gpus()] == [card.uuid for card in cards]
    assert host.epoch == 2


def test_driver_not_loaded(tree: Tree, sweep: Callable[[Host], Sweep]) -> None:
    root = tree("amd-mi210")
    now = [0.0]
    host = AmdHost(root, clock=lambda: now[0])
    sweep(host)
    for pci in (FIRST, SECOND):
        unbind(root, pci)
    shutil.move(root / "sys/bus/pci/drivers/amdgpu", root / "unloaded")
    with pytest.raises(DriverGone) as gone:
        host.gpus()
    assert gone.value.code == "driver_not_loaded"
    assert host.node().attributes["driver"] == "amdgpu 6.7.0"  # the module's directory is still there
    shutil.rmtree(root / "sys/module/amdgpu")
    assert host.node().attributes["driver"] == "amdgpu not loaded"
    # handed to guests, all of them: that is no fault of the driver
    for pci in (FIRST, SECOND):
        (device(root, pci) / "driver").symlink_to(root / "sys/bus/pci/drivers/vfio-pci")
    with pytest.raises(DriverGone):
        host.gpus()  # it looked a moment ago
    now[0] = 31.0
    assert host.gpus() == ()


def test_driver_that_took_no_card_fails(tree: Tree) -> None:
    root = tree("amd-mi210")
    for pci in (FIRST, SECOND):
        unbind(root, pci)
    with pytest.raises(DriverGone) as gone:
        AmdHost(root).gpus()
    assert gone.value.code == "driver_failed"


def test_host_without_cards_has_none(tmp_path: Path, tree: Tree) -> None:
    (tmp_path / "sys/devices").mkdir(parents=True)
    assert AmdHost(tmp_path).gpus() == ()
    # graphics of the processor alone are no card, taken by the driver or not
    root = tree("amd-rx7900")
    unplug(root, "0000:03:00.0")
    assert AmdHost(root).gpus() == ()
    unbind(root, "0000:0d:00.0")
    assert AmdHost(root).gpus() == ()


def test_graphics_of_a_processor_are_known_by_their_north_bridge_too(tree: Tree) -> None:
    root = tree("amd-rx7900")
    (root / "sys/bus/pci/devices/0000:0d:00.2").unlink()
    assert [card.pci for card in AmdHost(root).gpus()] == ["0000:03:00.0"]
    (hwmon(root, "0000:0d:00.0") / "in1_input").unlink()
    assert [card.pci for card in AmdHost(root).gpus()] == ["0000:0d:00.0", "0000:03:00.0"]


def test_console_of_a_server_board_waits_for_no_driver(tree: Tree) -> None:
    root = tree("amd-mi210")
    for pci in (FIRST, SECOND):
        unplug(root, pci)
    console = device(root, "0000:21:00.0")
    (console / "vendor").write_text("0x1002\n")
    assert AmdHost(root).gpus() == ()
    (console / "max_link_speed").write_text("8.0 GT/s PCIe\n")
    with pytest.raises(DriverGone):
        AmdHost(root).gpus()


def test_virtual_function_is_no_card_of_its_own(tree: Tree) -> None:
    root = tree("amd-mi210")
    (device(root, SECOND) / "physfn").symlink_to(device(root, FIRST))
    assert [card.pci for card in AmdHost(root).gpus()] == [FIRST]


@pytest.mark.parametrize("status", ["suspended", "suspending"])
def test_sleeping_card_is_not_woken(tree: Tree, sweep: Callable[[Host], Sweep], status: str) -> None:
    root = tree("amd-mi210")
    watch = Watch()
    (device(root, SECOND) / "power/runtime_status").write_text(f"{status}\n")
    # what cannot be read without waking it
    for name in ("config", "current_link_speed", "gpu_busy_percent", "gpu_metrics"):
        (device(root, SECOND) / name).unlink()
    host = AmdHost(root, watch)
    assert states(sweep(host))[1] == (SECOND, "ok", "GPU-a8c1f0d2734b9e65")
    card = host.gpus()[1]
    for group in ("ring", "gpu", "gpu_health"):
        assert set(card.read(group).values()) == {ASLEEP}
    assert card.identity()["serial"] == "692210000456"
    # these the driver answers from its memory
    assert {call for pci, call in watch.calls if pci == SECOND} <= {
        "unique_id", "device", "revision", "serial_number", "product_name", "product_number", "vbios_version",
        "xgmi_physical_id", "current_compute_partition", "current_memory_partition", "mem_info_vram_total",
    }  # fmt: skip


def test_sleeping_cards_row_says_so_in_every_cell(tree: Tree, sweep: Callable[[Host], Sweep]) -> None:
    root = tree("amd-mi210")
    (device(root, FIRST) / "power/runtime_status").write_text("suspended\n")
    found = sweep(AmdHost(root))
    cells = dict(zip([metric.name for metric in gpu.METRICS], found.rows[0], strict=True))
    assert {name for name, cell in cells.items() if cell is not None} == {
        "gpu_uuid", "gpu_index", "pci", "state", "driver_epoch"
    }  # fmt: skip
    assert set(found.reasons[0]) == {Reason.NOT_READ}


def test_card_in_reset_refuses_and_one_that_fell_asleep_sleeps(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree("amd-mi210")
    card = AmdHost(root).gpus()[0]
    names = ("gpu_busy_percent", "power1_average", "freq1_input")
    refuse(monkeypatch, "read", errno.EPERM, names)
    assert set(card.read("ring").values()) == {Null(Reason.FAILED, "EPERM")}
    row = card.read("gpu")
    assert row["util_pct_p10"] == Null(Reason.FAILED, "EPERM")
    assert row["temperature_c"] == 40.0

    status = device(root, FIRST) / "power/runtime_status"
    real = os.open

    def doze(path: Path, flags: int) -> int:
        if Path(path).name == "gpu_busy_percent":
            status.write_text("suspended\n")
        return real(path, flags)

    monkeypatch.setattr("gpufleet_agent.drivers.amdgpu_files.os.open", doze)
    monkeypatch.setattr("gpufleet_agent.drivers.amdgpu_files.os.read", lambda file, size: _eperm())
    assert set(card.read("ring").values()) == {ASLEEP}


def _eperm() -> bytes:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize(
    ("call", "code", "reason"),
    [
        ("open", errno.ENOENT, Reason.NOT_SUPPORTED),
        ("open", errno.EACCES, Reason.NO_PERMISSION),
        ("open", errno.EPERM, Reason.NO_PERMISSION),
        ("open", errno.EIO, Reason.FAILED),
        ("read", errno.EOPNOTSUPP, Reason.NOT_SUPPORTED),
        ("read", errno.EINVAL, Reason.FAILED),
        ("read", errno.EIO, Reason.FAILED),
        ("read", errno.EBUSY, Reason.FAILED),
        ("read", errno.EPERM, Reason.FAILED),
        ("read", errno.ETIMEDOUT, Reason.FAILED),
    ],
)
def test_why_a_file_gives_nothing(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, call: str, code: int, reason: Reason
) -> None:
    card = AmdHost(tree("amd-mi210")).gpus()[0]
    card.read("gpu")
    refuse(monkeypatch, call, code, ("mem_busy_percent", "gpu_metrics", "power1_cap", "umc_err_count"))
    row = card.read("gpu")
    wanted = Null(reason, errno.errorcode[code])
    assert {row[name] for name in ("mem_util_pct", "clock_reasons", "power_limit_w")} == {wanted}
    assert row["mem_used_bytes"] == 11530240
    assert memory_errors(card) == {wanted}


def test_no_file_of_the_driver_may_be_opened(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    host = AmdHost(tree("amd-mi210"))
    refuse(monkeypatch, "open", errno.EACCES)
    card = host.gpus()[0]
    assert card.uuid == ""
    read = {name: cell for name, cell in card.read("gpu").items() if not name.startswith("pcie_")}
    unspoken = (
        "pstate",
        "power_cap_s_total",
        "sync_boost_s_total",
        "sw_thermal_s_total",
        "hw_thermal_s_total",
        "hw_brake_s_total",
        "sm_active_pct",
        "sm_occupancy_pct",
        "tensor_active_pct",
        "mem_active_pct",
    )
    assert read.pop("fan_pct") == Null(Reason.NOT_READ)
    assert {read.pop(name) for name in unspoken} == {Null(Reason.NOT_SUPPORTED)}
    assert {cell.reason for cell in read.values() if isinstance(cell, Null)} <= {
        Reason.NO_PERMISSION,
        Reason.FAILED,
    }
    assert all(isinstance(cell, Null) for cell in read.values())


def test_without_hwmon_clocks_come_from_the_levels(tree: Tree) -> None:
    root = tree("amd-mi210")
    shutil.rmtree(device(root, SECOND) / "hwmon")
    card = AmdHost(root).gpus()[1]
    nothing = Null(Reason.NOT_SUPPORTED, "ENOENT")
    assert card.read("ring") == {"util_pct": 97, "sm_clock_mhz": 1700.0, "power_w": nothing}
    row = card.read("gpu")
    assert row["mem_clock_mhz"] == 1600.0
    names = ("power_limit_w", "temperature_c", "temperature_margin_c", "mem_temperature_c")
    assert {row[name] for name in names} == {nothing}


def test_hwmon_is_found_by_its_name_and_again_under_another_number(tree: Tree) -> None:
    root = tree("amd-mi210")
    card = AmdHost(root).gpus()[0]
    assert card.read("gpu")["temperature_c"] == 40.0
    folder = hwmon(root, FIRST)
    folder.rename(folder.with_name("hwmon9"))
    other = folder.with_name("hwmon1")
    other.mkdir()
    (other / "name").write_text("jc42\n")
    (other / "temp2_input").write_text("1000\n")
    assert card.read("gpu")["temperature_c"] == 40.0


def test_sensors_are_found_by_their_labels(tree: Tree) -> None:
    root = tree("amd-mi210")
    folder = hwmon(root, FIRST)
    for what in ("label", "input", "crit"):
        (folder / f"temp1_{what}").rename(folder / "kept")
        (folder / f"temp3_{what}").rename(folder / f"temp1_{what}")
        (folder / "kept").rename(folder / f"temp3_{what}")
    row = AmdHost(root).gpus()[0].read("gpu")
    assert (row["temperature_c"], row["mem_temperature_c"]) == (40.0, 44.0)


def test_an_old_card_has_its_edge_alone(tree: Tree) -> None:
    root = tree("amd-mi210")
    folder = hwmon(root, FIRST)
    for path in {*folder.glob("temp[23]_*"), *folder.glob("*_label")}:
        path.unlink()
    row = AmdHost(root).gpus()[0].read("gpu")
    assert (row["temperature_c"], row["temperature_margin_c"]) == (38.0, 62.0)
    assert (row["sm_clock_mhz"], row["mem_clock_mhz"]) == (500.0, 400.0)
    assert row["mem_temperature_c"] == Null(Reason.NOT_SUPPORTED, "no mem")


def test_a_label_that_cannot_be_read_is_no_missing_sensor(tree: Tree) -> None:
    root = tree("amd-mi210")
    label = hwmon(root, FIRST) / "temp3_label"
    label.write_bytes(b"\xff\xfe")
    card = AmdHost(root).gpus()[0]
    assert card.read("gpu")["mem_temperature_c"] == Null(Reason.FAILED, "unparsable")
    label.write_text("mem\n")
    assert card.read("gpu")["mem_temperature_c"] == 44.0


def test_unknown_limit_gives_no_margin(tree: Tree) -> None:
    root = tree("amd-mi210")
    (hwmon(root, FIRST) / "temp2_crit").write_text("0\n")
    row = AmdHost(root).gpus()[0].read("gpu")
    assert (row["temperature_c"], row["temperature_margin_c"]) == (40.0, Null(Reason.NOT_SUPPORTED))


def test_reset_makes_error_counts_unknown_not_smaller(tree: Tree) -> None:
    root = tree("amd-mi210")
    card = AmdHost(root).gpus()[1]
    (device(root, SECOND) / "ras/gfx_err_count").write_text("Query currently inaccessible\n")
    assert memory_errors(card) == {Null(Reason.FAILED, "inaccessible")}


def test_identity_of_cards_that_have_none(tree: Tree) -> None:
    root = tree("amd-mi210")
    (device(root, FIRST) / "unique_id").unlink()
    (device(root, SECOND) / "unique_id").write_text("0000000000000000\n")
    first, second = (card.uuid for card in AmdHost(root).gpus())
    assert first.startswith("GPU-at-")
    assert second.startswith("GPU-at-")
    assert first != second
    # the same after a restart; another one on another machine
    assert [card.uuid for card in AmdHost(root).gpus()] == [first, second]
    (root / "etc/machine-id").write_text("ee6f6c1b8a5f4f0c9d2d4c6b7a891011\n")
    assert AmdHost(root).gpus()[0].uuid != first


@pytest.mark.parametrize("text", ["xyz", "ffffffffffffffff", "12", "5e6a3b1c90d24f17a"])
def test_identity_that_cannot_be_read_now_is_asked_for_again(tree: Tree, text: str) -> None:
    root = tree("amd-mi210")
    (device(root, FIRST) / "unique_id").write_text(text)
    host = AmdHost(root)
    assert host.gpus()[0].uuid == ""
    (device(root, FIRST) / "unique_id").write_text("5e6a3b1c90d24f17\n")
    assert host.gpus()[0].uuid == "GPU-5e6a3b1c90d24f17"


def test_two_cards_with_one_number_are_two_cards(tree: Tree) -> None:
    root = tree("amd-mi210")
    (device(root, SECOND) / "unique_id").write_text("5e6a3b1c90d24f17\n")
    host = AmdHost(root)
    first, second = (card.uuid for card in host.gpus())
    assert first != second
    assert {first[:20], second[:20]} == {"GPU-5e6a3b1c90d24f17"}
    assert [card.uuid for card in host.gpus()] == [first, second]


def test_skipped_card_is_not_touched(tree: Tree, sweep: Callable[[Host], Sweep]) -> None:
    watch = Watch()
    host = AmdHost(tree("amd-mi210"), watch, skip=[SECOND])
    assert [state for _, state, _ in states(sweep(host))] == ["ok", "hung"]
    with pytest.raises(Hung):
        host.gpus()[1].identity()
    assert {card for card, _ in watch.calls} == {FIRST}


def test_every_read_is_announced_and_ended(tree: Tree, sweep: Callable[[Host], Sweep]) -> None:
    watch = Watch()
    host = AmdHost(tree("amd-mi210"), watch)
    sweep(host)
    host.gpus()[0].read("gpu_health")
    assert watch.inside == 0
    calls = {call for card, call in watch.calls if card == FIRST}
    assert calls >= {"gpu_busy_percent", "freq1_input", "power1_average", "temp2_input", "umc_err_count"}


def test_a_driver_directory_that_may_not_be_listed(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    host = AmdHost(tree("amd-mi210"))

    def denied(path: Path) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("gpufleet_agent.drivers.amdgpu.os.listdir", denied)
    with pytest.raises(DriverGone) as gone:
        host.gpus()
    assert gone.value.code == "no_permission"


def test_order_is_that_of_the_drm_nodes(tree: Tree) -> None:
    root = tree("amd-mi210")
    (device(root, FIRST) / "drm/card1").rename(device(root, FIRST) / "drm/card12")
    found: list[Gpu] = list(AmdHost(root).gpus())
    assert [(card.index, card.pci) for card in found] == [(0, SECOND), (1, FIRST)]
    shutil.rmtree(device(root, SECOND) / "drm")
    assert [card.pci for card in AmdHost(root).gpus()] == [FIRST, SECOND]


def test_hostile_values_are_implausible_not_numbers(tree: Tree, rows: Callable[[Host], list[Row]]) -> None:
    root = tree("amd-mi210")
    (device(root, FIRST) / "gpu_busy_percent").write_text("4294967295\n")
    (device(root, FIRST) / "mem_busy_percent").write_text("-1\n")
    (hwmon(root, FIRST) / "temp2_input").write_text("65535000\n")
    (hwmon(root, FIRST) / "power1_average").write_text("\n")
    row = rows(AmdHost(root))[0]
    for name in ("util_pct", "mem_util_pct", "temperature_c", "temperature_margin_c", "power_w"):
        assert name not in row
    assert row["mem_used_bytes"] == 11530240
