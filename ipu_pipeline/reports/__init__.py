"""What a person wants to know of a program."""
