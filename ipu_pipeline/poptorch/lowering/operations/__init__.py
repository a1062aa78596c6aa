"""PopTorch's operations by JAX."""
