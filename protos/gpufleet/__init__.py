"""What the three programs share: the wire contract, configuration, TLS, logging, metric types."""

__version__ = "0.1.0"

WIRE_VERSION = 1
"""Version of `gpufleet.v1`; a collector accepts agents of this version and the two before it."""
