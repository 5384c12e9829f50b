"""Take over what another tuner has: its configuration, and what it measured."""
