"""The real tokenizers package, in an environment of its own because the product works without it."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.own_environment import own_environment

ROOT = Path(__file__).parents[3]
MAKE = """
import sys
from tokenizers import Tokenizer, decoders, models
vocabulary = {"<eos>": 0, "the": 1, "\\u0120cat": 2, "\\u00c3": 3}
tokenizer = Tokenizer(models.BPE(vocabulary, []))
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens(["<eos>"])
tokenizer.save(sys.argv[1] + "/tokenizer.json")
"""
READ = """
import json, sys
from pathlib import Path
from rolloutctl.viewer.token_text import open_tokenizer
text_of = open_tokenizer(Path(sys.argv[1]))
print(json.dumps([text_of(token) for token in range(5)]))
"""
REFUSED = """
import sys
from pathlib import Path
from rolloutctl.errors import CommandError
from rolloutctl.viewer.token_text import open_tokenizer
try:
    open_tokenizer(Path(sys.argv[1]))
except CommandError as error:
    print(error.message, error.hint)
"""


@pytest.mark.full
def test_ids_have_the_text_of_the_models_tokenizer(tmp_path: Path) -> None:
    python = own_environment("tokenizers", "tokenizers==0.22.1") / "bin" / "python"

    def run(program: str) -> str:
        environ = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [str(python), "-c", program, str(tmp_path)], env=environ, check=True, capture_output=True, text=True
        ).stdout

    assert "tokenizer.json" in run(REFUSED)
    run(MAKE)
    # The last but one is half of a character, the last one is no token.
    assert json.loads(run(READ)) == ["<eos>", "the", " cat", "\u00c3", ""]
