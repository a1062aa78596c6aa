"""What a session keeps, and how it is written."""
