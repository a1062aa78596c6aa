"""Models on the devices: compiling, calls, and weights in step with the host."""
