"""Generation: requests of tokens through the stages, with caches that stay on their devices."""
