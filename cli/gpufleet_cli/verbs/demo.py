"""`fleet demo`: collector, simulated fleet and scripted faults on this machine."""

import click


@click.command()
def demo() -> None:
    """Placeholder until the agent can simulate."""
