"""Wrapped models as files, which are written whole and read without being trusted."""
