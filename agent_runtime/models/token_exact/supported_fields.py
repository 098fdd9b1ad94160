"""Request fields that have an effect on the token routes of an inference server. Pure."""

from collections.abc import Container, Mapping
from typing import Any, Final

ONLY_DEFAULTS: Final[Mapping[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (True, 0),
    "n": (1,),
    "return_token_ids": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream": (False,),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
}
"""Fields that are accepted only with these values, which are the routes' fixed behaviour."""


def fields_without_effect(
    extra: Mapping[str, Any], taken: Container[str], allowed: Mapping[str, tuple[Any, ...]] = ONLY_DEFAULTS
) -> list[str]:
    """Return the names of fields in `extra` that a server would ignore: those that it does not take (`taken`), except
    values that change nothing (`allowed`, by field).
    """
    return [
        name
        for name, value in extra.items()
        if value is not None and name not in taken and value not in allowed.get(name, ())
    ]
