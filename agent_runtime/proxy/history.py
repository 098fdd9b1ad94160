"""The state of a session that derives from its recorded turns: conversations, token prefixes, used limits."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_runtime.models.base import (
    REQUESTS_OWN_FAULTS,
    ContentFiltered,
    ContextExceeded,
    ConversationRefused,
    ModelError,
    ModelReply,
    RequestRefused,
    TokenPrefix,
)
from agent_runtime.models.token_history import experts_after, recorded_answer
from agent_runtime.proxy.conversation import Conversations, MatchedMessages
from agent_runtime.proxy.limits import REPEATED_BYTES, Spent, conversation_bytes
from agent_runtime.recording.segments import digest_of_message
from rollout_api.records import CallError, DeliveryRecord, IntentRecord, Message, Record, ResponseRecord

Tools = Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class Turn:
    """An answered turn."""

    intent: IntentRecord
    response: ResponseRecord
    tools: list[dict[str, Any]]
    delivered: bool | None = None
    """None if unknown: the process that answered it died before recording it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a request among the turns."""

    known: MatchedMessages
    parent: Turn | None
    keep: int
    same_tools: bool


def continues(later: IntentRecord, call: IntentRecord) -> bool:
    """Whether a later call shows that the caller of an earlier one has continued: it repeats that request, continues
    its conversation, or continues the same earlier turn.
    """
    if later.turn <= call.turn:
        return False
    return (
        later.parent == call.turn
        or (later.parent is not None and later.parent == call.parent)
        or (later.request_digest is not None and later.request_digest == call.request_digest)
    )


def given_up(turns: Container[int], calls: Sequence[IntentRecord]) -> list[int]:
    """Return those of these turns whose caller has not continued. Calls of the client's other workers do not count."""
    return [call.turn for call in calls if call.turn in turns and not any(continues(later, call) for later in calls)]


def unanswered_calls(records: Sequence[Record]) -> dict[int, CallError | None]:
    """Return why calls ended without an answer that a client has, by turn (`DeliveryRecord.error`)."""
    answered = {record.turn for record in records if isinstance(record, ResponseRecord)}
    latest = {record.turn: record for record in records if isinstance(record, DeliveryRecord)}
    return {
        turn: mark.error
        for turn, mark in latest.items()
        if not mark.delivered and (turn not in answered or mark.error is not None)
    }


def failed_calls(records: Sequence[Record]) -> dict[int, ModelError]:
    """Return the errors of those that model or storage failed."""
    return {
        turn: ModelError(error.reason, error.message)
        for turn, error in unanswered_calls(records).items()
        if error is not None and not error.of_request
    }


def last_refusal(records: Sequence[Record]) -> ModelError | ConversationRefused | None:
    """Return why the model refused the latest call; None if it did not."""
    latest = max((record.turn for record in records if isinstance(record, IntentRecord)), default=-1)
    error = unanswered_calls(records).get(latest)
    if error is None or not error.of_request:
        return None
    conversation = {kind.__name__: kind for kind in (ContextExceeded, ContentFiltered)}.get(error.reason)
    if conversation is not None:
        return conversation(error.message)
    return RequestRefused(error.reason, error.message) if error.reason in REQUESTS_OWN_FAULTS else None


def last_failure(
    failures: Mapping[int, Exception], calls: Sequence[IntentRecord]
) -> tuple[int, Exception] | tuple[None, None]:
    """Return the latest of these errors and its turn; None if the callers of all have continued."""
    turns = given_up(failures, calls)
    return (turns[-1], failures[turns[-1]]) if turns else (None, None)


class History:
    """The answered turns of a session."""

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self.turns: dict[int, Turn] = {}
        self.spent = Spent()
        self.next_turn = 0
        self.calls: list[IntentRecord] = []
        """All calls, answered or not, without their messages."""
        self._conversations = Conversations()
        self._held: dict[bytes, dict[str, Any]] = {}
        """Messages and tool definitions of all intents, each stored once."""
        self._ids: tuple[int, list[int]] = -1, []
        responses = {record.turn: record for record in records if isinstance(record, ResponseRecord)}
        for intent in (record for record in records if isinstance(record, IntentRecord)):
            self.begin(intent)
            if (response := responses.get(intent.turn)) is not None:
                self.add(intent, response)
        for mark in (record for record in records if isinstance(record, DeliveryRecord)):
            if mark.turn in self.turns:
                self.turns[mark.turn].delivered = mark.delivered
            elif mark.abandoned_tokens:
                self.abandon(mark.abandoned_tokens)

    def begin(self, intent: IntentRecord) -> None:
        self.next_turn = max(self.next_turn, intent.turn + 1)
        self.spent.requests += 1
        self.calls.append(intent.model_copy(update={"messages": [], "tools": None}))
        for messages in (intent.messages, intent.tools or []):
            for position, message in enumerate(messages):
                key = digest_of_message(message)
                self.spent.conversation_bytes += REPEATED_BYTES if key in self._held else conversation_bytes(message)
                messages[position] = self._held.setdefault(key, message)

    def add(self, intent: IntentRecord, response: ResponseRecord) -> None:
        before = None if intent.parent is None else self.turns.get(intent.parent)
        tools = intent.tools if intent.tools is not None else before.tools if before is not None else []
        if before is not None:
            before.delivered = True  # a client that continues from an answer has received it
        self.turns[intent.turn] = Turn(intent, response, tools)
        self._conversations.add(self.messages(intent), response.message, intent.turn)
        self.spent.turns += 1
        self.spent.tokens += response.usage.prompt_tokens + response.usage.completion_tokens

    def abandon(self, tokens: int) -> None:
        """Count the tokens of an answer whose client disconnected. Otherwise a client could exceed its budget by
        disconnecting.
        """
        self.spent.turns += 1
        self.spent.tokens += tokens

    def place(self, messages: Sequence[Message], tools: Tools) -> Place:
        """Find the longest stored conversation that a request extends."""
        known = self._conversations.find(messages)
        turn = None if known.turn is None else self.turns[known.turn]
        if turn is None:
            return Place(known, None, 0, same_tools=False)
        # Some answers are changed to a format that servers accept, and then do not match the recorded tokens.
        unchanged = known.messages[known.length - 1] == turn.response.message
        return Place(known, turn, known.length - (not unchanged), same_tools=list(tools) == turn.tools)

    def prefix(self, place: Place) -> TokenPrefix | None:
        """Return the token ids of that conversation; None if there are none, or if its tools differ."""
        turn = place.parent
        if turn is None or not place.same_tools or turn.response.completion_token_ids is None:
            return None
        return TokenPrefix(place.known.length, self.ids(turn), self._experts(turn))

    def ids(self, turn: Turn) -> list[int]:
        """Return the token ids up to the end of a turn: its own, or those of the nearest earlier turn that has any."""
        number = turn.intent.turn
        if self._ids[0] != number:
            ids: list[int] = []
            for step in self._path(turn):
                response = step.response
                if response.prompt_token_ids is not None and response.completion_token_ids is not None:
                    del ids[response.prompt_keep :]
                    ids += response.prompt_token_ids
                    ids += response.completion_token_ids
            self._ids = number, ids
        return self._ids[1]

    def _experts(self, turn: Turn) -> int:
        """Return for how many of these ids the routed experts are recorded."""
        known = 0
        for step in self._path(turn):
            if step.response.completion_token_ids is not None:
                known = experts_after(known, step.response)
        return known

    def reply(self, turn: Turn) -> ModelReply:
        response, completion = turn.response, turn.response.completion_token_ids
        has_ids = response.prompt_token_ids is not None and completion is not None
        prompt = self.ids(turn)[: -len(completion) or None] if has_ids and completion is not None else None
        return recorded_answer(response, prompt)

    def conversation(self, turn: Turn) -> list[Message]:
        return [*self.messages(turn.intent), turn.response.message]

    def messages(self, intent: IntentRecord) -> list[Message]:
        """Return all messages of a call."""
        if intent.parent is None:
            return list(intent.messages)
        messages: list[Message] = []
        for step in self._path(self.turns[intent.parent]):
            del messages[step.intent.keep :]
            messages += step.intent.messages
            messages.append(step.response.message)
        return [*messages[: intent.keep], *intent.messages]

    def _path(self, turn: Turn) -> list[Turn]:
        path = [turn]
        while path[-1].intent.parent is not None:
            path.append(self.turns[path[-1].intent.parent])
        path.reverse()
        return path
