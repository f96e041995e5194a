"""Who may change the inventory, and who the audit says it was."""

import asyncio
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import grpc
import pytest
import trustme

from gpufleet.tls import Tls, server_credentials
from gpufleet.v1 import fleet_pb2, fleet_pb2_grpc
from gpufleet_collector import rules
from gpufleet_collector.documents import Health
from gpufleet_collector.query import FleetServicer
from gpufleet_collector.store import LIVE, Store

NOW = datetime(2026, 11, 30, 12)
ACCEPT = fleet_pb2.AcceptInventoryRequest(nodes=["gpu-001"], author="ann", reason="repaired")
IMPORT = fleet_pb2.ImportInventoryRequest(
    csv=b"node,uuid,serial\ngpu-001,GPU-a,1650\n", author="ann", reason="repaired"
)


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store.open(None)
    rules.install(made, ())
    with made.transaction() as write:
        for node, claimed in (("gpu-001", "gpu-001"), ("gpu-002~ab12", "gpu-002")):
            write.execute(
                "INSERT INTO live.node VALUES (?, ?, '', 'b', 's', '1', '', ?, ?)", [node, claimed, NOW, NOW]
            )
        write.execute("INSERT INTO live.node_alias VALUES ('gpu-old', 'gpu-001', ?)", [NOW])
    yield made
    made.close()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def server_tls(authority: trustme.CA, folder: Path) -> grpc.ServerCredentials:
    issued = authority.issue_cert("localhost")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    return server_credentials(Tls(**{name: str(folder / f"{name}.pem") for name in ("ca", "cert", "key")}))


def client_tls(authority: trustme.CA, *names: str, common_name: str | None = None) -> grpc.ChannelCredentials:
    issued = authority.issue_cert(*names, common_name=common_name)
    return grpc.ssl_channel_credentials(
        authority.cert_pem.bytes(), issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes()
    )


def ask(
    store: Store,
    server: grpc.ServerCredentials | None,
    client: grpc.ChannelCredentials | None,
    request: fleet_pb2.AcceptInventoryRequest | fleet_pb2.ImportInventoryRequest,
) -> grpc.StatusCode:
    async def play() -> grpc.StatusCode:
        serving = grpc.aio.server()
        servicer = FleetServicer(store, {}, lambda: Health(True, "", None, False, ""), lambda: NOW)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(servicer, serving)
        if server is not None and client is not None:
            port = serving.add_secure_port("127.0.0.1:0", server)
            channel = grpc.aio.secure_channel(f"localhost:{port}", client)
        else:
            port = serving.add_insecure_port("127.0.0.1:0")
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        await serving.start()
        stub = fleet_pb2_grpc.FleetServiceStub(channel)
        try:
            if isinstance(request, fleet_pb2.AcceptInventoryRequest):
                await stub.AcceptInventory(request)
            else:
                await stub.ImportInventory(request)
        except grpc.aio.AioRpcError as error:
            return error.code()
        finally:
            await channel.close(None)
            await serving.stop(0)
        return grpc.StatusCode.OK

    return asyncio.run(play())


def audit(store: Store) -> list[tuple[str, str, str | None, str]]:
    """(actor, verb, author that the client gave, result)."""
    with store.reader(LIVE) as read:
        rows = read.execute("SELECT actor, verb, args::VARCHAR, result FROM audit").fetchall()
    return [(actor, verb, json.loads(args).get("author"), result) for actor, verb, args, result in rows]


def set_by(store: Store) -> set[str]:
    with store.reader(LIVE) as read:
        return {row[0] for row in read.execute("SELECT set_by FROM expected").fetchall()}


@pytest.mark.parametrize(("request_", "verb"), [(ACCEPT, "inventory accept"), (IMPORT, "inventory import")])
def test_the_certificate_says_who_it_was(
    store: Store,
    authority: trustme.CA,
    tmp_path: Path,
    request_: fleet_pb2.AcceptInventoryRequest | fleet_pb2.ImportInventoryRequest,
    verb: str,
) -> None:
    code = ask(store, server_tls(authority, tmp_path), client_tls(authority, "ops.example"), request_)
    assert code is grpc.StatusCode.OK
    assert audit(store) == [("ops.example", verb, "ann", "ok")]
    assert set_by(store) == {"ops.example"}


@pytest.mark.parametrize("request_", [ACCEPT, IMPORT])
@pytest.mark.parametrize(
    ("names", "common_name"),
    [
        (["gpu-001"], None),
        (["gpu-002"], None),
        (["ops.example", "gpu-001"], None),
        (["ops.example"], "gpu-001"),
        (["gpu-old"], None),
    ],
)
def test_an_agent_may_not_change_the_inventory(
    store: Store,
    authority: trustme.CA,
    tmp_path: Path,
    request_: fleet_pb2.AcceptInventoryRequest | fleet_pb2.ImportInventoryRequest,
    names: list[str],
    common_name: str | None,
) -> None:
    client = client_tls(authority, *names, common_name=common_name)
    code = ask(store, server_tls(authority, tmp_path), client, request_)
    assert code is grpc.StatusCode.PERMISSION_DENIED
    [(actor, _, author, result)] = audit(store)
    assert set(actor.split(", ")) == {*names, *([common_name] if common_name else [])}
    assert author == "ann"
    assert result.startswith("denied: the certificate belongs to the agent on gpu-")
    assert set_by(store) == set()


def test_over_plain_loopback_the_request_says_who(store: Store) -> None:
    assert ask(store, None, None, ACCEPT) is grpc.StatusCode.OK
    assert audit(store) == [("ann", "inventory accept", None, "ok")]
    assert set_by(store) == {"ann"}
