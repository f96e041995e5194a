"""Saturated ingest over mutual TLS, acknowledged after commit: samples per second and core of the collector.

`python tests/bench/ingest_rate.py` prints one JSON document. The generator is a process of its own and sends
bodies made beforehand, sixteen unacknowledged per stream; the CPU time counted is the collector's alone.
"""

import asyncio
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import trustme

from gpufleet.v1 import ingest_pb2 as pb
from gpufleet.v1 import ingest_pb2_grpc as pb_grpc

CARDS = 8
FLOATS = 20
COUNTERS = 20
WINDOW = 16
METRICS = FLOATS + COUNTERS


def measure(seconds: float = 6.0, streams: int = 100) -> dict[str, float]:
    """Rates at 10 ticks and at 1 tick per message."""
    out: dict[str, float] = {}
    for ticks, per_stream in ((10, streams), (1, streams)):
        with tempfile.TemporaryDirectory() as folder, _collector(Path(folder)) as (address, pid, ca):
            args = [address, str(ticks), str(per_stream), str(seconds), str(pid), ca]
            generator = subprocess.run(
                [sys.executable, __file__, "generate", *args],
                capture_output=True,
                text=True,
                check=True,
            )
        for name, value in json.loads(generator.stdout).items():
            out[f"{name}_{ticks}_ticks"] = value
    return out


@contextmanager
def _collector(folder: Path) -> Iterator[tuple[str, int, str]]:
    authority = trustme.CA()
    server = authority.issue_cert("localhost", "127.0.0.1")
    client = authority.issue_cert(*[f"node-{number}" for number in range(256)])
    authority.cert_pem.write_to_path(folder / "ca.pem")
    for name, cert in (("server", server), ("client", client)):
        cert.private_key_pem.write_to_path(folder / f"{name}.key")
        (folder / f"{name}.pem").write_bytes(b"".join(blob.bytes() for blob in cert.cert_chain_pems))
    (folder / "collector.toml").write_text(
        f'listen = "127.0.0.1:0"\ndata_dir = "{folder}"\n'
        f'[tls]\nca = "{folder}/ca.pem"\ncert = "{folder}/server.pem"\nkey = "{folder}/server.key"\n'
    )
    argv = [sys.executable, "-m", "gpufleet_collector.main", "serve", "--config"]
    process = subprocess.Popen([*argv, str(folder / "collector.toml")], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            found = re.search(r"listens on 127\.0\.0\.1:(\d+)", line)
            if found:
                break
        else:
            raise RuntimeError("the collector did not start")
        yield f"localhost:{found[1]}", process.pid, str(folder)
    finally:
        process.terminate()
        process.wait(30)
        if process.stderr is not None:
            process.stderr.close()


def _probe() -> pb.Probe:
    metrics = [pb.Metric(name="gpu_uuid", type=pb.TYPE_STRING, kind=pb.KIND_KEY)]
    metrics += [pb.Metric(name=f"gauge_{n}", type=pb.TYPE_F64, min=0, max=1e6) for n in range(FLOATS)]
    metrics += [pb.Metric(name=f"count_{n}_total", type=pb.TYPE_U64, min=0) for n in range(COUNTERS)]
    return pb.Probe(name="gpu", interval_s=1, metrics=metrics)


def _body(node: int, ticks: int, rng: np.random.Generator) -> bytes:
    count = CARDS * ticks
    now = time.time_ns() // 1000
    columns = [
        pb.Column(
            name="gpu_uuid",
            type=pb.TYPE_STRING,
            values=np.tile(np.arange(CARDS, dtype="<u4"), ticks).tobytes(),
            dictionary=[f"GPU-{node:08d}-{card:04d}-4000-8000-000000000000" for card in range(CARDS)],
        )
    ]
    for n in range(FLOATS):
        values = rng.normal(1000, 10, count).round(1) if n < 10 else np.full(count, 65.0)
        columns.append(pb.Column(name=f"gauge_{n}", type=pb.TYPE_F64, values=values.astype("<f8").tobytes()))
    for n in range(COUNTERS):
        values = rng.integers(0, 2**40, count) if n < 4 else np.full(count, n)
        columns.append(
            pb.Column(name=f"count_{n}_total", type=pb.TYPE_U64, values=values.astype("<u8").tobytes())
        )
    rows = pb.Rows(probe="gpu", count=count, ts_us=np.full(count, now, "<i8").tobytes(), columns=columns)
    mono = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
    return pb.Body(boot_id="boot", sealed_at_us=now, sealed_mono_us=mono, rows=[rows]).SerializeToString()


async def _stream(
    node: int, address: str, credentials: grpc.ChannelCredentials, bodies: list[bytes], until: list[float]
) -> tuple[int, list[float]]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    waits: list[float] = []
    sent: dict[int, float] = {}
    number = 0
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        call = pb_grpc.IngestServiceStub(channel).Stream()  # type: ignore[call-arg]
        hello = pb.Hello(
            wire_version=1, node=f"node-{node}", machine_id=f"{node + 1:032x}", boot_id="boot",
            spool_id=f"spool-{node}", probes=[_probe()],
        )  # fmt: skip
        await call.write(pb.StreamRequest(hello=hello))
        await call.read()
        acked = 0
        while time.perf_counter() < until[0] or sent:
            while len(sent) < WINDOW and time.perf_counter() < until[0]:
                number += 1
                mono = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
                batch = pb.Batch(
                    lane=pb.LANE_LIVE, number=number, body=bodies[number % len(bodies)],
                    sent_at_us=time.time_ns() // 1000, sent_mono_us=mono,
                )  # fmt: skip
                sent[number] = time.perf_counter()
                await call.write(pb.StreamRequest(batch=batch))
            response = await call.read()
            assert isinstance(response, pb.StreamResponse)
            now = time.perf_counter()
            for done in response.ack.numbers:
                waits.append(now - sent.pop(done))
                acked += 1
        await call.done_writing()
    return acked, waits


async def _generate(
    address: str, ticks: int, streams: int, seconds: float, pid: int, folder: str
) -> dict[str, float]:
    ca, key, cert = [(Path(folder) / name).read_bytes() for name in ("ca.pem", "client.key", "client.pem")]
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
    rng = np.random.default_rng(1)
    bodies = [[_body(node, ticks, rng) for _ in range(3)] for node in range(streams)]
    cpu = _cpu_s(pid)
    started = time.perf_counter()
    until = [started + seconds]
    done = await asyncio.gather(
        *[_stream(node, address, credentials, bodies[node], until) for node in range(streams)]
    )
    wall = time.perf_counter() - started
    cpu = _cpu_s(pid) - cpu
    messages = sum(acked for acked, _ in done)
    waits = sorted(wait for _, some in done for wait in some)
    samples = messages * CARDS * METRICS * ticks
    return {
        "samples_per_s": samples / wall,
        "samples_per_s_per_core": samples / cpu,
        "messages_per_s": messages / wall,
        "cpu_us_per_message": cpu / messages * 1e6,
        "cores": cpu / wall,
        "ack_p50_ms": statistics.median(waits) * 1e3,
        "ack_p99_ms": waits[int(len(waits) * 0.99)] * 1e3,
        "body_bytes_per_sample": len(bodies[0][0]) / (CARDS * METRICS * ticks),
    }


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    if sys.argv[1:2] == ["generate"]:
        address, ticks, streams, seconds, pid, folder = sys.argv[2:]
        made = asyncio.run(_generate(address, int(ticks), int(streams), float(seconds), int(pid), folder))
        sys.stdout.write(json.dumps(made))
    else:
        sys.stdout.write(json.dumps(measure(), indent=2) + "\n")
