"""A small byte-pair tokenizer: 256 bytes, merges learned from a fixed text on first use, three special tokens.

`decode` is the inverse of `encode`, but not the reverse: many id sequences spell the same text, and `encode` returns
only one of them. A client that re-encodes what a model sampled therefore gets other ids, as with any real tokenizer.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import pairwise

TEXT = """
The model reads the question, calls a tool, waits for the answer and then writes what it found. There are many ways to
solve a problem: look at the files, run the tests, change the code, run the tests again, and say when the work is done.
A function takes arguments and returns a result; an error has a message, and the message should say what was wrong and
what was expected. Please reduce the number of lines. We can not know before we have tried. Every rollout is recorded,
every token has a version, and no finished token is thrown away. If the server goes away, another server goes on with
the tokens so far. The first answer was right, the second one was wrong, the third one came too late to count. Think
about the shape of the data before the shape of the program. Open the door, close the window, bring water and bread.
{"name": "bash", "arguments": {"command": "ls -la /app && cat README.md", "path": "/tmp/file.txt", "timeout": 30}}
{"name": "calculator", "arguments": {"expression": "12 * (3 + 4)", "value": 84, "type": "string", "content": true}}
<tool_call> </tool_call> <tool_response> </tool_response> system user assistant tool
import json, os, sys; def main(): return 0; for line in lines: print(line); while True: pass; with open(path) as file
one two three four five six seven eight nine ten under over into from with this that these those which where there here
reading writing running testing calling making taking giving going coming being having doing saying seeing finding
"""
MERGES = 400
END_OF_TEXT, TURN_START, TURN_END = SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# Runs are short so that a word without an end, such as base64, costs no more than its length.
WORDS = re.compile(r" ?[A-Za-z]{1,24}| ?[0-9]{1,3}| ?[^\sA-Za-z0-9]{1,16}|\s{1,16}(?!\S)|\s")
SPECIAL = re.compile("|".join(map(re.escape, SPECIALS)))


class Tokenizer:
    """Ids: bytes 0-255, merges in the order in which they were learned, then the special tokens."""

    def __init__(self, text: str, merges: int) -> None:
        self.ranks = _learn(text, merges)
        self.pieces: list[bytes] = [bytes([value]) for value in range(256)]
        for left, right in self.ranks:
            self.pieces.append(self.pieces[left] + self.pieces[right])
        first_special = len(self.pieces)
        self.special_ids = {word: first_special + position for position, word in enumerate(SPECIALS)}
        self.pieces += [word.encode() for word in SPECIALS]
        self.first_special = first_special
        self.size = len(self.pieces)
        self.eos = self.special_ids[TURN_END]
        self._plain = [*self.pieces[:first_special], *(b"" for _ in SPECIALS)]
        self._word = lru_cache(65536)(self._encode_word)
        self._segment = lru_cache(4096)(self._encode_segment)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text with its special tokens, as a server encodes a rendered template."""
        ids: list[int] = []
        end = 0
        for match in SPECIAL.finditer(text):
            ids += self._segment(text[end : match.start()])
            ids.append(self.special_ids[match.group()])
            end = match.end()
        ids += self._segment(text[end:])
        return ids

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of ids, with special tokens only on request. Raises IndexError for an unknown id."""
        return self.spelled(ids, special=special).decode("utf-8", "replace")

    def spelled(self, ids: Iterable[int], *, special: bool = False) -> bytes:
        """Return the bytes of ids."""
        return b"".join(map((self.pieces if special else self._plain).__getitem__, ids))

    def _encode_segment(self, text: str) -> tuple[int, ...]:
        return tuple(token for word in WORDS.findall(text) for token in self._word(word))

    def _encode_word(self, word: str) -> tuple[int, ...]:
        return self.encode_bytes(word.encode("utf-8", "replace"))

    def encode_bytes(self, data: bytes) -> tuple[int, ...]:
        """Return the ids of one word."""
        ids: list[int] = list(data)
        while len(ids) > 1:
            pairs = [(self.ranks.get(pair, self.size), pair) for pair in pairwise(ids)]
            rank, pair = min(pairs)
            if rank == self.size:
                break
            ids = _merged(ids, pair, rank)
        return tuple(ids)


class TextStream:
    """The text of ids that arrive piece by piece. A part of a character waits for the rest."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int], *, final: bool = False) -> str:
        """Return the text that is certain after these ids."""
        return self._decoder.decode(self._tokenizer.spelled(ids, special=self._special), final)


@cache
def tokenizer() -> Tokenizer:
    """Return the only tokenizer, which is created on first use."""
    return Tokenizer(TEXT, MERGES)


def _learn(text: str, merges: int) -> dict[tuple[int, int], int]:
    """Return pairs in the order in which they are merged, each with the id of its result."""
    words = Counter(WORDS.findall(text))
    spelled = {word: list(word.encode()) for word in words}
    ranks: dict[tuple[int, int], int] = {}
    for _ in range(merges):
        pairs: Counter[tuple[int, int]] = Counter()
        for word, ids in spelled.items():
            for pair in pairwise(ids):
                pairs[pair] += words[word]
        if not pairs:
            break
        pair = min(pairs, key=lambda found: (-pairs[found], found))
        ranks[pair] = 256 + len(ranks)
        spelled = {word: _merged(ids, pair, ranks[pair]) for word, ids in spelled.items()}
    return ranks


def _merged(ids: Sequence[int], pair: tuple[int, int], becomes: int) -> list[int]:
    out: list[int] = []
    position = 0
    while position < len(ids):
        if position + 1 < len(ids) and (ids[position], ids[position + 1]) == pair:
            out.append(becomes)
            position += 2
        else:
            out.append(ids[position])
            position += 1
    return out
