"""What a Dockerfile tells about its image without being built."""

import pytest

from agent_runtime.dockerfiles.problems import Facts, facts_of

DOCKERFILES = {
    "FROM a\nWORKDIR /app\nUSER me\n": Facts("a", "/app", "me"),
    "FROM a AS build\nWORKDIR /src\nFROM b\n": Facts("b"),
    "FROM a AS build\nWORKDIR /src\nUSER me\nFROM Build\nWORKDIR x\n": Facts("a", "/src/x", "me"),
    "FROM a\nWORKDIR /app\nWORKDIR sub/x\n": Facts("a", "/app/sub/x"),
    "FROM a\nWORKDIR sub\n": Facts("a"),
    "FROM a\nWORKDIR /app\nWORKDIR $HOME\nUSER $U\n": Facts("a"),
    "FROM a\nWORKDIR $HOME\nWORKDIR sub\n": Facts("a"),
    'from a\nworkdir "/with space"\n': Facts("a", "/with space"),
    "FROM a\nWORKDIR /app\nRUN <<END\nWORKDIR /srv\nUSER me\nEND\n": Facts("a", "/app"),
    "ARG A\nFROM $A\nWORKDIR /app\n": Facts(None, "/app"),
    "ARG A=a\nFROM $A\nWORKDIR /app\n": Facts("a", "/app"),
}


@pytest.mark.parametrize(("text", "facts"), DOCKERFILES.items())
def test_facts_of_a_dockerfile(text: str, facts: Facts) -> None:
    assert facts_of(text, {}, None) == facts


def test_facts_are_those_of_the_target() -> None:
    text = "FROM a AS dev\nWORKDIR /app\nFROM b\nWORKDIR /service\nUSER me\n"
    assert facts_of(text, {}, "dev") == Facts("a", "/app")
    assert facts_of(text, {}, None) == Facts("b", "/service", "me")
