"""The kernel log end to end: from the kernel's lines to events in the spool, with real processes."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gpufleet.event import Event
from gpufleet_agent.episodes import Episodes
from gpufleet_agent.spool import Clock, Spool

LOST = "NVRM: Xid (PCI:0000:6a:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


class Machine:
    """A captured tree whose kernel log the test writes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root / "dev/kmsg"
        self.seq = 0
        self.log.parent.mkdir(parents=True)
        boot = root / "proc/sys/kernel/random/boot_id"
        boot.parent.mkdir(parents=True)
        boot.write_text("boot-1\n")

    def write(self, *texts: str, facility: int = 0) -> None:
        with self.log.open("a") as log:
            for text in texts:
                log.write(f"{facility << 3 | 3},{self.seq},{self.seq * 1000},-;{text}\n")
                self.seq += 1

    def xids(self, *codes: int) -> None:
        self.write(*(f"NVRM: Xid (PCI:0000:6a:00): {code}, pid=1, name=x, Ch 00000001" for code in codes))

    def config(self, kit: Any) -> Any:
        return kit.config(top=f'root = "{self.root}"\ndriver = "none"', faults=None)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "root")


def codes(kit: Any) -> Counter[str]:
    return Counter(event.code for event in kit.spool.events("xid"))


def test_K05_what_the_kernel_wrote_before_the_agent_and_since_is_told_once_whatever_ends(
    kit: Any, machine: Machine
) -> None:
    machine.xids(31, 32)
    config = machine.config(kit)
    agent = kit.start(config)
    kit.wait_for(lambda: codes(kit).total() == 2)
    machine.xids(43)
    kit.wait_for(lambda: codes(kit).total() == 3)
    sampler = agent.child()
    sampler.kill()
    machine.xids(45)
    kit.wait_for(lambda: codes(kit).total() == 4)
    agent.process.kill()
    agent.process.wait(90)
    machine.xids(48)  # while nobody reads
    again = kit.start(config)
    kit.wait_for(lambda: codes(kit).total() == 5)
    assert again.end() == 0
    third = kit.start(config)
    machine.xids(94)
    kit.wait_for(lambda: codes(kit).total() == 6)
    assert third.end() == 0
    assert codes(kit) == dict.fromkeys(("31", "32", "43", "45", "48", "94"), 1)


def test_K04_the_loss_of_a_card_goes_at_once_and_what_a_process_wrote_does_not(
    kit: Any, machine: Machine
) -> None:
    machine.log.touch()
    config = machine.config(kit)
    config.write_text(config.read_text().replace("seal_s = 0.2", "seal_s = 300"))
    agent = kit.start(config)
    kit.wait_for(lambda: kit.spool.kinds() == ["agent_start"])
    machine.write(LOST, facility=1)
    machine.write(LOST)
    kit.wait_for(lambda: "gpu_lost" in kit.spool.kinds())
    assert agent.end() == 0
    assert sorted(kit.spool.kinds()) == ["agent_start", "agent_stop", "gpu_lost", "xid"]
    (event,) = kit.spool.events("xid")
    assert (event.entity, event.code) == ("pci:0000:6a:00.0", "79")


def test_a_tree_without_a_kernel_log_is_told_once_also_over_a_restart(kit: Any, machine: Machine) -> None:
    config = machine.config(kit)
    for _ in range(2):
        agent = kit.start(config)
        kit.wait_for(lambda: kit.spool.events("kernel_log"))
        seen = len(kit.spool.rows("host"))
        kit.wait_for(lambda seen=seen: len(kit.spool.rows("host")) > seen + 1)
        assert agent.end() == 0
    (event,) = kit.spool.events("kernel_log")
    assert event.code == "unreadable"
    machine.xids(31)
    agent = kit.start(config)
    kit.wait_for(lambda: codes(kit).total() == 1)
    assert agent.end() == 0
    assert [event.code for event in kit.spool.events("kernel_log")] == ["unreadable", "readable"]


FAULTS = """
[[fault]]
node = "gpu-a01"
gpu = 2
kind = "card_lost"
at = 1
[[fault]]
node = "gpu-a01"
gpu = 4
kind = "xid"
at = 2
params = { code = 63 }
[[fault]]
node = "gpu-a01"
gpu = 0
kind = "driver_hang"
at = 0
"""


def test_K02_B01_a_simulated_loss_is_one_event_although_two_saw_it_and_a_hung_card_hides_nothing(
    kit: Any,
) -> None:
    agent = kit.start(kit.config(faults=FAULTS))
    kit.wait_for(lambda: codes(kit).total() == 2)
    kit.wait_for(lambda: [row["state"] for row in kit.spool.rows("gpu")].count("lost") >= 4)
    assert agent.end() == 0
    assert codes(kit) == {"79": 1, "63": 1}
    (lost,) = kit.spool.events("gpu_lost")
    assert lost.entity.startswith("gpu:GPU-")
    assert kit.spool.events("gpu_found") == []
    rows = kit.spool.rows("gpu")
    newest = [row for row in rows if row["ts_us"] == max(row["ts_us"] for row in rows)]
    assert sorted(str(row["state"]) for row in newest) == ["hung", "lost", *["ok"] * 6]


def test_events_and_position_are_one_step(tmp_path: Path) -> None:
    spool = Spool.open(tmp_path / "spool.db", max_bytes=1 << 20, max_age_s=60, clock=Clock("b"))
    spool.put_all([b"one", b"two"], event=True, notes={"kernel_log": "c1"})
    spool._db.execute("pragma query_only = on")  # a disk that takes no writes
    spool.put_all([b"three"], event=True, notes={"kernel_log": "c2"})
    assert spool.get_meta("kernel_log") == "c2"
    assert [row.body for row in spool.oldest_first()] == [b"one", b"two", b"three"]
    stored = spool._db.execute("select value from meta where key = 'kernel_log'").fetchone()[0]
    assert stored == "c1"  # neither of the two is on the disk
    spool._db.execute("pragma query_only = off")
    spool.set_meta("other", "x")
    spool.trim()
    assert spool._db.execute("select value from meta where key = 'kernel_log'").fetchone()[0] == "c2"
    assert spool._db.execute("select count(*) from batch").fetchone()[0] == 3
    spool.close()


# ---------------------------------------------------------------- one loss, told by whoever is first


def episodes() -> Episodes:
    return Episodes("boot", None, lambda text: None)


def heard(pci: str = "0000:6a:00.0", kind: str = "gpu_lost", mono_us: int = 10**9) -> Event:
    detail = json.dumps({"pci": pci, "uuid": "GPU-1"})
    return Event(kind, f"pci:{pci}", 10**15, mono_us, "off_bus", "gone", detail)


def test_K02_the_kernel_is_first_then_again_and_other_events_pass() -> None:
    known = episodes()
    told = known.hear(heard())
    assert told is not None
    assert told.entity == "gpu:GPU-1"
    assert known.hear(heard()) is None
    assert known.hear(heard(kind="xid")) == heard(kind="xid")
    assert known.hear(heard("0000:6b:00.0")) is None  # the same card, by its identity
