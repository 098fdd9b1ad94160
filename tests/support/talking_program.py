"""An unmodified program as the agent, and the record that its model calls must give."""

from collections.abc import Collection, Sequence
from typing import Protocol

from agent_runtime.recording.branches import Branch

TALKING = """
import http.client, json, os, sys, urllib.request

def ask(messages):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, "stream": True}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    text = ""
    with urllib.request.urlopen(request, timeout=60) as reply:
        for line in reply:
            if line.strip() == b"data: [DONE]":
                return text
            if line.startswith(b"data: "):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
    raise http.client.IncompleteRead(text.encode())

messages = [{"role": "user", "content": open(sys.argv[1]).read()}]
for number in range(int(sys.argv[2])):
    while True:
        try:
            text = ask(messages)
            break
        except (http.client.HTTPException, OSError) as error:
            print(type(error).__name__, file=open("broken.txt", "a"))
    print(number, file=open("answers.txt", "a"), flush=True)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And {number}?"}]
print("all is answered")
"""
"""A program without packages. It makes as many calls as its second argument says, beginning with the content of the
file in its first one. Each answer is streamed, and sent back with the next question. An answer that breaks off is
requested again, and reported.
"""

ASKING = """
import openai, os, sys

client = openai.OpenAI()
messages = [{"role": "user", "content": open(sys.argv[1]).read()}]
for number in range(int(sys.argv[2])):
    reply = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
    text = reply.choices[0].message.content
    print(number, file=open("answers.txt", "a"), flush=True)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And {number}?"}]
print("all is answered")
"""
"""The same program with the openai package: nothing is streamed, and the package itself retries what breaks off."""


class Served(Protocol):
    """A server's own record of one request."""

    @property
    def prompt_ids(self) -> list[int]:
        """Ids of its prompt."""

    ids: list[int]
    """Sampled ids."""
    logprobs: list[float]


def one_conversation(requests: Sequence[Served]) -> list[tuple[int, int, float]]:
    """Return (id, mask, logprob) of requests that continue each other, as the server saw them. Of a repeated request,
    the last answer counts; the earlier ones broke off.
    """
    sequence: list[tuple[int, int, float]] = []
    for request in {tuple(request.prompt_ids): request for request in requests}.values():
        assert request.prompt_ids[: len(sequence)] == [token for token, _, _ in sequence]
        sequence += [(token, 0, 0.0) for token in request.prompt_ids[len(sequence) :]]
        sequence += [(token, 1, logprob) for token, logprob in zip(request.ids, request.logprobs, strict=True)]
    return sequence


def exported(branch: Branch) -> list[tuple[int, int, float]]:
    """Return (id, mask, logprob) of a sample, as a trainer gets it."""
    assert branch.logprobs is not None
    return list(zip(branch.token_ids, branch.mask, branch.logprobs, strict=True))


def check_tokens(served: Sequence[Served], branches: Sequence[Branch]) -> None:
    """Like `check_answers`. Of a repeated request, the last answer counts; the earlier ones broke off."""
    check_answers({tuple(request.prompt_ids): request for request in served}.values(), branches)


def check_answers(requests: Collection[Served], branches: Sequence[Branch]) -> None:
    """Check that every answer is in exactly one sample, after the prompt that the server saw, and that nothing else is
    trained.
    """
    samples = [exported(branch) for branch in branches]
    for request in requests:
        begin, end = len(request.prompt_ids), len(request.prompt_ids) + len(request.ids)
        wanted = [(token, 1, logprob) for token, logprob in zip(request.ids, request.logprobs, strict=True)]
        found = [
            sample
            for sample in samples
            if sample[begin:end] == wanted and [token for token, _, _ in sample[:begin]] == list(request.prompt_ids)
        ]
        assert len(found) == 1, (len(found), begin, end)
    trained = sum(mask for sample in samples for _, mask, _ in sample)
    assert trained == sum(len(request.ids) for request in requests)
