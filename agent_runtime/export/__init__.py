"""Exports that are more than a line of JSON made of records."""
