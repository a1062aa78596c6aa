"""Compiled programs, as data."""
