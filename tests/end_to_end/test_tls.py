"""docs/tls.md, done as it says: its certificates, one agent over mutual TLS, and who is refused."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Fleet

PAGE = (Path(__file__).parents[2] / "docs/tls.md").read_text()
VARIABLES = ("GPUFLEET_CA", "GPUFLEET_CERT", "GPUFLEET_KEY")


def block(kind: str, place: int = 0) -> str:
    found: list[str] = re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return found[place]


def make_certificates(folder: Path) -> Path:
    """The page's commands, but for the collector's address and the names of the nodes."""
    commands = block("bash").replace("IP:192.0.2.10", "IP:127.0.0.1")
    commands = commands.replace('"gpu-a01 gpu-a02"', '"gpu-001 gpu-002"')
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": OK") == 4
    assert "IP Address:127.0.0.1" in done.stdout
    return folder / "tls"


def add_table(config: Path, example: str, folder: Path, node: str = "") -> None:
    """Put the page's own [tls] table into a configuration."""
    table = example[example.index("[tls]") :].replace("/etc/gpufleet/tls", str(folder))
    config.write_text(config.read_text() + "\n" + table.replace("gpu-a01", node))


def fleet_as(
    fleet: "Fleet", files: tuple[Path, Path, Path] | None, *words: str
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GPUFLEET_SERVER": f"127.0.0.1:{fleet.port}"}
    if files is not None:
        environment |= dict(zip(VARIABLES, map(str, files), strict=True))
    return subprocess.run(
        [sys.executable, "-m", "gpufleet_cli.main", *words],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.slow
def test_the_page_leads_to_rows_over_mutual_tls_and_refuses_the_rest(
    fleet: "Fleet", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = make_certificates(tmp_path)
    assert {path.stat().st_mode & 0o077 for path in tls.glob("*.key")} == {0}
    add_table(tmp_path / "collector.toml", block("toml", 0), tls)
    add_table(tmp_path / "gpu-001.toml", block("toml", 1), tls, "gpu-001")
    add_table(tmp_path / "gpu-003.toml", block("toml", 1), tls, "gpu-002")  # another node's certificate
    files = (tls / "ca.pem", tls / "person-ops.pem", tls / "person-ops.key")
    for variable, file in zip(VARIABLES, files, strict=True):
        monkeypatch.setenv(variable, str(file))
    fleet.command("gpufleet_collector.main", "check", "--config", "collector.toml")
    fleet.command("gpufleet_agent.main", "check", "--config", "gpu-001.toml")

    fleet.start_collector()
    for node in ("gpu-001", "gpu-002", "gpu-003"):  # gpu-002 has no [tls] and speaks plain text
        fleet.start_agent(node)
    fleet.wait("rows of gpu-001", lambda: fleet.sql("select count(*) as n from gpu")[0]["n"] != 0)
    audit = "select actor, target, result from audit where verb = 'hello'"
    fleet.wait("the wrong name is audited", lambda: bool(fleet.sql(audit)))
    [refused] = fleet.sql(audit)
    assert refused["target"] == "gpu-003"
    assert "node gpu-003 is not in the certificate, which names gpu-002" in str(refused["result"])
    assert fleet.sql("select node from node") == [{"node": "gpu-001"}]
    assert fleet.sql("select distinct node from gpu") == [{"node": "gpu-001"}]
    assert "is not in the certificate" in (tmp_path / "gpu-003.log").read_text()

    left = "select max(certificate_left_s / certificate_life_s) as part from agent where probe = 'agent'"
    fleet.wait("the agent's certificate", lambda: fleet.sql(left)[0]["part"] is not None)
    assert fleet.sql(f"select round(part, 1) as part from ({left})") == [{"part": 1.0}]
    own = "select valid_to > now()::timestamp + interval 30 day as long from certificate"
    assert fleet.sql(own) == [{"long": True}]

    for variable in VARIABLES:
        monkeypatch.delenv(variable)
    plain = fleet_as(fleet, None, "version", "-o", "json")
    assert plain.returncode == 3
    assert "--ca" in plain.stdout
    (tmp_path / "other").mkdir()
    strangers = make_certificates(tmp_path / "other")
    stranger = (tls / "ca.pem", strangers / "person-ops.pem", strangers / "person-ops.key")
    mistaken = (strangers / "ca.pem", *files[1:])
    assert fleet_as(fleet, stranger, "status").returncode in (3, 4)
    unknown = fleet_as(fleet, mistaken, "status")
    assert unknown.returncode == 4
    assert "--cert" in unknown.stderr
    elsewhere = fleet_as(fleet, files, "status", "--server", f"localhost:{fleet.port}")
    assert elsewhere.returncode == 4, "an address that the collector's certificate lacks"
