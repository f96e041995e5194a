"""The node: samples its host and streams what it read."""
