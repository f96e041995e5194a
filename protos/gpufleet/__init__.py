"""What the three programs share: the wire contract, configuration, TLS, logging, metric types."""

import os

# gRPC's core writes lines of its own to stderr; ours say what and what to do. Read when grpc is imported:
# the three programs import this package first.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

__version__ = "0.1.0"

WIRE_VERSION = 1
"""Version of `gpufleet.v1`; a collector accepts agents of this version and the two before it."""
