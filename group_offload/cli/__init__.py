"""The command `group-offload`."""
