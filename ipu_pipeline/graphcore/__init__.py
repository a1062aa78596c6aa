"""The names of Graphcore's SDK: where each is here, and what to use in place of those that are not."""
