"""The policy: a minimal language model with a tokenizer, a table of weights, softmax and sampling.

The next token depends only on the last `CONTEXT` tokens. Their checksum selects a row of a table, as in a hashed n-gram
model, and the row's weights are added to those of a base. The base is fixed: it prefers answers in the right format, but no
direction. The table is learned, starting at zero.
"""

import hashlib
import re
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.float64]
"""An array of the shape (ROWS, VOCABULARY), which is added to the base's logits."""

SPECIAL = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
"""Tokens of the chat template; no text is ever encoded as one of them."""
ACTIONS = ("Left", "Down", "Right", "Up")
WORDS = ("<answer>", "</answer>", *ACTIONS)
"""Words with their own token. All other text is encoded as bytes, each of which is a token."""
FIRST_WORD = 256
FIRST_SPECIAL = FIRST_WORD + len(WORDS)
VOCABULARY = FIRST_SPECIAL + len(SPECIAL)
TOKENS = {word: FIRST_WORD + place for place, word in enumerate((*WORDS, *SPECIAL))}
END = TOKENS["<|end|>"]

CONTEXT = 22
"""A 4 × 4 map (16 tiles, 3 line breaks) and the tokens between it and the action: end, assistant, `<answer>`."""
ROWS = 4096
"""Many more rows than there are situations, so that two situations rarely share a row."""
FORM = 10.0
"""The base's logit of tokens that the format of an answer requires; all other tokens have 0. With it, 99 of 100 answers
have the right format.
"""

_PIECES = re.compile("|".join(map(re.escape, WORDS)).encode() + b"|.", re.DOTALL)
_OF_PIECE = {bytes([byte]): byte for byte in range(256)} | {word.encode(): TOKENS[word] for word in WORDS}
_TEXT = [bytes([byte]) for byte in range(256)] + [word.encode() for word in (*WORDS, *SPECIAL)]


def encode(text: str) -> list[int]:
    return [_OF_PIECE[piece] for piece in _PIECES.findall(text.encode())]


def decode(ids: Sequence[int], *, special: bool = False) -> str:
    """Return the text of tokens. `special`: include tokens of the chat template."""
    return b"".join(_TEXT[token] for token in ids if special or token < FIRST_SPECIAL).decode(errors="replace")


def _base() -> NDArray[np.float64]:
    """Return logits of the shape (VOCABULARY, VOCABULARY): for each token, those of the next one."""
    logits = np.zeros((VOCABULARY, VOCABULARY))
    logits[TOKENS["<|assistant|>"], TOKENS["<answer>"]] = FORM
    for action in ACTIONS:
        logits[TOKENS["<answer>"], TOKENS[action]] = FORM
        logits[TOKENS[action], TOKENS["</answer>"]] = FORM
    logits[TOKENS["</answer>"], END] = FORM
    # Only the chat template may write the tokens of roles, so they are never sampled.
    logits[:, [TOKENS[name] for name in SPECIAL if TOKENS[name] != END]] = -np.inf
    return logits


BASE = _base()


def fresh_weights() -> Weights:
    """Return unlearned weights: each of the four actions is equally likely."""
    return np.zeros((ROWS, VOCABULARY))


def row_of(prefix: Sequence[int]) -> int:
    """Return the row of the table that is used for the token after these tokens."""
    return zlib.crc32(array("H", prefix[-CONTEXT:]).tobytes()) % ROWS


def log_probabilities(weights: Weights, rows: NDArray[np.intp], last: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return log probabilities of the shape (positions, VOCABULARY) for the token at each position, given its row and the
    previous token (`last`).
    """
    logits = BASE[last] + weights[rows]
    logits -= logits.max(axis=-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return logits


def sample(weights: Weights, prompt: Sequence[int], most: int, seed: int) -> tuple[list[int], list[float]]:
    """Return up to `most` tokens after a prompt, at temperature 1, and their log probabilities; fewer if END comes
    first.

    A token depends on the seed and its position, so an answer that is continued after an interruption is the same.
    """
    ids, logprobs = list(prompt), list[float]()
    while len(logprobs) < most:
        [found] = log_probabilities(weights, np.array([row_of(ids)]), np.array([ids[-1]]))
        drawn = np.random.default_rng([seed, len(ids)]).random()
        token = min(int(np.searchsorted(np.exp(found).cumsum(), drawn, side="right")), END)
        ids.append(token)
        logprobs.append(float(found[token]))
        if token == END:
            break
    return ids[len(prompt) :], logprobs


def save(weights: Weights, folder: Path) -> None:
    """Write the weights into a folder, in the format that the server loads."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "table.npy", weights)


def load(folder: Path) -> Weights:
    """Return the weights in a folder. Raises OSError, and ValueError unless they are weights of this policy."""
    weights: Weights = np.load(folder / "table.npy", allow_pickle=False)
    if weights.shape != (ROWS, VOCABULARY):
        raise ValueError(f"{folder}/table.npy has the shape {weights.shape}, expected {(ROWS, VOCABULARY)}")
    return weights


def checksum(weights: Weights) -> str:
    """Return a SHA-256 of the weights; trainer and server compute it alike."""
    return hashlib.sha256(weights.tobytes()).hexdigest()
