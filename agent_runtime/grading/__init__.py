"""Grading: selects the files of an agent's work to grade, runs the verifier, and computes the verdict."""
