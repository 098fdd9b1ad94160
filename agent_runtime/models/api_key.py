"""API keys that a manifest refers to but does not contain."""

from collections.abc import Mapping

from rollout_api.model import ApiKeySource


class NoKey(Exception):
    """The key is missing; the message has the field, the expected place and a remedy."""


def read_api_key(source: ApiKeySource, environ: Mapping[str, str], secret_variable: str, field: str) -> tuple[str, str]:
    """Return the key, and where it was read, for error messages.

    Runner pods have the key of a Secret in `secret_variable`. Raises NoKey.
    """
    if source.env is not None:
        variable, origin, advice = source.env, f"environment variable {source.env}", "set it"
    else:
        secret = source.secret_key_ref
        assert secret is not None  # ApiKeySource has exactly one of the two
        variable, origin = secret_variable, f"key {secret.key} of Secret {secret.name}"
        advice = f"a Secret is read in a cluster only; here use {field.rpartition('.')[2]}.env"
    # Keys that were pasted or read from files may end with line breaks, which HTTP headers cannot contain.
    api_key = environ.get(variable, "").strip()
    if not api_key:
        raise NoKey(f"{field}: {origin} is missing or empty; {advice}")
    return api_key, origin
