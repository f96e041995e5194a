"""`fleet-agent scan` shows whatever the probes found, and what they could not."""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpufleet.metric import Kind, Metric, Reason, Row, Type, Unit
from gpufleet_agent.drivers import Host
from gpufleet_agent.drivers.nvme import COLUMNS as SMART
from gpufleet_agent.guard import HostSettings
from gpufleet_agent.probe import Sweep
from gpufleet_agent.probes import PROBES
from gpufleet_agent.scan import Seen, document, look, table


def test_a_hosts_disks_and_mounts(tree: Callable[[str], Path]) -> None:
    seen = look(HostSettings(driver="none", root=str(tree("workstation"))), deadline_s=30.0)
    lines = table(seen).splitlines()
    assert "disk        5" in lines
    assert "  sdd  in flight 0, size 3.639 TiB, rotational, state offline" in lines
    assert "mount       4" in lines
    assert "  /archive  fstype ext4, source /dev/md127, read only" in lines
    assert "not supported: mount: nfs_*, lustre_*" in lines
    shown = document(seen)
    items = {str(item["entity"]): item for item in shown["items"]}  # type: ignore[attr-defined]
    assert items["disk:sda"]["attributes"]["serial"] == "S5NGNF0R234567"
    assert items["disk:sda"]["disk"]["state"] == "running"
    assert items["mount:/net/nas"]["mount"]["fstype"] == "cifs"
    assert items["node:"]["unseen"]["mount"]["canary_state"] == "not_read"
    assert items["node:"]["unseen"]["disk"] == {
        "flush_ops_total": "not_supported",
        "flush_s_total": "not_supported",
        "temperature_c": "not_supported",
        **dict.fromkeys(SMART, "not_supported"),
    }
    assert next(iter(items)) == "node:"


def nothing(host: Host, /) -> Iterable[Row]:
    return ()


METRICS = (
    Metric("device", Type.STRING, Unit.TEXT, Kind.KEY, "D."),
    Metric("number", Type.U64, Unit.ONE, Kind.KEY, "N."),
    Metric("state", Type.STRING, Unit.TEXT, Kind.STATE, "S."),
    Metric("up", Type.BOOL, Unit.ONE, Kind.STATE, "U."),
    Metric("temperature_c", Type.F64, Unit.CELSIUS, Kind.GAUGE, "T.", 0, 1),
    Metric("power_w", Type.F64, Unit.WATT, Kind.GAUGE, "P.", 0, 1),
    Metric("errors_total", Type.U64, Unit.COUNT, Kind.COUNTER, "E."),
)
NO = Reason.NO_PERMISSION


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = SimpleNamespace(EVERY=1.0, METRICS=METRICS, read=nothing)
    monkeypatch.setitem(PROBES, "newcomer", probe)


@pytest.mark.usefixtures("added")
def test_a_new_probe_needs_nothing_here() -> None:
    rows: list[list[float | int | str | bool | None]] = [
        ["mlx5_0", 1, "active", True, 41.5, None, 7],
        ["mlx5_1", 1, "", False, None, None, None],
    ]
    reasons = [bytes([NO]), bytes([Reason.FAILED, NO, Reason.FAILED])]
    seen = Seen(sweeps={"newcomer": Sweep("newcomer", 0, 0, 0.0, "", rows, reasons)})
    lines = table(seen).splitlines()
    at = lines.index("newcomer    2")
    assert lines[at + 1 : at + 3] == ["  mlx5_0 1  state active, up, temperature 41.5 C", "  mlx5_1 1"]
    assert "no permission: newcomer: power_w" in lines
    assert "disk        could not be looked for" in lines
    items = {item["entity"]: item for item in document(seen)["items"]}  # type: ignore[attr-defined]
    assert items["newcomer:mlx5_0/1"]["newcomer"]["errors_total"] == 7
    assert items["node:"]["unseen"] == {"newcomer": {"power_w": "no_permission"}}


@pytest.mark.usefixtures("added")
def test_none_very_many_and_an_error() -> None:
    assert "newcomer    none" in table(Seen(sweeps={"newcomer": Sweep("newcomer", 0, 0, 0.0, "", [], [])}))
    failed = Seen(sweeps={"newcomer": Sweep("newcomer", 0, 0, 0.0, "failed", [], [])})
    assert "newcomer    cannot be read: failed" in table(failed)
    rows: list[list[float | int | str | bool | None]] = [
        ["x" * 300, n, "y " * 100, True, 1.0, 2.0, 3] for n in range(50)
    ]
    text = table(Seen(sweeps={"newcomer": Sweep("newcomer", 0, 0, 0.0, "", rows, [b""] * 50)}))
    assert "  and 18 more" in text
    assert max(map(len, text.splitlines())) <= 110
