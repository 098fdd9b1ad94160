"""Dockerfiles are parsed as BuildKit's frontend does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.dockerfiles.instructions import (
    Arg,
    Cmd,
    Copy,
    Entrypoint,
    Env,
    From,
    Healthcheck,
    Heredoc,
    Instruction,
    Mount,
    OnBuild,
    Other,
    Run,
    Shell,
    User,
    Workdir,
)
from agent_runtime.dockerfiles.parse import parse


def instructions(text: str) -> tuple[Instruction, ...]:
    """The instructions after `FROM x` in line 1."""
    found = parse(f"FROM x\n{text}")
    assert not found.problems
    return found.stages[0].instructions


def problem(text: str) -> str:
    """The only problem after `FROM x` in line 1, with its line."""
    (found,) = parse(f"FROM x\n{text}").problems
    return f"{found.line}: {found.message}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("RUN a b", Run(2, "a b")),
        ("run a", Run(2, "a")),
        ('RUN ["a", "b c"]', Run(2, ("a", "b c"))),
        ("RUN ['a', 'b']", Run(2, "['a', 'b']")),
        ('RUN ["a", 1]', Run(2, '["a", 1]')),
        ("RUN [ -f x ] && y", Run(2, "[ -f x ] && y")),
        ("RUN a \\\n  b", Run(2, "a   b")),
        ("RUN a \\  \n b", Run(2, "a  b")),
        ("RUN a \\\n# note\n\n  # more\n b", Run(2, "a  b")),
        ("RUN a \\\\\nRUN b", Run(2, "a \\\\")),
        ("RUN a\r\nRUN b\r", Run(2, "a")),
        ("  RUN a   ", Run(2, "a")),
        ("RUN --network=none a --network=x", Run(2, "a --network=x", network="none")),
        (
            "ENV a=1 b=\"two words\" c='x y' d=e\\ f",
            Env(2, (("a", "1"), ("b", '"two words"'), ("c", "'x y'"), ("d", "e\\ f"))),
        ),
        ("ENV name the rest = all", Env(2, (("name", "the rest = all"),))),
        ("ENV a=", Env(2, (("a", ""),))),
        ("ARG one two=2 three=", Arg(2, (("one", None), ("two", "2"), ("three", "")))),
        ("WORKDIR  /a b ", Workdir(2, "/a b")),
        ("USER 1:2", User(2, "1:2")),
        ('SHELL ["/bin/bash", "-c"]', Shell(2, ("/bin/bash", "-c"))),
        ('ENTRYPOINT ["a"]', Entrypoint(2, ("a",))),
        ("CMD", Cmd(2, "")),
        ("CMD a b", Cmd(2, "a b")),
        ("LABEL a=b", Other(2, "LABEL", "a=b")),
        ("ONBUILD RUN a", OnBuild(2, "RUN a")),
        ("HEALTHCHECK NONE", Healthcheck(2, None)),
        (
            "HEALTHCHECK --interval=1m30s --retries=2 --start-period=500ms CMD a b",
            Healthcheck(2, "a b", interval=90.0, start_period=0.5, retries=2),
        ),
        ("COPY a b /c/", Copy(2, "COPY", ("a", "b"), "/c/")),
        ('COPY ["a b", "/c"]', Copy(2, "COPY", ("a b",), "/c")),
        (
            "COPY --from=x --chown=a:b --chmod=755 --link --parents --exclude=*.a --exclude=b c /d",
            Copy(2, "COPY", ("c",), "/d", (), "x", "a:b", "755", parents=True, excludes=("*.a", "b")),
        ),
        ("ADD --unpack=false a /b", Copy(2, "ADD", ("a",), "/b", unpack=False)),
        (
            "RUN --mount=type=cache,target=/c,sharing=locked --mount=source=s,dst=/t,from=f,ro a",
            Run(2, "a", mounts=(Mount("cache", "/c"), Mount("bind", "/t", "s", "f"))),
        ),
        (
            "RUN --mount=type=secret,id=k,required,mode=0440,uid=5,env=K a",
            Run(2, "a", mounts=(Mount("secret", id="k", required=True, mode=0o440, uid=5, env="K"),)),
        ),
    ],
)
def test_instruction(text: str, expected: Instruction) -> None:
    assert instructions(text)[0] == expected


@pytest.mark.parametrize(
    ("text", "command", "heredocs"),
    [
        ("RUN <<EOF\na\n  b\nEOF\nRUN c", "", (Heredoc("EOF", "a\n  b\n", True),)),
        ("RUN <<'EOF'\n$a\nEOF", "", (Heredoc("EOF", "$a\n", False),)),
        ('RUN <<"E F"\na\nE F', "", (Heredoc("E F", "a\n", False),)),
        ("RUN <<-EOF\n\ta\n\t\tb\n\tEOF", "", (Heredoc("EOF", "a\nb\n", True),)),
        ("RUN cat <<A 3<<B\n1\nA\n2\nB", "cat <<A 3<<B", (Heredoc("A", "1\n", True), Heredoc("B", "2\n", True))),
        ("RUN cat <<A > f && x\n# no comment\n\\\nA", "cat <<A > f && x", (Heredoc("A", "# no comment\n\\\n", True),)),
        ("RUN a <<< word", "a <<< word", ()),
        ("RUN echo $((1 << 2))", "echo $((1 << 2))", ()),
        ("RUN <<EOF bash\na\nEOF", "<<EOF bash", (Heredoc("EOF", "a\n", True),)),
    ],
)
def test_texts_after_run(text: str, command: str, heredocs: tuple[Heredoc, ...]) -> None:
    found = instructions(text)[0]
    assert isinstance(found, Run)
    assert (found.command, found.heredocs) == (command, heredocs)


def test_texts_are_files_of_copy() -> None:
    (found,) = instructions("COPY <<one a <<'two' /x/\n1\none\n2\ntwo")
    assert found == Copy(2, "COPY", ("a",), "/x/", (Heredoc("one", "1\n", True), Heredoc("two", "2\n", False)))


def test_stages_and_arguments_before_them() -> None:
    found = parse(
        "\ufeff# syntax=docker/dockerfile:1\n# a comment\nARG A=1\nFROM --platform=linux/amd64 x:$A AS one\nFROM one\n"
    )
    assert found.global_args == (Arg(3, (("A", "1"),)),)
    assert [stage.start for stage in found.stages] == [From(4, "x:$A", "one", "linux/amd64"), From(5, "one")]


def test_escape_can_be_a_backtick() -> None:
    found = parse("# escape=`\nFROM x\nRUN a `\n b\nWORKDIR C:\\\\\n")
    assert (found.escape, found.problems) == ("`", ())
    assert found.stages[0].instructions == (Run(3, "a  b"), Workdir(5, "C:\\\\"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("RUN a\nINSTALL b", "3: unknown instruction 'INSTALL'; expected one of ADD,"),
        ("COPY a", "2: COPY needs a source and a destination"),
        ("RUN <<EOF\na", "2: the text <<EOF has no end; end it with a line that is exactly EOF"),
        ("RUN", "2: RUN has no command"),
        (
            "RUN --mount=type=odd a",
            "2: --mount=type=odd is not supported; expected one of bind, cache, secret, tmpfs, ssh",
        ),
        ("RUN --mount=type=cache a", "2: --mount=type=cache needs a target"),
        ("COPY --form=x a b", "2: COPY has no flag --form; it has --chmod, --chown,"),
        ("COPY --from a b", "2: --from needs a value"),
        ("ENV a", "2: ENV needs a value: ENV NAME=VALUE"),
        ("ENV a=1 b", "2: 'b' has no =; write NAME=VALUE, with quotes around blanks"),
        ("SHELL /bin/bash", "2: SHELL needs its words as a JSON list"),
        ("HEALTHCHECK curl", "2: expected HEALTHCHECK CMD COMMAND, or HEALTHCHECK NONE"),
        ("HEALTHCHECK --interval=soon CMD a", "2: --interval=soon: expected a duration such as 30s or 1m30s"),
        ("ONBUILD FROM x", "2: ONBUILD FROM is not allowed"),
        ("WORKDIR", "2: WORKDIR has no argument"),
        ("FROM a b", "2: expected FROM IMAGE, or FROM IMAGE AS NAME"),
    ],
)
def test_problem_names_its_line_and_what_was_expected(text: str, message: str) -> None:
    assert problem(text).startswith(message)


def test_only_arg_stands_before_the_first_from() -> None:
    (found,) = parse("RUN a\nFROM x\n").problems
    assert (found.line, found.message) == (1, "RUN stands before the first FROM; only ARG may")


@given(st.text(alphabet=st.sampled_from("FROM RUNCOPYENV<->='\"\\\n\r\t #$[]{},:/abEOF`"), max_size=200))
def test_any_text_is_parsed(text: str) -> None:
    parse(text)
    parse(f"FROM x\nRUN {text}\nCOPY {text}\nENV {text}\nHEALTHCHECK {text}\n")
