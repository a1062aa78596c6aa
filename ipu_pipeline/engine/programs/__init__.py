"""The programs of stages, and how they are made."""
