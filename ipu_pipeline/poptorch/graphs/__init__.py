"""A module of torch as a graph, and the graph as stages."""
