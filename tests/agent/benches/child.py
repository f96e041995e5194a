"""Runs CUDA benches on the library that the loader finds: one JSON command per line in, one answer out."""

import json
import sys
from pathlib import Path

from gpufleet_agent.benches import BENCHES
from gpufleet_agent.drivers import NoProgress, cuda


def main() -> None:
    card = cuda.Card("0000:10:00.0", ("GPU-a",), Path(sys.argv[1]))
    for line in sys.stdin:
        name = json.loads(line)
        params = {**BENCHES[name].PARAMS, "peer": "0000:11:00.0"}
        result = cuda.run_bench(name, params, card, NoProgress(), lambda: None)
        sys.stdout.write(json.dumps([result.status, result.value, result.reason]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
