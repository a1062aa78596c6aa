"""The state that a session keeps, and its checkpoints on disk."""
