"""Models of transformers that generate: a chunk of a request as a module, and what is asked for."""
