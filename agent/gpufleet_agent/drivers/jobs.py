"""Which job a process belongs to, by /proc and its cgroup: Slurm, Kubernetes, or neither.

The cgroup decides, for the user of the job cannot choose it; the environment fills in what a path does not
say. An environment holds secrets: a handful of numbers is taken out of it here, and nothing else leaves this
file. Of the command line only the name of the program is read.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpufleet.metric import Cell, Null, Reason, Row
from gpufleet_agent.drivers import files

COLUMNS = (
    "pid_start", "job_kind", "job_id", "job_step", "container", "user", "uid", "rank", "local_rank", "world",
    "command", "psi_io_some_s_total", "psi_io_full_s_total", "psi_cpu_some_s_total",
    "psi_memory_full_s_total",
)  # fmt: skip

_PRESSURES = (("io", "some"), ("io", "full"), ("cpu", "some"), ("memory", "full"))
_ENVIRONMENT = ("SLURM_JOB_ID", "SLURM_PROCID", "RANK", "LOCAL_RANK", "WORLD_SIZE")
_ENVIRONMENT_BYTES = 1 << 20
_MOST_KNOWN = 4096
_INITIAL_NAMESPACE = "pid:[4026531836]"
"""The number is the kernel's own constant: the pid namespace of the machine itself."""

_ELSEWHERE = Null(Reason.FAILED, "pid_namespace")
_GONE = Null(Reason.FAILED, "no_such_pid")
_NO_CGROUP = Null(Reason.NOT_SUPPORTED, "no_cgroup")
_UNSET = Null(Reason.NOT_SUPPORTED, "unset")
_BUSY = Null(Reason.NOT_READ, "uninterruptible")

_SLURM = re.compile(
    r"(?P<place>/(?:slurm(?:_[^/]{1,255})?/uid_[0-9]{1,10}|(?:system\.slice/)?[^/]{0,255}slurmstepd\.scope)"
    r"/job_(?P<job>[0-9]{1,10}))(?:/step_(?P<step>[a-z0-9_]{1,32}))?(?:/.*)?"
)
_POD = re.compile(
    r"(?P<place>/.{0,512}?kubepods.{0,255}?pod"
    r"(?P<uid>[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?)"
    r"(?:[/:](?:[a-z-]{1,32}[-:])?(?P<container>[0-9a-f]{12,64})(?:\.scope)?)?(?:/.*)?"
)
_CONTAINER = re.compile(
    r"(?P<place>/.{0,512}?(?:docker|libpod|cri-containerd|crio|nerdctl|containerd)[-/](?P<container>[0-9a-f]{64})"
    r"(?:\.scope)?)(?:/.*)?"
)
_UNIT = re.compile(r"(?P<place>/(?:[^/]{1,255}/){0,30}(?P<unit>[^/]{1,248}\.(?:service|scope)))(?:/.*)?")


@dataclass(frozen=True, slots=True)
class Membership:
    """What the path of a cgroup says of a process in it.

    Attributes:
        kind: slurm, kubernetes or plain.
        job: Its number or name; empty when the path has none.
        step: Of a Slurm job.
        container: Id; empty = in none.
        place: Path of the cgroup of the whole job.
    """

    kind: str
    job: str = ""
    step: str = ""
    container: str = ""
    place: str = ""


def membership(text: str) -> Membership:
    """What /proc/PID/cgroup says, by the line that says most."""
    paths = [line.split(":", 2)[2] for line in text.splitlines()[:64] if line.count(":") >= 2]
    # below its own slice a user may name cgroups like a job of somebody else
    trusted = [path for path in paths if not path.startswith("/user.slice/")]
    for path in trusted:
        found = _SLURM.fullmatch(path)
        if found:
            return Membership("slurm", found["job"], found["step"] or "", "", found["place"])
    for path in trusted:
        found = _POD.fullmatch(path)
        if found:
            uid = found["uid"].replace("_", "-")
            return Membership("kubernetes", uid, "", found["container"] or "", found["place"])
    for path in paths:
        found = _CONTAINER.fullmatch(path)
        if found:
            name = f"container-{found['container'][:12]}"
            return Membership("plain", name, "", found["container"], found["place"])
    units = [_UNIT.fullmatch(path) for path in paths]
    deepest = max((found for found in units if found), key=lambda found: len(found["place"]), default=None)
    if deepest is None:
        return Membership("plain")
    return Membership("plain", _name(deepest["unit"]), "", "", deepest["place"])


def _name(text: str) -> str:
    return files.plain(text)[:64]


class Jobs:
    """Looks processes up below one root.

    The environment of a process is read once: reading it waits for a lock of that process, and it does not
    change. It is not read of one that the kernel holds in an uninterruptible wait.

    Args:
        root: Where /proc, /sys and /etc are.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._proc = root / "proc"
        self._known: dict[tuple[int, int], Mapping[str, int]] = {}
        self._users: tuple[tuple[int, int], dict[int, str]] = ((0, 0), {})

    def process(self, pid: int) -> Row:
        """The columns of probe `job` that are about a process."""
        if self._elsewhere():
            return dict.fromkeys(COLUMNS, _ELSEWHERE)
        home = self._proc / str(pid)
        row: dict[str, Cell] = dict.fromkeys(COLUMNS, _GONE)
        stat = files.read(home / "stat")
        head = _Stat.of(stat)
        if head is None:
            # hidepid: the process is there, but not for us
            why = stat if isinstance(stat, Null) and stat.reason is Reason.NO_PERMISSION else _GONE
            return dict.fromkeys(COLUMNS, why if isinstance(stat, Null) else files.UNPARSABLE)
        cgroup = files.read(home / "cgroup")
        status = files.read(home / "status")
        told = self._environment(pid, head)
        again = _Stat.of(files.read(home / "stat"))
        if again is None or again.start != head.start:
            return row  # it ended while we looked: what was read may be another's
        uid = files.parsed(status, _uid)
        row |= {"pid_start": head.start, "command": _name(head.command), "uid": uid}
        row["user"] = uid if isinstance(uid, Null) else self._user(int(uid))
        row |= _job(cgroup, told, head.session or pid)
        row |= self._pressure(cgroup)
        numbers = {"rank": ("RANK", "SLURM_PROCID"), "local_rank": ("LOCAL_RANK",), "world": ("WORLD_SIZE",)}
        for column, names in numbers.items():
            row[column] = told if isinstance(told, Null) else _first(told, names)
        return row

    def _elsewhere(self) -> bool:
        """Whether we live in a pid namespace of our own, where the driver's pids mean other processes."""
        here = files.link(self._proc / "self/ns/pid")
        return isinstance(here, str) and here not in ("", _INITIAL_NAMESPACE)

    def _environment(self, pid: int, head: "_Stat") -> Mapping[str, int] | Null:
        """The few numbers in it that say which part of which job this is."""
        key = (pid, head.start)
        if key in self._known:
            return self._known[key]
        if head.state == "D":
            return _BUSY
        try:
            with (self._proc / str(pid) / "environ").open("rb", buffering=0) as file:
                whole = bytearray()
                while len(whole) < _ENVIRONMENT_BYTES and (piece := file.read(1 << 16)):
                    whole += piece
        except OSError as error:
            return files.why(error)
        told = _numbers(bytes(whole))
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[key] = told
        return told

    def _user(self, uid: int) -> str:
        path = self._root / "etc/passwd"
        try:
            found = path.stat()
            mark = (found.st_mtime_ns, found.st_ino)
        except OSError:
            mark = (0, 0)
        if mark != self._users[0]:
            self._users = (mark, _passwd(files.read(path)))
        return self._users[1].get(uid, str(uid))

    def _pressure(self, cgroup: str | Null) -> dict[str, Cell]:
        """Pressure of the job's cgroup: of version 2 alone, which is the line `0::/path`."""
        names = {f"psi_{what}_{kind}_s_total": (what, kind) for what, kind in _PRESSURES}
        if isinstance(cgroup, Null):
            return dict.fromkeys(names, cgroup)
        unified = "\n".join(line for line in cgroup.splitlines()[:64] if line.startswith("0::/"))
        place = membership(unified).place
        if not place or ".." in place.split("/") or "\0" in place:
            return dict.fromkeys(names, _NO_CGROUP)
        home = self._root / "sys/fs/cgroup" / place.lstrip("/")
        texts = {what: files.read(home / f"{what}.pressure") for what, _ in _PRESSURES}
        return {name: files.pressure(texts[what], kind) for name, (what, kind) in names.items()}


@dataclass(frozen=True, slots=True)
class _Stat:
    command: str
    state: str
    session: int
    start: int

    @classmethod
    def of(cls, text: str | Null) -> "_Stat | None":
        """Of /proc/PID/stat; the name may hold anything, brackets and spaces too."""
        if isinstance(text, Null):
            return None
        head, _, tail = text.rpartition(")")
        words = tail.split()
        try:
            return cls(head.partition("(")[2], words[0], int(words[3]), files.count(words[19]))
        except (ValueError, IndexError):
            return None


def _job(cgroup: str | Null, told: Mapping[str, int] | Null, session: int) -> dict[str, Cell]:
    if isinstance(cgroup, Null):
        return dict.fromkeys(("job_kind", "job_id", "job_step", "container"), cgroup)
    found = membership(cgroup)
    job, kind = found.job, found.kind
    claimed = None if isinstance(told, Null) else told.get("SLURM_JOB_ID")
    if kind == "plain" and claimed and job in ("", "slurmd.service"):
        # a site whose Slurm tracks processes without cgroups; from a login anybody could claim any job
        kind, job = "slurm", str(claimed)
    return {
        "job_kind": kind,
        "job_id": job or f"pid-{session}",
        "job_step": found.step,
        "container": found.container,
    }


def _numbers(environment: bytes) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in environment.split(b"\0"):
        name, _, value = entry[:64].partition(b"=")
        key = name.decode("ascii", "replace")
        if key in _ENVIRONMENT and re.fullmatch(rb"[0-9]{1,10}", value):
            found.setdefault(key, int(value))
    return found


def _first(told: Mapping[str, int], names: tuple[str, ...]) -> Cell:
    return next((told[name] for name in names if name in told), _UNSET)


def _uid(text: str) -> Cell:
    found = re.search(r"^Uid:\s+([0-9]{1,10})\s", text, re.MULTILINE)
    if not found:
        raise ValueError("no Uid")
    return int(found[1])


def _passwd(text: str | Null) -> dict[int, str]:
    users: dict[int, str] = {}
    for line in "" if isinstance(text, Null) else text.splitlines():
        words = line.split(":")
        if len(words) >= 3 and re.fullmatch("[0-9]{1,10}", words[2]):
            users.setdefault(int(words[2]), _name(words[0]))
    return users
