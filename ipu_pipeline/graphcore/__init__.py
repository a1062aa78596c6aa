"""The names of Graphcore's SDK: where each one is here, or what to use in its place."""
