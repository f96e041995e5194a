"""What the stretches of the probe rules gave, as a table and as JSON."""

from collections.abc import Sequence

from tests.bench.detect.probes import DISTURBANCES, FAULTS, RULES, Result
from tests.bench.detect.score import poisson_bound
from tests.bench.detect.world import CARDS


def as_json(total: Result) -> dict[str, object]:
    """What the test of the small form looks at."""
    return {
        "false": [[one.rule, one.code, one.node, one.entity, one.at, one.kind] for one in total.false],
        "found": [
            [one.kind, one.seconds, one.samples, one.passes, FAULTS[one.kind].bound_s] for one in total.delays
        ],
        "met": dict(total.met),
        "calm_gpu_days": total.calm_gpu_days,
    }


def weighted(total: Result, rule: str = "") -> tuple[int, float, float]:
    """False findings after disturbances: their number, per 1,000 GPU-days, one-sided 95 % bound.

    The bound lets what was not seen weigh as much as the heaviest disturbance: never too low.
    """
    weights = [
        total.weight(one.kind) for one in total.false if one.kind in DISTURBANCES and rule in ("", one.rule)
    ]
    heaviest = max((total.weight(kind) for kind in DISTURBANCES if total.met[kind]), default=0.0)
    spare = poisson_bound(len(weights)) - len(weights)
    return len(weights), sum(weights), sum(weights) + spare * heaviest


def lines(total: Result) -> list[str]:
    """The table."""
    out = [
        f"probe rules: {total.passes} passes, one each 5 s; {total.gpu_days:.1f} GPU-days judged, "
        f"{total.calm_gpu_days:.1f} of them on hosts that meet nothing",
        "",
        f"{'fault':<18} {'planted':>7} {'found':>6} {'p50 s':>6} {'p95 s':>6} {'max s':>6}  "
        "in time; most samples, passes until it fired",
    ]
    for name, kind in FAULTS.items():
        those = [one for one in total.delays if one.kind == name]
        if not those:
            continue
        took = sorted(one.seconds for one in those if one.seconds is not None)
        figures = " ".join(f"{_part(took, part):>6}" for part in (0.5, 0.95, 1))
        rest = ""
        if kind.samples and took:
            in_time = sum(one <= kind.bound_s for one in took)
            samples = max(one.samples or 0 for one in those)
            passes = max(one.passes or 0 for one in those)
            rest = (
                f"{in_time} within {kind.bound_s:g} s; {samples} x {kind.every_s:g} s, "
                f"{passes} x {kind.rule_s:g} s"
            )
        out.append(f"{name:<18} {len(those):>7} {len(took):>6} {figures}  {rest}")
    missed = [one.kind for one in total.delays if one.seconds is None]
    out += ["", f"missed: {len(missed)} of {len(total.delays)}"]
    out += [f"  {kind}: {missed.count(kind)}" for kind in sorted(set(missed))]
    out += ["", f"findings that nothing planted explains: {len(total.false)}"]
    out += [
        f"  {one.rule} {one.code} {one.node} {one.entity} at {one.at:.0f} s of stretch {one.stretch}: "
        f"the host met: {one.kind}"
        for one in total.false
    ]
    out += ["", f"{'disturbance':<18} {'met':>5} {'in life':>8}  false; what it truly is, said so"]
    for name, kind in DISTURBANCES.items():
        false = sum(one.kind == name for one in total.false)
        said = ", ".join(f"{what} {n}" for (k, what), n in sorted(total.explained.items()) if k == name)
        out.append(f"{name:<18} {total.met[name]:>5} {kind.rate:>8.1f}  {false}; {said or '-'}")
    out += ["", "false findings after disturbances, weighted back to 1,000 GPU-days (one-sided 95 % bound):"]
    for rule in ("", *RULES):
        count, rate, bound = weighted(total, rule)
        if count or not rule:
            out.append(f"  {rule or 'all probe rules':<28} {count:>3}  {rate:.3f}  (<= {bound:.3f})")
    silent = [rule for rule in RULES if not weighted(total, rule)[0]]
    out.append(
        f"  none, so <= {weighted(total, silent[0])[2]:.3f} each: {', '.join(silent)}" if silent else ""
    )
    faulty = sum(one.kind in FAULTS for one in total.false)
    calm = sum(one.kind not in FAULTS and one.kind not in DISTURBANCES for one in total.false)
    bound = poisson_bound(calm) * total.weight("nothing")
    out += [
        f"beside faults: {faulty} (not weighted); on hosts that meet nothing: {calm} in "
        f"{total.calm_gpu_days:.1f} GPU-days (<= {bound:.0f} per 1,000)",
        f"'in life' is per 1,000 GPU-days of hosts with {CARDS} cards: an assumption, not a measurement.",
        "Calm time is the rest of 1,000 GPU-days, so each calm GPU-day that is played stands for many: what",
        "is played of it shows that nothing fires as a rule, not how rarely it does.",
    ]
    return out


def _part(ordered: Sequence[float], part: float) -> str:
    return f"{ordered[min(len(ordered) - 1, int(part * len(ordered)))]:.1f}" if ordered else "-"
