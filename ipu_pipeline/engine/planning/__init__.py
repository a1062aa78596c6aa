"""Plans memory and costs, and chooses by them."""
