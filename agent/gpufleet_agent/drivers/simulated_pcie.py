"""The way of a simulated card to its root: links and errors, its part of a row of probe `pci`.

Pure: a function of the model, the card's life, and the time.
"""

from gpufleet.metric import Cell, Null, Reason
from gpufleet_agent.drivers.cards import Model
from gpufleet_agent.drivers.pcie import LINK, PATH, Best, segment
from gpufleet_agent.drivers.timeline import CardPhase, Timeline

_ABSENT = Null(Reason.NOT_SUPPORTED, "ENOENT")
_UNREADABLE = Null(Reason.FAILED, "EIO")
_LANES = 16
_KINDS = {"corrected": "BadTLP", "nonfatal": "CmpltTO", "fatal": "DLP"}


def way(model: Model, life: Timeline[CardPhase], t: float) -> dict[str, Cell]:
    """The columns about link, path and errors, and the best that the link showed so far."""
    phase = life.at(t)
    row = _links(model, phase) | _errors(model, phase, t)
    best = Best()
    for earlier in life.phases:
        if earlier.start <= t and earlier.bus == "ok":
            best.after({"pci": phase.board.pci, "device_id": model.device_id, **_links(model, earlier)})
    return row | best.after({"pci": phase.board.pci, "device_id": model.device_id, **row})


def _links(model: Model, phase: CardPhase) -> dict[str, Cell]:
    """A card sits below a switch, whose link to the root is as good as the card's; a guest sees no port."""
    card = phase.board.pci
    if model.guest:
        return {"parent": "", "path": "", **dict.fromkeys((*LINK, *PATH, "path_links"), _ABSENT)}
    # 0000:43:00.0 below 0000:42:01.0, that below 0000:41:00.0, that below the root port 0000:40:01.1
    domain, bus = card[:5], int(card[5:7], 16)
    root, switch = f"{domain}{bus - 3:02x}:01.1", f"{domain}{bus - 2:02x}:00.0"
    able = dict(zip(LINK, (model.pcie_gen, model.pcie_gen, _LANES, _LANES), strict=True))
    own: dict[str, Cell] = dict.fromkeys(LINK, _UNREADABLE)
    if phase.bus == "ok":
        own = {**able, "pcie_gen": phase.gen_now(model), "pcie_width": phase.width}
    below, above = segment(card, own, {}), segment(switch, able, able)
    path: dict[str, Cell] = dict.fromkeys(PATH, _UNREADABLE)
    if phase.bus == "ok":
        path = {
            "path_gen": below.gen,
            "path_gen_max": model.pcie_gen,
            "path_width": below.width,
            "path_width_max": _LANES,
            "slowest": card,
            "narrowest": card,
        }
    ports = {"parent": phase.board.parent, "path": f"{root}/{switch}/{phase.board.parent}"}
    return own | path | ports | {"path_links": f"{above}, {below}"}


def _errors(model: Model, phase: CardPhase, t: float) -> dict[str, Cell]:
    errors = phase.errors(t)
    row: dict[str, Cell] = {}
    for end in ("", "port_"):
        counts = {severity: int(getattr(errors, f"{end}aer_{severity}")) for severity in _KINDS}
        row |= {f"{end}aer_{severity}_total": count for severity, count in counts.items()}
        row[f"{end}aer_errors"] = ", ".join(
            f"{severity} {_KINDS[severity]} {count}" for severity, count in counts.items() if count
        )
    return dict.fromkeys(row, _ABSENT) if model.guest else row
