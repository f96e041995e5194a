"""T04: two hosts with one name, one host renamed, cloned machine ids, reboots that are none of these."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
import trustme

from gpufleet.tls import Tls, server_credentials
from gpufleet_collector.identity import Alive, Claim, Identities, machine_id
from gpufleet_collector.ingest import certificate_names
from gpufleet_collector.store import Store

if TYPE_CHECKING:
    from tests.collector.ingest.conftest import Agent, Kit

SECOND = 1_000_000
NOW = 1_770_000_000 * SECOND


def test_T04_two_machines_with_one_name_then_a_rename(kit: Kit) -> None:
    running = kit.start()
    first = kit.agent(running.address).hello(machine_id="aaaa", boot_id="b-a", spool_id="s-a")
    second = kit.agent(running.address).hello(machine_id="bbbb", boot_id="b-b", spool_id="s-b")
    assert _name(first) == "gpu-a01"
    assert _name(second) == "gpu-a01~bbbb"
    for agent, uuid in ((first, "GPU-1"), (second, "GPU-2")):
        agent.send(1, kit.body(kit.gpu_rows(uuid)))
        agent.wait(1)
    assert not first.ended
    assert running.query("SELECT node, gpu_uuid FROM live.gpu ORDER BY 1") == [
        ("gpu-a01", "GPU-1"),
        ("gpu-a01~bbbb", "GPU-2"),
    ]
    assert running.query("SELECT node, claimed, conflict FROM live.node ORDER BY 1") == [
        ("gpu-a01", "gpu-a01", ""),
        ("gpu-a01~bbbb", "gpu-a01", "gpu-a01"),
    ]
    assert running.query("SELECT node, kind FROM live.event") == [("gpu-a01~bbbb", "identity_conflict")]
    with running.store.transaction() as write:
        write.execute(
            "INSERT INTO live.baseline VALUES "
            "('gpu-a01', 'gpu:GPU-1', 'k', 1, 0, 1, '', 'frozen', '', now()::TIMESTAMP, '')"
        )
        write.execute(
            "INSERT INTO live.maintenance (id, nodes, reason, actor, claimed, set_at, from_at, until) VALUES "
            "(1, ['gpu-a00', 'gpu-a01'], '', '', true, now()::TIMESTAMP, now()::TIMESTAMP, now()::TIMESTAMP)"
        )
    renamed = kit.agent(running.address).hello(
        node="gpu-z99", machine_id="aaaa", boot_id="b-a", spool_id="s-a"
    )
    assert _name(renamed) == "gpu-z99"
    assert first.code() is grpc.StatusCode.ABORTED
    assert running.query("SELECT before, node FROM live.node_alias") == [("gpu-a01", "gpu-z99")]
    assert running.one("SELECT node FROM live.baseline") == "gpu-z99"
    assert running.one("SELECT nodes FROM live.maintenance") == ["gpu-a00", "gpu-z99"]
    assert running.query("SELECT node FROM live.node ORDER BY 1") == [("gpu-a01~bbbb",), ("gpu-z99",)]
    assert running.query("SELECT node, detail->>'before' FROM live.event WHERE kind = 'renamed'") == [
        ("gpu-z99", "gpu-a01")
    ]
    assert set(running.state.nodes()) == {"gpu-z99", "gpu-a01~bbbb"}
    renamed.send(1, kit.body(kit.gpu_rows("GPU-1")))  # known from before the rename: not stored again
    renamed.send(2, kit.body(kit.gpu_rows("GPU-1")))
    renamed.wait(1, 2)
    assert running.one("SELECT count(*) FROM live.gpu WHERE gpu_uuid = 'GPU-1'") == 2


def test_T04_a_restart_keeps_who_is_who(kit: Kit) -> None:
    running = kit.start()
    kit.agent(running.address).hello(machine_id="aaaa", boot_id="b-a", spool_id="s-a")
    kit.agent(running.address).hello(machine_id="bbbb", boot_id="b-b", spool_id="s-b")
    running.stop()
    again = kit.start(store=running.store)
    second = kit.agent(again.address).hello(machine_id="bbbb", boot_id="b-b2", spool_id="s-b")
    first = kit.agent(again.address).hello(machine_id="aaaa", boot_id="b-a2", spool_id="s-a")
    assert (_name(first), _name(second)) == ("gpu-a01", "gpu-a01~bbbb")
    assert again.one("SELECT count(*) FROM live.event WHERE kind = 'identity_conflict'") == 1


def test_T04_clones_with_one_machine_id_are_two_nodes(kit: Kit) -> None:
    running = kit.start()
    first = kit.agent(running.address).hello(boot_id="1111-x", spool_id="s-1")
    first.send(1, kit.body(kit.gpu_rows("GPU-1")))
    first.wait(1)
    second = kit.agent(running.address).hello(boot_id="2222-x", spool_id="s-2")
    assert _name(second) == "gpu-a01~2222"
    second.send(1, kit.body(kit.gpu_rows("GPU-2")))
    second.wait(1)
    assert not first.ended
    assert running.query("SELECT node, gpu_uuid FROM live.gpu ORDER BY 2") == [
        ("gpu-a01", "GPU-1"),
        ("gpu-a01~2222", "GPU-2"),
    ]
    third = kit.agent(running.address).hello(boot_id="2222-x", spool_id="s-2")
    assert _name(third) == "gpu-a01~2222"
    assert running.one("SELECT count(*) FROM live.event WHERE kind = 'identity_conflict'") == 1


@pytest.mark.parametrize("zero", ["", "0" * 32, "00000000-0000-0000-0000-000000000000"])
def test_T04_no_machine_id_is_no_identity(kit: Kit, zero: str) -> None:
    running = kit.start()
    first = kit.agent(running.address).hello(node="n1", machine_id=zero, boot_id="1111", spool_id="s-1")
    other = kit.agent(running.address).hello(node="n2", machine_id=zero, boot_id="2222", spool_id="s-2")
    twin = kit.agent(running.address).hello(node="n1", machine_id=zero, boot_id="3333", spool_id="s-3")
    assert (_name(first), _name(other), _name(twin)) == ("n1", "n2", "n1~3333")
    assert not first.ended
    again = kit.agent(running.address).hello(node="n1", machine_id=zero, boot_id="1111", spool_id="s-1")
    assert _name(again) == "n1"
    assert first.code() is grpc.StatusCode.ABORTED


def _name(agent: Agent) -> str:
    assert agent.welcome is not None, agent.error
    return agent.welcome.node


@pytest.fixture
def authority(tmp_path: Path) -> trustme.CA:
    return trustme.CA()


def _tls(tmp: Path, authority: trustme.CA) -> grpc.ServerCredentials:
    server = authority.issue_cert("localhost")
    authority.cert_pem.write_to_path(tmp / "ca.pem")
    server.private_key_pem.write_to_path(tmp / "key.pem")
    (tmp / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in server.cert_chain_pems))
    return server_credentials(
        Tls(ca=str(tmp / "ca.pem"), cert=str(tmp / "cert.pem"), key=str(tmp / "key.pem"))
    )


def _channel(
    address: str, authority: trustme.CA, *names: str, common_name: str | None = None
) -> grpc.Channel:
    cert = authority.issue_cert(*names, common_name=common_name)
    credentials = grpc.ssl_channel_credentials(
        authority.cert_pem.bytes(),
        cert.private_key_pem.bytes(),
        b"".join(blob.bytes() for blob in cert.cert_chain_pems),
    )
    return grpc.secure_channel(address.replace("127.0.0.1", "localhost"), credentials)


def test_T04_under_mutual_tls_a_name_that_is_not_in_the_certificate_is_refused_and_audited(
    kit: Kit, authority: trustme.CA
) -> None:
    running = kit.start(credentials=_tls(kit.tmp, authority))
    hellos = [("aaaa", "gpu-a01", "gpu-a01"), ("bbbb", "gpu-a01", "gpu-a01b"), ("aaaa", "gpu-z99", "gpu-a01")]
    agents = []
    for identity, host, cert in hellos:
        channel = _channel(running.address, authority, cert)
        agents.append(kit.agent(running.address, channel).hello(node=host, machine_id=identity))
    assert _name(agents[0]) == "gpu-a01"
    for agent in agents[1:]:
        assert agent.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "certificate" in agent.details()
    kit.until(lambda: running.one("SELECT count(*) FROM live.audit") == 2)
    audit = running.query(
        "SELECT actor, verb, target, result LIKE 'denied: %' FROM live.audit ORDER BY target"
    )
    assert audit == [("gpu-a01b", "hello", "gpu-a01", True), ("gpu-a01", "hello", "gpu-z99", True)]
    assert running.query("SELECT node FROM live.node") == [("gpu-a01",)]
    assert not agents[0].ended


def test_T04_a_machine_id_alone_takes_nothing_from_another_certificate(
    kit: Kit, authority: trustme.CA
) -> None:
    running = kit.start(credentials=_tls(kit.tmp, authority))

    def call(node: str, boot: str, *names: str) -> Agent:
        channel = _channel(running.address, authority, *names)
        return kit.agent(running.address, channel).hello(
            node=node, machine_id="aaaa", boot_id=boot, spool_id=f"s-{node}"
        )

    victim = call("node-a", "boot-a", "node-a")
    thief = call("node-b", "boot-a", "node-b")
    assert thief.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "both names" in thief.details()
    kit.until(lambda: running.one("SELECT count(*) FROM live.audit") == 1)
    assert running.query("SELECT actor, target, result LIKE 'denied: %' FROM live.audit") == [
        ("node-b", "node-b", True)
    ]
    clone = call("node-b", "boot-b", "node-b")  # another boot that runs now: a node of its own
    assert _name(clone) == "node-b"
    victim.send(1, kit.body(kit.gpu_rows()))
    victim.wait(1)
    assert not victim.ended
    assert running.query("SELECT node, machine_id FROM live.node ORDER BY 1") == [
        ("node-a", "aaaa"),
        ("node-b", "aaaa"),
    ]
    assert running.query("SELECT node, kind FROM live.event") == [("node-b", "identity_conflict")]
    for agent in (victim, clone):
        agent.close()
        kit.agents.remove(agent)
    kit.until(lambda: not any(state.connected for state in running.state.nodes().values()))
    again = call("node-b", "boot-a", "node-b")  # its own row, whatever boot it says
    assert _name(again) == "node-b"
    assert call("node-c", "boot-c", "node-c").code() is grpc.StatusCode.PERMISSION_DENIED
    assert _name(call("node-a", "boot-a", "node-a")) == "node-a"
    assert running.query("SELECT node FROM live.node ORDER BY 1") == [("node-a",), ("node-b",)]


def test_T04_a_certificate_with_both_names_renames(kit: Kit, authority: trustme.CA) -> None:
    running = kit.start(credentials=_tls(kit.tmp, authority))
    for node in ("node-a", "node-z"):
        channel = _channel(running.address, authority, "node-a", "node-z")
        assert _name(kit.agent(running.address, channel).hello(node=node)) == node
    assert running.query("SELECT node FROM live.node") == [("node-z",)]


def test_T04_without_a_certificate_nobody_gets_in(kit: Kit, authority: trustme.CA) -> None:
    running = kit.start(credentials=_tls(kit.tmp, authority))
    stranger = trustme.CA()
    cert = stranger.issue_cert("gpu-a01")
    for credentials in (
        grpc.ssl_channel_credentials(authority.cert_pem.bytes()),
        grpc.ssl_channel_credentials(
            authority.cert_pem.bytes(), cert.private_key_pem.bytes(), cert.cert_chain_pems[0].bytes()
        ),
    ):
        channel = grpc.secure_channel(running.address.replace("127.0.0.1", "localhost"), credentials)
        assert kit.agent(running.address, channel).hello().code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("auth", "names"),
    [
        ({}, None),
        ({"transport_security_type": [b"ssl"]}, set()),
        (
            {
                "transport_security_type": [b"ssl"],
                "x509_common_name": [b"cn"],
                "x509_subject_alternative_name": [
                    b"dns",
                    b"spiffe://fleet/node/gpu-1",
                    b"spiffe://fleet/user/x",
                ],
            },
            {"cn", "dns", "gpu-1", "spiffe://fleet/user/x"},
        ),
    ],
)
def test_T04_names_of_a_certificate(auth: dict[str, list[bytes]], names: set[str] | None) -> None:
    assert certificate_names(auth) == names


def test_machine_ids_that_are_none() -> None:
    assert machine_id(" ABCDEF ") == "abcdef"
    assert machine_id("uninitialized") == machine_id("0000") == machine_id("-") == ""


CLAIM = Claim("gpu-a01", "aaaa", "boot-1", "spool-1", "1", NOW - 3600 * SECOND)


class Filed:
    """Identities over an in-memory store, with a presence that a test sets."""

    def __init__(self) -> None:
        self.store = Store.open(None)
        self.identities = Identities()
        self.alive: dict[str, Alive] = {}

    def hello(self, claim: Claim, open_: bool = True, now: int = NOW) -> str:
        decision = self.identities.decide(claim, self.alive.get, now)
        with self.store.transaction() as write:
            self.identities.store(write, decision)
            self.identities.flush(write)
        if decision.before:
            self.alive.pop(decision.before, None)
        self.alive[decision.machine.node] = Alive(open_, claim.boot_id, now)
        return decision.machine.node

    def names(self) -> list[str]:
        with self.store.reader() as read:
            return [node for (node,) in read.execute("SELECT node FROM live.node ORDER BY 1").fetchall()]


@pytest.fixture
def filed() -> Filed:
    return Filed()


def test_a_fast_reboot_is_no_conflict(filed: Filed) -> None:
    filed.hello(CLAIM)
    rebooted = replace(CLAIM, boot_id="boot-2", booted_us=NOW + 5 * SECOND)
    assert filed.hello(rebooted, now=NOW + 20 * SECOND) == "gpu-a01"
    assert filed.names() == ["gpu-a01"]


def test_a_reinstalled_host_goes_on_under_its_name(filed: Filed) -> None:
    filed.hello(CLAIM, open_=False)
    fresh = Claim("gpu-a01", "cccc", "boot-9", "spool-9", "1", None)
    assert filed.hello(fresh, now=NOW + 3600 * SECOND) == "gpu-a01"
    assert filed.names() == ["gpu-a01"]
    assert filed.hello(CLAIM, now=NOW + 3601 * SECOND) == "gpu-a01~aaaa"


def test_a_short_absence_does_not_give_the_name_away(filed: Filed) -> None:
    filed.hello(CLAIM, open_=False)
    assert (
        filed.hello(replace(CLAIM, machine_id="bbbb", boot_id="x", spool_id="y"), now=NOW + 30 * SECOND)
        == "gpu-a01~bbbb"
    )
    assert filed.hello(CLAIM, now=NOW + 31 * SECOND) == "gpu-a01"


def test_suffixes_grow_until_they_are_free(filed: Filed) -> None:
    filed.hello(CLAIM)
    ids = ["bbbb1111", "bbbb2222", "bbbb1122"]
    names = [filed.hello(Claim("gpu-a01", m, f"boot-{m}", f"spool-{m}", "1", None)) for m in ids]
    assert names == ["gpu-a01~bbbb", "gpu-a01~bbbb2", "gpu-a01~bbbb1"]
    assert filed.hello(Claim("gpu-a01~bbbb", "dddd", "d", "d", "1", None)) == "gpu-a01~bbbb~dddd"
    assert len(set(filed.names())) == 5


def test_a_name_is_given_back_when_the_other_was_renamed(filed: Filed) -> None:
    filed.hello(CLAIM)
    second = Claim("gpu-a01", "bbbb", "boot-b", "spool-b", "1", None)
    assert filed.hello(second) == "gpu-a01~bbbb"
    assert filed.hello(replace(CLAIM, name="gpu-z99")) == "gpu-z99"
    assert filed.hello(second, now=NOW + SECOND) == "gpu-a01"
    assert filed.names() == ["gpu-a01", "gpu-z99"]


def test_a_rename_onto_a_name_that_is_taken_gets_a_suffix(filed: Filed) -> None:
    filed.hello(CLAIM)
    filed.hello(Claim("gpu-b02", "bbbb", "boot-b", "spool-b", "1", None), open_=False)
    assert filed.hello(replace(CLAIM, name="gpu-b02"), now=NOW + 3600 * SECOND) == "gpu-b02~aaaa"


def test_two_live_hosts_without_any_id_are_two_nodes(filed: Filed) -> None:
    bare = Claim("gpu-a01", "", "", "spool-1", "1", None)
    other = replace(bare, spool_id="tool-2")
    assert filed.hello(bare) == "gpu-a01"
    assert filed.hello(other) == "gpu-a01~tool"
    assert filed.hello(bare) == "gpu-a01"
    assert filed.hello(other) == "gpu-a01~tool"
    filed.alive["gpu-a01"] = Alive(False, "", NOW)
    assert filed.hello(replace(bare, spool_id="new-3")) == "gpu-a01"  # a spool that was begun anew


def test_five_thousand_hellos_are_filed_at_once(filed: Filed) -> None:
    with filed.store.transaction() as write:
        for number in range(5000):
            claim = Claim(f"n{number}", f"m{number}", f"b{number}", f"s{number}", "1", None)
            decision = filed.identities.decide(claim, filed.alive.get, NOW)
            filed.identities.store(write, decision)
        filed.identities.flush(write)
    assert len(filed.names()) == 5000
    again = Identities()
    with filed.store.reader() as read:
        again.load(read)
    claim = Claim("n17", "m17", "b17-2", "s17", "1", None)
    assert not again.decide(claim, filed.alive.get, NOW).new
