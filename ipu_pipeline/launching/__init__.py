"""Several processes of this machine that run a program together, as `ipu-pipeline launch` starts them."""
