import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.plugins.safety_filter import program, simple_commands

NAME = st.sampled_from(["ls", "make", "git", "python3", "true"])


@given(st.text(max_size=200))
def test_no_text_that_a_model_can_write_makes_it_fail(text: str) -> None:
    assert all(words for words in simple_commands(text))


@given(
    NAME, st.lists(st.text("abc xyz.-_/=", max_size=12), max_size=4), st.sampled_from([";", "&&", "||", "|", "\n", "&"])
)
def test_quoted_words_remain_arguments_and_each_command_is_found(name: str, words: list[str], separator: str) -> None:
    line = shlex.join([name, *words])
    assert list(simple_commands(f"{line} {separator} {line}")) == [[name, *words]] * 2


@given(NAME, st.sampled_from(["sudo {}", "sudo -u root {}", "env A=1 {}", "timeout 5 {}", "nice -n 3 {}", "xargs -n 1 {}",
    "X=1 {}", "if true; then {}; fi", "bash -c '{}'", "sh -ec '{}'", "eval '{}'", "$({})", 'echo "$({})"', "echo `{}`",
    "find . -exec {} \\;", "({})", "{{ {}; }}", "sudo env X=1 nohup {}", "echo hi\n{}", "true &&\\\n {}"]))  # fmt: skip
def test_program_is_found_behind_every_wrapper(name: str, form: str) -> None:
    found = [program(words) for words in simple_commands(form.format(f"{name} --now"))]
    assert name in found


@given(NAME)
def test_quoted_name_is_not_a_program(name: str) -> None:
    spoken = (f"echo {name}", f"grep -r '{name} now' .", f"git log --format={name}", f"# {name}", f"cat <<EOF\n{name}\nEOF",
              f"echo 'first\n{name}'", f"sudo grep {name} log")  # fmt: skip
    for text in spoken:
        assert name not in [program(words) for words in simple_commands(text) if words[0] not in ("git", "cat")], text


@pytest.mark.parametrize("form", ["$(echo {})", '"$(echo {})"', "find . -exec {}", "sudo {}", "eval {}"])
def test_commands_inside_of_commands_are_not_found_again_and_again(form: str) -> None:
    text = "rm"
    for _ in range(10):
        text = form.format(text)

    assert len(list(simple_commands(text))) <= 100


def test_here_documents_without_a_line_are_read_at_once() -> None:
    found = list(simple_commands("cat " + "<<A" * 300_000 + " ; reboot"))
    assert "reboot" in [program(words) for words in found]


@pytest.mark.parametrize("form", ["$(true; {})", 'echo "$(true; {})"', "find . -exec {}"])
def test_deeply_nested_command_is_found(form: str) -> None:
    text = "reboot"
    for _ in range(20):
        text = form.format(text)

    assert "reboot" in [program(words) for words in simple_commands(text)]


def test_script_of_the_task_is_not_the_systems_program() -> None:
    assert program(["./reboot"]) == "" == program(["/workspace/bin/reboot"])
    assert program(["/usr/sbin/reboot", "now"]) == "reboot"
