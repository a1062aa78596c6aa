"""User functions in, stages out."""
