import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet.event import Event
from gpufleet.metric import Value
from gpufleet_agent.drivers import Item
from gpufleet_agent.episodes import Episodes
from gpufleet_agent.pipe import Inventory
from gpufleet_agent.probe import Sweep
from gpufleet_agent.probes import gpu, pci

NAMES = [metric.name for metric in gpu.METRICS]
PCI = ["0000:1b:00.0", "0000:43:00.0", "0000:52:00.0"]


class Clock:
    def __init__(self) -> None:
        self.us = 10**9

    def __call__(self) -> int:
        return self.us


class Kept:
    def __init__(self, boot: str = "boot-1") -> None:
        self.text = ""
        self.clock = Clock()
        self.restart(boot)

    def restart(self, boot: str = "boot-1") -> Episodes:
        self.episodes = Episodes(boot, self.text, self.save, 60.0, 3600.0, self.clock)
        return self.episodes

    def save(self, text: str) -> None:
        self.text = text

    def see(self, *states: str | None, epoch: int = 1, error: str = "") -> list[str]:
        """Events of one sweep of three cards; None = not listed."""
        return [event.kind for event in self.look(*states, epoch=epoch, error=error)]

    def look(self, *states: str | None, epoch: int = 1, error: str = "", live: bool = True) -> list[Event]:
        rows: list[list[Value | None]] = []
        for at, state in enumerate(states):
            if state is not None:
                known: dict[str, Value] = {
                    "gpu_uuid": f"GPU-{at}", "gpu_index": at, "pci": PCI[at], "state": state,
                    "driver_epoch": epoch,
                }  # fmt: skip
                if live and state == "ok":
                    known["temperature_c"] = 60.0
                rows.append([known.get(name) for name in NAMES])
        return self.episodes.see_gpus(Sweep("gpu", 1, self.clock(), 0.1, error, rows, [b""] * len(rows)))


def test_a_lost_card_is_told_once_and_so_is_its_return() -> None:
    kept = Kept()
    assert kept.see("ok", "ok", "ok") == []
    assert kept.see("ok", "lost", "ok") == ["gpu_lost"]
    assert kept.see("ok", "lost", "ok") == []
    kept.restart()
    assert kept.see("ok", "lost", "ok") == []
    assert kept.see("ok", "ok", "ok") == ["gpu_found"]
    assert kept.see("ok", "ok", "ok") == []
    kept.restart()
    assert kept.see("ok", "lost", "ok") == ["gpu_lost"]


def test_a_card_that_is_no_longer_listed_is_lost_too() -> None:
    kept = Kept()
    kept.see("ok", "ok", "ok")
    (event,) = kept.look("ok", None, "ok")
    assert (event.kind, event.code, event.entity) == ("gpu_lost", "not_listed", "gpu:GPU-1")
    assert json.loads(event.detail)["pci"] == PCI[1]
    assert kept.see("ok", None, "ok") == []
    assert kept.see("ok", "ok", "ok") == ["gpu_found"]


def test_a_card_that_comes_later_is_found_but_not_all_of_them_at_the_start() -> None:
    kept = Kept()
    assert kept.see("ok", "ok", None) == []
    (event,) = kept.look("ok", "ok", "ok")
    assert (event.kind, event.code) == ("gpu_found", "new")


def test_a_failed_sweep_says_nothing_about_any_card() -> None:
    kept = Kept()
    kept.see("ok", "ok", "ok")
    assert kept.see(error="driver_not_loaded") == []
    assert kept.see("ok", "ok", "ok") == []


def test_the_event_of_a_lost_card_names_its_serial() -> None:
    kept = Kept()
    kept.episodes.see_inventory(Inventory(1, True, [Item("gpu:GPU-0", {"serial": "1650"})]))
    kept.see("ok", "ok", "ok")
    (event,) = kept.look("lost", "ok", "ok")
    assert json.loads(event.detail) == {"pci": PCI[0], "serial": "1650", "code": "no_answer"}


def test_an_epoch_that_grows_is_a_reload_and_one_that_begins_anew_is_a_new_sampler() -> None:
    kept = Kept()
    assert kept.see("ok", "ok", "ok", epoch=1) == []
    assert kept.see("ok", "ok", "ok", epoch=2) == ["driver_reloaded"]
    assert kept.see("ok", "ok", "ok", epoch=2) == []
    kept.episodes.new_process()
    assert kept.see("ok", "ok", "ok", epoch=1) == []
    assert kept.see("ok", "ok", "ok", epoch=3) == ["driver_reloaded"]


# ---------------------------------------------------------------- what the kernel log says


def gone(pci: str = PCI[1], mono_us: int = 0) -> Event:
    return Event("gpu_lost", f"pci:{pci}", 10**15, mono_us, "off_bus", "gone", json.dumps({"pci": pci}))


def test_K02_B01_a_loss_that_both_see_is_told_by_whoever_is_first() -> None:
    kept = Kept()
    kept.see("ok", "ok", "ok")
    told = kept.episodes.hear(gone(mono_us=kept.clock.us))
    assert told is not None
    assert told.entity == "gpu:GPU-1"
    assert kept.see("ok", "ok", "ok") == []  # the driver answers from memory for a while
    assert kept.see("ok", "lost", "ok") == []
    assert kept.restart().hear(gone()) is None
    kept.clock.us += 60_000_000
    assert kept.see("ok", "ok", "ok") == ["gpu_found"]
    assert kept.see("ok", "lost", "ok") == ["gpu_lost"]
    assert kept.episodes.hear(gone()) is None


def test_K04_a_loss_before_the_card_was_ever_read_goes_by_its_address() -> None:
    kept = Kept()
    told = kept.episodes.hear(gone(mono_us=kept.clock.us))
    assert told is not None
    assert told.entity == f"pci:{PCI[1]}"
    assert kept.see("ok", "lost", "ok") == []
    assert kept.see("ok", "lost", "ok") == []
    assert kept.episodes.hear(gone()) is None


def test_a_loss_that_only_the_kernel_saw_ends_when_the_card_goes_on_answering() -> None:
    kept = Kept()
    kept.see("ok", "ok", "ok")
    kept.episodes.hear(gone(mono_us=kept.clock.us))
    kept.clock.us += 60_000_000
    assert kept.see("ok", "ok", "ok") == ["gpu_found"]
    assert kept.see("ok", "ok", "ok") == []


def test_a_card_none_of_whose_sensors_answers_is_not_found_again() -> None:
    kept = Kept()
    kept.see("ok", "ok", "ok")
    kept.episodes.hear(gone(mono_us=kept.clock.us))
    kept.clock.us += 60_000_000
    assert kept.look("ok", "ok", "ok", live=False) == []  # the handle is good, and nothing else is
    assert kept.see("ok", "ok", "ok") == ["gpu_found"]


def bus(*present: bool) -> Sweep:
    names = [metric.name for metric in pci.METRICS]
    rows: list[list[Value | None]] = []
    for at, there in enumerate(present):
        known: dict[str, Value] = {"pci": PCI[at], "present": there}
        rows.append([known.get(name) for name in names])
    return Sweep("pci", 1, 1, 0.1, "", rows, [b""] * len(rows))


def test_a_lost_card_that_the_bus_shows_is_looked_for_at_growing_intervals() -> None:
    kept = Kept()
    kept.see("ok", "ok", "ok")
    kept.see("ok", "lost", "ok")
    kept.episodes.see_bus(bus(True, False, True))
    kept.clock.us += 7_200_000_000
    assert kept.episodes.lost_due() == []  # it is not there
    kept.episodes.see_bus(bus(True, True, True))
    waits = []
    for _ in range(8):
        began = kept.clock.us
        while not kept.episodes.lost_due():
            kept.clock.us += 1_000_000
        waits.append((kept.clock.us - began) // 1_000_000)
        (lost,) = kept.episodes.lost_due()
        assert (lost.what, lost.uuid) == (PCI[1], "GPU-1")
        kept.episodes.postpone(PCI[1])
    assert waits == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    assert kept.see("ok", "ok", "ok") == ["gpu_found"]
    assert kept.episodes.lost_due() == []
    kept.see("ok", "lost", "ok")
    assert kept.episodes.lost_due() == []
    kept.clock.us += 61_000_000
    assert len(kept.episodes.lost_due()) == 1  # the waits began anew
    kept.see("ok", None, "ok")
    assert kept.episodes.lost_due() == []  # the driver does not list it: nothing to look at


@pytest.mark.parametrize("detail", ["", "{}", "[]", "null", "x", '{"pci": 7, "uuid": []}'])
def test_a_loss_of_no_known_card_passes(detail: str) -> None:
    kept = Kept()
    event = Event("gpu_lost", "node:", 1, 1, "off_bus", "gone", detail)
    assert kept.episodes.hear(event) == event
    event = Event("gpu_lost", "gpu:GPU-9", 1, 1, "off_bus", "gone", detail)
    assert kept.episodes.hear(event) is not None
    assert kept.episodes.hear(event) is None


# ---------------------------------------------------------------- the driver as a whole


def test_a_release_outlives_the_agent_but_not_the_boot_or_its_time() -> None:
    kept = Kept()
    kept.episodes.release(60.0)
    assert [skip.why for skip in kept.episodes.skip_list()] == ["released"]
    assert kept.restart().released
    assert not kept.restart("boot-2").released
    again = kept.restart()
    kept.clock.us += 61_000_000
    assert not again.released
    assert again.skip_list() == []


def test_B09_a_mismatch_is_told_once_with_both_versions_also_over_a_restart() -> None:
    kept = Kept()
    versions = {"driver_version": "550.127.05", "library_version": "550.144.03"}
    kept.episodes.see_inventory(Inventory(1, False, [Item("node:", versions)]))
    event = kept.episodes.begin_mismatch()
    assert event is not None
    assert json.loads(event.detail) == {"driver": "550.127.05", "library": "550.144.03"}
    assert "550.127.05" in event.message
    assert kept.episodes.begin_mismatch() is None
    assert kept.restart().begin_mismatch() is None
    assert kept.episodes.end_mismatch() is not None
    assert kept.episodes.end_mismatch() is None


# ---------------------------------------------------------------- over time


def test_a_hang_is_told_once_also_over_a_restart_and_is_tried_at_growing_intervals() -> None:
    kept = Kept()
    kept.see("ok", "ok", "ok")
    event = kept.episodes.begin_hang(PCI[1], PCI[1], "temperature", 3.2)
    assert event is not None
    assert event.entity == "gpu:GPU-1"
    assert json.loads(event.detail) == {"pci": PCI[1], "call": "temperature", "seconds": 3.2}
    assert kept.episodes.begin_hang(PCI[1], PCI[1], "temperature", 3.2) is None
    waits = []
    for _ in range(8):
        began = kept.clock.us
        while not kept.episodes.due():
            kept.clock.us += 1_000_000
        waits.append((kept.clock.us - began) // 1_000_000)
        kept.episodes.postpone(PCI[1])
    assert waits == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    kept.restart()
    assert [hang.what for hang in kept.episodes.skips()] == [PCI[1]]
    assert kept.episodes.skips()[0].uuid == "GPU-1"
    assert kept.episodes.begin_hang(PCI[1], PCI[1], "power", 3.2) is None
    recovered = kept.episodes.end_hang(PCI[1])
    assert recovered is not None
    assert recovered.kind == "driver_recovered"
    assert json.loads(recovered.detail)["seconds"] > 3600
    assert kept.episodes.end_hang(PCI[1]) is None
    assert kept.restart().skips() == []


def test_after_a_reboot_a_hung_card_is_tried_afresh() -> None:
    kept = Kept()
    kept.see("ok", "ok", "ok")
    kept.episodes.begin_hang(PCI[1], PCI[1], "temperature", 3.2)
    kept.restart("boot-2")
    assert kept.episodes.skips() == []
    assert kept.see("ok", "ok", "ok") == ["driver_recovered"]
    assert kept.see("ok", "ok", "ok") == []
    kept.episodes.begin_hang(PCI[1], PCI[1], "temperature", 3.2)
    kept.restart("boot-3")
    assert kept.episodes.begin_hang(PCI[1], PCI[1], "temperature", 3.2) is not None  # it hangs again


@pytest.mark.parametrize("text", ["", "null", "[]", "{", '{"hung": 3}', '{"hung": [{}]}', "\0"])
def test_what_was_kept_by_another_version_is_forgotten(text: str) -> None:
    kept = Kept()
    kept.text = text
    assert kept.restart().skips() == []


@given(
    st.lists(
        st.one_of(
            st.tuples(*[st.sampled_from(["ok", "lost", "hung", None])] * 3),
            st.just("restart"),
            st.just("error"),
        ),
        max_size=30,
    )
)
def test_lost_and_found_alternate_whatever_happens(story: list[tuple[str | None, ...] | str]) -> None:
    kept = Kept()
    told: dict[str, list[str]] = {}
    for step in story:
        if step == "restart":
            kept.restart()
        elif step == "error":
            assert kept.see(error="driver_not_loaded") == []
        else:
            for event in kept.look(*step):
                if event.code != "new":
                    told.setdefault(event.entity, []).append(event.kind)
    for kinds in told.values():
        assert all(kind == ("gpu_lost", "gpu_found")[at % 2] for at, kind in enumerate(kinds))


def test_nothing_is_tried_while_an_earlier_process_is_stuck_in_it_also_after_a_restart() -> None:
    kept = Kept()
    stuck = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        kept.episodes.begin_hang(PCI[0], PCI[0], "temperature", 3.0)
        kept.episodes.set_orphan(PCI[0], stuck.pid)
        for _ in range(2):
            kept.clock.us += 7_200_000_000
            assert kept.episodes.due() == []
            kept.restart()
    finally:
        stuck.communicate()
    kept.clock.us += 7_200_000_000
    assert [hang.what for hang in kept.episodes.due()] == [PCI[0]]


def test_a_later_process_of_the_same_number_is_not_the_stuck_one() -> None:
    kept = Kept()
    kept.episodes.begin_hang(PCI[0], PCI[0], "temperature", 3.0)
    kept.episodes.set_orphan(PCI[0], os.getpid())
    kept.text = kept.text.replace('"orphan_born":"', '"orphan_born":"9')
    kept.restart()
    kept.clock.us += 7_200_000_000
    assert [hang.what for hang in kept.episodes.due()] == [PCI[0]]
