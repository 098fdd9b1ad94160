"""Exports that need more than one line of JSON for each record."""
