"""Binary, huge, truncated and forged records: nothing raises, everything stays bounded and valid."""

import json
import random
import re
import time
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpufleet import catalogue
from gpufleet.event import KINDS, Event
from gpufleet.wire import MAX_STRING_BYTES
from gpufleet_agent import kernel_lines
from gpufleet_agent.drivers.kmsg import FROM_BOOT, KernelLog, unescape
from gpufleet_agent.kernel_log import Now, Reader, Record, State

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures/kernel_log/lines.toml"
SEEDS: list[str] = [line["text"] for line in tomllib.loads(FIXTURE.read_text())["line"]]
DICTIONARY = re.findall(r"[A-Za-z]+|[0-9a-fx:.]+|[^A-Za-z0-9]+", " ".join(SEEDS))
NOW = Now(1_772_359_200_000_000, 7_200_000_000, 7_200_000_000)


def check(event: Event) -> None:
    """What the wire and the store can take."""
    assert event.kind in KINDS
    assert re.fullmatch(r"node:|(pci|disk):[!-~]{1,80}", event.entity), event.entity
    for text in (event.message, event.detail, event.code, event.entity):
        assert len(text.encode()) <= MAX_STRING_BYTES
        assert text.isprintable()
    assert isinstance(json.loads(event.detail), dict)
    assert 1 <= event.count <= 0xFFFFFFFF
    assert 0 <= event.ts_us <= NOW.wall_us
    assert event.mono_us <= NOW.boot_us
    if event.kind != "kernel_log":
        assert json.loads(event.detail)["severity"] in catalogue.SEVERITIES


def read(texts: list[str]) -> list[Event]:
    reader = Reader(State(boot="b"))
    reader.begin(NOW)
    for seq, text in enumerate(texts):
        reader.feed(Record(seq, seq * 1000, text))
    events = reader.finish()
    reader.begin(Now(NOW.wall_us, NOW.boot_us + 61_000_000, NOW.kernel_us))
    return [*events, *reader.finish()]


def mutated(rng: random.Random) -> str:
    text = rng.choice(SEEDS)
    for _ in range(rng.randint(1, 6)):
        at = rng.randint(0, len(text))
        what = rng.randint(0, 6)
        if what == 0:
            text = text[:at]
        elif what == 1:
            text = text[:at] + rng.choice(DICTIONARY) * rng.choice((1, 1, 1, 40)) + text[at:]
        elif what == 2:
            text = text[:at] + text[at + rng.randint(1, 12) :]
        elif what == 3:
            text = (
                text[:at]
                + chr(rng.choice((0, 7, 10, 27, 0x85, 0xA0, 0x2028, 0x660, 0xFFFD, 0x10FFFF)))
                + text[at:]
            )
        elif what == 4:
            text = text[:at] + rng.choice(SEEDS)[rng.randint(0, 30) :]
        elif what == 5:
            text = re.sub(
                r"[0-9]+", lambda _: str(rng.choice((0, 1, 65535, 2**31, 2**64, 10**30))), text, count=3
            )
        else:
            text = text[:at] + text[at : at + 1].swapcase() + text[at + 1 :]
    return text


def test_fifteen_thousand_mutations_of_real_lines_never_raise() -> None:
    rng = random.Random(79)
    kinds: dict[str, int] = {}
    for _ in range(500):
        for event in read([mutated(rng) for _ in range(30)]):
            check(event)
            kinds[event.kind] = kinds.get(event.kind, 0) + 1
    assert len(kinds) >= 12  # the mutations still reach every parser
    assert kinds["xid_unparsed"] > 50


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(max_size=300) | st.sampled_from(SEEDS), max_size=12))
def test_any_text_never_raises(texts: list[str]) -> None:
    for event in read(texts):
        check(event)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.binary(max_size=400)
        | st.builds(
            lambda priority, seq, stamp, text: b"%d,%d,%d,-;%s" % (priority, seq, stamp, text.encode()),
            st.integers(0, 10**6),
            st.integers(0, 10**25),
            st.integers(0, 10**25),
            st.sampled_from(SEEDS),
        ),
        max_size=20,
    )
)
def test_any_bytes_in_the_log_never_raise(tmp_path: Path, chunks: list[bytes]) -> None:
    root = tmp_path / str(time.monotonic_ns())
    (root / "dev").mkdir(parents=True)
    (root / "dev/kmsg").write_bytes(b"\n".join(chunks))
    log, cursor = KernelLog(root, clock=lambda: NOW), FROM_BOOT
    for _ in range(3):
        events, cursor = log.read(cursor)
        for event in events:
            check(event)
        log.close()


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda raw: raw.decode("latin-1")))
def test_any_cursor_never_raises(cursor: str) -> None:
    log = KernelLog(Path("/nonexistent"), clock=lambda: NOW)
    events, _ = log.read(cursor)
    assert {event.kind for event in events} <= {"kernel_log"}


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_unescaping_gives_back_what_the_kernel_had(raw: bytes) -> None:
    escaped = b"".join(bytes((b,)) if 32 <= b < 127 and b != 92 else b"\\x%02x" % b for b in raw)
    assert unescape(escaped) == raw.decode("utf-8", "replace")


def test_a_record_of_a_megabyte_is_cut(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    huge = b"4,0,1,-;NVRM: Xid (PCI:0000:6a:00): 31, pid=1, name=" + b"x" * 1_000_000
    (tmp_path / "dev/kmsg").write_bytes(huge + b"\n4,1,1,-;NVRM: Xid (PCI:0000:6a:00): 79, gone\n")
    log = KernelLog(tmp_path, clock=lambda: NOW)
    events, cursor = log.read(FROM_BOOT)
    log.close()
    assert "79" in {event.code for event in events}
    for event in events:
        check(event)
    assert len(cursor) < 10_000


SPITEFUL = [
    "NVRM: Xid (PCI:0000:6a:00): 79" + ", pid=1, name=" * 150,
    "NVRM: Xid (PCI:0000:6a:00): 95, Uncontained: " + "a. RST: " * 240,
    "NVRM: Xid (PCI:0000:6a:00): 149, " + "A/" * 900 + " Fatal",
    "NVRM: Xid (PCI:0000:6a:00): 149, X Fatal XC0 i0 Link 01 (0x1" + " 0x1" * 450,
    "NVRM: Xid (PCI:0000:6a:00): 74, " + "link 1(0x1, " * 160,
    "NVRM: Xid (PCI:0000:6a:00): 31, " + "ENGINE A B faulted @ " * 90,
    "oom-kill:constraint=CONSTRAINT_MEMCG" + ",task_memcg=,task=,pid=1,uid=" * 60 + "x",
    "Killed process 1 (" + ") " * 900,
    "INFO: task " + ":1 blocked " * 180,
    "nvidia 0000:01:00.0: PCIe Bus Error: severity=" + "Corrected, type=" * 120,
    "{1}[Hardware Error]: " + "section_type: " * 140,
    "EDAC MC0: 1 CE " + "on on on page:" * 130,
    "nvme nvme0: I/O " + "1 " * 900 + "QID 5 timeou",
    "XFS (sda): " + "I/O " * 480,
    "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 1, " + "Fatal, Link 1 " * 140,
    "[ 1.0] " * 290,
    "<1>" * 680,
    "Memory failure: 0x1: recovery action for " + ": Recovere" * 190,
    "NVRM: " + "fallen off the bus and is not " * 68,
]


@pytest.mark.parametrize("text", SPITEFUL, ids=[text[:32] for text in SPITEFUL])
def test_no_line_makes_a_pattern_run_away(text: str) -> None:
    """A hundred of the worst lines: a runaway pattern takes minutes, an honest one milliseconds."""
    started = time.process_time()
    for event in read([text[:2048]] * 100):
        check(event)
    assert time.process_time() - started < 10


def test_patterns_have_no_unbounded_repetition_inside_another() -> None:
    patterns = [value for value in vars(kernel_lines).values() if isinstance(value, re.Pattern)]
    patterns += [pattern for _, _, pattern in kernel_lines._IO]
    assert len(patterns) > 40
    for pattern in patterns:
        assert not re.search(r"(?<!\\)[*+]\)(?:[*+]|\{[0-9]*,)", pattern.pattern), pattern.pattern
        unbounded = re.findall(r"(?<!\\)(?<!\\\.)\.[*+]", pattern.pattern)
        assert len(unbounded) <= 1, pattern.pattern
