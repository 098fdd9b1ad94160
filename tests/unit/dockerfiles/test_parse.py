"""Parsing of Dockerfiles. The expectations were compared with BuildKit 0.34's own parser."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.dockerfiles.instructions import (
    Arg,
    Checked,
    Cmd,
    Copy,
    Dockerfile,
    Entrypoint,
    Env,
    From,
    Healthcheck,
    Instruction,
    OnBuild,
    Run,
    Shell,
    User,
    Workdir,
)
from agent_runtime.dockerfiles.parse import parse


def _stage(text: str) -> tuple[Instruction, ...]:
    dockerfile = parse(f"FROM base\n{text}")
    assert dockerfile.problems == ()
    return dockerfile.stages[0].instructions


def _one(text: str) -> Instruction:
    (instruction,) = _stage(text)
    return instruction


def _run(text: str) -> Run:
    instruction = _one(text)
    assert isinstance(instruction, Run)
    return instruction


def _copy(text: str) -> Copy:
    instruction = _one(text)
    assert isinstance(instruction, Copy)
    return instruction


def _problem(text: str) -> str:
    (problem,) = parse(text).problems
    return str(problem)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ARG A B=2 C='x y'", Arg(2, (("A", None), ("B", "2"), ("C", "'x y'")))),
        ('ENV A=1 B="x y" C=a\\ b', Env(2, (("A", "1"), ("B", '"x y"'), ("C", "a\\ b")))),
        ("ENV A b  c", Env(2, (("A", "b  c"),))),
        ('LABEL a.b="c" d=', Checked(2, "LABEL")),
        ("run  echo $X ", Run(2, "echo $X")),
        ('RUN ["a", "\\u00e9 $X"]', Run(2, ("a", "é $X"))),
        ("RUN ['a', 'b']", Run(2, "['a', 'b']")),
        ('RUN ["a"] b', Run(2, '["a"] b')),
        ("RUN [NaN]", Run(2, "[NaN]")),
        ('RUN ["\\ud800"]', Run(2, ("\ufffd",))),
        ("RUN", Run(2, "")),
        ("COPY a b* /c/", Copy(2, "COPY", ("a", "b*"), "/c/")),
        ('COPY "a b" /c', Copy(2, "COPY", ('"a', 'b"'), "/c")),
        ('ADD ["a b", "/c"]', Copy(2, "ADD", ("a b",), "/c")),
        ("WORKDIR /a b", Workdir(2, "/a b")),
        ("USER a:b", User(2, "a:b")),
        ('SHELL ["bash", "-c"]', Shell(2, ("bash", "-c"))),
        ("ENTRYPOINT []", Entrypoint(2, ())),
        ("CMD a b", Cmd(2, "a b")),
        ('CMD ["a", "b"]', Cmd(2, ("a", "b"))),
        ("HEALTHCHECK NONE", Healthcheck(2, None)),
        (
            "HEALTHCHECK --interval=1m1.5s --timeout=300ms --start-period=0 --retries=3 CMD curl x",
            Healthcheck(2, "curl x", 61.5, 0.3, None, 3),
        ),
        ('HEALTHCHECK cmd ["a"]', Healthcheck(2, ("a",))),
        ("EXPOSE 80 443/tcp", Checked(2, "EXPOSE")),
        ("VOLUME /a /b", Checked(2, "VOLUME")),
        ('VOLUME ["/a b"]', Checked(2, "VOLUME")),
        ("STOPSIGNAL SIGINT", Checked(2, "STOPSIGNAL")),
        ("MAINTAINER A B", Checked(2, "MAINTAINER")),
        ("ONBUILD  RUN a", OnBuild(2, "RUN a")),
    ],
)
def test_instruction_is_read(text: str, expected: Instruction) -> None:
    assert _one(text) == expected


def test_stages_have_names_and_numbers() -> None:
    dockerfile = parse("ARG V=1\nFROM a:$V AS Build\nFROM --platform=$P build\nFROM c as other\n")
    assert dockerfile.global_args == (Arg(1, (("V", "1"),)),)
    assert [stage.start for stage in dockerfile.stages] == [
        From(2, "a:$V", "build"),
        From(3, "build", None, "$P"),
        From(4, "c", "other"),
    ]
    assert dockerfile.stage("BUILD") == 0
    assert dockerfile.stage("1") == 1
    assert dockerfile.stage("other", before=2) is None
    assert dockerfile.stage("7") is None


def test_last_stage_of_a_name_counts() -> None:
    assert parse("FROM a AS x\nFROM b AS x\n").stage("x") == 1


@pytest.mark.parametrize(
    "text",
    [
        "RUN a \\\n b",
        "RUN a \\  \n b",
        "RUN a \\\r\n b\r\n",
        "RUN a \\\n# comment\n b",
        "RUN a \\\n\n  # comment\n\n b",
    ],
)
def test_continuation_lines_are_joined(text: str) -> None:
    assert _run(text).command == "a  b"


def test_escape_before_continuation_ends_the_line() -> None:
    assert _stage("RUN a \\\\\nUSER b") == (Run(2, "a \\\\"), User(3, "b"))


def test_lines_are_counted_across_continuations_and_heredocs() -> None:
    assert [item.line for item in _stage("\n# c\nRUN a \\\n  b\nRUN <<E\nx\nE\nUSER u\n")] == [4, 6, 9]


def test_escape_directive_changes_the_continuation() -> None:
    dockerfile = parse("#syntax=docker/dockerfile:1\n# Escape = `\nFROM a\nRUN c:\\ `\n b\n")
    assert dockerfile.escape == "`"
    assert dockerfile.stages[0].instructions == (Run(4, "c:\\  b"),)


def test_directive_after_a_comment_is_a_comment() -> None:
    assert parse("# comment\n# escape=`\nFROM a\n").escape == "\\"


def test_byte_order_mark_is_skipped() -> None:
    assert parse("\ufeffFROM a\n").problems == ()


def test_heredoc_alone_is_the_script() -> None:
    run = _run("RUN <<EOF\necho $X\n# kept\nFROM b\nEOF\n")
    assert run.command == "<<EOF"
    assert run.script == "echo $X\n# kept\nFROM b\n"
    assert run.executable is None


def test_heredoc_with_shebang_is_an_executable() -> None:
    run = _run("RUN <<-EOF\n\t#!/bin/sh\n\t\tx\n\tEOF\n")
    assert run.executable is not None
    assert (run.executable.name, run.executable.content) == ("EOF", "#!/bin/sh\nx\n")


def test_heredocs_of_a_command_are_passed_to_the_shell() -> None:
    run = _run("RUN cat <<A <<-'B' && x\n1\nA\n\t2\n\tB\n")
    assert run.script == "cat <<A <<-'B' && x\n1\nA\n\t2\nB"
    assert [heredoc.expands for heredoc in run.heredocs] == [True, False]


def test_heredoc_needs_space_before_it() -> None:
    assert _stage("RUN cat<<EOF\nUSER u") == (Run(2, "cat<<EOF"), User(3, "u"))


def test_copy_takes_heredocs_as_sources() -> None:
    copy = _copy('COPY <<a.txt x <<-"b" /d/\n$X\na.txt\n\t$Y\nb\n')
    assert copy.sources == ("x",)
    assert [(item.name, item.content, item.expands) for item in copy.inline] == [
        ("a.txt", "$X\n", True),
        ("b", "$Y\n", False),
    ]


def test_onbuild_keeps_its_heredoc() -> None:
    assert _one("ONBUILD RUN <<E\nx\nE\n") == OnBuild(2, "RUN <<E\nx\nE")


def test_copy_flags_are_read() -> None:
    copy = _copy("COPY --from=b --chown=1:2 --chmod=755 --link --parents=true --exclude=*.md --exclude=x a /b")
    found = (copy.from_, copy.chown, copy.chmod, copy.parents, copy.excludes)
    assert found == ("b", "1:2", "755", True, ("*.md", "x"))


def test_add_flags_are_read() -> None:
    copy = _copy("ADD --keep-git-dir=false --checksum=sha256:a --unpack --link=false a /b")
    assert copy.unpack is True


def test_run_flags_are_read() -> None:
    run = _run("RUN --network=none --mount=type=cache,target=/x --security=insecure --mount='type=ssh' -- a --b")
    assert (run.network, run.security, run.command) == ("none", "insecure", "a --b")
    assert [mount.type for mount in run.mounts] == ["cache", "ssh"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "has no instructions"),
        ("ARG A", "has no FROM"),
        ("RUN a", "line 1: RUN comes before the first FROM"),
        ("FROM a\n\nFORM b", "line 3: unknown instruction 'FORM'; did you mean FROM?"),
        ("FROM a b", "FROM has 2 arguments"),
        ("FROM a AS 1x", "stage name '1x'"),
        ("FROM a\nCOPY b", "COPY has 1 argument"),
        ("FROM a\nCOPY --froom=b c d", "unknown flag '--froom'; expected --chown, --from"),
        ("FROM a\nCOPY --link= c d", "--link of COPY has no value"),
        ("FROM a\nCOPY --link=1 c d", "expected true or false"),
        ("FROM a\nCOPY --from=b --from=c d e", "--from twice"),
        ("FROM a\nCOPY a <<E\nE\n", "as its destination"),
        ('FROM a\nRUN ["a", 1]', "items that are not strings"),
        ("FROM a\nRUN []", "RUN has an empty command"),
        ("FROM a\nRUN --network=x b", "--network of RUN is 'x'"),
        ("FROM a\nRUN --mount=type=x b", "type is 'x'; expected bind, cache"),
        ("FROM a\nRUN <<E\nFROM b\nFROM c", "line 2: the heredoc 'E' does not end"),
        ("FROM a\nENV A", "without a value"),
        ("FROM a\nENV A=1 B", "'B' without '='"),
        ("FROM a\nENV =1", "value without a name"),
        ("FROM a\nARG =1", "ARG has no name"),
        ("FROM a\nSHELL bash", "expected a JSON array"),
        ("FROM a\nHEALTHCHECK NONE x", "HEALTHCHECK NONE has arguments"),
        ("FROM a\nHEALTHCHECK x", "type 'x'"),
        ("FROM a\nHEALTHCHECK CMD", "no command"),
        ("FROM a\nHEALTHCHECK --interval=5 CMD x", "expected a duration"),
        ("FROM a\nHEALTHCHECK --interval=1us CMD x", "at least 1ms"),
        ("FROM a\nHEALTHCHECK --retries=-1 CMD x", "--retries"),
        ("FROM a\nONBUILD ONBUILD RUN x", "cannot contain ONBUILD"),
        ("FROM a\nONBUILD FROM x", "cannot contain FROM"),
        ("FROM a\nWORKDIR", "WORKDIR has no argument"),
        ("FROM a\nVOLUME []", "VOLUME has no path"),
        ("# escape=x\nFROM a", "line 1: the parser directive 'escape' is 'x'"),
        ("# escape=`\n# escape=`\nFROM a", "line 2: the parser directive 'escape' is repeated"),
        ("# syntax=example/other\nFROM a", "another language"),
        ("FROM a\n\\", "an instruction is missing"),
    ],
)
def test_problem_names_line_and_cause(text: str, part: str) -> None:
    assert part in _problem(text)


def test_reading_continues_after_a_problem() -> None:
    dockerfile = parse("FROM a b\nRUN []\nFORM c\nUSER u\n")
    assert [problem.line for problem in dockerfile.problems] == [1, 2, 3]
    assert dockerfile.stages[0].instructions == (User(4, "u"),)


@given(st.text())
def test_any_text_is_parsed(text: str) -> None:
    assert isinstance(parse(text), Dockerfile)


_INSTRUCTIONS = "FROM a\n|RUN |COPY |ENV |HEALTHCHECK |ONBUILD |--mount=|type=cache,|--interval=|1s|<<E|E\n|<<-'E'"
_SYNTAX = '\t|\\\n|\n|[|"a"|,|]|\'|=|$|${|}|#|# escape=`\n|`\n|\ud800|\x00|\x85'
_LONG = ["9" * 5000, "[" * 5000]
_FRAGMENTS = st.sampled_from([*_INSTRUCTIONS.split("|"), *_SYNTAX.split("|"), *_LONG])


@given(st.lists(_FRAGMENTS, max_size=20))
def test_any_fragments_are_parsed(fragments: list[str]) -> None:
    assert isinstance(parse("".join(fragments)), Dockerfile)


_WORD = st.text("abcXYZ012./_-$é", min_size=1, max_size=8).filter(lambda word: not word.startswith("-"))
_WORDS = st.lists(_WORD, min_size=1, max_size=4)


def _quoted(words: list[str]) -> str:
    return "[" + ", ".join(f'"{word}"' for word in words) + "]"


_GENERATED: st.SearchStrategy[tuple[str, object]] = st.one_of(
    _WORDS.map(lambda words: ("RUN " + " \\\n# c\n".join(words) + "\n", (Run, "command", " ".join(words)))),
    _WORDS.map(lambda words: (f"RUN {_quoted(words)}\n", (Run, "command", tuple(words)))),
    _WORDS.map(lambda words: (f"CMD {_quoted(words)}\n", (Cmd, "command", tuple(words)))),
    _WORDS.map(lambda words: (f"COPY {' '.join(words)}  /d\n", (Copy, "sources", tuple(words)))),
    _WORDS.map(lambda words: ("\tvolume " + " ".join(words) + "\r\n", (Checked, "keyword", "VOLUME"))),
    _WORDS.map(
        lambda words: (
            "ENV " + " ".join(f"K={word}" for word in words) + "\n",
            (Env, "items", tuple(("K", w) for w in words)),
        )
    ),
    _WORD.map(lambda word: (f"RUN <<'E'\n{word}\nE\n", (Run, "script", f"{word}\n"))),
)


@given(st.lists(_GENERATED, max_size=8))
def test_generated_dockerfiles_round_trip(generated: list[tuple[str, tuple[type, str, object]]]) -> None:
    text = "".join(part.replace(" \\\n# c\n", "\\\n# c\n ") for part, _ in generated)
    instructions = _stage(text)
    assert [
        (type(item), getattr(item, field)) for item, (_, (_, field, _)) in zip(instructions, generated, strict=True)
    ] == [(kind, value) for _, (kind, _, value) in generated]
