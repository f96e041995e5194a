"""Numbers both ends must agree on."""

MAX_MESSAGE_BYTES = 1 << 20
"""No message is larger; a batch is split before it is."""

MAX_STRING_BYTES = 4096
"""A text cell or an event's message is cut to this by the agent and refused above it by the collector."""

KEEPALIVE_S = 30
"""The agent pings a quiet stream this often; the collector allows it (drill G01: a pair, or GOAWAY)."""

KEEPALIVE_TIMEOUT_S = 10

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
"""Of the client. Message sizes stay at gRPC's 4 MiB: ours are a quarter of it."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_S * 1000 // 3),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_S * 1000 // 3),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.so_reuseport", 0),
)
"""Of the collector. so_reuseport off: a port in use is an error, not half of the traffic."""
