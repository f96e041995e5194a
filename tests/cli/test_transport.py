"""Over mutual TLS, and again and again: what `--ca --cert --key` and `--watch` do."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import trustme
from click.testing import CliRunner

from gpufleet.tls import Tls, server_credentials
from gpufleet.v1 import fleet_pb2_grpc
from gpufleet_cli.main import fleet
from gpufleet_collector import rules
from gpufleet_collector.documents import Health
from gpufleet_collector.query import FleetServicer
from gpufleet_collector.store import Store


def files(folder: Path, authority: trustme.CA, name: str) -> Tls:
    issued = authority.issue_cert(name, "localhost")
    folder.mkdir()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    (folder / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    return Tls(ca=str(folder / "ca.pem"), cert=str(folder / "cert.pem"), key=str(folder / "key.pem"))


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def address(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An empty collector that wants a certificate."""
    store = Store.open(None)
    rules.install(store, ())
    tls = files(tmp_path_factory.mktemp("tls") / "server", authority, "collector")
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), []
    stop = asyncio.Event()

    async def serve() -> None:
        server = grpc.aio.server()
        servicer = FleetServicer(store, {}, lambda: Health(True, "", None, False, ""))
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(servicer, server)
        found.append(server.add_secure_port("127.0.0.1:0", server_credentials(tls)))
        await server.start()
        ready.set()
        await stop.wait()
        await server.stop(0)
        await loop.shutdown_default_executor()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(90)
    yield f"localhost:{found[0]}"
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()
    store.close()


def words_of(tls: Tls) -> list[str]:
    return ["--ca", tls.ca, "--cert", tls.cert, "--key", tls.key]


def test_with_a_certificate_it_answers(address: str, authority: trustme.CA, tmp_path: Path) -> None:
    tls = files(tmp_path / "client", authority, "ops")
    result = CliRunner().invoke(fleet, ["--server", address, *words_of(tls), "status", "-o", "json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["kind"] == "FleetStatus"


def test_without_a_certificate_it_says_what_may_be_missing(address: str) -> None:
    result = CliRunner().invoke(fleet, ["--server", address, "status"])
    assert result.exit_code == 3
    assert "--ca, --cert, --key" in result.stderr


def test_a_collector_we_do_not_trust_is_4(address: str, tmp_path: Path) -> None:
    tls = files(tmp_path / "stranger", trustme.CA(), "ops")
    result = CliRunner().invoke(fleet, ["--server", address, *words_of(tls), "status", "-o", "json"])
    assert result.exit_code == 4
    assert json.loads(result.stdout)["error"]["code"] == "tls"


def test_watch_appends_documents_to_a_pipe(address: str, authority: trustme.CA, tmp_path: Path) -> None:
    tls = files(tmp_path / "watcher", authority, "ops")
    watching = subprocess.Popen(
        [
            sys.executable, "-m", "gpufleet_cli.main", "--server", address, *words_of(tls), "-w",
            "-o", "json", "status",
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "80"},
    )  # fmt: skip
    try:
        assert watching.stdout is not None
        seen = [json.loads(watching.stdout.readline()) for _ in range(2)]
        assert seen[0]["generated_at"] < seen[1]["generated_at"]
        watching.send_signal(2)
        _, complaint = watching.communicate(timeout=90)
    finally:
        watching.kill()
    assert watching.returncode == 130
    assert "Traceback" not in complaint
