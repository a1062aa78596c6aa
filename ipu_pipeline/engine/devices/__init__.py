"""Where arrays are, and how they move."""
