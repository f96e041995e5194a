"""What `fleet demo` plays: a scenario and a collector configuration, shipped with the command."""
