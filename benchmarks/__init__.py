"""Benchmarks, a folder per question."""
