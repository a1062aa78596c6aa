"""Infeeds and outfeeds."""
