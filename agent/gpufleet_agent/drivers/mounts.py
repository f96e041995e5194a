"""Mounted file systems by /proc/self/mountinfo and mountstats. None is touched from here: see `canary`.

What is mounted is what this process sees: a hardened service sees every mount point read-only, and an empty
/home over the real one. Whether the file system itself is read-only is true everywhere.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpufleet.metric import Cell, Null, Reason, Row
from gpufleet_agent.drivers import files
from gpufleet_agent.drivers.canary import Answer, Canaries, Key

MOST_ROWS = 64
MOST_SHOWN = 256

# fmt: off
_LOCAL = frozenset((
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs", "nilfs2", "fuseblk",
    "ntfs3", "exfat",
))
_NETWORK = frozenset((
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "glusterfs", "9p", "virtiofs", "afs",
    "wekafs", "panfs", "pvfs2", "orangefs", "gfs2", "ocfs2",
))
_NO_DATA = frozenset((
    "fuse.lxcfs", "fuse.portal", "fuse.snapfuse", "fuse.gvfsd-fuse", "fuse.xdg-document-portal",
    "fuse.squashfuse", "fuse.fuse-overlayfs",
))
# fmt: on
_IN_CONTAINERS = re.compile(
    r"/(?:var/lib/(?:kubelet|docker|containers|containerd|rancher|k0s)|run/containerd|var/snap|snap)/"
)
_COVERED = Null(Reason.NOT_READ, "covered")
_AUTOMOUNTED = Null(Reason.NOT_READ, "automounted")
_NOT_A_NAME = Null(Reason.NOT_READ, "no_utf8")
_NOT_ASKED = Null(Reason.NOT_READ, "not_asked")
_NO_BLOCKS = Null(Reason.NOT_SUPPORTED, "no_blocks")
_NO_INODES = Null(Reason.NOT_SUPPORTED, "no_inodes")
_NOT_NFS = Null(Reason.NOT_SUPPORTED, "not_nfs")
_NOT_LUSTRE = Null(Reason.NOT_SUPPORTED, "not_lustre")
_NO_STATS = Null(Reason.NOT_SUPPORTED, "not_in_mountstats")

USAGE = ("size_bytes", "free_bytes", "avail_bytes", "inodes", "inodes_free")
_OPERATIONS = ("READ", "WRITE", "GETATTR", "LOOKUP")
NFS = (
    *(f"nfs_{op.lower()}_{what}_total" for op in _OPERATIONS for what in ("ops", "rtt_s", "exe_s")),
    "nfs_retransmits_total", "nfs_timeouts_total", "nfs_backlog_total", "nfs_bad_xids_total",
)  # fmt: skip
LUSTRE = (
    "lustre_read_bytes_total", "lustre_write_bytes_total", "lustre_opens_total", "lustre_imports",
    "lustre_imports_down",
)  # fmt: skip
_XPRT = {"tcp": (8, 10), "rdma": (8, 10), "local": (7, 9), "udp": (5, 7)}
"""Of each transport: places of bad_xids and of the cumulative backlog among the words of its line."""
_WORKING_IMPORTS = ("FULL", "IDLE")
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo. `point` is the path as it is."""

    id: int
    parent: int
    device: str
    root: str
    point: str
    options: frozenset[str]
    fstype: str
    source: str
    super_options: frozenset[str]

    @property
    def network(self) -> bool:
        """Whether it depends on another machine, or on a process."""
        return self.fstype in _NETWORK or self.fstype.startswith("fuse.")

    @property
    def has_data(self) -> bool:
        """Whether it is of a kind that holds data: not /proc, an image, a container's overlay, or most tmpfs.

        Workers of data loaders hand their batches over in /dev/shm: when it is full they die of SIGBUS.
        """
        shared_memory = self.fstype == "tmpfs" and self.point == "/dev/shm"
        return self.fstype in _LOCAL or (self.network and self.fstype not in _NO_DATA) or shared_memory

    @property
    def shown(self) -> str:
        """The path as it can be shown; what is not printable stays in octal."""
        return shown(self.point)[:MOST_SHOWN]

    def option(self, name: str) -> str:
        """Value of an option of the file system; empty when it has none."""
        return next((one[len(name) + 1 :] for one in self.super_options if one.startswith(f"{name}=")), "")


def unescaped(text: str) -> str:
    r"""`/my\040data` -> `/my data`."""
    return _OCTAL.sub(lambda found: chr(int(found[1], 8) & 0xFF), text)


def shown(text: str) -> str:
    """Printable: anything else in octal."""
    return "".join(
        letter
        if letter.isprintable() and letter != "\ufffd"
        else "".join(f"\\{byte:03o}" for byte in letter.encode())
        for letter in text
    )


def parse(text: str | Null) -> list[Mount]:
    """Every line that can be read, in order."""
    if isinstance(text, Null):
        return []
    found: list[Mount] = []
    for line in text.split("\n"):
        left, bar, right = line.partition(" - ")
        words, behind = left.split(" "), right.split(" ")
        if not bar or len(words) < 6 or len(behind) < 3 or not words[4].startswith("/"):
            continue
        try:
            number, parent = files.count(words[0]), files.count(words[1])
        except ValueError:
            continue
        # the source may be empty, so that two blanks follow each other: the options are the last word
        found.append(
            Mount(
                number, parent, words[2], words[3], unescaped(words[4]), frozenset(words[5].split(",")),
                behind[0], unescaped(" ".join(behind[1:-1])), frozenset(behind[-1].split(",")),
            )
        )  # fmt: skip
    return found


class Tree:
    """Which mount a path leads to: mounts cover each other."""

    def __init__(self, mounts: Sequence[Mount]) -> None:
        self._of = {mount.id: mount for mount in mounts}
        self._on = {(mount.parent, mount.point): mount.id for mount in mounts if mount.parent != mount.id}
        roots = [
            mount
            for mount in mounts
            if mount.point == "/" and (mount.parent not in self._of or mount.parent == mount.id)
        ]
        self._root = roots[-1].id if roots else -1

    def reached(self, mount: Mount) -> bool:
        """Whether the path of the mount leads to it, and not to what was mounted over it."""
        here = self._over(self._root, "/")
        place = -1
        while self._root >= 0 and place < len(mount.point):
            place = mount.point.find("/", place + 1)
            place = len(mount.point) if place < 0 else place
            here = self._over(here, mount.point[:place] or "/")
        return self._root < 0 or here == mount.id

    def expires(self, mount: Mount) -> bool:
        """Whether an automounter takes it away when it is not used: asking it would keep it."""
        parent = self._of.get(mount.parent)
        above = parent is not None and parent.fstype == "autofs"
        return above and parent is not None and parent.option("timeout") != "0"

    def _over(self, here: int, path: str) -> int:
        for _ in range(64):
            above = self._on.get((here, path))
            if above is None:
                break
            here = above
        return here


def chosen(mounts: Sequence[Mount]) -> list[tuple[Mount, Cell]]:
    """The mounts to show, each with why it must not be asked ("" = it may be): one per file system."""
    tree = Tree(mounts)
    ranked: list[tuple[tuple[bool, bool, int, int], Mount, Cell]] = []
    for at, mount in enumerate(mounts):
        if mount.has_data:
            why: Cell = ""
            if not tree.reached(mount):
                why = _COVERED
            elif tree.expires(mount):
                why = _AUTOMOUNTED
            elif "\ufffd" in mount.point:
                why = _NOT_A_NAME
            inside = bool(_IN_CONTAINERS.match(mount.point))
            ranked.append(((why is _COVERED, inside, mount.point.count("/"), at), mount, why))
    ranked.sort(key=lambda one: one[0])
    # the shortest path stands for a file system; `mount --bind` and containers show it again and again
    first: dict[str, tuple[Mount, Cell]] = {}
    for _, mount, why in ranked:
        first.setdefault(f"{mount.device} {mount.fstype}", (mount, why))
    by_name: dict[str, tuple[Mount, Cell]] = {}
    for mount, why in first.values():
        by_name.setdefault(mount.shown, (mount, why))
    return list(by_name.values())[:MOST_ROWS]


class Mounts:
    """Reader of probe `mount`.

    Args:
        root: Where /proc and /sys are.
        canaries: Who asks the mounts.
    """

    def __init__(self, root: Path, canaries: Canaries) -> None:
        self._root = root
        self._canaries = canaries
        self._writable: set[tuple[str, str]] = set()
        """Path and source: another file system in the same place has its own past."""
        self._text: str | Null = ""
        self._chosen: list[tuple[Mount, Cell]] = []

    def rows(self) -> Iterable[Row]:
        """One row per file system that is mounted."""
        found = self._mounts()
        askable = [Key(mount.id, mount.point) for mount, why in found if not isinstance(why, Null)]
        answers = self._canaries.ask(askable)
        stats: Mapping[str, Mapping[str, Cell]] = {}
        if any(mount.fstype in ("nfs", "nfs4") for mount, _ in found):
            stats = nfs_stats(files.read(self._root / "proc/self/mountstats"))
        self._writable &= {(mount.shown, mount.source) for mount, _ in found}
        return [self._row(mount, why, answers, stats) for mount, why in found]

    def items(self) -> Iterable[Row]:
        """What is mounted, for the inventory; without what an automounter takes away again."""
        return [
            {
                "mount": mount.shown,
                "fstype": mount.fstype,
                "source": shown(mount.source)[:MOST_SHOWN],
                "writable": str(int(self._was_writable(mount))),
            }
            for mount, why in self._mounts()
            if why is not _AUTOMOUNTED
        ]

    def _mounts(self) -> list[tuple[Mount, Cell]]:
        text = files.read(self._root / "proc/self/mountinfo")
        if text != self._text:
            self._text, self._chosen = text, chosen(parse(text))
        return self._chosen

    def _was_writable(self, mount: Mount) -> bool:
        if "ro" not in mount.super_options:
            self._writable.add((mount.shown, mount.source))
        return (mount.shown, mount.source) in self._writable

    def _row(
        self, mount: Mount, why: Cell, answers: Mapping[Key, Answer], stats: Mapping[str, Mapping[str, Cell]]
    ) -> Row:
        nothing = why if isinstance(why, Null) else _NOT_ASKED
        answer = answers.get(Key(mount.id, mount.point), Answer(nothing))
        row: dict[str, Cell] = {
            "mount": mount.shown,
            "fstype": shown(mount.fstype)[:64],
            "source": shown(mount.source)[:MOST_SHOWN],
            "network": mount.network,
            "nfs_address": shown(mount.option("addr"))[:64] if mount.fstype in ("nfs", "nfs4") else _NOT_NFS,
            "read_only": "ro" in mount.super_options,
            "mount_read_only": "ro" in mount.options,
            "was_writable": self._was_writable(mount),
            "canary_state": answer.state,
            "canary_code": answer.code if isinstance(answer.state, str) else answer.state,
            "canary_s": no_answer(answer.state) if answer.seconds is None else answer.seconds,
            "hung_s": answer.hung_s if isinstance(answer.state, str) else answer.state,
        }
        row |= _usage(answer)
        if mount.fstype in ("nfs", "nfs4"):
            row |= stats.get(mount.point, dict.fromkeys(NFS, _NO_STATS))
        else:
            row |= dict.fromkeys(NFS, _NOT_NFS)
        row |= self._lustre(mount) if mount.fstype == "lustre" else dict.fromkeys(LUSTRE, _NOT_LUSTRE)
        return row

    def _lustre(self, mount: Mount) -> dict[str, Cell]:
        """Client statistics, where the kernel shows them to everybody (`lctl get_param llite.*.stats`)."""
        name = mount.source.rpartition(":/")[2].partition("/")[0]
        row: dict[str, Cell] = dict.fromkeys(LUSTRE, Null(Reason.NOT_SUPPORTED, "ENOENT"))
        homes = [self._root / "proc/fs/lustre", self._root / "sys/fs/lustre"]
        for home in homes:
            for instance in files.listed(home / "llite"):
                if name and instance.name.startswith(f"{name}-"):
                    text = files.read(instance / "stats")
                    if not isinstance(text, Null):
                        row |= _llite(text)
        states: list[str] = []
        for one in (one for home in homes for kind in ("osc", "mdc") for one in files.listed(home / kind)):
            if name and one.name.startswith(f"{name}-"):
                text = files.read(one / "import")
                states += [] if isinstance(text, Null) else _IMPORT.findall(text)[:1]
        if states:
            row["lustre_imports"] = len(states)
            row["lustre_imports_down"] = sum(state not in _WORKING_IMPORTS for state in states)
        return row


def no_answer(state: Cell) -> Null:
    """Why there are no figures of a mount in this state."""
    if isinstance(state, Null):
        return state
    return Null(Reason.NOT_READ if state == "pending" else Reason.FAILED, str(state))


def _usage(answer: Answer) -> dict[str, Cell]:
    usage = answer.usage
    if usage is None:
        why = no_answer(answer.state)
        if answer.code:
            denied = answer.code in ("EACCES", "EPERM")
            why = Null(Reason.NO_PERMISSION if denied else Reason.FAILED, answer.code)
        return dict.fromkeys(USAGE, why)
    row: dict[str, Cell] = dict.fromkeys(USAGE, _NO_BLOCKS)
    if usage.size:
        row |= {"size_bytes": usage.size, "free_bytes": usage.free, "avail_bytes": usage.avail}
    inodes = (usage.inodes, usage.inodes_free)
    row |= dict(zip(USAGE[3:], inodes if usage.inodes else (_NO_INODES, _NO_INODES), strict=True))
    return row


_DEVICE = re.compile(r"device (\S+) mounted on (\S+) with fstype (nfs4?)\b")
_PER_OP = re.compile(r"\s*([A-Z0-9_]{2,32}): ((?:\d{1,20} ){7}\d{1,20})(?: \d{1,20})*\s*")


def nfs_stats(text: str | Null) -> dict[str, dict[str, Cell]]:
    """Path of each NFS mount -> its columns; an operation that was never used has no line: NULL.

    Of several mounts on one path the last counts, as it covers the others.
    """
    if isinstance(text, Null):
        return {}
    found: dict[str, dict[str, Cell]] = {}
    here: dict[str, Cell] = {}
    for line in text.split("\n"):
        if line.startswith("device "):
            device = _DEVICE.match(line)
            here = {}
            if device:
                here = found[unescaped(device[2])] = dict.fromkeys(NFS, Null(Reason.NOT_SUPPORTED, "no_line"))
        elif line.startswith("\txprt:"):
            _add_transport(here, line.split()[1:])
        elif match := _PER_OP.fullmatch(line):
            _add_operation(here, match[1], [int(word) for word in match[2].split()])
    return found


def _add_transport(row: dict[str, Cell], words: Sequence[str]) -> None:
    """With `nconnect` a mount has several."""
    places = _XPRT.get(words[0] if words else "")
    for name, place in zip(("nfs_bad_xids_total", "nfs_backlog_total"), places or (), strict=False):
        if place < len(words) and re.fullmatch(r"\d{1,19}", words[place]):
            _add(row, name, int(words[place]))


def _add_operation(row: dict[str, Cell], name: str, counts: Sequence[int]) -> None:
    operations, sent, timeouts, _, _, _, rtt_ms, exe_ms = counts
    if name in _OPERATIONS:
        _add(row, f"nfs_{name.lower()}_ops_total", operations)
        _add(row, f"nfs_{name.lower()}_rtt_s_total", rtt_ms / 1000)
        _add(row, f"nfs_{name.lower()}_exe_s_total", exe_ms / 1000)
    _add(row, "nfs_retransmits_total", max(0, sent - operations))
    _add(row, "nfs_timeouts_total", timeouts)


def _add(row: dict[str, Cell], name: str, amount: float) -> None:
    if row:
        before = row[name]
        row[name] = amount + before if isinstance(before, int | float) else amount


_IMPORT = re.compile(r"^ *state: *(\w{1,16})", re.MULTILINE)
_LLITE = re.compile(
    r"^(read_bytes|write_bytes|open)\s+(\d{1,19}) samples \[\w+\](?: (\d+) (\d+) (\d{1,19}))?", re.M
)


def _llite(text: str) -> dict[str, Cell]:
    row: dict[str, Cell] = {}
    for name, samples, _, _, total in _LLITE.findall(text):
        if name == "open":
            row["lustre_opens_total"] = int(samples)
        elif total:
            row[f"lustre_{name}_total"] = int(total)
    return row
