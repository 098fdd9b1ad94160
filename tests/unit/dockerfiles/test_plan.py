"""Plans of stages: variables, settings, and what is not supported."""

import pytest

from agent_runtime.dockerfiles.instructions import Problem
from agent_runtime.dockerfiles.parse import parse
from agent_runtime.dockerfiles.plan import (
    STAGES,
    CopyStep,
    FoldersStep,
    PlanFailed,
    RunStep,
    Settings,
    StagePlan,
    bases,
    plan_stage,
)
from agent_runtime.dockerfiles.problems import problems_of


def plan(text: str, number: int = 0, start: Settings | None = None, **arguments: str) -> StagePlan:
    return plan_stage(parse(text), number, start or Settings(), arguments, "amd64")


def run(text: str, **arguments: str) -> RunStep:
    """The last step, which is a RUN."""
    step = plan_stage(parse(f"FROM x\n{text}"), 0, Settings(), arguments, "amd64").steps[-1]
    assert isinstance(step, RunStep)
    return step


def copy(text: str) -> CopyStep:
    step = plan(f"FROM x\n{text}").steps[-1]
    assert isinstance(step, CopyStep)
    return step


def test_variables_come_from_arguments_defaults_and_the_environment() -> None:
    text = "ARG A=1\nARG B\nARG C=$A-x\nENV A=2 D=$A E=$PATH\nRUN y"
    assert run(text).env == {"A": "2", "C": "1-x", "D": "1", "E": ""}
    assert run(text, A="3", B="4").env == {"A": "2", "B": "4", "C": "3-x", "D": "3", "E": ""}


def test_arguments_before_from_are_seen_where_a_stage_declares_them() -> None:
    text = "ARG V=1\nFROM x:$V\nRUN y\nARG V\nRUN z\nFROM x\nARG V=2\nRUN a"
    first, second = plan(text).steps
    assert isinstance(first, RunStep)
    assert isinstance(second, RunStep)
    assert (first.env, second.env) == ({}, {"V": "1"})
    assert bases(parse(text), {}, "amd64") == ["x:1", "x"]
    assert bases(parse(text), {"V": "9"}, "amd64") == ["x:9", "x"]


def test_arguments_of_a_stage_are_those_of_the_stages_that_start_from_it() -> None:
    text = "FROM x AS base\nARG V=1\nARG W\nFROM base\nRUN y"
    start = plan(text, W="2").settings
    (step,) = plan(text, 1, start).steps
    assert isinstance(step, RunStep)
    assert step.env == {"V": "1", "W": "2"}


def test_an_entry_point_removes_the_command_of_the_base_alone() -> None:
    base = plan('FROM x\nCMD ["a"]').settings
    assert plan('FROM x\nENTRYPOINT ["b"]', start=base).settings.command is None
    assert plan('FROM x\nCMD ["c"]\nENTRYPOINT ["b"]', start=base).settings.command == ("c",)


def test_environment_of_the_base_is_replaced_but_not_repeated() -> None:
    start = Settings(env={"PATH": "/bin"})
    found = plan("FROM x\nENV PATH=/own:$PATH\nRUN y", start=start)
    assert found.settings.own_env == {"PATH": "/own:/bin"}
    assert plan("FROM x\nRUN y", start=start).settings.own_env == {}


def test_folders_of_workdir_are_made_with_the_next_step() -> None:
    steps = plan("FROM x\nWORKDIR /a\nUSER me\nWORKDIR b\nRUN y\nWORKDIR ../c\n").steps
    assert [[folder.path for folder in step.folders] for step in steps] == [["/a", "/a/b"], ["/a/c"]]
    assert [[folder.user for folder in step.folders] for step in steps] == [[None, "me"], ["me"]]
    assert isinstance(steps[1], FoldersStep)


def test_shell_form_uses_the_shell_and_exec_form_does_not() -> None:
    assert run("RUN a b").command == ("/bin/sh", "-c", "a b")
    assert run('SHELL ["bash", "-ec"]\nRUN a').command == ("bash", "-ec", "a")
    assert run('RUN ["a", "$B"]').command == ("a", "$B")


def test_texts_of_run_are_scripts_or_stay_with_their_command() -> None:
    assert run("RUN <<E\na\nE").command[-1] == "a\n"
    assert run("RUN <<E\n#!/x\na\nE").script == "#!/x\na\n"
    assert run("RUN cat <<E\na\nE").command[-1] == "cat <<E\na\nE"


@pytest.mark.parametrize(
    ("text", "destination"),
    [
        ("COPY a b", "/w/b"),
        ("COPY a b/", "/w/b/"),
        ("COPY a .", "/w/"),
        ("COPY a ..", "/"),
        ("COPY a /x/./y", "/x/y"),
        ("ENV D=/d\nCOPY a $D/", "/d/"),
    ],
)
def test_destination_is_absolute(text: str, destination: str) -> None:
    assert copy(f"WORKDIR /w\n{text}").destination == destination


def test_stage_is_found_by_name_or_number_and_everything_else_is_an_image() -> None:
    text = "FROM x AS One\nFROM y\nCOPY --from=one a b\nCOPY --from=0 a b\nCOPY --from=z:1 a b\n"
    steps = plan(text, 1).steps
    assert [step.source for step in steps if isinstance(step, CopyStep)] == [0, 0, "z:1"]


def test_texts_of_copy_have_variables_unless_quoted() -> None:
    step = copy("ENV A=1\nCOPY <<x <<'y' /z/\n$A\nx\n$A\ny")
    assert step.inline == (("x", b"1\n"), ("y", b"$A\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FROM x\nADD https://h/a /b", "line 2: ADD https://h/a: remote sources are not supported; fetch it in a RUN"),
        ("FROM x\nADD git@h:r.git /b", "line 2: ADD git@h:r.git: remote"),
        ("FROM x\nRUN --security=insecure a", "line 2: RUN --security=insecure is not supported"),
        ("FROM x\nRUN --network=host a", "line 2: RUN --network=host is not supported"),
        ("FROM x\nRUN --mount=type=ssh,required a", "line 2: RUN --mount=type=ssh is not supported"),
        ("FROM x\nCOPY --chmod=u+x a b", "line 2: --chmod=u\\+x is not supported; give the mode in octal"),
        ("FROM x\nCOPY --from=3 a b", "line 2: --from=3: no stage with that number"),
        ("FROM x\nENV A=${B!}", "line 2: "),
        ("FROM x\nRUN a\nBOO", "line 3: unknown instruction"),
    ],
)
def test_what_is_not_supported_is_named_with_its_line(text: str, message: str) -> None:
    found = problems_of(text, {})
    assert found
    with pytest.raises(PlanFailed, match=message):
        raise PlanFailed(found)


def test_all_problems_are_found_at_once() -> None:
    text = "FROM scratch AS a\nADD http://x /y\nFROM $NONE\nRUN --network=host z\n"
    assert [problem.line for problem in problems_of(text, {})] == [3]
    text = text.replace("$NONE", "a")
    assert [problem.line for problem in problems_of(text, {})] == [1, 2, 4]


def test_from_without_an_image_is_explained() -> None:
    (found,) = problems_of("ARG V\nFROM $V\n", {})
    assert found.message == "FROM $V: no image; give the ARG before it a default"
    assert not problems_of("ARG V\nFROM $V\n", {"V": "x"})


def test_empty_dockerfile_is_refused() -> None:
    (found,) = problems_of("# nothing\n", {})
    assert found.message == "the Dockerfile has no instructions; expected FROM and others"


def test_variables_that_grow_without_limit_are_refused() -> None:
    text = "FROM a\nENV A=0123456789abcdef\n" + "ENV A=$A$A\n" * 60
    assert all("longer than" in problem.message for problem in problems_of(text, {}))
    assert problems_of(text, {})


def test_more_stages_than_the_limit_are_refused() -> None:
    text = "FROM a AS s0\n" + "".join(f"FROM s{number} AS s{number + 1}\n" for number in range(STAGES))
    (problem,) = problems_of(text, {})
    assert problem == Problem(STAGES + 1, "101 stages; at most 100 are supported")
