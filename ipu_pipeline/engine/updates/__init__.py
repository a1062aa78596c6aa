"""The weight update."""
