"""The program `ipu-pipeline`."""
