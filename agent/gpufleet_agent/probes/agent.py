"""The agent itself: a row for every probe run, and what the agent costs. Table `agent`.

`probe` says which run the row is about. A row `gpu, ok, 0 rows` means "looked, found none"; no row means "did not
look". On the agent's own row (probe = 'agent', every 10 s) stand the process and spool columns.
"""

from gpufleet.metric import Kind, Metric, Type, Unit

EVERY = 10.0

_F, _U, _S = Type.F64, Type.U64, Type.STRING
_G, _C = Kind.GAUGE, Kind.COUNTER

METRICS = (
    Metric("probe", _S, Unit.TEXT, Kind.KEY, "The probe that ran; 'agent' for the agent's own row."),
    Metric("ok", Type.BOOL, Unit.ONE, Kind.STATE, "The run ended and its rows are whole.", rollup="min"),
    Metric("error", _S, Unit.TEXT, Kind.STATE, "Why not ok: driver_not_loaded, no_library, hung, failed, ...; empty when ok.", rollup="last"),
    Metric("rows", _U, Unit.COUNT, _G, "Rows the run gave.", 0, 1e7, "mean"),
    Metric("seconds", _F, Unit.SECOND, _G, "Time the run took.", 0, 1e6, "max"),
    Metric("cpu_s_total", _F, Unit.SECOND, _C, "CPU time of the agent's standing processes since they started.", 0, 1e10, "delta"),
    Metric("pss_bytes", _U, Unit.BYTE, _G, "Memory of the agent's standing processes, proportional share (smem).", 0, 2**45, "max"),
    Metric("sampler_restarts_total", _U, Unit.COUNT, _C, "Times the sampler child was started again.", rollup="delta"),
    Metric("spool_batches", _U, Unit.COUNT, _G, "Batches not yet acknowledged.", 0, 1e9, "max"),
    Metric("spool_bytes", _U, Unit.BYTE, _G, "Bytes of those batches.", 0, 2**45, "max"),
    Metric("spool_oldest_s", _F, Unit.SECOND, _G, "Age of the oldest of those batches.", 0, 1e9, "max"),
    Metric("spool_dropped_total", _U, Unit.COUNT, _C, "Batches dropped because the spool was full.", rollup="delta"),
    Metric("reconnects_total", _U, Unit.COUNT, _C, "Times the stream to the collector was opened again.", rollup="delta"),
    Metric("certificate_left_s", _F, Unit.SECOND, _G, "Time until the agent's own certificate ends, negative when it has (openssl x509 -enddate); NULL without TLS.", -1e10, 1e11, "min"),
    Metric("certificate_life_s", _F, Unit.SECOND, _G, "How long it holds in all.", 0, 1e11, "last"),
    Metric("bench_gpu_s_total", _F, Unit.SECOND, _C, "Time that benches kept cards for themselves, of all cards.", 0, 1e10, "delta"),
)  # fmt: skip
