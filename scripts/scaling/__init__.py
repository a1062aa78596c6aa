"""What the table of devices in docs/speed.md is computed from."""
