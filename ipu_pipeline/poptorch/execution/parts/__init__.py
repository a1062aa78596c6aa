"""Parts of a wrapped model, which the executor is made of."""
