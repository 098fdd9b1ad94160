"""Which turn of a session a request continues."""

from agent_runtime.proxy.conversation import Conversations, is_copy
from rollout_api.records import Message

USER: Message = {"role": "user", "content": "hi"}
MORE: Message = {"role": "user", "content": "go on"}


def said(text: str, thought: str | None = None) -> Message:
    return {"role": "assistant", "content": text} | ({"reasoning_content": thought} if thought else {})


def called(arguments: str, id: str = "c") -> Message:
    function = {"name": "run", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": id, "type": "function", "function": function}]}


def test_new_conversation_has_no_parent() -> None:
    conversations = Conversations()
    conversations.add([USER], said("hello"), 0)
    known = conversations.find([MORE])
    assert (known.messages, known.turn, known.length) == ([MORE], None, 0)


def test_equal_parallel_questions_are_branches_with_their_own_answers() -> None:
    conversations = Conversations()
    conversations.add([USER], said("one"), 0)
    conversations.add([USER], said("two"), 1)
    assert conversations.find([USER, said("one"), MORE]).turn == 0
    assert conversations.find([USER, said("two"), MORE]).turn == 1


def test_equal_answers_resolve_to_the_continued_one() -> None:
    conversations = Conversations()
    conversations.add([USER], said("ok", "thought A"), 0)
    conversations.add([USER], said("ok", "thought B"), 1)
    assert conversations.find([USER, said("ok"), MORE]).messages[1]["reasoning_content"] == "thought B"
    conversations.add([USER, said("ok", "thought A"), MORE], said("fine"), 2)
    known = conversations.find([USER, said("ok"), MORE, said("fine"), USER])
    assert (known.turn, known.length) == (2, 4)
    assert known.messages[1] == said("ok", "thought A")


def test_rewritten_history_continues_from_its_unchanged_part() -> None:
    conversations = Conversations()
    conversations.add([USER], said("one"), 0)
    conversations.add([USER, said("one"), MORE], said("two"), 1)
    known = conversations.find([USER, said("one"), {"role": "user", "content": "a summary"}])
    assert (known.turn, known.length) == (0, 2)
    assert conversations.find([MORE, said("one"), MORE, said("two")]).turn is None


def test_words_that_the_agent_put_into_the_models_mouth_are_not_an_answer() -> None:
    conversations = Conversations()
    conversations.add([USER, said("an example"), MORE], said("two"), 0)
    known = conversations.find([USER, said("an example"), MORE, USER])
    assert (known.turn, known.length) == (None, 0)
    assert conversations.find([USER, said("an example "), MORE, said("two")]).turn is None


def test_unacceptable_arguments_are_sent_back_in_an_accepted_form() -> None:
    conversations = Conversations()
    conversations.add([USER], called("{bad"), 0)
    known = conversations.find([USER, called("{bad")])
    assert known.turn == 0
    assert known.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"malformed_arguments": "{bad"}'


def test_copy_may_differ_in_formatting_but_not_in_content() -> None:
    answer = called('{"a":  1, "b": "x"}') | {"reasoning_content": "hm"}
    assert is_copy(called('{"b": "x", "a": 1.0}'), answer)
    assert is_copy(said(" text \n", "hm"), said("text", "hm"))
    assert not is_copy(called('{"a": 2, "b": "x"}'), answer)
    assert not is_copy(called('{"a": 1, "b": "x"}', "other"), answer)
    assert not is_copy(said(""), answer)
    assert not is_copy(answer | {"reasoning_content": "no"}, answer)
    assert not is_copy(said("text") | {"role": "user"}, said("text"))
    assert not is_copy(said("te xt"), said("text"))
