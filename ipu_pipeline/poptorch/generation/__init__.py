"""Models of transformers that generate: one chunk of a request as a module, and what `generate` is asked for."""
