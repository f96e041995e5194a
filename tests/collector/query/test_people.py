"""Who may do what people do with incidents, and who the audit says it was; over real sockets."""

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
Request = (
    fleet_pb2.ActOnIncidentsRequest
    | fleet_pb2.AddSilenceRequest
    | fleet_pb2.EndSilencesRequest
    | fleet_pb2.StartMaintenanceRequest
    | fleet_pb2.EndMaintenanceRequest
)
REQUESTS: dict[str, Request] = {
    "incidents ack": fleet_pb2.ActOnIncidentsRequest(
        numbers=[1], act=fleet_pb2.ACT_ACKNOWLEDGE, text="on it", author="ann"
    ),
    "incidents note": fleet_pb2.ActOnIncidentsRequest(
        numbers=[1], act=fleet_pb2.ACT_NOTE, text="riser", author="ann"
    ),
    "incidents close": fleet_pb2.ActOnIncidentsRequest(
        numbers=[1], act=fleet_pb2.ACT_CLOSE, text="swapped", author="ann"
    ),
    "incidents silence": fleet_pb2.AddSilenceRequest(nodes=["gpu-001"], for_s=60, reason="x", author="ann"),
    "incidents silence end": fleet_pb2.EndSilencesRequest(ids=[7], author="ann"),
    "maintenance start": fleet_pb2.StartMaintenanceRequest(
        nodes=["gpu-001"], for_s=60, reason="x", author="ann"
    ),
    "maintenance end": fleet_pb2.EndMaintenanceRequest(ids=[7], author="ann"),
}
TABLES = ("incident_act", "silence", "maintenance")


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store.open(None)
    rules.install(made, ())
    with made.transaction() as write:
        write.execute(
            "INSERT INTO live.node VALUES ('gpu-001', 'gpu-001', '', 'b', 's', '1', '', ?, ?)", [NOW, NOW]
        )
        write.execute(
            "INSERT INTO live.incident VALUES "
            "(1, 'xid', 'gpu-001', 'node:', 'open', 'crit', 'Xid', ?, ?, NULL, NULL, 0)",
            [NOW, NOW],
        )
        write.execute(
            "INSERT INTO live.silence "
            "VALUES (7, ['gpu-001'], [], [], [], 'x', 'ann', true, ?, ?, NULL, NULL)",
            [NOW, datetime(2026, 12, 1)],
        )
        write.execute(
            "INSERT INTO live.maintenance VALUES (7, ['gpu-001'], 'x', 'ann', true, ?, ?, ?, NULL, NULL)",
            [NOW, NOW, datetime(2026, 12, 1)],
        )
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


def ask(
    store: Store, request: Request, server: grpc.ServerCredentials | None = None,
    authority: trustme.CA | None = None, name: str = "",
) -> tuple[grpc.StatusCode, dict[str, object]]:  # fmt: skip
    """The code and the document of a call; with `authority` over mutual TLS as `name`."""

    async def play() -> tuple[grpc.StatusCode, dict[str, object]]:
        serving = grpc.aio.server()
        servicer = FleetServicer(store, {}, lambda: Health(True, "", None, False, ""), lambda: NOW)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(servicer, serving)
        if server is not None and authority is not None:
            issued = authority.issue_cert(name)
            client = grpc.ssl_channel_credentials(
                authority.cert_pem.bytes(), issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes()
            )
            port = serving.add_secure_port("127.0.0.1:0", server)
            channel = grpc.aio.secure_channel(f"localhost:{port}", client)
        else:
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{serving.add_insecure_port('127.0.0.1:0')}")
        await serving.start()
        stub = fleet_pb2_grpc.FleetServiceStub(channel)
        method = getattr(stub, type(request).__name__.removesuffix("Request"))
        try:
            whole = b"".join([part.json async for part in method(request)])
        except grpc.aio.AioRpcError as error:
            return error.code(), {}
        finally:
            await channel.close(None)
            await serving.stop(0)
        found = json.loads(whole)
        assert isinstance(found, dict)
        return grpc.StatusCode.OK, found

    return asyncio.run(play())


def audit(store: Store) -> list[tuple[str, str, object, object, str]]:
    """(actor, verb, claimed, author that the client gave beside its certificate, result)."""
    with store.reader(LIVE) as read:
        rows = read.execute("SELECT actor, verb, args::VARCHAR, result FROM audit").fetchall()
    told = [(actor, verb, json.loads(args), result) for actor, verb, args, result in rows]
    return [
        (actor, verb, args.get("claimed"), args.get("author"), result) for actor, verb, args, result in told
    ]


def written(store: Store) -> list[tuple[object, ...]]:
    with store.reader(LIVE) as read:
        return [row for table in TABLES for row in read.execute(f"FROM {table}").fetchall()]


@pytest.mark.parametrize("verb", REQUESTS)
def test_the_certificate_says_who_it_was(
    store: Store, authority: trustme.CA, tmp_path: Path, verb: str
) -> None:
    code, _ = ask(store, REQUESTS[verb], server_tls(authority, tmp_path), authority, "ops.example")
    assert code is grpc.StatusCode.OK
    assert audit(store) == [("ops.example", verb, False, "ann", "ok")]


@pytest.mark.parametrize("verb", REQUESTS)
def test_an_agent_may_do_none_of_it(store: Store, authority: trustme.CA, tmp_path: Path, verb: str) -> None:
    before = written(store)
    code, _ = ask(store, REQUESTS[verb], server_tls(authority, tmp_path), authority, "gpu-001")
    assert code is grpc.StatusCode.PERMISSION_DENIED
    [(actor, denied, _, author, result)] = audit(store)
    assert (actor, denied, author) == ("gpu-001", verb, "ann")
    assert result.startswith("denied: the certificate belongs to the agent on gpu-001: an agent may not")
    assert written(store) == before
    with store.reader(LIVE) as read:
        assert read.execute("SELECT state FROM incident").fetchone() == ("open",)


@pytest.mark.parametrize("verb", REQUESTS)
def test_over_plain_loopback_the_name_is_claimed(store: Store, verb: str) -> None:
    code, document = ask(store, REQUESTS[verb])
    assert code is grpc.StatusCode.OK
    assert document["api_version"] == "fleet/v1"
    assert audit(store) == [("ann", verb, True, None, "ok")]


def test_a_request_that_says_nothing_is_refused(store: Store) -> None:
    before = written(store)
    for request in (
        fleet_pb2.ActOnIncidentsRequest(numbers=[1]),
        fleet_pb2.ActOnIncidentsRequest(act=fleet_pb2.ACT_ACKNOWLEDGE),
        fleet_pb2.ActOnIncidentsRequest(numbers=[1], act=fleet_pb2.ACT_ACKNOWLEDGE, for_s=float("inf")),
        fleet_pb2.AddSilenceRequest(for_s=60, reason="x"),
        fleet_pb2.EndSilencesRequest(),
        fleet_pb2.StartMaintenanceRequest(nodes=["gpu-001"], for_s=60, reason="x", from_us=2**62),
        fleet_pb2.StartMaintenanceRequest(nodes=["gpu-001"], for_s=60, reason="x", from_us=-1),
    ):
        assert ask(store, request)[0] is grpc.StatusCode.INVALID_ARGUMENT
    huge = fleet_pb2.ActOnIncidentsRequest(numbers=[2**64 - 1], act=fleet_pb2.ACT_NOTE, text="x")
    assert ask(store, huge)[0] is grpc.StatusCode.NOT_FOUND
    assert written(store) == before
    assert audit(store) == []


def test_text_of_a_person_is_bounded_and_one_line(store: Store) -> None:
    text = "a\r\n\x1b[2J\x00" + "b" * 5000
    note = fleet_pb2.ActOnIncidentsRequest(numbers=[1], act=fleet_pb2.ACT_NOTE, text=text, author="\n" * 900)
    assert ask(store, note)[0] is grpc.StatusCode.OK
    with store.reader(LIVE) as read:
        row = read.execute("SELECT actor, text FROM incident_act").fetchone()
    assert row is not None
    assert row[0] == "unknown"
    assert row[1].startswith("a [2J bbb")
    assert len(row[1]) == 2000
