import contextlib
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet.event import Event
from gpufleet_agent.drivers import Item
from gpufleet_agent.pipe import Frames, Inventory, Message, PipeError, send
from gpufleet_agent.probe import Sweep
from gpufleet_agent.progress import ProgressView, SharedProgress, new_memory

MESSAGES: list[Message] = [
    Sweep("gpu", 1, 2, 0.5, "", [[1.5, None, "a", True, 2**63 - 1]], [b"\1"]),
    Inventory(7, False, [Item("gpu:GPU-1", {"serial": "1"})]),
    Event("gpu_lost", "gpu:GPU-1", 1, 2, "x", "lost", "{}", 3),
]


def framed() -> bytes:
    reads, writes = os.pipe()
    try:
        for message in MESSAGES:
            send(writes, message)
        return os.read(reads, 1 << 16)
    finally:
        os.close(reads)
        os.close(writes)


@given(st.lists(st.integers(1, 40), max_size=30))
def test_messages_come_out_as_they_went_in_however_the_pipe_cuts_them(cuts: list[int]) -> None:
    data, frames = framed(), Frames()
    found = []
    for size in cuts:
        found += list(frames.feed(data[:size]))
        data = data[size:]
    found += list(frames.feed(data))
    assert found == MESSAGES


@given(st.binary(max_size=300))
def test_what_is_no_frame_is_refused_or_awaited_and_nothing_else(data: bytes) -> None:
    found: list[Message] = []
    with contextlib.suppress(PipeError):
        found += Frames().feed(data)
    assert all(isinstance(message, Sweep | Inventory | Event) for message in found)


def test_a_frame_that_claims_to_be_huge_is_refused_before_it_is_read() -> None:
    with pytest.raises(PipeError):
        list(Frames().feed(b"\xff\xff\xff\xffS"))


@given(st.text(max_size=80), st.text(max_size=200))
def test_the_progress_word_names_card_and_call(card: str, call: str) -> None:
    memory = new_memory()
    view = ProgressView(memory)
    progress = SharedProgress(memory)
    assert view.call() is None
    progress.begin("probe gpu")
    progress.enter(card, call)
    doing, phase = view.call(), view.phase()
    assert doing is not None
    assert phase is not None
    assert card.encode(errors="replace").startswith(doing.card.encode().split(b"\xef\xbf\xbd")[0])
    assert len(doing.call.encode()) <= 64 * 3
    assert phase.call == "probe gpu"
    progress.leave()
    progress.rest()
    assert (view.call(), view.phase()) == (None, None)
    view.close()


WRITER = """
import sys
from gpufleet_agent.progress import SharedProgress
progress = SharedProgress(int(sys.argv[1]))
pairs = (("0000:1b:00.0", "temperature"), ("0000:df:00.0", "power_usage_by_a_longer_name"))
for at in range(100_000):
    progress.enter(*pairs[at % 2])
    if at % 3 == 0:
        progress.leave()
"""


def test_a_record_torn_by_its_writer_is_no_record() -> None:
    memory = new_memory()
    view = ProgressView(memory)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(memory)], pass_fds=(memory,))
    os.close(memory)
    seen = set()
    while writer.poll() is None:
        for _ in range(1000):
            doing = view.call()
            if doing is not None:
                seen.add((doing.card, doing.call))
    view.close()
    assert writer.returncode == 0
    assert seen == {("0000:1b:00.0", "temperature"), ("0000:df:00.0", "power_usage_by_a_longer_name")}
