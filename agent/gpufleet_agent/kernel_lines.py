"""One line of the kernel log -> what it says. No state and no clock: `kernel_log` has those.

Every pattern is tried at the beginning of a line and never searched for behind text that a user can choose
(process names, file names), and every repetition is bounded, so that a hostile line costs what an honest
one costs. The forms and the versions that print them are in tests/fixtures/kernel_log.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpufleet.catalogue import Catalogue, unknown

Detail = str | int | float | bool | list[int | str] | None
"""What may stand in an event's detail."""

NODE = "node:"

_HEX = "[0-9a-fA-F]"
_BDF = rf"(?:{_HEX}{{4,8}}:)?{_HEX}{{2}}:{_HEX}{{2}}(?:\.[0-7])?"


@dataclass(slots=True)
class Said:
    """What one line says, before it has a time.

    Attributes:
        kind: Of the event.
        entity: Of the event.
        code: Of the event.
        severity: info, warning or critical; goes into the detail.
        detail: Goes into the detail.
        same: Lines of one kind, entity and code that differ here are never folded into one event.
        count: How many of it this line stands for.
    """

    kind: str
    entity: str
    code: str
    severity: str
    detail: dict[str, Detail] = field(default_factory=dict)
    same: str = ""
    count: int = 1


def pci_address(text: str) -> str:
    """Any spelling of a PCI address as `dddd:bb:dd.f`; function 0 when it has none; "" when it is none."""
    found = _ADDRESS.fullmatch(text)
    if found is None:
        return ""
    domain, bus, device, function = found.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function or '0'}".lower()


_ADDRESS = re.compile(rf"(?:({_HEX}{{4,8}}):)?({_HEX}{{2}}):({_HEX}{{2}})(?:\.([0-7]))?")

_WORDS = (
    "NVRM: ",
    "SXid",
    "Hardware Error]",
    "PCIe Bus Error",
    " AER: ",
    "EDAC ",
    "Memory failure: ",
    "BERT: ",
    " not responding, ",
    ": server ",
    " blocked ",
    "oom-kill:",
    "Kill process",
    "Killed process",
    "I/O ",
    " error, dev ",
    "lockup",
    "LOCKUP",
    " stall",
    "ead-only",
    "orruption",
    " error (",
    "nvme nvme",
    "Disk failure",
    "[10de:",
)


def interesting(line: str) -> bool:
    """Cheap first sieve: a line with none of these words says nothing to us."""
    return any(word in line for word in _WORDS)


_PREFIX = re.compile(
    r"(?:<[0-9]{1,3}>)?"
    r"(?:\[ {0,8}[0-9]{1,9}\.[0-9]{1,9}\] )?"
    r"(?:[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.,]{8,16}(?:Z|[+-][0-9:]{4,5})? )?"
    r"(?:(?:[A-Z][a-z]{2} [ 0-9][0-9] [0-9:]{8} )?(?:[A-Za-z0-9.-]{1,64} )?kernel: )?"
    r"(?:\[ {0,8}[0-9]{1,9}\.[0-9]{1,9}\] )?"
)
_BY_PROCESS = re.compile(r".{0,16}\[[0-9]{1,10}\][ :]")


def bare(line: str) -> str:
    """The line without what dmesg, an ISO time stamp or the journal puts before it."""
    found = _PREFIX.match(line)
    return line[found.end() :] if found else line


def names_a_process(line: str) -> bool:
    """Whether the line begins with a process's own name and pid (`comm[123]: segfault ...`)."""
    return _BY_PROCESS.match(line) is not None


# ---------------------------------------------------------------- Xid

_XID = re.compile(
    rf"NVRM: Xid \((?:PCI:)?(?P<pci>{_BDF})(?: GPU-I:(?P<gi>[0-9]{{1,5}}))?(?: GPU-CI:(?P<ci>[0-9]{{1,5}}))?\)"
    r": (?P<xid>[0-9]{1,9})(?:,? (?P<rest>.*)|,?)"
)
_PROCESS = re.compile(
    r"pid=(?P<pid>'?[0-9]{1,10}'?|'?<unknown>'?)(?:, name=(?P<name>[^,]{0,64})[^,]{0,200})?(?:, ?|$)(?P<message>.*)"
)
_NVLINK5 = re.compile(
    r"(?P<unit>[A-Za-z0-9_/]{1,64})\s{1,8}(?P<word>Fatal|Non-?fatal)\s{1,8}XC ?(?P<xc>[0-9])\s{1,8}i ?(?P<injected>[0-9])"
    r"\s{1,8}Link\s{1,8}(?P<link>-?[0-9]{1,3})"
    r"(?:\s{1,8}[(\[](?P<words>0x[0-9a-fA-F]{1,16}(?:,?\s{1,8}0x[0-9a-fA-F]{1,16}){0,9})[)\]])?"
)
_RECOVERY = re.compile(
    r"GPU recovery action changed from 0x([0-9a-fA-F]{1,8}) \(([^)]{0,64})\) to 0x([0-9a-fA-F]{1,8}) \(([^)]{0,64})\)"
)
_CONTAINED = re.compile(
    r"(?P<containment>Contained|Uncontained): (?P<source>[^.]{1,120})\."
    r"(?: physAddr: (?P<physical_address>0x[0-9a-fA-F]{1,16})\.?)?"
    r"(?:.{0,80}? ?RST: (?P<reset>Yes|No), D-RST: (?P<drain_reset>Yes|No))?"
)
_ANYWHERE: tuple[re.Pattern[str], ...] = (
    re.compile(r"caused by previous Xid (?P<previous_xid>[0-9]{1,9})"),
    re.compile(r"phys(?:Addr:|ical address) ?(?P<physical_address>0x[0-9a-fA-F]{1,16})"),
    re.compile(r"\bCh(?:annel ID|annel|ID)? (?:0x)?(?P<channel>[0-9a-fA-F]{1,8})\b"),
)
_BY_NUMBER: Mapping[int, tuple[re.Pattern[str], ...]] = {
    13: (
        re.compile(r"\(GPC (?P<gpc>[0-9]{1,3}), TPC (?P<tpc>[0-9]{1,3})(?:, SM (?P<sm>[0-9]{1,3}))?\)"),
        re.compile(r"ESR 0x[0-9a-fA-F]{1,8}=(?P<esr>0x[0-9a-fA-F]{1,8})"),
    ),
    31: (
        re.compile(
            r"ENGINE (?P<engine>[A-Z0-9_]{1,48}) (?P<client>[A-Z0-9_]{1,64}) faulted @ (?P<address>0x[0-9a-fA-F_]{1,32})"
        ),
        re.compile(r"type (?P<fault>FAULT_[A-Z0-9_]{1,48})(?: (?P<access>ACCESS_[A-Z0-9_]{1,48}))?"),
    ),
    48: (re.compile(r"partition (?P<partition>[0-9]{1,4})(?:, subpartition (?P<subpartition>[0-9]{1,4}))?"),),
    63: (re.compile(r"\((?P<physical_address>0x[0-9a-fA-F]{1,16})\)"),),
    64: (re.compile(r"\((?P<physical_address>0x[0-9a-fA-F]{1,16})\)"),),
    74: (
        re.compile(
            r"link (?P<link>[0-9]{1,3}) ?\((?P<words>0x[0-9a-fA-F]{1,16}(?:, 0x[0-9a-fA-F]{1,16}){0,9})\)"
        ),
    ),
    94: (_CONTAINED,),
    95: (_CONTAINED,),
    119: (
        re.compile(
            r"Timeout after (?P<waited_s>[0-9]{1,6})s of waiting for RPC response from GPU[0-9]{1,3} GSP!"
            r"(?: Expected function (?P<function>[0-9]{1,6})(?: \((?P<function_name>[A-Z0-9_]{1,64})\))?)?"
        ),
    ),
    140: (
        re.compile(
            r"DRAM:(?P<dram>-?[0-9]{1,9}), LTC:(?P<ltc>-?[0-9]{1,9}), MMU:(?P<mmu>-?[0-9]{1,9}), PCIE:(?P<pcie>-?[0-9]{1,9})"
        ),
    ),
}
_INTEGERS = {
    "previous_xid",
    "gpc",
    "tpc",
    "sm",
    "partition",
    "subpartition",
    "link",
    "waited_s",
    "function",
} | {
    "dram",
    "ltc",
    "mmu",
    "pcie",
}
NVLINK5 = range(144, 151)

RECOVERY = {
    "none": ("none", "info"),
    "gpu reset required": ("gpu_reset", "critical"),
    "node reboot required": ("node_reboot", "critical"),
    "drain p2p": ("drain_p2p", "warning"),
    "drain and reset": ("drain_and_reset", "warning"),
    "recover imex domain": ("recover_imex", "warning"),
    "bus reset": ("bus_reset", "critical"),
    "system reboot": ("system_reboot", "critical"),
}
"""Text of Xid 154 -> our word and severity. A text that is not here keeps its own words and warns."""


def xid(line: str, catalogue: Catalogue) -> list[Said] | None:
    """What an Xid line says; None when it cannot be read."""
    found = _XID.fullmatch(line)
    if found is None:
        return None
    number = int(found["xid"])
    entry = catalogue.xid(number) or unknown(number)
    entity = f"pci:{pci_address(found['pci'])}"
    detail: dict[str, Detail] = {
        "xid": number,
        "name": entry.name,
        "scope": entry.scope,
        "action": entry.action,
        "basis": entry.basis,
        "catalogue": catalogue.version,
    }
    for key, group in (("gpu_instance", "gi"), ("compute_instance", "ci")):
        if found[group] is not None:
            detail[key] = int(found[group])
    text = _process(found["rest"] or "", detail)
    _extract(text, (*_ANYWHERE, *_BY_NUMBER.get(number, ())), detail)
    said = Said("xid", entity, str(number), entry.severity, detail)
    said.same = f"{found['gi'] or ''}/{found['ci'] or ''}"
    if entry.basis == "site":
        _nvlink5(number, text, said, judge=False)
        return [said, *_recovery(number, text, said, judge=False)]
    if number in (94, 95):
        _containment(number, said)
    _nvlink5(number, text, said, judge=True)
    return [said, *_recovery(number, text, said, judge=True)]


def _process(rest: str, detail: dict[str, Detail]) -> str:
    """Take pid and name out of the text behind the number; the rest is the driver's own text."""
    found = _PROCESS.match(rest)
    if found is None:
        return rest
    pid = found["pid"].strip("'")
    if pid.isdigit():
        detail["pid"] = int(pid)
    name = (found["name"] or "").strip()
    if name and name != "<unknown>":
        detail["process"] = name
    return found["message"]


def _extract(text: str, patterns: tuple[re.Pattern[str], ...], detail: dict[str, Detail]) -> None:
    for pattern in patterns:
        found = pattern.search(text)
        for name, value in found.groupdict().items() if found else ():
            if value is None:
                continue
            if name in ("reset", "drain_reset"):
                detail[name] = value == "Yes"
            elif name == "words":
                detail[name] = [*value.replace(",", " ").split()]
            elif name == "containment":
                detail[name] = value.lower()
            else:
                detail[name] = int(value) if name in _INTEGERS else value


def _containment(number: int, said: Said) -> None:
    """The flags of 94/95 say whether a reset is needed: believe them over the number."""
    if number == 94 and (said.detail.get("reset") is True or said.detail.get("containment") == "uncontained"):
        said.severity = "critical"
        said.detail["action"] = "reset_gpu"
    said.same += f"/{said.detail.get('containment', '')}/{said.detail.get('reset', '')}"


def _nvlink5(number: int, text: str, said: Said, *, judge: bool) -> None:
    """144-150: unit, severity word, link and register words; the word decides what the number cannot."""
    found = _NVLINK5.match(text) if number in NVLINK5 else None
    if found is None:
        return
    fatal = found["word"] == "Fatal"
    link = int(found["link"])
    words = (found["words"] or "").replace(",", " ").split()
    said.detail |= {
        "unit": found["unit"],
        "fatal": fatal,
        "link": link if link >= 0 else None,
        "cross_containment": found["xc"] != "0",
        "injected": found["injected"] != "0",
        "words": [*words],
    }
    if words:
        info = int(words[0], 16)
        said.detail |= {"intr_info": words[0], "subcode": (info >> 20) & 0x3F}
    if len(words) > 1:
        said.detail["error_status"] = words[1]
    said.same += f"/{found['unit']}/{fatal}/{link}"
    if judge:
        said.severity = "critical" if fatal else "warning"
        said.detail["action"] = "reset_gpu" if fatal else "none"


def _recovery(number: int, text: str, said: Said, *, judge: bool) -> list[Said]:
    """154: what the driver now wants done with the card, as an event of its own."""
    found = _RECOVERY.match(text) if number == 154 else None
    if found is None:
        return []
    before, after = found[2].strip(), found[4].strip()
    code, severity = RECOVERY.get(after.lower(), (re.sub(r"[^a-z0-9]+", "_", after.lower())[:32], "warning"))
    said.detail |= {"before": before, "after": after}
    said.same += f"/{code}"
    if judge and code == "none":
        said.severity = "info"
    detail: dict[str, Detail] = {
        "before": before,
        "after": after,
        "before_code": int(found[1], 16),
        "after_code": int(found[3], 16),
    }
    return [Said("recovery_action", said.entity, code or "unknown", severity, detail)]


_SOME_ADDRESS = re.compile(rf"\((?:PCI:)?({_BDF})(?:[ )]|$)")
_VARYING = re.compile(r"[0-9a-fA-F]*[0-9][0-9a-fA-F]*")


def unparsed(line: str, source: str) -> Said:
    """A line that says Xid or SXid and cannot be read: kept as it is, with the card if it can be seen."""
    found = _SOME_ADDRESS.search(line[:64])
    address = pci_address(found[1]) if found else ""
    same = _VARYING.sub("#", line[:96])
    return Said(
        "xid_unparsed",
        f"pci:{address}" if address else NODE,
        "",
        "warning",
        {"source": source, "action": "contact"},
        same,
    )


# ---------------------------------------------------------------- other lines of the NVIDIA driver

UUID = re.compile(rf"NVRM: GPU at (?:PCI:)?(?P<pci>{_BDF}): (?P<uuid>GPU-[0-9a-fA-F-]{{1,48}})")
BOARD_SERIAL = re.compile(r"NVRM: GPU Board Serial Number: (?P<serial>[0-9A-Za-z-]{1,32})")
CARD_SERIAL = re.compile(rf"NVRM: GPU (?P<pci>{_BDF}): GPU serial number is (?P<serial>[0-9A-Za-z-]{{1,32}})")
OFF_BUS = re.compile(rf"NVRM: GPU (?:at )?(?:PCI:)?(?P<pci>{_BDF}):? (?:GPU )?has fallen off the bus")
PROBED = re.compile(rf"NVRM: The NVIDIA GPU (?P<pci>{_BDF})(?: |$)")
OFF_BUS_END = re.compile(r"NVRM: .{0,80}fallen off the bus and is not responding")
NOT_SUPPORTED = re.compile(r"NVRM: .{0,120}not supported by")
DRIVER_LOADED = re.compile(r"NVRM: loading NVIDIA ")
ENUMERATED = re.compile(rf"pci (?P<pci>{_BDF}): \[10de:{_HEX}{{4}}\] type ")
_INIT_FAILED = re.compile(
    rf"NVRM: (?:GPU (?P<pci>{_BDF}): )?RmInitAdapter failed!(?: \((?P<status>[0-9a-fA-Fx:]{{1,40}})\))?"
)
_POWER_CABLE = re.compile(rf"NVRM: GPU (?P<pci>{_BDF}): GPU does not have the necessary power cables")


def init_failed(line: str) -> Said | None:
    """A card that the driver found and could not start."""
    found = _INIT_FAILED.match(line)
    if found is not None:
        address = pci_address(found["pci"] or "")
        entity = f"pci:{address}" if address else NODE
        detail: dict[str, Detail] = {"action": "reset_gpu"}
        if found["status"]:
            detail["status"] = found["status"]
        return Said("gpu_init_failed", entity, "rm_init_adapter", "critical", detail)
    found = _POWER_CABLE.match(line)
    if found is not None:
        entity = f"pci:{pci_address(found['pci'])}"
        return Said("gpu_init_failed", entity, "power_cable", "critical", {"action": "drain_rma"})
    return None


# ---------------------------------------------------------------- SXid

_SXID = re.compile(
    rf"nvidia-nvswitch(?P<switch>[0-9]{{1,4}}):? SXid \(PCI:(?P<pci>{_BDF})\): (?P<sxid>[0-9]{{1,9}}),? ?(?P<rest>.*)"
)
_SXID_HEAD = re.compile(
    r"(?P<word>Fatal|Non-fatal|Correctable)(?:, |$)(?:Link (?P<link>-?[0-9]{1,3})(?: |$))?(?P<text>.*)"
)
_SXID_MORE = re.compile(
    r"Severity (?P<level>-?[0-9]{1,3}) Engine instance (?P<engine>-?[0-9]{1,6})"
    r" Sub-engine instance (?P<subengine>-?[0-9]{1,6})|Data \{"
)


@dataclass(frozen=True, slots=True)
class Switch:
    """One SXid line: a head, which counts, or a continuation, which does not."""

    key: str
    head: bool
    said: Said


def sxid(line: str, catalogue: Catalogue) -> Switch | None:
    """What an SXid line says; None when it cannot be read."""
    found = _SXID.fullmatch(line)
    if found is None:
        return None
    number = int(found["sxid"])
    entry = catalogue.sxid(number) or unknown(number, "fabric")
    address = pci_address(found["pci"])
    detail: dict[str, Detail] = {
        "sxid": number,
        "switch": int(found["switch"]),
        "name": entry.name,
        "scope": entry.scope,
        "action": entry.action,
        "basis": entry.basis,
        "catalogue": catalogue.version,
    }
    said = Said("sxid", f"pci:{address}", str(number), entry.severity, detail)
    key = f"{address}/{number}"
    more = _SXID_MORE.match(found["rest"])
    if more is not None:
        if more["engine"] is not None:
            detail |= {"engine": int(more["engine"]), "subengine": int(more["subengine"])}
        return Switch(key, False, said)
    head = _SXID_HEAD.match(found["rest"])
    if head is not None:
        detail["word"] = head["word"].lower()
        if head["link"] is not None:
            detail["link"] = int(head["link"])
        said.same = f"{head['word']}/{head['link']}"
        if entry.basis != "site":
            _switch_severity(head["word"], said)
    return Switch(key, True, said)


def _switch_severity(word: str, said: Said) -> None:
    """The hardware's own word bounds the table's: Fatal is at least critical, the others at most a warning."""
    if word == "Fatal":
        said.severity = "critical"
    elif said.severity in ("critical", "fault"):
        said.severity = "warning"
        said.detail["action"] = "contact"


# ---------------------------------------------------------------- PCIe AER

AER_BUS = re.compile(
    rf"(?P<driver>[A-Za-z0-9_.-]{{1,32}}) (?P<pci>{_BDF}): (?:AER: )?PCIe Bus Error: "
    r"severity=(?P<severity>[A-Za-z() -]{1,40}?), type=(?P<layer>[A-Za-z ]{1,40}), ?(?:id=[0-9a-f]{4}\()?\(?(?P<agent>[A-Za-z ]{1,40})"
)
AER_PORT = re.compile(
    rf"(?P<driver>[A-Za-z0-9_.-]{{1,32}}) (?P<port>{_BDF}): AER: (?P<many>Multiple )?"
    r"(?P<severity>Correct(?:ed|able)|Uncorrect(?:ed|able) \((?:Non-)?Fatal\)) error (?:message )?received"
    rf"(?: from)?:? (?:id=(?P<id>[0-9a-f]{{4}})|(?P<pci>{_BDF}))"
)
AER_STATUS = re.compile(
    rf"[A-Za-z0-9_.-]{{1,32}} (?P<pci>{_BDF}): (?:AER: )? {{0,6}}device \[[0-9a-f]{{4}}:[0-9a-f]{{4}}\] "
    r"error status/mask=(?P<status>[0-9a-f]{8})/"
)
AER_BIT = re.compile(
    rf"[A-Za-z0-9_.-]{{1,32}} (?P<pci>{_BDF}): (?:AER: )? {{0,8}}\[ ?[0-9]{{1,2}}\] (?P<bit>[A-Za-z]{{1,32}})"
)


def aer_code(text: str) -> str:
    """Corrected, nonfatal or fatal, from any kernel's spelling."""
    if text.startswith("Uncorrect"):
        return "nonfatal" if "Non-Fatal" in text else "fatal"
    return "corrected"


AER_SEVERITY = {"corrected": "info", "nonfatal": "warning", "fatal": "critical"}


def aer(line: str) -> Said | None:
    """A device's own report of a PCIe error."""
    found = AER_BUS.match(line)
    if found is None:
        return None
    code = aer_code(found["severity"])
    detail: dict[str, Detail] = {
        "driver": found["driver"],
        "layer": found["layer"].strip(),
        "agent": found["agent"].strip(),
    }
    return Said("aer", f"pci:{pci_address(found['pci'])}", code, AER_SEVERITY[code], detail)


def aer_port(line: str) -> Said | None:
    """A root port's note that some device below it sent an error: counts only when the device adds nothing."""
    found = AER_PORT.match(line)
    if found is None:
        return None
    port = pci_address(found["port"])
    if found["pci"]:
        source = pci_address(found["pci"])
    else:
        number = int(found["id"], 16)
        source = f"{port[:4]}:{number >> 8:02x}:{number >> 3 & 0x1F:02x}.{number & 7}"
    code = aer_code(found["severity"])
    return Said("aer", f"pci:{source}", code, AER_SEVERITY[code], {"port": port, "source": "root port"})


# ---------------------------------------------------------------- MCE, APEI, EDAC

_MCE = re.compile(
    r"mce: \[Hardware Error\]: CPU (?P<cpu>[0-9]{1,5}): Machine Check(?P<exception> Exception)?: (?P<mcg>[0-9a-f]{1,16})"
    r" Bank (?P<bank>[0-9]{1,3}): (?P<status>[0-9a-f]{1,16})"
)
_MCA = re.compile(
    r"(?:mce: )?\[Hardware Error\]: CPU:(?P<cpu>[0-9]{1,5}) \([^)]{1,24}\) MC(?P<bank>[0-9]{1,3})_STATUS\[(?P<flags>[^\]]{0,160})\]"
    r": (?P<status>0x[0-9a-f]{1,16})"
)
MCE_LOGGED = re.compile(r"(?:mce: )?\[Hardware Error\]: Machine check events logged")
BERT = re.compile(r"BERT: Error records from previous boot")
_MEMORY_FAILURE = re.compile(
    r"Memory failure: (?P<page>0x[0-9a-f]{1,16}): recovery action for (?P<what>.{1,60}): (?P<result>Ignored|Failed|Delayed|Recovered)"
)
APEI = re.compile(r"\{(?P<tag>[0-9]{1,9})\}\[Hardware Error\]: ?(?P<rest>.*)")
APEI_BEGIN = "Hardware error from APEI Generic Hardware Error Source"
_APEI_FIELD = re.compile(
    r" {0,8}(?P<key>event severity|section_type|section type|device_id|physical_address|DIMM location|error_type): (?P<value>.{0,120})"
)
_EDAC = re.compile(
    r"EDAC (?:[a-z0-9_]{1,32} )?MC(?P<mc>[0-9]{1,4}): (?:(?P<count>[0-9]{1,9}) )?(?P<what>CE|UE)\b(?P<rest>.*)"
)
_EDAC_ON = re.compile(r"\bon (?P<label>[^ (]{1,96})")
_EDAC_PAGE = re.compile(r"\bpage[: ](?P<page>0x[0-9a-f]{1,16})")

_MCE_SEVERITY = {"corrected": "info", "deferred": "warning", "uncorrected": "critical", "fatal": "critical"}


def mce(line: str) -> Said | None:
    """A machine check: the processor's own report of a hardware error."""
    found = _MCE.match(line)
    if found is not None:
        status = int(found["status"], 16)
        code = "fatal" if status >> 57 & 1 else "uncorrected" if status >> 61 & 1 else "corrected"
        if found["exception"] and code == "corrected":
            code = "uncorrected"
    else:
        found = _MCA.match(line)
        if found is None:
            return _memory_failure(line)
        flags = found["flags"].split("|")
        code = (
            "fatal"
            if "PCC" in flags
            else "uncorrected"
            if "UE" in flags or "UC" in flags
            else "deferred"
            if "Deferred" in flags
            else "corrected"
        )
    detail: dict[str, Detail] = {
        "cpu": int(found["cpu"]),
        "bank": int(found["bank"]),
        "status": "0x" + found["status"].removeprefix("0x"),
    }
    return Said("mce", NODE, code, _MCE_SEVERITY[code], detail, f"{found['bank']}")


def _memory_failure(line: str) -> Said | None:
    found = _MEMORY_FAILURE.match(line)
    if found is None:
        return None
    severity = "warning" if found["result"] in ("Recovered", "Delayed") else "critical"
    detail: dict[str, Detail] = {
        "page": found["page"],
        "what": found["what"],
        "result": found["result"].lower(),
    }
    return Said("mce", NODE, "memory_failure", severity, detail, found["result"])


def apei_field(rest: str, said: Said) -> None:
    """Add one line of a firmware error record to the event that it is part of."""
    found = _APEI_FIELD.match(rest)
    if found is None:
        return
    key, value = found["key"], found["value"].strip()
    if key == "event severity":
        code = {"recoverable": "uncorrected", "info": "corrected"}.get(value, value)
        said.code = code if code in _MCE_SEVERITY else "uncorrected"
    elif key in ("section_type", "section type"):
        said.detail["section"] = value
        said.kind = "aer" if "PCIe" in value else "edac" if "memory" in value.lower() else "mce"
    elif key == "device_id":
        address = pci_address(value)
        if address:
            said.entity = f"pci:{address}"
    else:
        said.detail[key.replace(" ", "_").lower()] = value


def apei_done(said: Said) -> None:
    """Give a finished firmware record the words of its kind."""
    if said.kind == "aer":
        said.code = {"uncorrected": "nonfatal"}.get(said.code, said.code)
        said.severity = AER_SEVERITY.get(said.code, "warning")
    else:
        said.severity = _MCE_SEVERITY.get(said.code, "warning")
        said.entity = NODE
        if said.kind == "edac" and said.code == "fatal":
            said.code = "uncorrected"


def edac(line: str) -> Said | None:
    """A host memory error counted by the memory controller's driver."""
    found = _EDAC.match(line)
    if found is None:
        return None
    code = "corrected" if found["what"] == "CE" else "uncorrected"
    detail: dict[str, Detail] = {"controller": int(found["mc"])}
    for pattern in (_EDAC_ON, _EDAC_PAGE):
        more = pattern.search(found["rest"])
        if more is not None:
            detail |= more.groupdict()
    count = min(max(int(found["count"] or 1), 1), 0xFFFFFFFF)
    severity = "info" if code == "corrected" else "critical"
    return Said("edac", NODE, code, severity, detail, f"{found['mc']}/{detail.get('label', '')}", count)


# ---------------------------------------------------------------- NFS, memory, stuck tasks

NFS = re.compile(
    r"(?:nfs|NFS|lockd): server (?P<server>[A-Za-z0-9_.:%\[\]-]{1,255}) "
    r"(?P<what>not responding, (?:still trying|timed out)|OK)$"
)
OOM_WHERE = re.compile(r"oom-kill:constraint=(?P<constraint>CONSTRAINT_[A-Z_]{1,24})")
OOM_KILLED = re.compile(
    r"(?P<where>(?:Memory cgroup o|O)ut of memory)?(?: \(oom_kill_allocating_task\))?(?:: |^)"
    r"Kill(?:ed)? process (?P<pid>[0-9]{1,10})(?:, UID [0-9]{1,10},)?,? "
    r"\((?P<name>.{0,64}?)\)(?= total-vm:| score |,|$)(?P<rest>.*)"
)
_RSS = re.compile(r"anon-rss:(?P<kb>[0-9]{1,15})kB")
_UID = re.compile(r"\bUID:(?P<uid>[0-9]{1,10})\b")
_HUNG = re.compile(
    r"INFO: task (?P<name>.{1,64}):(?P<pid>[0-9]{1,10}) blocked (?:in I/O wait )?for more than (?P<seconds>[0-9]{1,9}) seconds"
)
_SOFT = re.compile(
    r"(?:watchdog: )?BUG: soft lockup - CPU#(?P<cpu>[0-9]{1,5}) stuck for (?P<seconds>[0-9]{1,9})s!"
    r"(?: \[(?P<name>.{1,64}):(?P<pid>[0-9]{1,10})\])?"
)
_HARD = re.compile(
    r"(?:NMI watchdog: |watchdog: )?Watchdog detected hard LOCKUP on cpu (?P<cpu>[0-9]{1,5})", re.IGNORECASE
)
_RCU = re.compile(r"(?:rcu: )?INFO: (?P<flavour>rcu[a-z_]{0,24}) (?:self-)?detected (?:expedited )?stall")
STACK_MODULE = re.compile(
    r"[ ?]{1,6}[A-Za-z0-9_.]{1,120}\+0x[0-9a-f]{1,8}/0x[0-9a-f]{1,8} \[(?P<module>[0-9a-z_]{1,55})"
)


def oom_where(line: str) -> tuple[str, str] | None:
    """Pid and cgroup of the process about to be killed, from the kernel's summary line."""
    if OOM_WHERE.match(line) is None:
        return None
    # A cgroup's or a process's name may hold commas and equals signs: cut from the end, where numbers stand.
    front, found, _ = line.rpartition(",uid=")
    front, found_pid, pid = front.rpartition(",pid=")
    front, found_task, _ = front.rpartition(",task=")
    _, found_group, group = front.partition(",task_memcg=")
    if not (found and found_pid and found_task and found_group and pid.isdigit() and len(pid) <= 10):
        return None
    return pid, group


def oom(line: str) -> Said | None:
    """A process that the kernel killed for memory. The name is the kernel's 15 characters, no arguments."""
    found = OOM_KILLED.match(line)
    if found is None:
        return None
    code = "cgroup" if (found["where"] or "").startswith("Memory cgroup") else "host"
    detail: dict[str, Detail] = {"pid": int(found["pid"]), "process": found["name"]}
    rss, uid = _RSS.search(found["rest"]), _UID.search(found["rest"])
    if rss is not None:
        detail["anon_rss_bytes"] = int(rss["kb"]) * 1024
    if uid is not None:
        detail["uid"] = int(uid["uid"])
    return Said("oom", NODE, code, "warning", detail, found["name"])


def stuck(line: str) -> Said | None:
    """A task or a processor that makes no progress in the kernel."""
    found = _HUNG.match(line)
    if found is not None:
        detail: dict[str, Detail] = {
            "pid": int(found["pid"]),
            "process": found["name"],
            "seconds": int(found["seconds"]),
        }
        return Said("hung_task", NODE, "", "warning", detail, f"{found['name']}:{found['pid']}")
    found = _SOFT.match(line)
    if found is not None:
        detail = {"cpu": int(found["cpu"]), "seconds": int(found["seconds"])}
        if found["pid"]:
            detail |= {"pid": int(found["pid"]), "process": found["name"]}
        return Said("lockup", NODE, "soft", "critical", detail, found["cpu"])
    found = _HARD.match(line)
    if found is not None:
        return Said("lockup", NODE, "hard", "critical", {"cpu": int(found["cpu"])}, found["cpu"])
    found = _RCU.match(line)
    if found is not None:
        return Said("lockup", NODE, "rcu", "critical", {"flavour": found["flavour"]})
    return None


# ---------------------------------------------------------------- disks and file systems

_DEV = "[A-Za-z0-9_!-]{1,64}"
_IO: tuple[tuple[str, str, re.Pattern[str]], ...] = (
    (
        "",
        "warning",
        re.compile(
            r"(?:blk_update_request: |print_req_error: |end_request: )?"
            rf"(?P<code>I/O|critical medium|critical target|critical nexus|recoverable transport|critical space allocation) error, "
            rf"dev (?P<dev>{_DEV}), sector (?P<sector>[0-9]{{1,20}})(?: op 0x[0-9a-f]{{1,4}}:\((?P<op>[A-Z_]{{1,24}})\))?"
        ),
    ),
    (
        "buffer",
        "warning",
        re.compile(
            rf"Buffer I/O error on dev(?:ice)? (?P<dev>{_DEV}), logical block (?P<block>[0-9]{{1,20}})(?:, (?P<op>.{{1,40}}))?"
        ),
    ),
    (
        "filesystem",
        "critical",
        re.compile(rf"(?P<filesystem>EXT[234]|BTRFS)(?:-fs)? error \(device (?P<dev>{_DEV})"),
    ),
    (
        "filesystem",
        "critical",
        re.compile(
            rf"(?P<filesystem>XFS) \((?P<dev>{_DEV})\): (?:(?:Metadata c|C)orruption|.{{0,60}}I/O [Ee]rror)"
        ),
    ),
    (
        "read_only",
        "critical",
        re.compile(
            rf"(?P<filesystem>EXT[234]-fs|BTRFS info|F2FS-fs) \((?:device )?(?P<dev>{_DEV})\): (?:Remounting filesystem|forced) read-?only",
            re.IGNORECASE,
        ),
    ),
    (
        "timeout",
        "warning",
        re.compile(
            r"nvme (?P<dev>nvme[0-9]{1,4}): I/O (?:tag )?[0-9]{1,6} (?:\([0-9a-f:]{1,16}\) )?(?:opcode 0x[0-9a-f]{1,4} (?:\([^)]{1,32}\) )?)?"
            r"QID [0-9]{1,6} timeout"
        ),
    ),
    (
        "controller_down",
        "critical",
        re.compile(r"nvme (?P<dev>nvme[0-9]{1,4}): controller is down; will reset"),
    ),
    (
        "device_removed",
        "critical",
        re.compile(
            r"nvme (?P<dev>nvme[0-9]{1,4}): (?:Removing after probe failure|Disabling device after reset failure)"
        ),
    ),
    (
        "raid_member",
        "critical",
        re.compile(
            r"md/raid[0-9]{0,2}:(?P<array>[A-Za-z0-9_]{1,32}): Disk failure on (?P<dev>[A-Za-z0-9_]{1,64})"
        ),
    ),
)
_REMOVABLE = re.compile(r"(?:sr|fd|loop|nbd)[0-9]{1,4}")


def io_error(line: str) -> Said | None:
    """A disk or file system that failed an operation; the entity is the disk."""
    for code, severity, pattern in _IO:
        found = pattern.match(line)
        if found is None:
            continue
        parts = found.groupdict()
        device = parts.pop("dev")
        word = parts.pop("code", None)
        if word is not None:
            code = "io" if word == "I/O" else word.split()[1]
        detail: dict[str, Detail] = {key: value for key, value in parts.items() if value is not None}
        for key in ("sector", "block"):
            if key in parts:
                detail[key] = int(parts[key])
        if _REMOVABLE.fullmatch(device):
            severity = "info"  # a management board's empty virtual CD drive does this on healthy hosts
        return Said("io_error", f"disk:{device}", code, severity, detail)
    return None
