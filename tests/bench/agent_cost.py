"""What the agent costs on a host with eight simulated cards: `python tests/bench/agent_cost.py [SECONDS]`.

A real `fleet-agent run` with its real sampler at default intervals, pushing to a collector that only
acknowledges. CPU is the processes' own time over the measured stretch, memory the largest sum of their
proportional shares.
"""

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import psutil

from gpufleet.v1 import ingest_pb2 as pb
from gpufleet.v1 import ingest_pb2_grpc as pb_grpc
from gpufleet_agent.benches import BENCHES

CPU_PCT, PSS_MIB, READY_S = 0.5, 64.0, 2.0
"""The budgets."""

WARM_UP_S = 15.0


class Acknowledging(pb_grpc.IngestServiceServicer):
    """A collector without a store."""

    def __init__(self) -> None:
        self.batches = 0

    async def Stream(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[pb.StreamRequest],
        context: grpc.aio.ServicerContext[pb.StreamRequest, pb.StreamResponse],
    ) -> None:
        hello = (await anext(request_iterator)).hello
        await context.write(
            pb.StreamResponse(
                welcome=pb.Welcome(wire_version=1, node=hello.node, live_credit=64, backfill_credit=8)
            )
        )
        async for request in request_iterator:
            if request.HasField("batch"):
                self.batches += 1
                ack = pb.Ack(lane=request.batch.lane, numbers=[request.batch.number])
                await context.write(pb.StreamResponse(ack=ack))


def measure(seconds: float = 60.0) -> dict[str, float]:
    """CPU in percent of one core, memory in MiB, time to READY in seconds."""
    return asyncio.run(_measure(seconds))


async def _measure(seconds: float) -> dict[str, float]:
    collector = Acknowledging()
    server = grpc.aio.server()
    pb_grpc.add_IngestServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = await _watch(Path(folder), port, seconds)
        finally:
            await server.stop(None)
    found["batches"] = collector.batches
    return found


async def _watch(folder: Path, port: int, seconds: float) -> dict[str, float]:
    (folder / "scenario.toml").write_text('[fleet]\nnodes = "gpu-a01"\ngpus = 8\nmodel = "H100"\n')
    (folder / "agent.toml").write_text(
        f'collector = "127.0.0.1:{port}"\ndriver = "simulated"\nstate_dir = "{folder}/state"\n'
        f'runtime_dir = "{folder}/run"\n[simulated]\nscenario = "{folder}/scenario.toml"\nnode = "gpu-a01"\n'
        # benches are no standing process and have their own budget
        + "".join(f"[benches.{name}]\nenabled = false\n" for name in BENCHES)
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(folder / "notify"))
        systemd.setblocking(False)
        began = time.monotonic()
        agent = subprocess.Popen(
            [sys.executable, "-m", "gpufleet_agent.main", "run", "--config", str(folder / "agent.toml")],
            env={**os.environ, "NOTIFY_SOCKET": str(folder / "notify"), "MALLOC_ARENA_MAX": "2"},
            stderr=subprocess.DEVNULL,
        )
        try:
            await asyncio.get_running_loop().sock_recv(systemd, 4096)
            ready_s = time.monotonic() - began
            await asyncio.sleep(min(WARM_UP_S, seconds))
            return {"ready_s": ready_s, **await _cost(agent.pid, seconds)}
        finally:
            agent.terminate()
            await asyncio.to_thread(agent.wait, 20)


async def _cost(pid: int, seconds: float) -> dict[str, float]:
    supervisor = psutil.Process(pid)
    processes = [supervisor, *supervisor.children(recursive=True)]
    before, began = [_cpu_s(one) for one in processes], time.monotonic()
    memory: list[list[float]] = []
    while time.monotonic() < began + seconds:
        await asyncio.sleep(min(5.0, seconds))
        memory.append([one.memory_full_info().pss / 2**20 for one in processes])
    took = time.monotonic() - began
    spent = [(_cpu_s(one) - base) / took * 100 for one, base in zip(processes, before, strict=True)]
    return {
        "seconds": took,
        "processes": len(processes),
        "cpu_pct": sum(spent),
        "cpu_supervisor_pct": spent[0],
        "cpu_sampler_pct": sum(spent[1:]),
        "pss_mib": max(sum(sizes) for sizes in memory),
        "pss_supervisor_mib": statistics.median(sizes[0] for sizes in memory),
        "pss_sampler_mib": statistics.median(sum(sizes[1:]) for sizes in memory),
    }


def _cpu_s(process: psutil.Process) -> float:
    """By the account of each thread, which is finer, or of the process, which keeps ended threads."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    fine = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    times = process.cpu_times()
    return max(fine, times.user + times.system)


def main() -> int:
    """Print the costs beside their budgets; 1 when one is exceeded."""
    found = measure(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)
    within = found["cpu_pct"] <= CPU_PCT and found["pss_mib"] <= PSS_MIB and found["ready_s"] <= READY_S
    lines = [f"{name:<22}{value:10.3f}" for name, value in found.items()]
    lines.append(f"budget: {CPU_PCT} % of one core, {PSS_MIB:g} MiB, READY {READY_S:g} s")
    sys.stdout.write("\n".join([*lines, "kept" if within else "EXCEEDED", ""]))
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
