"""`make bench-detect`: does the judge find what is wrong with a fleet, and is it quiet about the rest?

`python -m tests.bench.detect` plays two fleets of 100,000 GPU-days together, each in a process, and prints
one table; then stretches of two more fleets for the rules of the sampled probes, and another table (`--part`
plays one of both). The seed comes from the commit, so that nobody can choose it; `--seed N` is for
development. `--small` is what CI runs. `--hosts`, `--hours` and `--stretches` cut it short, and the tables
say so.
"""

import argparse
import json
import math
import os
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context

from tests.bench.detect import benches, probe_report, probes
from tests.bench.detect.play import play
from tests.bench.detect.score import FLEET, Score, quantile, together
from tests.bench.detect.world import CARDS, LEARN_HOURS, SIZES, Assumed, Fault

ANCHORS = """\
Beside it. Minder (NSDI 2025) reports precision 0.904, F1 0.893. Single tests in a simulation of 512 cards
without a gate, each card counted (scatter 0.5 % between runs, 1 % between cards unless said):

                                    false per 1,000   recall / p50 / p95 in runs, steps of
                                    GPU-days          3 %          5 %          10 %       20 %
  1 % of runs disturbed, one by one:
    one run 5 % below itself        239               .92/3/-      .98/1/1      .99/1/1    .99/1/1
    one run 10 % below itself       213               .07          .05          .99/1/2    .99/1/1
    10 % below peers (1, 2.5 %)     205               .05          .15          .78/4/-    .99/1/1
    5 % below peers, 3 of 4 (same)  48                .26          .59          .99/3/4    .99/3/3
    net 5 %, 2 of 3                 4.2               0            1/6/29       1/2/2      1/2/2
    net 5 %, 3 of 4 (T2)            0.07              0            .94/17/-     1/3/3      1/3/3
    clipped sum, h = 10             0.00              1/6/6        1/6/6        1/6/6      1/6/6
    clipped sum, h = 10 (1, 2.5 %)  0.03              1/7/12       1/6/6        1/6/6      1/6/6
    clipped sum, h = 10 (3, 2 %)    0.10              .29          .98/21/57    1/6/8      1/6/6
  as often, but whole hosts for 3 h on average:
    T2                              33.7
    clipped sum, h = 10 / 14 / 20   11.6 / 4.8 / 1.8  h = 20 needs 11 runs"""


SMALL_SEED, SMALL_S = 7, 340
STRETCH_HOSTS, STRETCH_S = 96, 540
"""Of the probe rules: so many hosts cost a pass little more than a few; so long a pinned clock takes."""


def as_json(total: Score) -> dict[str, object]:
    """What the test of the small form looks at."""
    return {
        "gpu_days": total.gpu_days,
        "false": [[one.rule, one.code, one.host, one.card, one.hour] for one in (*total.early, *total.false)],
        "bursts": total.bursts,
        "fleet_events": total.fleet_events,
        "fleet_steps": total.fleet_steps,
        "found": [[one.fault.kind, one.fault.size, one.samples, one.code] for one in total.found],
    }


def lines(total: Score) -> list[str]:
    """The table."""
    out = [
        f"{total.gpu_days:.0f} GPU-days judged, {len(total.found)} faults, "
        f"{total.bursts} leaked host-wide bursts",
        "",
    ]
    out.append("false confirmed events per 1,000 GPU-days (one-sided 95 % bound):")
    for rule in (*benches.RULES, ""):
        count, rate, bound = total.per_thousand(rule)
        out.append(f"  {rule or 'all bench rules':<28} {count:>3}  {rate:.3f}  (<= {bound:.3f})")
    out += [_fired(one) for one in total.false]
    out.append(f"while baselines were learned (neither they nor their days are counted): {len(total.early)}")
    out += [_fired(one) for one in total.early]
    out.append(
        f"driver steps of 3 % and more: {total.fleet_steps}, fleet events ({FLEET}): {total.fleet_events}"
    )
    out += ["", "quality at 0.5 faults per 1,000 GPU-days, faults of a size and more:"]
    for smallest in (0.01, 0.03, 0.05, 0.10):
        precision, recall, both = total.quality(smallest)
        out.append(f"  >= {smallest:>4.0%}  precision {precision:.3f}  recall {recall:.3f}  F1 {both:.3f}")
    out += [
        "",
        f"{'fault':<16} {'planted':>7} {'found':>6} {'p50':>5} {'p95':>5}  runs until it fired; which test",
    ]
    for kind in ("step", "ramp", "flicker", "host"):
        for size in SIZES:
            those = [one for one in total.found if (one.fault.kind, one.fault.size) == (kind, size)]
            if not those:
                continue
            delays = [one.samples for one in those]
            codes = sorted({one.code for one in those if one.code})
            hits = sum(1 for one in delays if one is not None)
            p50, p95 = (_number(quantile(delays, part)) for part in (0.5, 0.95))
            out.append(
                f"{kind + f' {size:.0%}':<16} {len(those):>7} {hits:>6} {p50:>5} {p95:>5}  {', '.join(codes)}"
            )
    missed = [one.fault for one in total.found if one.samples is None]
    out += ["", f"missed: {len(missed)} of {len(total.found)}"]
    out += [f"  {kind} {size:.0%}: {count}" for (kind, size), count in _counts(missed)]
    return [*out, "", ANCHORS]


def _fired(one: benches.Fired) -> str:
    return f"    {one.rule} {one.code} host {one.host} card {one.card} hour {one.hour}"


def _counts(missed: list[Fault]) -> list[tuple[tuple[str, float], int]]:
    keys = [(one.kind, one.size) for one in missed]
    return sorted({key: keys.count(key) for key in keys}.items())


def _number(value: float) -> str:
    return "-" if math.isinf(value) or math.isnan(value) else f"{value:.0f}"


def _commit_seed() -> tuple[int, str]:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    commit = done.stdout.strip()
    return int(commit[:12], 16), commit[:12]


def main() -> None:
    """Play, score, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.detect", description=__doc__)
    parser.add_argument("--small", action="store_true", help="what CI runs: one small fleet of a fixed seed")
    parser.add_argument("--seed", type=int, help="development seed; without it the commit gives the seed")
    parser.add_argument("--fleets", type=int, default=2, help="how many fleets, each in a process")
    parser.add_argument("--hosts", type=int, default=512, help="hosts of 8 cards in each fleet")
    parser.add_argument(
        "--hours", type=int, default=LEARN_HOURS + 296, help="simulated hours, learning included"
    )
    parser.add_argument("--part", choices=("benches", "probes"), help="only this; without it both")
    parser.add_argument("--stretches", type=int, default=5, help="of the probe rules, in each process")
    parser.add_argument("--json", action="store_true", help="one JSON document for each part")
    given = parser.parse_args()
    if given.part != "probes":
        _benches(given)
    if given.part != "benches":
        _probes(given)


def _probes(given: argparse.Namespace) -> None:
    """The rules of the sampled probes."""
    began = time.perf_counter()
    if given.small:
        total = probes.play(SMALL_SEED, 1, 28, SMALL_S)
        print(json.dumps(probe_report.as_json(total)) if given.json else "\n".join(probe_report.lines(total)))
        return
    seed, name = (given.seed, f"development seed {given.seed}") if given.seed is not None else _commit_seed()
    with ProcessPoolExecutor(given.fleets, mp_context=get_context("spawn")) as pool:
        every = [
            pool.submit(probes.play, seed + number, given.stretches, STRETCH_HOSTS, STRETCH_S, not given.json)
            for number in range(given.fleets)
        ]
        total = probes.together(one.result() for one in every)
    if given.json:
        print(json.dumps(probe_report.as_json(total)))
        return
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    print(f"\n{when}, {os.cpu_count()} cores, {time.perf_counter() - began:.0f} s, seed of {name}")
    print(
        f"{given.fleets} x {given.stretches} stretches of {STRETCH_HOSTS} hosts x {CARDS} cards, "
        f"{STRETCH_S} s, judged from {probes.RUN_IN_S} s on\n"
    )
    print("\n".join(probe_report.lines(total)))


def _benches(given: argparse.Namespace) -> None:
    """The rules of the hourly benches."""
    began = time.perf_counter()
    if given.small:
        # four times the interference: else a fleet as small as this meets none
        total = play(7, 32, LEARN_HOURS + 44, 150, False, Assumed(interference=0.04))
        print(json.dumps(as_json(total)) if given.json else "\n".join(lines(total)))
        return
    seed, name = (given.seed, f"development seed {given.seed}") if given.seed is not None else _commit_seed()
    with ProcessPoolExecutor(given.fleets, mp_context=get_context("spawn")) as pool:
        every = [
            pool.submit(play, seed + number, given.hosts, given.hours, 20.0, True)
            for number in range(given.fleets)
        ]
        total = together(one.result() for one in every)
    if given.json:
        print(json.dumps(as_json(total)))
        return
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    print(f"\n{when}, {os.cpu_count()} cores, {time.perf_counter() - began:.0f} s, seed of {name}")
    print(f"{given.fleets} fleets of {given.hosts} x {CARDS} cards, {given.hours} h; assumed: {Assumed()}\n")
    print("\n".join(lines(total)))


if __name__ == "__main__":
    main()
