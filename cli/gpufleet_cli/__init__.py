"""The on-call: shows what the collector knows."""
