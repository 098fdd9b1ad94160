"""Verification: what of an agent's work is graded, how, and what verdict comes of it."""
