"""Refusals by admission. Pure."""

_WORDS = ("violates PodSecurity", "denied the request", "denied request", "unable to validate against any")
"""Of Pod Security, webhooks, ValidatingAdmissionPolicies, OpenShift's constraints."""


def is_by_admission(message: str) -> bool:
    """Whether an API server's message says that admission refused an object: labels and policies may change."""
    return any(words in message for words in _WORDS)
