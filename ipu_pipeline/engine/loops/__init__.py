"""Loop bodies, and their shards."""
