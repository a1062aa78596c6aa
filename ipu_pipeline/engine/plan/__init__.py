"""A step as data: how it is made from a schedule, and what reads it."""
