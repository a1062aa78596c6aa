"""What stands for a value before it has one: placeholders and operations."""
