"""Turns a module of torch into a graph, and the graph into stages."""
