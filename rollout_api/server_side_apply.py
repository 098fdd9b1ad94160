"""Bodies of server-side applies. API servers parse them as YAML, which refuses some JSON."""

import json
import re
from typing import Any, Final

APPLY_TYPE: Final = "application/apply-patch+yaml"

_ESCAPED = re.compile("[\x7f-\uffff]")


def apply_body(document: Any) -> bytes:
    """Serialize a document as JSON that is YAML too. Unpaired surrogates become U+FFFD, as in every JSON body.

    Python's own JSON would be refused with status 400: it writes characters above U+FFFF as two escapes of surrogates,
    and U+007F as itself.
    """
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return _ESCAPED.sub(_escape, text).encode()


def _escape(found: re.Match[str]) -> str:
    character = found.group()
    return r"\ufffd" if "\ud800" <= character <= "\udfff" else f"\\u{ord(character):04x}"
