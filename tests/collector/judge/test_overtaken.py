"""Samples that arrive two at a time between passes: each counts, as if a pass had seen it as the newest."""

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.findings import Finding
from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeSettings
from gpufleet_collector.rules import load_rules

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Card, Fleet

Change = Callable[["Card"], None]

EACH = {rule.name: rule for rule in load_rules() if rule.header.each_sample}


def state(word: str) -> tuple[Change, Change]:
    return lambda card: setattr(card, "state", word), lambda card: setattr(card, "state", "ok")


def grow(counter: str) -> tuple[Change, Change]:
    return lambda card: setattr(card, counter, getattr(card, counter) + 0.5), lambda card: None


def listed(yes: bool) -> Change:
    return lambda card: setattr(card, "listed", yes)


TROUBLES: dict[str, tuple[str, Change, Change]] = {
    "lost_at_run_time": ("gpu_missing", *state("lost")),
    "refused_by_driver": ("gpu_missing", listed(False), listed(True)),
    "card_hung": ("driver_hung", *state("hung")),
    "power_brake": ("gpu_downclocked", *grow("brake_s")),
    "hw_thermal": ("gpu_downclocked", *grow("heat_s")),
}
"""Code -> its rule, what makes the next sample of a card bad, and what good."""


class Line:
    """One host whose samples arrive when a test says, and a pass each five seconds."""

    def __init__(self, fleet: "Fleet", code: str) -> None:
        self.fleet = fleet
        self.card = fleet.add("gpu-001", gpus=2).cards[1]
        self.rule, self.bad, self.good = TROUBLES[code]
        if self.rule == "gpu_downclocked":
            fleet.run(65)  # says nothing good of a card before it has a whole minute of it
        self.begin = fleet.at
        self.passes = 0
        self.restart()
        for _ in range(2):
            assert self.step("good") == []

    def restart(self) -> None:
        self.judge = Judge(self.fleet.store, JudgeSettings(), rules=[EACH[self.rule]])

    def step(self, *arrive: str, read_s: float = 0.5) -> list[Finding]:
        """These samples ("bad", "good"), five seconds apart, are in before the next pass; what fires in it.

        The last was read `read_s` before that pass.
        """
        self.passes += 1
        pass_at = self.begin + timedelta(seconds=5 * self.passes)
        for number, word in enumerate(arrive):
            self.fleet.at = pass_at - timedelta(seconds=read_s + 5 * (len(arrive) - 1 - number))
            (self.bad if word == "bad" else self.good)(self.card)
            self.fleet.send()
        self.fleet.at = pass_at
        return self.judge.run_pass(pass_at).fired


def test_rules_that_count_each_sample_run_as_often_as_samples_come() -> None:
    assert EACH.keys() == {rule for rule, *_ in TROUBLES.values()}
    assert {rule.header.every for rule in EACH.values()} == {"5s"}


@pytest.mark.parametrize("code", TROUBLES)
def test_two_bad_samples_that_arrive_between_two_passes_fire_at_the_second(fleet: "Fleet", code: str) -> None:
    line = Line(fleet, code)
    assert line.step() == []
    (fired,) = line.step("bad", "bad")
    assert (fired.entity, fired.code) == (line.card.entity, code)
    newer, older = (sample.at for sample in fired.evidence[:2])
    assert newer - older == timedelta(seconds=5)
    assert (fired.began_at, fired.id) == (older, 1)
    assert len(fleet.incidents()) == 1
    assert line.step("bad") == [], "it fires once"


@pytest.mark.parametrize("code", TROUBLES)
def test_single_bad_samples_between_good_ones_never_fire(fleet: "Fleet", code: str) -> None:
    line = Line(fleet, code)
    for steps in (
        [("bad",), (), ("good", "bad")],  # the good one is overtaken
        [(), ("good", "bad"), (), ("good", "bad")],
        [(), ("bad", "good"), (), ("bad", "good")],
        [("bad",), ("good",), (), ("good", "bad")],  # dropped by the older, begun anew by the newer
    ):
        for arrive in [*steps, ("good",), (), ("good", "good")]:
            assert line.step(*arrive) == [], (steps, arrive)
    assert fleet.incidents() == []


def test_samples_that_are_on_their_way_for_longer_than_an_interval(fleet: "Fleet") -> None:
    line = Line(fleet, "lost_at_run_time")
    assert line.step() == line.step() == []
    assert len(line.step("bad", "bad", read_s=7)) == 1


def test_a_sample_that_is_asked_for_again_counts_once(fleet: "Fleet") -> None:
    line = Line(fleet, "lost_at_run_time")
    for arrive in (("bad",), (), (), ()):
        assert line.step(*arrive) == []
    assert [row[2] for row in fleet.findings()] == ["pending"]
    line.restart()
    assert len(line.step("bad")) == 1


def test_an_older_sample_alone_begins_what_the_newer_one_goes_on_with(fleet: "Fleet") -> None:
    line = Line(fleet, "lost_at_run_time")
    for arrive in (("bad",), ("good",), (), ("good", "bad")):
        assert line.step(*arrive) == []
    assert [row[2] for row in fleet.findings()] == ["pending"], "dropped, and begun anew in the same pass"
    assert len(line.step("bad")) == 1


def test_quiet_and_firing_rules_are_asked_once(fleet: "Fleet", monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask again costs as much as to ask: it is done only while something may fire."""
    line = Line(fleet, "lost_at_run_time")
    asked: list[bool] = []
    is_open = Judge._is_open

    def noted(*given: object) -> bool:
        asked.append(is_open(*given))  # type: ignore[arg-type]
        return asked[-1]

    monkeypatch.setattr(Judge, "_is_open", noted)
    line.step("good")
    assert asked == []
    line.step("bad")
    line.step("bad")
    assert asked == [True, True]
    line.step("bad")
    assert asked == [True, True, False]
