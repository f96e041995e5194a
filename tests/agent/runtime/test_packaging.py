import shutil
import subprocess
from pathlib import Path

import pytest

from gpufleet_agent import handover
from gpufleet_agent.config import AgentConfig

PACKAGING = Path(__file__).parents[3] / "packaging"
UNIT = PACKAGING / "systemd" / "gpufleet-agent.service"
BENCH_UNIT = PACKAGING / "systemd" / "gpufleet-bench@.service"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_the_unit_keeps_its_security_score() -> None:
    checked = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(UNIT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout[-200:]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_the_unit_of_the_benches_keeps_its_security_score() -> None:
    checked = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(BENCH_UNIT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout[-200:]


def test_the_agent_finds_the_socket_of_the_benches_and_may_use_it() -> None:
    socket = (PACKAGING / "systemd" / "gpufleet-bench.socket").read_text().splitlines()
    path = Path(AgentConfig().runtime_dir) / handover.NAME
    for line in (f"ListenStream={path}", "SocketUser=gpufleet-agent", "SocketMode=0600", "Accept=yes"):
        assert line in socket
    unit = BENCH_UNIT.read_text().splitlines()
    for line in (
        "ExecStart=/usr/bin/fleet-agent bench-unit",
        "StandardInput=socket",
        "StandardOutput=journal",
        "User=gpufleet-agent",
        "StateDirectory=gpufleet",
        "NoNewPrivileges=yes",
        "MemoryMax=50%",
    ):
        assert line in unit
    assert not any(line.startswith("CPUQuota=") for line in unit)


def test_the_unit_runs_the_agent_as_its_own_user_under_a_watchdog() -> None:
    lines = UNIT.read_text().splitlines()
    for line in (
        "Type=notify",
        "NotifyAccess=main",
        "WatchdogSec=60s",
        "Restart=always",
        "KillMode=mixed",
        "User=gpufleet-agent",
        "StateDirectory=gpufleet",
        "RuntimeDirectory=gpufleet",
        "RuntimeDirectoryMode=0755",
        "ExecStart=/usr/bin/fleet-agent run --config /etc/gpufleet/agent.toml",
    ):
        assert line in lines
    assert "u gpufleet-agent " in (PACKAGING / "sysusers.d" / "gpufleet-agent.conf").read_text()
