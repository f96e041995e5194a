"""Probe `port` on whole machines and on trees that are as bad as trees get."""

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpufleet.metric import Cell, Null, Reason, Row
from gpufleet_agent.drivers import affinity, files, ports
from gpufleet_agent.drivers.ports import Ports
from gpufleet_agent.drivers.sysfs import SysfsHost
from gpufleet_agent.guard import GuardedHost
from gpufleet_agent.probe import check_row, run_probe
from gpufleet_agent.probes import port
from gpufleet_agent.sampler import read_inventory
from gpufleet_agent.scenario import parse

HOSTS = Path(__file__).parents[2] / "fixtures/hosts"
Plant = Callable[[str], Path]
IB = "sys/class/infiniband"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def write(root: Path, tree: Mapping[str, str]) -> Path:
    for name, text in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def device(root: Path, name: str, number: str = "1", **parts: str) -> Path:
    """A healthy InfiniBand port; `parts` says what it says differently."""
    said = {
        "link_layer": "InfiniBand", "state": "4: ACTIVE", "phys_state": "5: LinkUp", "lid": "0x70",
        "sm_lid": "0x1", "rate": "400 Gb/sec (4X NDR)", "gids/0": "fe80:0000:0000:0000:b83f:d203:00a1:b2c4",
        "counters/link_downed": "0", "counters/symbol_error": "0", "counters/port_xmit_data": "0",
        "counters/port_rcv_data": "0",
    } | {name.replace("__", "/"): text for name, text in parts.items()}  # fmt: skip
    write(root, {f"{IB}/{name}/ports/{number}/{file}": f"{text}\n" for file, text in said.items()})
    write(root, {f"{IB}/{name}/node_guid": "b83f:d203:00a1:b2c0\n", f"{IB}/{name}/fw_ver": "28.43.2026\n"})
    return root / IB / name


def interface(root: Path, name: str, hardware: str = "", **parts: str) -> Path:
    """A network interface; below `hardware`, a path in sys/devices, when it has some."""
    home = root / "sys/devices" / (hardware or "virtual") / "net" / name
    said = {"type": "1", "flags": "0x1003", "carrier": "1", "speed": "100000", "mtu": "1500", "dev_port": "0",
            "carrier_changes": "1", "statistics/rx_bytes": "12", "statistics/tx_bytes": "34"} | {
        name.replace("__", "/"): text for name, text in parts.items()
    }  # fmt: skip
    write(home, {file: f"{text}\n" for file, text in said.items()})
    if hardware:
        (home / "device").symlink_to(root / "sys/devices" / hardware)
    (root / "sys/class/net").mkdir(parents=True, exist_ok=True)
    (root / "sys/class/net" / name).symlink_to(home)
    return home


def read(root: Path) -> dict[str, Row]:
    return {f"{row['device']}/{row['port']}": row for row in Ports(root).rows()}


def reason(cell: Cell) -> tuple[Reason, str]:
    assert isinstance(cell, Null)
    return cell.reason, cell.code


def shown(cell: Cell) -> object:
    return f"NULL {cell.reason.name.lower()} {cell.code}".rstrip() if isinstance(cell, Null) else cell


@pytest.mark.parametrize("host", ["hgx-h100", "cloud-vm", "workstation", "grace"])
def test_readings_of_whole_machines(tree: Plant, host: str) -> None:
    rows = [
        {metric.name: shown(metric.check(row[metric.name])) for metric in port.METRICS}
        for row in port.read(SysfsHost(tree(host)))
    ]
    assert rows == json.loads((HOSTS / host / "golden" / "port.json").read_text())


def test_a_host_without_any(tmp_path: Path) -> None:
    sweep = run_probe("port", port, SysfsHost(tmp_path), pytest.fail)
    assert (sweep.error, sweep.rows) == ("", [])


def test_F05_text_in_the_counters_of_one_device(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(
        tmp_path,
        {
            f"{IB}/irdma0/ports/1/counters/link_downed": "N/A (no PMA)\n",
            f"{IB}/mlx5_0/ports/1/counters/link_downed": "0\n",
            f"{IB}/mlx5_0/ports/1/counters/symbol_error": "",
            f"{IB}/hfi1_0/ports/1/hw_counters/SwLinkUp,32": "1\n",
        },
    )
    host = Ports(tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            rows = {str(row["device"]): row for row in host.rows()}
    assert list(rows) == ["hfi1_0", "irdma0", "mlx5_0"]
    assert rows["mlx5_0"]["link_downed_total"] == 0
    assert reason(rows["mlx5_0"]["symbol_errors_total"]) == (Reason.FAILED, "empty")
    assert reason(rows["irdma0"]["link_downed_total"]) == (Reason.NOT_SUPPORTED, "N/A (no PMA)")
    assert reason(rows["hfi1_0"]["link_downed_total"]) == (Reason.NOT_SUPPORTED, "ENOENT")
    said = [record.getMessage().split(":")[0] for record in caplog.records]
    assert sorted(said) == ["port irdma0", "port mlx5_0"], "once per device"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("17", 17),
        (" 17 ", 17),
        ("18446744073709551615", "NULL implausible 18446744073709551615"),
        ("65535", "NULL implausible saturated"),
        ("4294967295", "NULL implausible saturated"),
        ("65536", 65536),
        ("", "NULL failed empty"),
        ("N/A", "NULL not_supported N/A"),
        ("-1", "NULL failed unparsable"),
        ("0x10", "NULL failed unparsable"),
        ("1e5", "NULL failed unparsable"),
        ("7 8", "NULL failed unparsable"),
        ("\x00\x01", "NULL failed unparsable"),
        ("٣", "NULL failed unparsable"),
        ("9" * 5000, "NULL failed unparsable"),
    ],
)
def test_F05_what_a_counter_may_hold(tmp_path: Path, text: str, wanted: object) -> None:
    device(tmp_path, "mlx5_0", counters__symbol_error=text)
    row = read(tmp_path)["mlx5_0/1"]
    metric = next(metric for metric in port.METRICS if metric.name == "symbol_errors_total")
    assert shown(metric.check(row["symbol_errors_total"])) == wanted
    assert (row["state"], row["link_downed_total"]) == ("ACTIVE", 0), "nothing else is lost"


def test_F05_a_refusal_costs_one_counter_and_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device(tmp_path, "mlx5_0")
    asked: list[str] = []

    def refusing(path: str) -> str | Null:
        if path.endswith("/symbol_error"):
            asked.append(path)
            return Null(Reason.FAILED, "EINVAL")
        return files_brief(path)

    files_brief = files.brief
    monkeypatch.setattr(files, "brief", refusing)
    clock = Clock()
    host = Ports(tmp_path, clock=clock)
    for _ in range(5):
        row = host.rows()[0]
        assert reason(row["symbol_errors_total"]) == (Reason.NOT_SUPPORTED, "EINVAL")
        assert row["link_downed_total"] == 0
        clock.now += 10
    assert len(asked) == 1
    clock.now += ports.REFUSED_S
    host.rows()
    assert len(asked) == 2


@pytest.mark.parametrize("rate", ["100 Gb/sec (2X HDR)", "400 Gb/sec (4X NDR)", "2.5 Gb/sec (1X SDR)"])
def test_F07_words_of_four_bytes_whatever_the_lanes(tmp_path: Path, rate: str) -> None:
    host = Ports(tmp_path)
    sent = []
    for words in (1_000_000_000, 1_625_000_000):
        device(tmp_path, "mlx5_0", rate=rate, counters__port_xmit_data=str(words))
        sent.append(host.rows()[0]["tx_bytes_total"])
    first, second = sent
    assert isinstance(first, int)
    assert isinstance(second, int)
    assert (second - first) * 8 == 20_000_000_000


def test_F07_wide_data_counters_are_preferred_and_narrow_ones_fill_up(tmp_path: Path) -> None:
    full = {"counters__port_xmit_data": "4294967295", "counters__port_rcv_data": "4294967294"}
    device(tmp_path, "mlx4_0", **full)
    wide = {"counters_ext__port_xmit_data_64": "4294967295", "counters_ext__port_rcv_data_64": "7"}
    device(tmp_path, "mlx4_1", **full, **wide)
    write(
        tmp_path,
        {f"{IB}/efa_0/ports/1/hw_counters/{name}": "4294967297" for name in ("rx_bytes", "tx_bytes")},
    )
    rows = read(tmp_path)
    assert reason(rows["mlx4_0/1"]["tx_bytes_total"]) == (Reason.IMPLAUSIBLE, "saturated")
    assert rows["mlx4_0/1"]["rx_bytes_total"] == 4294967294 * 4
    assert rows["mlx4_1/1"]["tx_bytes_total"] == 4294967295 * 4
    assert rows["efa_0/1"]["tx_bytes_total"] == 4294967297, "these count bytes"


@pytest.mark.parametrize(
    ("rate", "gbps", "lanes", "signalling"),
    [
        ("400 Gb/sec (4X NDR)", 400.0, 4, "NDR"),
        ("800 Gb/sec (4X XDR)", 800.0, 4, "XDR"),
        ("2.5 Gb/sec (1X SDR)", 2.5, 1, "SDR"),
        ("40 Gb/sec (4X)", 40.0, 4, "NULL not_supported not_said"),
        ("100 Gb/sec", 100.0, "NULL not_supported not_said", "NULL not_supported not_said"),
        ("fast", "NULL failed unparsable", "NULL failed unparsable", "NULL failed unparsable"),
    ],
)
def test_rates(tmp_path: Path, rate: str, gbps: object, lanes: object, signalling: object) -> None:
    device(tmp_path, "mlx5_0", rate=rate)
    row = read(tmp_path)["mlx5_0/1"]
    assert [shown(row[name]) for name in ("rate_gbps", "lanes", "signalling")] == [gbps, lanes, signalling]


@pytest.mark.parametrize(
    ("state", "phys", "wanted"),
    [
        ("4: ACTIVE", "5: LinkUp", ["ACTIVE", "LinkUp"]),
        ("ACTIVE", "LinkUp", ["ACTIVE", "LinkUp"]),
        ("1: DOWN", "2: Polling", ["DOWN", "Polling"]),
        ("2: INIT", "5: LinkUp", ["INIT", "LinkUp"]),
        ("3: ARMED", "7: Phy Test", ["ARMED", "Phy Test"]),
        ("5: ACTIVE_DEFER", "6: LinkErrorRecovery", ["ACTIVE_DEFER", "LinkErrorRecovery"]),
        ("0: NOP", "<unknown>", ["NOP", "NULL failed unparsable"]),
        ("4:", "", ["NULL failed unparsable", "NULL failed unparsable"]),
    ],
)
def test_states_and_no_rate_without_a_link(tmp_path: Path, state: str, phys: str, wanted: list[str]) -> None:
    device(tmp_path, "mlx5_0", state=state, phys_state=phys, rate="10 Gb/sec (4X SDR)")
    row = read(tmp_path)["mlx5_0/1"]
    assert [shown(row[name]) for name in ("state", "phys_state")] == wanted
    assert isinstance(row["rate_gbps"], Null) == (wanted[0] != "ACTIVE")


def test_F04_names_are_ordered_as_people_do_and_two_ports_are_two(tmp_path: Path) -> None:
    for name in ("mlx5_10", "mlx5_2", "mlx5_bond_0", "mlx5_0"):
        device(tmp_path, name)
    device(tmp_path, "mlx4_0")
    device(tmp_path, "mlx4_0", "2")
    write(tmp_path, {f"{IB}/mlx4_0/ports/nonsense/state": "4: ACTIVE\n"})
    assert list(read(tmp_path)) == [
        "mlx4_0/1",
        "mlx4_0/2",
        "mlx5_0/1",
        "mlx5_2/1",
        "mlx5_10/1",
        "mlx5_bond_0/1",
    ]


def test_the_guid_is_that_of_the_port_and_a_blank_is_none(tmp_path: Path) -> None:
    device(tmp_path, "mlx5_0")
    device(tmp_path, "mlx5_1", gids__0="fe80:0000:0000:0000:0000:0000:0000:0000")
    device(tmp_path, "mlx5_2", link_layer="Ethernet")
    device(tmp_path, "mlx5_3", gids__0="nonsense")
    write(tmp_path, {f"{IB}/mlx5_3/node_guid": "0000:0000:0000:0000\n"})
    said = [shown(row["guid"]) for row in read(tmp_path).values()]
    node = "b83f:d203:00a1:b2c0"
    assert said == ["b83f:d203:00a1:b2c4", node, node, "NULL not_supported not_said"]


NIC = "pci0000:00/0000:00:1c.0/0000:05:00.0"


def test_what_is_no_port_of_this_host(tmp_path: Path) -> None:
    interface(tmp_path, "lo", type="772")
    interface(tmp_path, "docker0")
    interface(tmp_path, "bond0")
    interface(tmp_path, "wlan0", f"{NIC}/a", wireless__link="")
    interface(tmp_path, "mon0", f"{NIC}/b", type="803")
    interface(tmp_path, "ib0", f"{NIC}/c", type="32")
    interface(tmp_path, "vf0", f"{NIC}/d")
    (tmp_path / "sys/devices" / NIC / "d/physfn").mkdir()
    interface(tmp_path, "sf0", f"{NIC}/mlx5_core.sf.2")
    for number, name in enumerate(("pf0vf3", "c1pf0vf1", "pf1sf88", "pf0hpf")):
        interface(tmp_path, f"rep{number}", f"{NIC}/r{number}", phys_port_name=name)
    interface(tmp_path, "usb0", f"{NIC}/e")
    (tmp_path / "sys/bus/usb").mkdir(parents=True)
    (tmp_path / "sys/devices" / NIC / "e/subsystem").symlink_to(tmp_path / "sys/bus/usb")
    interface(tmp_path, "eth0", "pci0000:00/0000:00:03.0/virtio2", speed="-1")
    interface(tmp_path, "hv0", "LNXSYSTM:00/vmbus/7ed8")
    interface(tmp_path, "up0", f"{NIC}", phys_port_name="p0")
    device(tmp_path, "rxe0")
    write(tmp_path, {f"{IB}/rxe0/parent": "eth0\n"})
    rows = read(tmp_path)
    assert [(name, shown(row["pci"])) for name, row in rows.items()] == [
        ("eth0/1", "0000:00:03.0"), ("hv0/1", "NULL not_supported not_said"), ("up0/1", "0000:05:00.0")
    ]  # fmt: skip
    assert shown(rows["eth0/1"]["rate_gbps"]) == "NULL not_supported unknown"


@pytest.mark.parametrize(
    ("parts", "state", "rate"),
    [
        ({}, "ACTIVE", 100.0),
        ({"carrier": "0"}, "DOWN", "NULL not_read not_active"),
        ({"flags": "0x1002", "carrier": "1"}, "DOWN", "NULL not_read not_active"),
        ({"carrier": "x"}, "NULL failed unparsable", "NULL not_read not_active"),
        ({"speed": "4294967295"}, "ACTIVE", "NULL not_supported unknown"),
        ({"speed": "0"}, "ACTIVE", "NULL not_supported unknown"),
        ({"speed": "2500"}, "ACTIVE", 2.5),
        ({"speed": ""}, "ACTIVE", "NULL failed unparsable"),
        ({"flags": "?"}, "ACTIVE", 100.0),
    ],
)
def test_an_ethernet_card(tmp_path: Path, parts: dict[str, str], state: str, rate: object) -> None:
    interface(tmp_path, "enp5s0", NIC, **parts)
    row = read(tmp_path)["enp5s0/1"]
    assert [shown(row[name]) for name in ("state", "rate_gbps")] == [state, rate]
    assert (row["rx_bytes_total"], row["tx_bytes_total"]) == (12, 34)


def test_an_interface_of_an_rdma_port_is_no_port_of_its_own(tmp_path: Path) -> None:
    home = "pci0000:29/0000:29:01.0/0000:2a:00.0"
    for number in range(2):
        interface(tmp_path, f"eth{number}", home, dev_port=str(number))
        device(tmp_path, "mlx4_0", str(number + 1), link_layer="Ethernet")
    (tmp_path / IB / "mlx4_0/device").symlink_to(tmp_path / "sys/devices" / home)
    rows = read(tmp_path)
    assert {name: row["netdev"] for name, row in rows.items()} == {"mlx4_0/1": "eth0", "mlx4_0/2": "eth1"}
    assert rows["mlx4_0/1"]["carrier_changes_total"] == 1
    device(tmp_path, "mlx5_bond_0", link_layer="Ethernet", gid_attrs__ndevs__0="bond0")
    interface(tmp_path, "bond0")
    assert read(tmp_path)["mlx5_bond_0/1"]["netdev"] == "bond0"


def test_odd_names_travel(tmp_path: Path) -> None:
    odd = os.fsdecode(b"en\xff\xfe{}'\"%")
    interface(tmp_path, odd, NIC)
    device(tmp_path, "mlx5_0", gid_attrs__ndevs__0="../../../etc")
    rows = read(tmp_path)
    for row in rows.values():
        for cell in row.values():
            if isinstance(cell, str):
                cell.encode()
    assert len(rows) == 2


def test_what_comes_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = device(tmp_path, "mlx5_0")
    device(tmp_path, "mlx5_1")
    clock = Clock()
    host = Ports(tmp_path, clock=clock)
    assert len(host.rows()) == 2
    # gone after the folder was listed
    names = {IB: ["mlx5_0", "mlx5_1"]}
    monkeypatch.setattr(ports, "_names", lambda folder: names.get(os.path.relpath(folder, tmp_path), []))
    host = Ports(tmp_path, clock=clock)
    monkeypatch.undo()
    host.rows()
    os.rename(home, tmp_path / "away")
    assert [row["device"] for row in host.rows()] == ["mlx5_1"]
    os.rename(tmp_path / "away", home)
    assert len(host.rows()) == 2


def test_in_use_and_the_best_rate_are_kept_for_an_hour(tmp_path: Path) -> None:
    clock = Clock()
    host = Ports(tmp_path, clock=clock)

    def at(seconds: float, **parts: str) -> list[object]:
        clock.now = 1000 + seconds
        device(tmp_path, "mlx5_0", **parts)
        row = host.rows()[0]
        return [row["in_use"], shown(row["rate_best_gbps"])]

    down = {"state": "1: DOWN", "rate": "10 Gb/sec (4X SDR)"}
    half = {"rate": "200 Gb/sec (2X NDR)"}
    assert at(0, **down) == [False, "NULL not_read not_active"]
    assert at(10) == [True, 400.0]
    assert at(20, **down) == [True, 400.0]
    assert at(3000, **half) == [True, 400.0]
    assert at(3615, **half) == [True, 200.0]
    assert at(3625) == [True, 400.0]
    assert at(3625 + 3590, **down) == [True, 400.0]
    assert at(3625 + 3610, **down) == [False, "NULL not_read not_active"]


def test_names_that_are_swapped_take_nothing_along(tmp_path: Path) -> None:
    homes = [tmp_path / "sys/devices" / f"0000:{number}8:00.0/infiniband/it" for number in range(2)]
    for number, rate in enumerate(("400 Gb/sec (4X NDR)", "200 Gb/sec (4X HDR)")):
        home = device(
            tmp_path, "it", rate=rate, gids__0=f"fe80:0000:0000:0000:b83f:d203:00a1:000{number + 1}"
        )
        homes[number].parent.mkdir(parents=True)
        home.rename(homes[number])
        (tmp_path / IB / f"mlx5_{number}").symlink_to(homes[number])
    host = Ports(tmp_path, clock=Clock())
    before = {row["guid"]: row["rate_best_gbps"] for row in host.rows()}
    for number in range(2):
        (tmp_path / IB / f"mlx5_{number}").unlink()
        (tmp_path / IB / f"mlx5_{number}").symlink_to(homes[1 - number])
    rows = host.rows()
    assert [row["rate_gbps"] for row in rows] == [200.0, 400.0]
    assert {row["guid"]: row["rate_best_gbps"] for row in rows} == before


def test_the_inventory_says_what_a_port_is(tree: Plant) -> None:
    items = {
        item.entity: item.attributes
        for item in read_inventory(GuardedHost(SysfsHost(tree("hgx-h100")))).items
    }
    found = items["port:mlx5_6/1"]
    assert {name: found[name] for name in ("guid", "pci", "numa_node", "firmware", "board", "in_use")} == {
        "guid": "b83f:d203:00a1:1060", "pci": "0000:ce:00.0", "numa_node": "1", "firmware": "28.43.2026",
        "board": "MT_0000000838", "in_use": "true",
    }  # fmt: skip
    assert found["rate_gbps_active"] == "200"
    assert not {"in_use", "rate_gbps_active"} & set(items["port:mlx5_5/1"]), "it was never active"
    assert "port:mlx5_9/1" not in items


def test_ports_that_hang_are_left_out_of_the_inventory(tmp_path: Path) -> None:
    device(tmp_path, "mlx5_0")
    host, phases = GuardedHost(SysfsHost(tmp_path)), list[str]()
    entities = [item.entity for item in read_inventory(host, phases.append, bus=False).items]
    assert entities == ["node:", "port:mlx5_0/1"]
    assert phases.count("probe port") == 1, "a hang is put down to the probe"
    assert len(read_inventory(host, bus=False, ports=False).items) == 1


SWITCH = "/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0"


@pytest.mark.parametrize(
    ("card", "same_node", "wanted"),
    [
        (f"{SWITCH}/0000:17:02.0/0000:1b:00.0", True, "pix"),
        (f"{SWITCH}/0000:17:02.0/0000:1b:00.0/0000:1c:00.0/0000:1d:00.0", True, "pxb"),
        ("/sys/devices/pci0000:15/0000:15:03.0/0000:20:00.0", True, "phb"),
        ("/sys/devices/pci0000:3d/0000:3d:01.0/0000:43:00.0", True, "node"),
        ("/sys/devices/pci0000:97/0000:97:01.0/0000:9d:00.0", False, "sys"),
    ],
)
def test_how_near_a_card_is(card: str, same_node: bool, wanted: str) -> None:
    port_ = f"{SWITCH}/0000:17:00.0/0000:18:00.0"
    assert affinity.relation(port_, card, same_node) == wanted
    assert affinity.relation(card, port_, same_node) == wanted


def test_cards_are_told_nearest_first(tmp_path: Path) -> None:
    homes = {
        "0000:1b:00.0": ("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:02.0", "0"),
        "0000:43:00.0": ("pci0000:3d/0000:3d:01.0", "0"),
        "0000:9d:00.0": ("pci0000:97/0000:97:01.0", "1"),
    }
    listed = tmp_path / "sys/bus/pci/devices"
    listed.mkdir(parents=True)
    for address, (above, node) in homes.items():
        home = tmp_path / "sys/devices" / above / address
        write(home, {"vendor": "0x10de\n", "class": "0x030200\n", "numa_node": f"{node}\n"})
        (listed / address).symlink_to(home)
    home = tmp_path / "sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0"
    write(home, {"numa_node": "0\n"})
    (device(tmp_path, "mlx5_0") / "device").symlink_to(home)
    row = next(iter(SysfsHost(tmp_path).rows("port")))
    assert row["gpu_affinity"] == "0000:1b:00.0=pix,0000:43:00.0=node,0000:9d:00.0=sys"


JUNK = st.sampled_from(
    [b"", b"\n", b"-1\n", b"N/A (no PMA)\n", b"4: \n", b"\xff\xfe\x00", b"9" * 30, b"0x\n", b"Gb/sec (X)",
     b"1: DOWN\n", b"x" * 10_000, "٤: ACTIVE".encode(), b"inf\n", b"nan Gb/sec (4X NDR)\n",
     b"18446744073709551616\n"]
)  # fmt: skip


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_nothing_comes_out_of_a_mutated_tree_but_rows(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("tree")
    device(root, "mlx5_0", hw_counters__np_cnp_sent="3", gid_attrs__ndevs__0="eth0")
    device(root, "mlx5_1", "2")
    interface(root, "eth0", NIC, phys_port_name="p0")
    interface(root, "eth1", "pci0000:00/0000:00:1d.0/0000:06:00.0")
    every = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    host = Ports(root)
    for victim in data.draw(st.lists(st.sampled_from(every), min_size=1, max_size=8, unique=True)):
        how = data.draw(st.sampled_from(["junk", "gone", "folder", "loop"]))
        victim.unlink()
        if how == "junk":
            victim.write_bytes(data.draw(JUNK))
        elif how == "folder":
            victim.mkdir()
        elif how == "loop":
            victim.symlink_to(victim)
        for row in host.rows():
            check_row(port.METRICS, row)
            assert isinstance(row["device"], str)
            assert isinstance(row["port"], int)


DEMO = """
[fleet]
nodes = 1
gpus = 2
model = "{model}"
[[load]]
kind = "train"
{fault}
"""
FAULT = '[[fault]]\nnode = "gpu-001"\ngpu = 1\nat = 30\nuntil = 300\nkind = "{kind}"\n{params}'


def play(fault: str, seconds: float, model: str = "H100") -> dict[str, Row]:
    host = parse(DEMO.format(model=model, fault=fault).encode()).host("gpu-001", lambda: seconds, 0)
    sweep = run_probe("port", port, host, pytest.fail)
    names = [metric.name for metric in port.METRICS]
    rows = [dict(zip(names, row, strict=True)) for row in sweep.rows]
    return {
        str(row["device"]): {name: cell for name, cell in row.items() if cell is not None} for row in rows
    }


def test_simulated_ports_carry_what_cards_exchange() -> None:
    before, after = play("", 100), play("", 110)
    assert list(before) == ["mlx5_0", "mlx5_1", "mlx5_2"]
    assert before["mlx5_0"]["rate_gbps"] == 400.0
    sent = [int(str(rows["mlx5_0"]["tx_bytes_total"])) for rows in (before, after)]
    assert sent[1] - sent[0] == pytest.approx(10 * 400e9 / 8 * 0.4 * 0.95, rel=0.01)
    assert list(play("", 100, "RTX 4090")) == ["eth0"]
    assert "rate_gbps" not in play("", 100, "vGPU")["eth0"]


@pytest.mark.parametrize(
    ("kind", "params", "wanted"),
    [
        ("port_down", "", {"state": "DOWN", "phys_state": "Polling", "link_downed_total": 1}),
        ("port_down", '{ as = "init" }', {"state": "INIT", "phys_state": "LinkUp", "link_downed_total": 0}),
        ("port_flapping", "{ period_s = 50, down_s = 30 }", {"state": "DOWN", "link_downed_total": 2}),
        ("port_errors", '{ counter = "rcv_errors" }', {"state": "ACTIVE", "rcv_errors_total": 700}),
        ("port_rate", "{ lanes = 1 }", {"state": "ACTIVE", "rate_gbps": 100.0, "rate_best_gbps": 400.0}),
    ],
)
def test_simulated_faults(kind: str, params: str, wanted: dict[str, object]) -> None:
    fault = FAULT.format(kind=kind, params=f"params = {params}" if params else "")
    row = play(fault, 100)["mlx5_1"]
    assert {name: row.get(name) for name in wanted} == wanted
    assert play(fault, 20)["mlx5_1"]["link_downed_total"] == 0
    assert play(fault, 400)["mlx5_1"]["state"] == "ACTIVE"
    assert play(fault, 100)["mlx5_0"]["state"] == "ACTIVE"


def test_a_simulated_port_that_is_gone() -> None:
    fault = FAULT.format(kind="port_down", params='params = { as = "gone" }')
    assert list(play(fault, 100)) == ["mlx5_0", "mlx5_2"]
