"""What docs/scale.md is computed from."""
