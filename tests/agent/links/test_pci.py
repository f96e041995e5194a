"""Probe pci on whole machines: paths, what both ends of a link can do, their errors; mutilated trees too."""

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpufleet.metric import Cell, Null, Reason, Row
from gpufleet_agent.drivers import files
from gpufleet_agent.drivers.simulated import SimulatedHost
from gpufleet_agent.drivers.sysfs import Sysfs, SysfsHost
from gpufleet_agent.guard import GuardedHost
from gpufleet_agent.probe import check_row, run_probe
from gpufleet_agent.probes import pci
from gpufleet_agent.sampler import read_inventory
from gpufleet_agent.scenario import parse

HOSTS = Path(__file__).parents[2] / "fixtures" / "hosts"
CARD = "0000:d1:00.0"
UNPARSABLE = Null(Reason.FAILED, "unparsable")

Plant = Callable[[str], Path]


def rows(root: Path) -> dict[str, Row]:
    return {str(row["pci"]): row for row in Sysfs(root).pci_devices()}


def shown(cell: Cell) -> object:
    return f"NULL {cell.reason.name.lower()} {cell.code}".strip() if isinstance(cell, Null) else cell


@pytest.mark.parametrize("host", ["hgx-h100", "cloud-vm", "workstation", "grace"])
def test_readings_of_whole_machines(tree: Plant, host: str) -> None:
    names = [metric.name for metric in pci.METRICS]
    read = [{name: shown(row[name]) for name in names} for row in pci.read(SysfsHost(tree(host)))]
    assert read == json.loads((HOSTS / host / "golden" / "pci.json").read_text())


def home(root: Path, address: str) -> Path:
    return (root / "sys/bus/pci/devices" / address).resolve()


def say(root: Path, address: str, **values: str) -> None:
    for name, value in values.items():
        (home(root, address) / name).write_text(f"{value}\n")


def test_a_narrow_card_and_the_errors_of_the_port_above_it(tree: Plant) -> None:
    row = rows(tree("hgx-h100"))[CARD]
    assert row["path"] == "0000:cb:01.0/0000:cc:00.0/0000:cd:02.0"
    assert row["path_links"] == "0000:cc:00.0 5x16/5x16, 0000:d1:00.0 5x8/5x16"
    assert (row["path_width"], row["path_width_max"], row["narrowest"]) == (8, 16, CARD)
    assert (row["aer_corrected_total"], row["aer_nonfatal_total"], row["aer_fatal_total"]) == (7, 1, 0)
    assert row["aer_errors"] == "corrected Timeout 7, nonfatal UnsupReq 1"
    assert (row["port_aer_corrected_total"], row["port_aer_errors"]) == (
        115,
        "corrected RxErr 3, corrected BadTLP 112",
    )


def test_a_narrow_uplink_narrows_everything_below_it(tree: Plant) -> None:
    root = tree("hgx-h100")
    for end in ("0000:16:00.0", "0000:15:01.0"):
        say(root, end, current_link_width="4", current_link_speed="8.0 GT/s PCIe")
    found = rows(root)
    for below in ("0000:1b:00.0", "0000:18:00.0"):
        row = found[below]
        assert (row["pcie_width"], row["path_width"], row["narrowest"]) == (16, 4, "0000:16:00.0")
        assert (row["pcie_gen"], row["path_gen"], row["path_gen_max"], row["slowest"]) == (
            5,
            3,
            5,
            "0000:16:00.0",
        )
    assert found["0000:43:00.0"]["path_width"] == 16


def test_of_equally_narrow_links_the_one_that_could_do_more_is_named(tree: Plant) -> None:
    root = tree("hgx-h100")
    say(root, "0000:16:00.0", current_link_width="8", max_link_width="8")
    say(root, "0000:1b:00.0", current_link_width="8")
    row = rows(root)["0000:1b:00.0"]
    assert (row["path_width"], row["path_width_max"], row["narrowest"]) == (8, 8, "0000:1b:00.0")
    say(root, "0000:16:00.0", max_link_width="16")
    assert rows(root)["0000:1b:00.0"]["narrowest"] == "0000:1b:00.0", "the one next to the card"


@pytest.mark.parametrize(
    ("card", "port", "gen", "possible"),
    [
        ({"max_link_speed": "64.0 GT/s PCIe"}, {}, 5, 5),  # a card faster than its slot
        ({}, {"max_link_speed": "16.0 GT/s PCIe"}, 5, 5),  # no port does less than runs through it
        ({"current_link_speed": "16 GT/s"}, {}, 4, 5),
        ({"current_link_speed": "64.0 GT/s PCIe", "max_link_speed": "64.0 GT/s PCIe"},
         {"max_link_speed": "64.0 GT/s PCIe"}, 5, 5),  # the switch above it is of the fifth
        ({"current_link_speed": "Unknown"}, {}, 5, 5),  # the other end knows
        ({"current_link_speed": "Unknown"}, {"current_link_speed": "Unknown"}, "Unknown", 5),
        ({"max_link_speed": "Unknown"}, {"max_link_speed": "Unknown"}, 5, 5),
    ],
)  # fmt: skip
def test_speeds_of_both_ends(
    tree: Plant, card: dict[str, str], port: dict[str, str], gen: int | str, possible: int
) -> None:
    root = tree("hgx-h100")
    say(root, "0000:1b:00.0", **card)
    say(root, "0000:17:02.0", **port)
    row = rows(root)["0000:1b:00.0"]
    expected = Null(Reason.FAILED, gen) if isinstance(gen, str) else gen
    assert (row["path_gen"], row["path_gen_max"]) == (expected, possible)


def test_a_link_that_trains_anew_is_unknown_not_fine(tree: Plant) -> None:
    root = tree("hgx-h100")
    for end in ("0000:1b:00.0", "0000:17:02.0"):
        say(root, end, current_link_width="0")
    row = rows(root)["0000:1b:00.0"]
    assert row["path_width"] == row["pcie_width"] == row["narrowest"] == Null(Reason.FAILED, "0")
    assert row["path_width_max"] == 16
    assert row["path_links"] == "0000:16:00.0 5x16/5x16, 0000:1b:00.0 5x?/5x16"


def test_a_kernel_that_says_little(tree: Plant) -> None:
    root = tree("hgx-h100")
    for file in (*root.rglob("max_link_*"), *root.rglob("aer_dev_*")):
        file.unlink()
    row = rows(root)["0000:1b:00.0"]
    assert (row["path_width"], row["path_gen"]) == (16, 5)
    for name in (
        "path_width_max",
        "path_gen_max",
        "aer_corrected_total",
        "port_aer_fatal_total",
        "aer_errors",
    ):
        assert row[name] == Null(Reason.NOT_SUPPORTED, "ENOENT"), name
    for file in root.rglob("current_link_*"):
        file.unlink()
    row = rows(root)["0000:1b:00.0"]
    assert row["path_width"] == row["slowest"] == Null(Reason.NOT_SUPPORTED, "ENOENT")
    assert row["path_links"] == ""


def test_a_card_that_fell_off_still_has_its_place_and_its_counts(tree: Plant) -> None:
    root = tree("hgx-h100")
    say(root, CARD, current_link_width="63", current_link_speed="Unknown")
    row = rows(root)[CARD]
    assert row["present"] is False
    assert {row[name] for name in ("path_width", "path_gen", "narrowest", "pcie_width")} == {
        Null(Reason.FAILED, "all_ones")
    }
    assert (row["path"], row["port_aer_corrected_total"]) == ("0000:cb:01.0/0000:cc:00.0/0000:cd:02.0", 115)


def test_what_sleeps_is_not_read(tree: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree("workstation")
    touched: list[Path] = []
    read = files.read

    def watched(path: Path) -> str | Null:
        touched.append(path)
        return read(path)

    monkeypatch.setattr(files, "read", watched)
    row = rows(root)["0000:02:00.0"]
    assert row["path_width"] == row["pcie_width"] == row["present"] == Null(Reason.NOT_READ, "suspended")
    wakes = [path for path in touched if "_link_" in path.name]
    assert {path.parent.name for path in wakes} == {"0000:01:00.0", "0000:00:01.1"}


@pytest.mark.parametrize(
    ("text", "total", "named"),
    [
        ("RxErr 1\nBadTLP 0\nTOTAL_ERR_COR 1", 1, "corrected RxErr 1"),
        ("TOTAL_ERR_COR 18446744073709551615", UNPARSABLE, UNPARSABLE),
        ("RxErr 1\nBadTLP 0", UNPARSABLE, "corrected RxErr 1"),
        ("TOTAL_ERR_COR", UNPARSABLE, UNPARSABLE),
        ("TOTAL_ERR_COR -1", UNPARSABLE, UNPARSABLE),
        ("", UNPARSABLE, UNPARSABLE),
        ("NewKind 3\nTOTAL_ERR_COR 3", 3, "corrected NewKind 3"),
    ],
)
def test_error_files(tree: Plant, text: str, total: object, named: object) -> None:
    root = tree("hgx-h100")
    say(root, "0000:1b:00.0", aer_dev_correctable=text)
    row = rows(root)["0000:1b:00.0"]
    assert row["aer_corrected_total"] == total
    assert row["aer_errors"] == named


def test_the_inventory_has_the_path_and_the_best_that_the_link_showed(tree: Plant) -> None:
    root = tree("hgx-h100")
    host = GuardedHost(SysfsHost(root))
    say(root, CARD, current_link_width="4")

    def item() -> dict[str, str]:
        return next(dict(one.attributes) for one in read_inventory(host).items if one.entity == f"pci:{CARD}")

    first = item()
    assert first["path"] == "0000:cb:01.0/0000:cc:00.0/0000:cd:02.0"
    assert (first["path_gen_possible"], first["path_width_possible"]) == ("5", "16")
    assert (first["pcie_width_best"], first["path_width_best"], first["pcie_gen_best"]) == ("4", "4", "5")
    say(root, CARD, current_link_width="16")
    best = item()
    assert (best["pcie_width_best"], best["path_width_best"]) == ("16", "16")
    for width in ("8", "16", "0", "63", "1"):  # comes and goes: the same text each time
        say(root, CARD, current_link_width=width)
        assert item() == best, width
    say(root, CARD, device="0x2335", current_link_width="8")
    assert item()["pcie_width_best"] == "8", "another kind of card"


def test_the_node_says_how_devices_reach_memory(tree: Plant) -> None:
    def node(root: Path) -> dict[str, str]:
        return dict(SysfsHost(root).node().attributes)

    found = {host: node(tree(host)).get("iommu") for host in ("hgx-h100", "cloud-vm", "workstation", "grace")}
    assert found == {
        "hgx-h100": "on/passthrough",
        "cloud-vm": "off",
        "workstation": "on/translated",
        "grace": "on/translated",
    }


@pytest.mark.parametrize(
    ("cmdline", "iommu"),
    [
        ("quiet", "on"),
        ("intel_iommu=on iommu=pt", "on/passthrough"),
        ("iommu=pt iommu=nopt", "on/translated"),
        ("iommu.passthrough=1", "on/passthrough"),
        ("iommu.passthrough=0", "on/translated"),
    ],
)
def test_without_groups_the_command_line_decides(tree: Plant, cmdline: str, iommu: str) -> None:
    root = tree("hgx-h100")
    shutil.rmtree(root / "sys/kernel/iommu_groups")
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/cmdline").write_text(f"{cmdline}\n")
    assert SysfsHost(root).node().attributes["iommu"] == iommu


def extended(*capabilities: tuple[int, bytes]) -> bytes:
    """A configuration space with these extended capabilities, 16 bytes each."""
    space = bytearray(0x100)
    for number, (identity, body) in enumerate(capabilities):
        following = 0x100 + 16 * (number + 1) if number + 1 < len(capabilities) else 0
        space += (identity | 1 << 16 | following << 20).to_bytes(4, "little") + body.ljust(12, b"\0")
    return bytes(space)


AER = (0x0001, b"")


@pytest.mark.parametrize(
    ("space", "acs"),
    [
        (extended(AER, (0x000D, b"\x5f\0\x1d\0")), "on"),
        (extended(AER, (0x000D, b"\x5f\0\x11\0")), "off"),  # source validation and upstream forwarding alone
        (extended(AER), "off"),
        (extended((0x000D, b"\x5f")), "off"),
        (b"\0" * 64, None),  # not root: nothing past the first 64 bytes
        (extended(AER)[:0x102], None),
        (b"\xff" * 4096, None),
        (b"", None),
        (
            extended((1, b""))[:0x100] + (1 | 0x100 << 20).to_bytes(4, "little"),
            None,
        ),  # a list that bites its tail
    ],
)
def test_acs_as_far_as_it_can_be_seen(tree: Plant, space: bytes, acs: str | None) -> None:
    root = tree("grace")
    (home(root, "0009:00:00.0") / "config").write_bytes(space)
    assert SysfsHost(root).node().attributes.get("acs") == acs


def test_one_port_that_cannot_be_seen_leaves_acs_open(tree: Plant) -> None:
    root = tree("hgx-h100")
    for port in ("0000:15:01.0", "0000:16:00.0", "0000:17:02.0"):
        (home(root, port) / "config").write_bytes(extended(AER))
    assert "acs" not in SysfsHost(root).node().attributes
    (home(root, "0000:17:02.0") / "config").write_bytes(extended((0x000D, b"\x5f\0\x0c\0")))
    assert SysfsHost(root).node().attributes["acs"] == "on"


@pytest.mark.slow
@given(seed=st.integers(0, 2**32), junk=st.binary(max_size=80))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_mutilated_bus_raises(tree: Plant, seed: int, junk: bytes) -> None:
    chance = random.Random(seed)
    host = chance.choice(("hgx-h100", "workstation", "cloud-vm", "grace"))
    kept = tree("nothing").with_name(host)
    if not kept.exists():
        tree(host)
    root = kept.with_name(f"{host}-mutilated")
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(kept, root, symlinks=True)
    paths = sorted(path for path in root.rglob("*") if path.is_symlink() or path.is_file())
    for path in chance.sample(paths, min(len(paths), 40)):
        mutilate(path, chance, junk)
    sweep = run_probe("pci", pci, SysfsHost(root), pytest.fail)
    assert sweep.error == ""
    for row in SysfsHost(root).pci_devices():
        cells, _ = check_row(pci.METRICS, row)
        assert all(not isinstance(cell, str) or (cell.isprintable() and len(cell) < 4000) for cell in cells)
    assert SysfsHost(root).node().attributes.get("iommu", "on") in (
        "off",
        "on",
        "on/passthrough",
        "on/translated",
    )
    assert read_inventory(GuardedHost(SysfsHost(root))).items


def mutilate(path: Path, chance: random.Random, junk: bytes) -> None:
    content = b"" if path.is_symlink() else path.read_bytes()
    path.unlink()
    how = chance.randrange(6)
    if how == 0:
        path.write_bytes(content[: chance.randrange(len(content) + 1)])
    elif how == 1:
        path.write_bytes(junk)
    elif how == 2:
        path.mkdir()
    elif how == 3:
        path.symlink_to(chance.choice((path.name, "/nowhere", "..", ".")))
    elif how == 4:
        path.write_bytes(content.replace(b"1", junk))


def simulated(text: str, times: Sequence[float], model: str = "H100") -> list[Row]:
    scenario = parse(f'[fleet]\nnodes = 1\ngpus = 2\nmodel = "{model}"\nseed = 7\n{text}'.encode())
    now = [0.0]
    host: SimulatedHost = scenario.host("gpu-001", lambda: now[0], 1_700_000_000_000_000)
    found: list[Row] = []
    for t in times:
        now[0] = t
        found.append(list(host.pci_devices())[1])
    return found


FAULT = (
    '[[fault]]\nat = 100\nuntil = 400\nnode = "gpu-001"\ngpu = 1\nkind = "{kind}"\nparams = {{ {params} }}\n'
)


def test_a_simulated_link_fault_shows_on_the_whole_way() -> None:
    before, during, after = simulated(FAULT.format(kind="pcie_width", params="width = 4"), (0, 200, 500))
    assert [row["path_width"] for row in (before, during, after)] == [16, 4, 16]
    assert (during["pcie_width"], during["narrowest"], during["pcie_width_best"]) == (4, "0000:43:00.0", 16)
    assert during["path_links"] == "0000:41:00.0 5x16/5x16, 0000:43:00.0 5x4/5x16"
    assert during["path"] == "0000:40:01.1/0000:41:00.0/0000:42:01.0"
    assert str(during["path"]).endswith(str(during["parent"]))
    (slow,) = simulated(FAULT.format(kind="pcie_gen", params="gen = 3"), (200,))
    assert (slow["path_gen"], slow["path_gen_max"], slow["pcie_gen_best"]) == (3, 5, 5)


def test_simulated_errors_grow_and_start_anew_with_a_reboot_only() -> None:
    params = 'per_minute = 30, severity = "nonfatal", end = "port"'
    text = FAULT.format(kind="aer_errors", params=params)
    text += '[[fault]]\nat = 280\nuntil = 290\nnode = "gpu-001"\nkind = "driver_not_loaded"\n'
    text += '[[fault]]\nat = 600\nnode = "gpu-001"\nkind = "reboot"\nparams = { down_s = 60 }\n'
    found = [row["port_aer_nonfatal_total"] for row in simulated(text, (0, 160, 220, 300, 500, 700))]
    assert found == [0, 30, 60, 100, 150, 0]
    named = simulated(text, (160,))[0]
    assert (named["port_aer_errors"], named["aer_nonfatal_total"]) == ("nonfatal CmpltTO 30", 0)


def test_a_simulated_guest_sees_no_path_and_no_counters() -> None:
    (row,) = simulated("", (10,), model="vGPU")
    assert (row["path"], row["parent"]) == ("", "")
    assert {row["path_width"], row["aer_fatal_total"], row["port_aer_errors"]} == {
        Null(Reason.NOT_SUPPORTED, "ENOENT")
    }


def test_what_is_replaced_at_an_address_is_read_anew(tree: Plant) -> None:
    root = tree("hgx-h100")
    bus = Sysfs(root)
    assert bus.kind(CARD) == "gpu"
    link = root / "sys/bus/pci/devices" / CARD
    link.unlink()
    link.symlink_to(home(root, "0000:dc:00.0"))
    assert bus.kind(CARD) == "hca"
    link.unlink()
    assert bus.kind(CARD) == ""
    assert CARD not in {row["pci"] for row in bus.pci_devices()}
