"""Packages with the names of other libraries, put on the path of scripts; never imported from here."""
