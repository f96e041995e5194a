"""One simulated fleet, from drawing to score; a module of its own, so that other processes find it."""

from tests.bench.detect import benches
from tests.bench.detect.score import Score, score
from tests.bench.detect.world import LEARN_HOURS, Assumed, make


def play(
    seed: int, hosts: int, hours: int, oversampled: float, say: bool, assumed: Assumed | None = None
) -> Score:
    """One fleet, from drawing to score."""
    world = make(seed, hosts, hours, oversampled, assumed)

    def told(hour: int, judged: benches.Judged) -> None:
        if hour <= LEARN_HOURS:
            return
        so_far = score(world, judged, hour)
        found = sum(1 for one in so_far.found if one.samples is not None)
        print(
            f"  seed {seed}: {hour} of {hours} h in {judged.seconds:.0f} s ({judged.pass_s:.2f} s a pass): "
            f"{so_far.gpu_days:.0f} GPU-days, {len(so_far.false)} false, "
            f"{found} of {len(so_far.found)} faults",
            flush=True,
        )

    judged = benches.judge(world, told if say else None)
    return score(world, judged)
