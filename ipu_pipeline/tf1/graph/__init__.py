"""Objects that stand for a value before it exists: placeholders and operations."""
