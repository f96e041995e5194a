"""`make bench`: every measured cost beside its budget, met or not. Nothing here fails a build.

Each part runs in a process of its own, one after the other, so that none warms or burdens the next.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
Found = Mapping[str, float]


@dataclass(frozen=True)
class Line:
    """One row of the table.

    Attributes:
        part: The module beside this file that measures it.
        what: What a reader calls it.
        value: Takes the figure from what the module found.
        budget: Limit in `unit`; None = no budget, shown for the picture.
        most: Whether the budget is a most or a least.
    """

    part: str
    what: str
    value: Callable[[Found], float]
    unit: str
    budget: float | None = None
    most: bool = True


LINES = (
    Line("agent_cost", "agent, 8 cards: CPU of one core", lambda found: found["cpu_pct"], "%", 0.5),
    Line("agent_cost", "agent, 8 cards: memory (PSS)", lambda found: found["pss_mib"], "MiB", 64),
    Line("agent_cost", "agent: start to READY", lambda found: found["ready_s"], "s", 2),
    Line("probe_cost", "probe gpu, 8 simulated cards", lambda found: found["gpu_ms"], "ms"),
    Line("probe_cost", "probe gpu_health, 8 simulated cards", lambda found: found["gpu_health_ms"], "ms"),
    Line("probe_cost", "probe nvlink, 8 simulated cards", lambda found: found["nvlink_ms"], "ms"),
    Line("probe_cost", "probe pci, this host", lambda found: found["pci_ms"], "ms"),
    Line("probe_cost", "probe host, this host", lambda found: found["host_ms"], "ms"),
    Line("probe_cost", "probe loader, this host", lambda found: found["loader_ms"], "ms"),
    Line("loader_hook", "loader hook: a batch", lambda found: found["batch_us"], "us", 1),
    Line("loader_hook", "loader hook: a second of 10 batches", lambda found: found["second_us"], "us", 10),
    Line("loader_hook", "loader hook: a message, cold", lambda found: found["send_cold_us"], "us"),
    Line("loader_hook", "loader hook: agent stopped, p99", lambda found: found["stopped_p99_us"], "us", 100),
    Line("loader_hook", "agent: a message of the hook", lambda found: found["take_us"], "us"),
    Line(
        "ingest_rate", "ingest, mTLS, 10 ticks a message, per core",
        lambda found: found["samples_per_s_per_core_10_ticks"] / 1e6, "M samples/s", 8, most=False,
    ),
    Line(
        "ingest_rate", "ingest, mTLS, 1 tick a message, per core",
        lambda found: found["samples_per_s_per_core_1_ticks"] / 1e6, "M samples/s", 1.5, most=False,
    ),
    Line("judge_pass", "judge: a pass, median, 1,000 x 8", lambda found: found["pass_s"], "s", 1),
    Line(
        "judge_pass", "judge: the dearest pass of two minutes", lambda found: found["pass_max_s"], "s", 1
    ),
    Line("status_latency", "status: answer of the collector", lambda found: found["call_ms"], "ms", 20),
    Line("status_latency", "status: document built behind it", lambda found: found["build_ms"], "ms"),
    Line("status_latency", "fleet status at the prompt", lambda found: found["prompt_ms"], "ms", 300),
    Line("status_latency", "fleet --help", lambda found: found["help_ms"], "ms", 120),
)  # fmt: skip


def measure(part: str) -> Found:
    """Run one part alone and read what it found."""
    code = f"import json, runpy; print(json.dumps(runpy.run_path({str(HERE / part)!r} + '.py')['measure']()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(f"{part} did not end well:\n{done.stderr[-2000:]}\n")
        return {}
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return {key: value for key, value in found.items() if isinstance(value, int | float)}


def row(line: Line, found: Found) -> str:
    """`what   value unit   budget   verdict`."""
    try:
        value = line.value(found)
    except KeyError as missing:
        return f"{line.what:<44} {'-':>10} {line.unit:<12} not measured ({missing})"
    budget, verdict = "", ""
    if line.budget is not None:
        sign = "<=" if line.most else ">="
        met = value <= line.budget if line.most else value >= line.budget
        budget, verdict = f"{sign} {line.budget:g}", "met" if met else "MISSED"
    return f"{line.what:<44} {value:>10.3g} {line.unit:<12} {budget:<8} {verdict}"


def main() -> None:
    """Measure and print."""
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    print(f"{when}, {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    found: dict[str, Found] = {}
    for line in LINES:
        if line.part not in found:
            found[line.part] = measure(line.part)
        print(row(line, found[line.part]), flush=True)


if __name__ == "__main__":
    main()
