"""Grading: which files of an agent's work are graded, how, and with what verdict."""
