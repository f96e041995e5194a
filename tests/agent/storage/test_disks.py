"""Disks on made and mutilated trees."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpufleet.metric import Null, Reason, Row
from gpufleet_agent.drivers.disks import MOST_ROWS, Disks
from gpufleet_agent.probe import check_row
from gpufleet_agent.probes import disk as probe

LINE = "   8       0 {name} {r} 0 800 {rt} {w} 0 1600 {wt} 0 {busy} {queue}"


class Tree:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.disks = Disks(root)
        (root / "proc").mkdir()
        (root / "sys/block").mkdir(parents=True)

    def add(self, name: str, **files: str) -> Path:
        home = self.root / "sys/block" / name
        for file, text in {
            "size": "1000",
            "queue/rotational": "0",
            "device/state": "running",
            **files,
        }.items():
            (home / file).parent.mkdir(parents=True, exist_ok=True)
            (home / file).write_text(f"{text}\n")
        return home

    def stats(self, *lines: str) -> None:
        (self.root / "proc/diskstats").write_text("".join(f"{line}\n" for line in lines))

    def rows(self) -> dict[str, Row]:
        return {str(row["disk"]): row for row in self.disks.rows()}


@pytest.fixture
def made(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def line(
    name: str = "sda", r: int = 10, rt: int = 20, w: int = 30, wt: int = 40, busy: int = 50, queue: int = 60
) -> str:
    return LINE.format(name=name, r=r, rt=rt, w=w, wt=wt, busy=busy, queue=queue)


@pytest.mark.parametrize(
    ("more", "discards", "flushes"),
    [("", False, False), (" 5 0 9 1000", True, False), (" 5 0 9 1000 7 2000", True, True),
     (" 5 0 9 1000 7 2000 8 8 8", True, True)],
)  # fmt: skip
def test_fourteen_eighteen_twenty_and_more_columns(
    made: Tree, more: str, discards: bool, flushes: bool
) -> None:
    made.add("sda")
    made.stats(line() + more)
    row = made.rows()["sda"]
    assert (row["read_ops_total"], row["read_bytes_total"], row["read_s_total"]) == (10, 800 * 512, 0.02)
    assert (row["write_ops_total"], row["write_bytes_total"], row["write_s_total"]) == (30, 1600 * 512, 0.04)
    assert (row["busy_s_total"], row["queue_s_total"], row["in_flight"]) == (0.05, 0.06, 0)
    absent = Null(Reason.NOT_SUPPORTED, "kernel")
    assert (row["discard_ops_total"], row["discard_s_total"]) == ((5, 1.0) if discards else (absent, absent))
    assert (row["flush_ops_total"], row["flush_s_total"]) == ((7, 2.0) if flushes else (absent, absent))


def test_milliseconds_that_wrap_at_32_bits_go_on_but_another_disk_begins_anew(made: Tree) -> None:
    made.add("sda")
    made.stats(line(r=100, rt=2**32 - 100, busy=2**32 - 1))
    assert made.rows()["sda"]["read_s_total"] == (2**32 - 100) / 1000
    made.stats(line(r=120, rt=400, busy=9))
    row = made.rows()["sda"]
    assert (row["read_s_total"], row["busy_s_total"]) == ((2**32 + 400) / 1000, (2**32 + 9) / 1000)
    made.stats(line(r=130, rt=300, busy=10))
    assert made.rows()["sda"]["read_s_total"] == (2**32 + 300) / 1000, "a small step back is no wrap"
    made.stats(line(r=3, rt=7, busy=1, w=1))
    row = made.rows()["sda"]
    assert (row["read_ops_total"], row["read_s_total"], row["busy_s_total"]) == (3, 0.007, 0.001)


def test_a_disk_that_goes_and_comes(made: Tree) -> None:
    home = made.add("sda")
    made.add("sdb")
    made.stats(line("sda", rt=2**32 - 1), line("sdb"))
    assert set(made.rows()) == {"sda", "sdb"}
    made.stats(line("sdb"))
    gone = made.rows()["sda"]
    assert gone["read_ops_total"] == Null(Reason.FAILED, "no_line")
    assert gone["temperature_c"] == Null(Reason.NOT_READ, "no_progress")
    home.rename(made.root / "away")
    assert set(made.rows()) == {"sdb"}
    (made.root / "away").rename(home)
    made.stats(line("sda", rt=5), line("sdb"))
    assert made.rows()["sda"]["read_s_total"] == 0.005


@pytest.mark.parametrize(
    ("name", "files", "there"),
    [
        ("sda", {}, True),
        ("nvme0n1", {}, True),
        ("nvme0c0n1", {}, False),
        ("nvme7n1", {"hidden": "1"}, False),
        ("sda", {"size": "0"}, False),
        ("sr0", {}, False),
        ("loop0", {}, False),
        ("zram0", {}, False),
        ("ram3", {}, False),
        ("nbd5", {}, False),
        ("dm-0", {"dm/uuid": "LVM-abc"}, False),
        ("dm-1", {"dm/uuid": "CRYPT-LUKS2-abc"}, False),
        ("dm-2", {"dm/uuid": "mpath-3600a"}, True),
        ("md0", {"md/array_state": "active"}, True),
        ("md1", {"md/array_state": "inactive", "size": "0"}, False),
        ("a\nb", {}, False),
        ("..", {}, False),
    ],
)
def test_what_is_a_disk(made: Tree, name: str, files: dict[str, str], there: bool) -> None:
    if name != "..":
        made.add(name, **files)
    made.stats(line(name.replace("\n", "")))
    assert set(made.rows()) == ({name} if there else set())


def test_a_device_without_a_home_of_its_own_is_no_disk(made: Tree) -> None:
    home = made.add("rbd0")
    made.stats(line("rbd0"))
    assert set(made.rows()) == {"rbd0"}
    (home / "device/state").unlink()
    (home / "device").rmdir()
    assert made.rows() == {}


def test_a_name_with_a_slash(made: Tree) -> None:
    made.add("cciss!c0d0")
    made.stats(line("cciss/c0d0"))
    assert made.rows()["cciss/c0d0"]["read_ops_total"] == 10


def test_of_a_multipath_nvme_disk_one_living_path_is_enough(made: Tree) -> None:
    made.add(
        "nvme0n1",
        **{
            "device/nvme0/state": "connecting",
            "device/nvme1/state": "live",
            "device/nvme1/hwmon1/temp1_input": "45850",
        },
    )
    made.stats(line("nvme0n1"))
    row = made.rows()["nvme0n1"]
    assert (row["state"], row["temperature_c"]) == ("live", 45.85)


def test_a_disk_that_does_not_answer_is_not_asked_for_its_temperature(made: Tree) -> None:
    home = made.add("nvme0n1", **{"device/state": "live", "device/hwmon1/temp1_input": "45850"})
    busy = line("nvme0n1").replace("1600 40 0", "1600 40 3")
    made.stats(busy)
    assert made.rows()["nvme0n1"]["temperature_c"] == 45.85
    assert made.rows()["nvme0n1"]["temperature_c"] == Null(Reason.NOT_READ, "no_progress")
    (home / "device/state").write_text("resetting\n")
    made.stats(line("nvme0n1", r=11))
    assert made.rows()["nvme0n1"]["temperature_c"] == Null(Reason.NOT_READ, "not_live")


def test_a_host_without_any_and_one_with_very_many(made: Tree) -> None:
    assert made.rows() == {}
    for number in range(300):
        made.add(f"sd{number}")
    assert len(made.rows()) == MOST_ROWS


CONTENT = st.one_of(
    st.none(),
    st.binary(max_size=80),
    st.integers(-(2**70), 2**70).map(lambda number: f"{number}\n".encode()),
    st.sampled_from([b"", b"\n", b"nan\n", b"1e9\n", b"live\n", b"\xff" * 4096, b"7" * 5000, b"\x1b[31m\n"]),
)
COUNTS = st.lists(
    st.one_of(st.integers(0, 2**64), st.sampled_from(["-1", "x", "\x00", "1.5"])), min_size=0, max_size=25
).map(lambda words: " ".join(["259", "0", "nvme0n1", *map(str, words)]))


@pytest.fixture
def found(tree: Callable[[str], Path]) -> tuple[Path, list[tuple[Path, bytes]]]:
    root = tree("hgx-h100")
    home = root / "sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0/nvme/nvme0"
    paths = [path for path in sorted(home.rglob("*")) if path.is_file() and not path.is_symlink()]
    return root, [(path, path.read_bytes()) for path in paths]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    contents=st.lists(CONTENT, min_size=15, max_size=15),
    stats=st.one_of(st.none(), COUNTS),
    cut=st.integers(0, 900),
)
def test_whatever_stands_in_the_files_rows_are_whole_and_the_other_disk_is_read(
    found: tuple[Path, list[tuple[Path, bytes]]], contents: list[bytes | None], stats: str | None, cut: int
) -> None:
    root, files = found
    other = "259 4 nvme1n1 1 0 8 1 1 0 8 1 0 1 2"
    (root / "proc/diskstats").write_text(f"{stats if stats is not None else 'x' * cut}\n{other}\n")
    for (path, before), content in zip(files, contents, strict=False):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content if content else before)
    disks = Disks(root)
    for _ in range(2):
        read = {str(row["disk"]): row for row in disks.rows()}
        assert read["nvme1n1"]["read_ops_total"] == 1
        for row in read.values():
            assert row.keys() == {metric.name for metric in probe.METRICS}
            cells, _ = check_row(probe.METRICS, row)
            assert all(text.isprintable() for text in cells if isinstance(text, str))
    for item in disks.items():
        assert all(
            isinstance(text, str) and text.isprintable() and len(text) <= 256 for text in item.values()
        )
