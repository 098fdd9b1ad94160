"""Verification: what of an agent's work is graded, how, and what verdict comes of it."""

from agent_runtime.grading.artifacts import carry_rules
from agent_runtime.grading.grade import VerifierUnavailable, grade
from agent_runtime.grading.programs import missing_program

__all__ = [
    "VerifierUnavailable",
    "carry_rules",
    "grade",
    "missing_program",
]
