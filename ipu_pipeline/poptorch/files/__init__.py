"""Wrapped models as files: what is in one, written whole, and read without trusting it."""
