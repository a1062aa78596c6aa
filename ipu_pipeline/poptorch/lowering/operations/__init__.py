"""Computes PopTorch's operations by JAX."""
