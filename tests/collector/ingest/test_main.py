"""From the command line to a running collector, and the one line that says why there is none."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trustme
from click.testing import CliRunner

from gpufleet.config import ConfigError, load, parse
from gpufleet_collector.config import CollectorConfig, check
from gpufleet_collector.main import main

if TYPE_CHECKING:
    from tests.collector.ingest.conftest import Kit

PACKAGED = Path(__file__).parents[3] / "packaging" / "collector.toml"


def test_the_packaged_file_shows_every_key_with_its_default() -> None:
    text = PACKAGED.read_text()
    assert parse(text.encode(), CollectorConfig, "as shipped") == CollectorConfig()
    plain = "\n".join(
        line.removeprefix("# ") for line in text.splitlines() if re.match(r"# (\[|\w+ = )", line)
    )
    assert parse(plain.encode(), CollectorConfig, "uncommented") == CollectorConfig()
    for section in (
        CollectorConfig(),
        *(getattr(CollectorConfig(), name) for name in ("ingest", "retention", "disk", "judge", "tls")),
    ):
        for key in section.__struct_fields__:
            if key not in ("limit", "model", "node", "rule"):
                assert re.search(rf"^# (\[{key}\]|{key} = )", text, re.MULTILINE), key


def _run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, args)
    return result.exit_code, result.output


def test_check_says_ok_or_one_line(tmp_path: Path) -> None:
    assert _run("check", "--config", str(PACKAGED)) == (0, "ok\n")
    bad = tmp_path / "collector.toml"
    for text, words in [
        ("evry = 1", "unknown key evry"),
        ("[ingest]\nlinger_ms = 'x'", "ingest.linger_ms"),
        ("[ingest]\nqueue_mib = 0", "ingest.queue_mib"),
        ("[retention]\nhistory_days = 3", "history_days"),
        ('listen = "nowhere"', "listen"),
        ('listen = "0.0.0.0:7443"', "not loopback"),
        ('[tls]\nca = "/no/such"\ncert = "/no"\nkey = "/no"', "tls.ca"),
        ("[limit.no_such_rule.x]\nvalue = 1", "[limit.no_such_rule]: no such rule"),
        (
            '[rule.gpu_downclocked]\nevery = "60parsecs"',
            "[rule.gpu_downclocked] every: '60parsecs' is not a duration like \"90s\"",
        ),
        ('[judge]\nrule_timeout = "soon"', "[judge] rule_timeout: 'soon' is not a duration"),
        ("not toml", "not valid TOML"),
    ]:
        bad.write_text(text)
        code, output = _run("check", "--config", str(bad))
        assert code == 1, text
        assert words in output
        assert output.startswith(f"fleet-collector: {bad}: ")
        assert len(output.splitlines()) == 1
    code, output = _run("check", "--config", str(tmp_path / "absent.toml"))
    assert (code, len(output.splitlines())) == (1, 1)


def test_check_reads_certificates(tmp_path: Path) -> None:
    authority = trustme.CA()
    ours, other = authority.issue_cert("collector"), authority.issue_cert("other")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    ours.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    ours.private_key_pem.write_to_path(tmp_path / "key.pem")
    other.private_key_pem.write_to_path(tmp_path / "other.pem")
    (tmp_path / "junk.pem").write_text(
        "-----BEGIN CERTIFICATE-----\nPRIVATE KEY\n-----END CERTIFICATE-----\n"
    )
    config = tmp_path / "collector.toml"

    def said(**files: str) -> tuple[int, str]:
        paths = {"ca": "ca", "cert": "cert", "key": "key"} | files
        config.write_text("[tls]\n" + "".join(f'{n} = "{tmp_path}/{to}.pem"\n' for n, to in paths.items()))
        return _run("check", "--config", str(config))

    assert said() == (0, "ok\n")
    start = f"fleet-collector: {config}: tls."
    assert said(ca="junk") == (1, f"{start}ca: {tmp_path}/junk.pem is not a PEM certificate\n")
    assert said(cert="junk") == (1, f"{start}cert: {tmp_path}/junk.pem is not a PEM certificate\n")
    assert said(cert="key") == (1, f"{start}cert: {tmp_path}/key.pem is not a PEM certificate\n")
    key_text = "is not a PEM private key without a password"
    assert said(key="junk") == (1, f"{start}key: {tmp_path}/junk.pem {key_text}\n")
    mismatch = f"{tmp_path}/cert.pem does not match its key, tls.key {tmp_path}/other.pem"
    assert said(key="other") == (1, f"{start}cert: {mismatch}\n")


def test_limits_and_rules_of_the_site_are_read(tmp_path: Path) -> None:
    path = tmp_path / "collector.toml"
    path.write_text(
        "[limit.gpu_downclocked.warn_ratio]\nvalue = 0.9\nsource = 'site'\n"
        '[model."H100".limit.gpu_downclocked.warn_ratio]\nvalue = 0.91\n'
        '[node."gpu-a01".limit.gpu_downclocked.warn_ratio]\nvalue = 0.92\n'
        "[rule.gpu_downclocked]\nfor = '2 of 3'\n"
    )
    config = load(path, CollectorConfig)
    assert config.limit["gpu_downclocked"]["warn_ratio"].value == 0.9
    assert config.rule["gpu_downclocked"].for_ == "2 of 3"


def test_version() -> None:
    code, output = _run("version")
    assert code == 0
    assert output.startswith("fleet-collector 0.")


def test_a_port_in_use_is_one_line(kit: Kit) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "gpufleet_collector.main",
                "serve",
                "--data",
                str(kit.tmp),
                "--listen",
                f"127.0.0.1:{port}",
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_check_refuses_nonsense() -> None:
    for config in (CollectorConfig(log_level="loud"), CollectorConfig(listen="127.0.0.1:99999")):
        with pytest.raises(ConfigError):
            check(config, "x")


class Notified:
    """The other end of NOTIFY_SOCKET."""

    def __init__(self, where: Path) -> None:
        self.path = where / "notify"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(self.path))
        self.messages: list[tuple[float, str]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                text = self.socket.recv(4096).decode()
            except OSError:
                return
            self.messages.append((time.monotonic(), text))

    def count(self, word: str) -> int:
        return sum(word in text for _, text in self.messages)


def test_W01_pings_only_while_the_committer_gets_on(kit: Kit, tmp_path: Path) -> None:
    told = Notified(tmp_path)
    process = kit.process(NOTIFY_SOCKET=str(told.path), WATCHDOG_USEC="500000")
    kit.until(lambda: told.count("WATCHDOG=1") > 5)
    assert told.messages[0][1].startswith("READY=1")
    pings = [at for at, text in told.messages if text == "WATCHDOG=1"]
    gaps = sorted(after - before for before, after in pairwise(pings))
    assert gaps[len(gaps) // 2] < 0.25
    assert process.stop() == 0
    kit.until(lambda: told.count("STOPPING=1") == 1)
    told.socket.close()


def test_W01_no_limit_no_pings(kit: Kit, tmp_path: Path) -> None:
    told = Notified(tmp_path)
    process = kit.process(NOTIFY_SOCKET=str(told.path))
    kit.until(lambda: told.count("READY=1") == 1)
    time.sleep(0.3)
    assert process.stop() == 0
    assert told.count("WATCHDOG") == 0
    told.socket.close()


def test_W01_a_stuck_or_dead_committer_gets_no_pings(kit: Kit) -> None:
    running = kit.start()
    committer = running.collector.ingest.committer
    assert running.collector.gets_on()
    committer.progress -= 3600
    assert not running.collector.gets_on()
    kit.until(running.collector.gets_on)  # an idle committer gets on once a second
    committer.stop()
    committer.join(90)
    assert not running.collector.gets_on()


def test_sigterm_ends_it_cleanly_and_keeps_what_was_acknowledged(kit: Kit) -> None:
    process = kit.process()
    agent = kit.agent(process.address).hello()
    for number in range(1, 11):
        agent.send(number, kit.body(kit.gpu_rows()))
    agent.wait(*range(1, 11))
    assert process.stop() == 0
    assert not (kit.tmp / "fleet.duckdb.wal").exists() or (kit.tmp / "fleet.duckdb.wal").stat().st_size == 0
    again = kit.process()
    agent = kit.agent(again.address).hello()
    agent.send(11, kit.body(kit.gpu_rows()))
    agent.wait(11)
    assert again.stop() == 0
