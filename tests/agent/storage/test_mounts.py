"""Which mounts are shown and asked, and what mountstats says, on sound and on mutilated files."""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpufleet.metric import Cell, Null, Reason, Row
from gpufleet_agent.drivers.canary import Answer, Key, NoCanaries, Usage
from gpufleet_agent.drivers.mounts import MOST_ROWS, Mounts, chosen, nfs_stats, parse
from gpufleet_agent.probe import check_row
from gpufleet_agent.probes import mount as probe

ROOT = "27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw"
GB = 10**9


class Canned:
    """Answers as it was told, and remembers who was asked."""

    def __init__(self, **answers: Answer) -> None:
        self.answers = answers
        self.asked: list[Key] = []

    def ask(self, keys: Sequence[Key]) -> Mapping[Key, Answer]:
        self.asked = list(keys)
        well = Answer("ok", "", 0.001, 0.0, Usage(100 * GB, 20 * GB, 15 * GB, 1000, 900))
        return {key: self.answers.get(key.path.strip("/"), well) for key in keys}


def plant(root: Path, mountinfo: str, mountstats: str = "") -> Path:
    home = root / "proc/self"
    home.mkdir(parents=True, exist_ok=True)
    (home / "mountinfo").write_text(mountinfo)
    (home / "mountstats").write_text(mountstats)
    return root


def rows(mounts: Mounts) -> dict[str, Row]:
    return {str(row["mount"]): row for row in mounts.rows()}


def names(*lines: str) -> dict[str, Cell]:
    return {mount.shown: why for mount, why in chosen(parse("\n".join(lines) + "\n"))}


COVERED, AUTOMOUNTED = Null(Reason.NOT_READ, "covered"), Null(Reason.NOT_READ, "automounted")


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        pytest.param([ROOT], {"/": ""}, id="root"),
        pytest.param(
            [ROOT, "30 27 0:4 / /proc rw - proc proc rw", "31 27 0:5 / /tmp rw - tmpfs tmpfs rw"],
            {"/": ""},
            id="pseudo",
        ),
        pytest.param(
            [ROOT, "29 27 0:5 / /dev rw - devtmpfs udev rw", "30 29 0:23 / /dev/shm rw - tmpfs tmpfs rw",
             "31 27 0:24 / /run/shm rw - tmpfs tmpfs rw", "32 27 0:23 / /run/c/shm rw - tmpfs tmpfs rw"],
            {"/": "", "/dev/shm": ""},
            id="shared memory, and what is no such thing",
        ),
        pytest.param([ROOT, "30 27 0:23 / /dev/shm rw - ramfs r rw"], {"/": ""}, id="a ramfs has no size"),
        pytest.param([ROOT, "30 27 254:0 /srv /srv rw - ext4 /dev/vda1 rw"], {"/": ""}, id="bind"),
        pytest.param(
            [ROOT, "30 27 254:0 / /a ro - ext4 /dev/vda1 rw", "31 27 254:1 / /b rw - ext4 /dev/vdb rw"],
            {"/": "", "/b": ""},
            id="bind of the root",
        ),
        pytest.param(
            [ROOT, "30 27 0:9 / /h rw - autofs auto rw,timeout=60", "31 30 0:10 / /h/a rw - nfs4 s:/a rw"],
            {"/": "", "/h/a": AUTOMOUNTED},
            id="automounter that expires",
        ),
        pytest.param(
            [ROOT, "30 27 0:9 / /h rw - autofs systemd-1 rw,timeout=0", "31 30 0:10 / /h rw - nfs4 s:/a rw"],
            {"/": "", "/h": ""},
            id="automounter that does not",
        ),
        pytest.param(
            [ROOT, "30 27 0:9 / /h rw - autofs systemd-1 rw,timeout=0"],
            {"/": ""},
            id="automount that nobody used",
        ),
        pytest.param(
            [ROOT, "30 27 0:9 / /d rw - nfs4 a:/d rw", "31 30 0:10 / /d rw - nfs4 b:/d rw"],
            {"/": "", "/d": ""},
            id="stacked",
        ),
        pytest.param(
            [ROOT, "30 27 0:9 / /home/x rw - nfs4 a:/x rw", "31 27 0:10 / /home ro - tmpfs tmpfs ro"],
            {"/": "", "/home/x": COVERED},
            id="covered from above",
        ),
        pytest.param(
            ["1 1 0:2 / / rw - rootfs rootfs rw", ROOT, "30 27 8:1 / /b rw - xfs /dev/sda1 rw"],
            {"/": "", "/b": ""},
            id="root over an initial one",
        ),
        pytest.param([ROOT, "30 27 0:9 / /m rw - fuse.lxcfs lxcfs rw"], {"/": ""}, id="lxcfs"),
        pytest.param([ROOT, "30 27 0:9 / /m rw - nfs4  rw"], {"/": "", "/m": ""}, id="no source"),
        pytest.param(["garbage", "", "1 2", "x y 0:1 / /a rw - ext4 d rw", ROOT[:20]], {}, id="nonsense"),
    ],
)  # fmt: skip
def test_which_mounts_are_shown(lines: list[str], found: dict[str, Cell]) -> None:
    assert names(*lines) == found


def test_the_upper_of_two_on_one_path_is_asked(tmp_path: Path) -> None:
    lines = [ROOT, "30 27 0:9 / /d rw - nfs4 a:/d rw", "31 30 0:10 / /d rw - nfs4 b:/d rw"]
    canaries = Canned()
    found = rows(Mounts(plant(tmp_path, "\n".join(lines)), canaries))
    assert found["/d"]["source"] == "b:/d"
    assert canaries.asked == [Key(27, "/"), Key(31, "/d")]


def test_hostile_names_are_decoded_for_the_question_and_shown_in_octal(tmp_path: Path) -> None:
    lines = [
        ROOT,
        r"30 27 0:9 / /my\040data\012x\134y rw - fuse.evil \033[31mred rw",
        "31 27 0:10 / /\x1b[2J rw - fuse.evil e rw",
        f"32 27 0:11 / /{'n' * 4000} rw - fuse.evil e rw",
    ]
    (tmp_path / "proc/self").mkdir(parents=True)
    not_utf8 = b"33 27 0:12 / /\xff\xfe rw - fuse.evil e rw\n"
    (tmp_path / "proc/self/mountinfo").write_bytes("\n".join(lines).encode() + b"\n" + not_utf8)
    canaries = Canned()
    found = rows(Mounts(tmp_path, canaries))
    assert set(found) == {
        "/",
        "/my data\\012x\\y",
        "/\\033[2J",
        f"/{'n' * 255}",
        "/\\357\\277\\275\\357\\277\\275",
    }
    assert [key.path for key in canaries.asked][:3] == ["/", "/my data\nx\\y", "/\x1b[2J"]
    assert len(canaries.asked) == 4
    unasked = found["/\\357\\277\\275\\357\\277\\275"]
    assert unasked["canary_state"] == Null(Reason.NOT_READ, "no_utf8"), "its true name is not known"
    for row in found.values():
        assert all(text.isprintable() for text in row.values() if isinstance(text, str))


def test_a_thousand_container_mounts_push_nothing_out(tmp_path: Path) -> None:
    pods = [
        f"{100 + n} 27 0:{1000 + n} / /var/lib/kubelet/pods/{n}/vol rw - ext4 /dev/sd{n} rw"
        for n in range(1000)
    ]
    binds = [
        f"{2000 + n} 27 0:9 /set{n} /var/lib/kubelet/pods/{n}/data rw - nfs4 a:/d rw" for n in range(1000)
    ]
    host = ["30 27 0:9 / /data rw - nfs4 a:/d rw", "31 27 8:1 / /scratch rw - xfs /dev/sda1 rw"]
    found = list(rows(Mounts(plant(tmp_path, "\n".join([*pods, *binds, ROOT, *host])), Canned())))
    assert len(found) == MOST_ROWS
    assert set(found[:3]) == {"/", "/data", "/scratch"}


def test_usage_and_what_there_is_instead_of_it(tmp_path: Path) -> None:
    lines = [ROOT] + [
        f"{40 + n} 27 0:{40 + n} / /{name} rw - nfs4 a:/{name} rw" for n, name in enumerate("abcdef")
    ]
    canaries = Canned(
        a=Answer("hung", "", None, 31.0),
        b=Answer("failed", "ESTALE", 0.01),
        c=Answer("failed", "EACCES", 0.01),
        d=Answer("ok", "", 0.01, 600.0, Usage(0, 0, 0, 0, 0)),
        e=Answer("pending"),
        f=Answer(Null(Reason.NOT_READ, "next_time")),
    )
    found = rows(Mounts(plant(tmp_path, "\n".join(lines)), canaries))
    hung, pending = Null(Reason.FAILED, "hung"), Null(Reason.NOT_READ, "pending")
    nothing = Null(Reason.NOT_SUPPORTED, "no_blocks"), Null(Reason.NOT_SUPPORTED, "no_inodes")
    picked = ("canary_state", "canary_code", "canary_s", "hung_s", "size_bytes", "inodes")
    assert {name: tuple(row[column] for column in picked) for name, row in found.items()} == {
        "/": ("ok", "", 0.001, 0.0, 100 * GB, 1000),
        "/a": ("hung", "", hung, 31.0, hung, hung),
        "/b": ("failed", "ESTALE", 0.01, 0.0, *(Null(Reason.FAILED, "ESTALE"),) * 2),
        "/c": ("failed", "EACCES", 0.01, 0.0, *(Null(Reason.NO_PERMISSION, "EACCES"),) * 2),
        "/d": ("ok", "", 0.01, 600.0, *nothing),
        "/e": ("pending", "", pending, 0.0, pending, pending),
        "/f": (Null(Reason.NOT_READ, "next_time"),) * 6,
    }  # fmt: skip
    assert found["/"]["avail_bytes"] == 15 * GB


def test_a_remount_read_only_is_seen_and_that_it_was_writable(tmp_path: Path) -> None:
    data = "30 27 8:1 / /data ro,relatime - xfs /dev/sda1 rw"
    mounts = Mounts(plant(tmp_path, f"{ROOT}\n{data}\n"), Canned())
    columns = ("read_only", "mount_read_only", "was_writable")
    assert [rows(mounts)["/data"][name] for name in columns] == [False, True, True]
    plant(tmp_path, f"{ROOT}\n{data[:-2]}ro,noquota\n")
    assert [rows(mounts)["/data"][name] for name in columns] == [True, True, True]
    plant(tmp_path, f"{ROOT}\n")
    assert set(rows(mounts)) == {"/"}, "unmounted"
    plant(tmp_path, f"{ROOT}\n{data[:-2]}ro,noquota\n")
    assert [rows(mounts)["/data"][name] for name in columns] == [True, True, False], "mounted anew, read-only"


def test_another_file_system_in_the_same_place_was_never_writable(tmp_path: Path) -> None:
    data = "30 27 8:1 / /data ro,relatime - xfs /dev/sda1 rw"
    mounts = Mounts(plant(tmp_path, f"{ROOT}\n{data}\n"), Canned())
    assert rows(mounts)["/data"]["was_writable"] is True
    plant(tmp_path, f"{ROOT}\n30 27 8:17 / /data ro,relatime - xfs /dev/sdb1 ro\n")
    assert rows(mounts)["/data"]["was_writable"] is False
    assert {item["mount"]: item["writable"] for item in mounts.items()}["/data"] == "0"


def test_without_this_machines_root_nobody_is_asked(tmp_path: Path) -> None:
    found = rows(Mounts(plant(tmp_path, ROOT), NoCanaries()))
    assert found["/"]["canary_state"] == Null(Reason.NOT_READ, "not_asked")


HEAD = "device a:/d mounted on /d with fstype nfs4 statvers=1.1\n"


@pytest.mark.parametrize(
    ("xprt", "bad_xids", "backlog"),
    [
        ("tcp 866 0 2 0 11 220 219 2 99 140 32 88 99", 2, 140),
        ("tcp 866 0 2 0 -1 220 219 2 99 140", 2, 140),  # 1.0
        ("udp 866 0 220 219 3 99 141", 3, 141),
        ("udp 866 0 220 219 3 99 141 16 1 2", 3, 141),
        ("local 0 1 0 4 220 219 4 99 142 32 1 1", 4, 142),
        ("rdma 0 0 1 0 4 55 55 5 99 143 55 12 0 88 99 0 0 0 0 0 0", 5, 143),
        ("tcp 866 0 2", None, None),
        ("vsock 1 2 3 4 5 6 7 8 9 10 11", None, None),
        ("", None, None),
    ],
)
def test_transports(xprt: str, bad_xids: int | None, backlog: int | None) -> None:
    line = f"\txprt:\t{xprt}\n" if xprt else ""
    row = nfs_stats(f"{HEAD}{line}\tper-op statistics\n\t        READ: 5 7 1 9 9 1 2000 3000 0\n")["/d"]
    missing = Null(Reason.NOT_SUPPORTED, "no_line")
    assert row["nfs_bad_xids_total"] == (missing if bad_xids is None else bad_xids)
    assert row["nfs_backlog_total"] == (missing if backlog is None else backlog)
    assert (row["nfs_read_ops_total"], row["nfs_read_rtt_s_total"], row["nfs_read_exe_s_total"]) == (
        5,
        2.0,
        3.0,
    )
    assert (row["nfs_retransmits_total"], row["nfs_timeouts_total"]) == (2, 1)
    assert row["nfs_write_ops_total"] == missing


def test_mountstats_of_paths_with_blanks_and_of_stacked_mounts() -> None:
    text = (
        r"device a:/my\040d mounted on /my\040d with fstype nfs statvers=1.0" "\n"
        "\tper-op statistics\n\t        READ: 1 1 0 9 9 1 2 3\n"
        "device b:/d mounted on /d with fstype nfs4 statvers=1.1\n\tREAD: 2 2 0 9 9 1 2 3 0\n"
        "device c:/d mounted on /d with fstype nfs4 statvers=1.1\n\tREAD: 3 3 0 9 9 1 2 3 0\n"
        "device /dev/sda mounted on /x with fstype ext4\n\tREAD: 99 99 0 9 9 1 2 3 0\n"
    )  # fmt: skip
    found = nfs_stats(text)
    assert {path: row["nfs_read_ops_total"] for path, row in found.items()} == {"/my d": 1, "/d": 3}


FILES = ("mountinfo", "mountstats", "stats", "import")


def _damage(text: bytes, seed: int) -> bytes:
    """Cut, mixed up, filled with bytes or numbers that no counter has."""
    dice = random.Random(seed)
    data = bytearray(text)
    for _ in range(dice.randint(1, 8)):
        at = dice.randrange(len(data) + 1)
        what = dice.randrange(5)
        if what == 0:
            del data[at : at + dice.randrange(1, 200)]
        elif what == 1:
            data[at:at] = dice.randbytes(dice.randrange(1, 20))
        elif what == 2:
            data[at:at] = dice.choice(
                [b"18446744073709551615", b"-1", b"nan", b" ", b"\n", b"\t", b" - ", b"\\777"]
            )
        elif what == 3:
            lines = bytes(data).split(b"\n")
            dice.shuffle(lines)
            data = bytearray(b"\n".join(lines))
        else:
            data = data[:at]
    return bytes(data)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(FILES), st.integers(0, 2**32), min_size=1))
def test_whatever_stands_in_the_files_rows_are_whole_and_may_be_sent(
    changed: dict[str, list[tuple[Path, bytes]]], changes: dict[str, int]
) -> None:
    root = changed["mountinfo"][0][0].parents[2]
    for name in FILES:
        for path, before in changed[name]:
            path.write_bytes(_damage(before, changes[name]) if name in changes else before)
    mounts = Mounts(root, Canned())
    found = list(mounts.rows())
    assert len(found) <= MOST_ROWS
    assert len({row["mount"] for row in found}) == len(found)
    for row in found:
        assert row.keys() == {metric.name for metric in probe.METRICS}
        cells, _ = check_row(probe.METRICS, row)
        assert all(text.isprintable() and len(text) <= 256 for text in cells if isinstance(text, str))
    assert all(isinstance(text, str) for row in mounts.items() for text in row.values())


@pytest.fixture
def changed(tree: Callable[[str], Path]) -> dict[str, list[tuple[Path, bytes]]]:
    root = tree("hgx-h100")
    found: dict[str, list[tuple[Path, bytes]]] = {name: [] for name in FILES}
    for place in (root / "proc/self", root / "proc/fs"):
        for path in sorted(place.rglob("*")):
            if path.name in FILES:
                found[path.name].append((path, path.read_bytes()))
    assert all(found.values())
    return found
