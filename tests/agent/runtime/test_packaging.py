import shutil
import subprocess
from pathlib import Path

import pytest

PACKAGING = Path(__file__).parents[3] / "packaging"
UNIT = PACKAGING / "systemd" / "gpufleet-agent.service"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_the_unit_keeps_its_security_score() -> None:
    checked = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(UNIT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout[-200:]


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
