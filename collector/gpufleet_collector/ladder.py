"""What to do next about an incident: per rule a ladder of steps, less what was tried on this card or node.

Steps that were tried are known by what they leave behind: a reboot and a driver that is loaded anew are
events, a card that was moved shows in the inventory at another address.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

import duckdb

from gpufleet.catalogue import ACTIONS

WITHIN = timedelta(days=30)
"""What was done longer ago was done about something else."""

Step = tuple[str, str]
"""Its word (reset, reboot, reseat, replace, or "" for what leaves no trace), and what to do."""

_RESET: Step = ("reset", "reset the card once nobody holds it (nvidia-smi -r -i)")
_REBOOT: Step = ("reboot", "reboot the node once it is drained")
_RESEAT: Step = ("reseat", "reseat the card or put it into another slot")
_REPLACE: Step = ("replace", "replace the card")
_CARD = (_RESET, _REBOOT, _RESEAT, _REPLACE)
_CLOCK: tuple[Step, ...] = (("", "repair time synchronisation on the host (chronyc tracking)"),)
_PORT: tuple[Step, ...] = (
    ("", "reseat or swap cable and transceiver, then try another port of the switch"),
    _REBOOT,
)

_STEP: tuple[Step, ...] = (
    ("", "see what changed everywhere, usually the driver: go back, or accept what is now as the baseline"),
)

STEPS: Mapping[str, tuple[Step, ...]] = {
    "agent_silent": (("", "see whether the host is up (BMC), then systemctl status gpufleet-agent on it"),),
    "bandwidth_regression": (("", "run the bench again on the idle node before anything else"), *_CARD),
    "bench_corrupt": (
        ("", "take the card out of service now, then replace it: what it calculated is in doubt"),
    ),
    "bandwidth_regression_fleet": _STEP,
    "bandwidth_regression_host": (
        ("", "see what changed on the host (driver, governor, firmware, memory) and what else runs on it"),
        _REBOOT,
    ),
    "bench_stale": (("", "drain it for an hour and run what is due: fleet-agent bench --quick on it"),),
    "clock_skew": _CLOCK,
    "clock_unsynchronised": _CLOCK,
    "data_starved": (("", "look at the loader and at what feeds it: fleet job shows where it runs"),),
    "dimm_errors": (("", "reseat the memory module at the next stop; if it goes on, replace it"),),
    "disk_full": (("", "free space on it"),),
    "disk_slow": (("", "read the disk's own log (smartctl -x, nvme smart-log), replace it if that agrees"),),
    "driver_hung": (_REBOOT, _RESEAT, _REPLACE),
    "driver_mismatch": (("reset", "load the new driver once the node is drained (rmmod, modprobe)"), _REBOOT),
    "agent_dropping": (("", "see why its agent cannot send: network, disk of the spool, collector"),),
    "agent_restarted": (("", "read why: journalctl -u gpufleet-agent on the host"),),
    "certificate_expiry": (("", "renew the certificate before it ends"),),
    "ecc_corrected": _CARD,
    "ecc_uncorrectable": _CARD,
    "gpu_hot": (("", "look at fans, inlet temperature and the neighbours"), _RESEAT, _REPLACE),
    "node_rebooted": (("", "read the BMC's event log and the last lines of the boot before"),),
    "retired_pages": _CARD,
    "sensor_stuck": _CARD,
    "gpu_downclocked": (
        ("", "see whether anybody set clocks or limits (nvidia-smi -q -d CLOCK,POWER)"),
        *_CARD,
    ),
    "gpu_missing": (_REBOOT, _RESEAT, _REPLACE),
    "identity_conflict": (("", "give one of the two machines a name and machine-id of its own"),),
    "mount_hung": (("", "look at the server first; mount it anew only when that answers"), _REBOOT),
    "nvlink_down": (("reset", "reset all cards of the node together once it is drained"), *_CARD[1:]),
    "nvlink_errors": (("reset", "reset all cards of the node together once it is drained"), *_CARD[1:]),
    "pcie_errors": _CARD,
    "pcie_speed": _CARD,
    "pcie_width": (_REBOOT, _RESEAT, _REPLACE),
    "port_down": _PORT,
    "port_errors": _PORT,
    "port_flapping": _PORT,
    "port_rate": _PORT,
    "power_limit": (
        ("", "see who set it (nvidia-smi -q -d POWER) and set what its peers have (nvidia-smi -pl)"),
        _REBOOT,
    ),
    "process_unkillable": (_REBOOT,),
    "recovery_action": _CARD,
    "remap_failed": _CARD,
    "rule_failed": (
        ("", "read the error (fleet explain rule NAME) and what changed: an upgrade, a site's rule"),
    ),
    "software_drift": (("", "give it what its peers have once it is drained, or a label pool of its own"),),
    "temperature_margin": (("", "look at fans, inlet temperature and the neighbours"), _RESEAT, _REPLACE),
    "xid": _CARD,
}

_OF_CODE: Mapping[tuple[str, str], tuple[Step, ...]] = {
    ("gpu_missing", "driver_not_loaded"): (
        ("reset", "load the driver (modprobe nvidia) and read dmesg if it refuses"),
        ("", "install the driver for the running kernel anew"),
    ),
    ("gpu_downclocked", "power_brake"): (
        ("", "power: look at supplies, PDU and the limit of the rack"),
        *_CARD,
    ),
    ("gpu_downclocked", "hw_thermal"): (("", "cooling: look at fans, inlet temperature, neighbours"), *_CARD),
    ("gpu_downclocked", "fleet_step"): _STEP,
    ("bandwidth_regression_fleet", "fleet_step"): _STEP,
    ("power_limit", "held_lower"): (
        ("", "the board or its host holds it down: look at power cables, supplies and the BMC's own limit"),
        _RESEAT,
        _REPLACE,
    ),
    ("agent_silent", "many_silent"): (
        ("", "look at the collector's host and its network; agents keep their data meanwhile"),
    ),
}

_ASKED = {
    "gpu_reset": "reset", "drain_and_reset": "reset", "bus_reset": "reset", "reset_gpu": "reset",
    "node_reboot": "reboot", "system_reboot": "reboot", "reboot": "reboot", "drain_rma": "replace",
}  # fmt: skip
"""What a driver or the catalogue of errors asks for -> the step that does it."""

_FIRST = {
    **{action: ACTIONS[action] for action in ("none", "restart_app", "contact")},
    "accept": "see who exchanged the card; where that was meant: fleet inventory accept NODE",
}
"""What comes before the ladder: it is not known to be the card, or the card is well, elsewhere."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One kind of step that was taken since the trouble began."""

    word: str
    count: int
    last_at: datetime


def tried(
    read: duckdb.DuckDBPyConnection, node: str, uuids: list[str], since: datetime, until: datetime
) -> list[Tried]:
    """What was done to a node, and to these cards wherever they were, between two times."""
    rows = read.execute(_TRIED, {"node": node, "uuids": uuids, "since": since, "until": until}).fetchall()
    return [Tried(*row) for row in rows]


def next_step(rule: str, code: str, asked: str, domain: str, done: list[Tried]) -> str | None:
    """The first step of the rule's ladder that was not tried yet; None = its runbook knows better.

    Args:
        rule: The cause.
        code: Of its finding.
        asked: What the driver wants done, or what the error's catalogue says.
        domain: What the nodes share, in words; empty = it is about one node.
        done: What was tried.
    """
    if domain and (rule, code) not in _OF_CODE:
        return f"look at what these nodes share: {domain}"
    steps = _OF_CODE.get((rule, code)) or STEPS.get(rule)
    if not steps:
        return None
    if asked == "accept" or (asked in _FIRST and not done):
        return _FIRST[asked]
    wanted = _ASKED.get(asked)
    words = [word for word, _ in steps]
    start = words.index(wanted) if wanted in words else 0
    taken = [words.index(one.word) + 1 for one in done if one.word in words]
    at = min(max([start, *taken]), len(steps) - 1)
    return steps[at][1]


_TRIED = """
    SELECT if(kind = 'reboot', 'reboot', 'reset') AS word, count(*), max(ts) FROM event
    WHERE node = $node AND kind IN ('reboot', 'driver_reloaded') AND ts > $since AND ts <= $until
    GROUP BY word
    UNION ALL
    SELECT 'reseat', count(*), max(valid_from)
    FROM (
        SELECT valid_from, (node, pci) IS DISTINCT FROM lag((node, pci)) OVER w AS moved,
               row_number() OVER w > 1 AS later
        FROM inventory
        WHERE kind = 'gpu' AND uuid IN (SELECT unnest($uuids::VARCHAR[])) AND valid_from <= $until
        WINDOW w AS (PARTITION BY uuid ORDER BY valid_from)
    )
    WHERE moved AND later AND valid_from > $since
    HAVING count(*) > 0
    ORDER BY 1
"""
