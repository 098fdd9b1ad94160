"""The text of token ids, by the model's own tokenizer. Records have ids, because training needs nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rolloutctl.errors import CommandError

TextOf = Callable[[int], str]

FILE = "tokenizer.json"
"""Name of a fast tokenizer's file in the folder of a model on Hugging Face."""


def open_tokenizer(path: Path) -> TextOf:
    """Return a function for the text of an id, given a tokenizer's file or the folder of its model. Raises CommandError."""
    try:
        import tokenizers
    except ImportError:
        raise CommandError("--tokenizer needs tokenizers; install agent-rollouts[tokens]") from None
    file = path / FILE if path.is_dir() else path
    try:
        tokenizer: Any = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise CommandError(f"--tokenizer {file}: {error}", f"Give {FILE} of the model, or its folder.") from error

    def text_of(token: int) -> str:
        text: str = tokenizer.decode([token], skip_special_tokens=False)
        # A part of a character alone, and a special token of some models, have no text.
        return text if text and "\ufffd" not in text else str(tokenizer.id_to_token(token) or "")

    return text_of
