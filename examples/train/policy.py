"""The policy: a language model small enough to be read in one go. Text in tokens, a table of weights, softmax, sampling.

What comes next depends on the last `CONTEXT` tokens alone. They choose a row of a table, by their checksum, as a hashed
n-gram model does it, and the row's weights are added to those of a base. The base knows the form of an answer and nothing
of where to go; it is never changed. The table is what is learned, from zero.
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
"""(ROWS, VOCABULARY): what is added to the base's logits."""

SPECIAL = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
"""What the chat template is made of; no text is ever read as one of them."""
ACTIONS = ("Left", "Down", "Right", "Up")
WORDS = ("<answer>", "</answer>", *ACTIONS)
"""Words with a token of their own. All other text is bytes, of which each is a token."""
FIRST_WORD = 256
FIRST_SPECIAL = FIRST_WORD + len(WORDS)
VOCABULARY = FIRST_SPECIAL + len(SPECIAL)
TOKENS = {word: FIRST_WORD + place for place, word in enumerate((*WORDS, *SPECIAL))}
END = TOKENS["<|end|>"]

CONTEXT = 22
"""A 4 × 4 map (16 tiles, 3 line breaks) and what stands between it and the action: end, assistant, `<answer>`."""
ROWS = 4096
"""Many more than there are situations, so that two of them hardly ever share a row."""
FORM = 10.0
"""The base's logit of what the form of an answer asks for; all else has 0: 99 of 100 answers have the form."""

_PIECES = re.compile("|".join(map(re.escape, WORDS)).encode() + b"|.", re.DOTALL)
_OF_PIECE = {bytes([byte]): byte for byte in range(256)} | {word.encode(): TOKENS[word] for word in WORDS}
_TEXT = [bytes([byte]) for byte in range(256)] + [word.encode() for word in (*WORDS, *SPECIAL)]


def encode(text: str) -> list[int]:
    return [_OF_PIECE[piece] for piece in _PIECES.findall(text.encode())]


def decode(ids: Sequence[int], *, special: bool = False) -> str:
    """The text of tokens. `special`: what the chat template is made of is spelled out, else left out."""
    return b"".join(_TEXT[token] for token in ids if special or token < FIRST_SPECIAL).decode(errors="replace")


def _base() -> NDArray[np.float64]:
    """(VOCABULARY, VOCABULARY): logits of what follows a token."""
    logits = np.zeros((VOCABULARY, VOCABULARY))
    logits[TOKENS["<|assistant|>"], TOKENS["<answer>"]] = FORM
    for action in ACTIONS:
        logits[TOKENS["<answer>"], TOKENS[action]] = FORM
        logits[TOKENS[action], TOKENS["</answer>"]] = FORM
    logits[TOKENS["</answer>"], END] = FORM
    # Nobody but the template says who speaks.
    logits[:, [TOKENS[name] for name in SPECIAL if TOKENS[name] != END]] = -np.inf
    return logits


BASE = _base()


def fresh_weights() -> Weights:
    """Nothing is learned yet: each of the four actions is as likely as the others."""
    return np.zeros((ROWS, VOCABULARY))


def row_of(prefix: Sequence[int]) -> int:
    """Row of the table for what follows these tokens."""
    return zlib.crc32(array("H", prefix[-CONTEXT:]).tobytes()) % ROWS


def log_probabilities(weights: Weights, rows: NDArray[np.intp], last: NDArray[np.intp]) -> NDArray[np.float64]:
    """(positions, VOCABULARY), of what follows at each position, given its row and the token before."""
    logits = BASE[last] + weights[rows]
    logits -= logits.max(axis=-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return logits


def sample(weights: Weights, prompt: Sequence[int], most: int, seed: int) -> tuple[list[int], list[float]]:
    """Up to `most` tokens after a prompt, at temperature 1, and their log probabilities; fewer where END comes first.

    A token depends on the seed and its place, so whoever goes on in the middle of an answer gets the rest of the same.
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
    """Write the weights as an engine loads them."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "table.npy", weights)


def load(folder: Path) -> Weights:
    """The weights in a folder. Raises OSError, and ValueError for anything else than weights of this policy."""
    weights: Weights = np.load(folder / "table.npy", allow_pickle=False)
    if weights.shape != (ROWS, VOCABULARY):
        raise ValueError(f"{folder}/table.npy has the shape {weights.shape}, expected {(ROWS, VOCABULARY)}")
    return weights


def checksum(weights: Weights) -> str:
    """SHA-256 of the weights: the same here and where they are served."""
    return hashlib.sha256(weights.tobytes()).hexdigest()
