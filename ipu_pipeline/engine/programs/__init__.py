"""What a stage's programs are, and how they are made."""
