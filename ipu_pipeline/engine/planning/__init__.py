"""Memory, costs and what is chosen by them."""
