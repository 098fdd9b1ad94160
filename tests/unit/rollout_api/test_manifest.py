"""Reading manifests: all errors are reported, with their place and a correction."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollout_api.crd import definitions
from rollout_api.json_schema import json_schema
from rollout_api.manifest import _FORMS, ManifestError, Problem, load_manifest
from rollout_api.rollout_job import RolloutJob
from rollout_api.tasks import Task

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart" / "job.yaml"
MINIMAL: dict[str, Any] = {
    "apiVersion": "rollout.dev/v1alpha1",
    "kind": "RolloutJob",
    "metadata": {"name": "job"},
    "spec": {"tasks": {"inline": [{"name": "a", "prompt": "p"}]}, "agent": {"type": "Nop"}, "output": {"uri": "out"}},
}
HEAD = "apiVersion: rollout.dev/v1alpha1\nkind: RolloutJob\nmetadata: {name: job}\nspec:\n"
REST = "  tasks: {inline: [{name: a, prompt: p}]}\n  agent: {type: Nop}\n  output: {uri: out}\n"


def problems(text: str | Path) -> list[Problem]:
    with pytest.raises(ManifestError) as caught:
        load_manifest(text)
    assert str(caught.value).count("\n") == len(caught.value.problems)
    return caught.value.problems


def only(text: str) -> Problem:
    (problem,) = problems(text)
    return problem


def test_yaml_and_json_mean_the_same(tmp_path: Path) -> None:
    texts = [yaml.safe_dump(MINIMAL), json.dumps(MINIMAL), json.dumps(MINIMAL, indent="\t")]
    (tmp_path / "job.yaml").write_text(texts[0], encoding="utf-8-sig")
    sources: list[str | Path] = [*texts, tmp_path / "job.yaml", str(tmp_path / "job.yaml")]
    jobs = [load_manifest(source) for source in sources]
    assert all(job == jobs[0] for job in jobs)


@given(st.text())
def test_any_text_survives_json(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    manifest = {**MINIMAL, "metadata": {"name": "job", "annotations": {"note": text}}}
    for ascii_only in (True, False):
        if ascii_only or text.isprintable():
            assert load_manifest(json.dumps(manifest, ensure_ascii=ascii_only)).metadata.annotations["note"] == text


def test_all_problems_are_reported_in_the_order_of_the_lines() -> None:
    text = HEAD + "  groupSize: many\n  mode: train\n  sandbox: {user: 1000}\n  groupsize: 4\n  output: {}\n"
    assert [(problem.line, problem.path) for problem in problems(text)] == [
        (4, "spec.tasks"),
        (5, "spec.groupSize"),
        (6, "spec.mode"),
        (7, "spec.sandbox.user"),
        (8, "spec.groupsize"),
        (9, "spec.output.uri"),
    ]


@pytest.mark.parametrize(
    ("line", "path", "message"),
    [
        ("groupsize: 4", "spec.groupsize", "is not a known field; did you mean groupSize?"),
        ("group_size: 4", "spec.group_size", "is not a known field; did you mean groupSize?"),
        ("maxTurns: 4", "spec.maxTurns", "is not a known field here; did you mean spec.agent.maxTurns?"),
        ("mode: train", "spec.mode", '"train" is not allowed, expected one of Train, Eval; did you mean Train?'),
        ('seed: "1"', "spec.seed", 'is the text "1", expected a whole number'),
        ("seed: 1.5", "spec.seed", "is the number 1.5, expected a whole number"),
        ("seed: -1", "spec.seed", "is -1, expected at least 0"),
        ("seed: yes", "spec.seed", "is true, expected a whole number"),
        ("sandbox: {user: 1000}", "spec.sandbox.user", "is the number 1000, expected text; put it into quotes"),
        ("sandbox:", "spec.sandbox", "is empty, expected a mapping; fill it in or leave the field out"),
        ("sandbox: [a]", "spec.sandbox", "is a list, expected a mapping"),
        ("runners: {image: ''}", "spec.runners.image", "has 0 characters, expected at least 1"),
        (
            "model: {function: 'm:f', routedExperts: {}}",
            "spec.model",
            "routedExperts is allowed only with server, serverRef, or an endpoint with api: OpenAI",
        ),
        ("model: {}", "spec.model", "exactly one of endpoint, serverRef, server, scripted and function must be given"),
        ("sampling: {topP: .nan}", "spec.sampling.topP", '".nan" is not a number that JSON can hold'),
        ("sandbox: {network: {agent: [host]}}", "spec.sandbox.network.agent[0]", '"host" does not have the expected form'),
        ("model: {name: gpt}", "spec.model.name", "is not a known field here; did you mean spec.model.endpoint.name?"),
        ("sampling: {temperature: -1}", "spec.sampling.temperature", "is -1, expected at least 0"),
        ("agent: {type: Nop, tools: bash}", "spec.agent.tools", 'is the text "bash", expected a list; put it into [brac'),
        ("sandbox: {network: {agent: [http://h]}}", "spec.sandbox.network.agent[0]", '"http://h" does not have the expected '
         "form: a host and a port, such as pypi.org:443"),
        ("sandbox: {resources: {memory: 1 GB}}", "spec.sandbox.resources.memory", '"1 GB" does not have the expected form: '
         "a number with a unit such as m, M, Mi or Gi, without spaces."),
        ("sandbox: {workingDir: work}", "spec.sandbox.workingDir", '"work" does not have the expected form: an absolute'),
        ("sandbox: {network: {agent: x}}", "spec.sandbox.network.agent", '"x" is not allowed, expected one of None, P'),
        ("agent: {type: Command}", "spec.agent", "command, which begins with the name of a program, is needed for type Co"),
        ("agent: {type: Command, command: ['', a]}", "spec.agent", "command, which begins with the name of a program"),
        ("agent: {type: Nop, command: [a]}", "spec.agent", "command, which begins with the name of a program, is needed"),
        ("agent: {type: Nop, install: [a]}", "spec.agent", "install is only for type Command; use the task's setup"),
        ("agent: {type: Command, command: [a], systemPrompt: b}", "spec.agent", "systemPrompt is not for type Command"),
        ("completion: {minCompletedPerGroup: 2}", "spec", "completion.minCompletedPerGroup is 2, more than groupSize 1"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_what_was_expected(line: str, path: str, message: str) -> None:
    rest = REST.replace("  agent: {type: Nop}\n", "") if line.startswith("agent:") else REST
    problem = only(f"{HEAD}  {line}\n{rest}")
    assert problem.path == path
    assert problem.message.startswith(message)
    assert problem.line == (4 if path == "spec" else 5)


def test_duplicate_key_is_an_error_and_other_errors_are_reported_too() -> None:
    found = problems(f"{HEAD}  seed: 1\n  seed: 2\n  mode: x\n{REST}")
    assert [(problem.path, problem.line) for problem in found] == [("spec.seed", 6), ("spec.mode", 7)]
    assert found[0].message == "is given twice, first in line 5; keep one of them"


def test_anchors_and_merges_are_written_out() -> None:
    text = HEAD + REST.replace("{name: a, prompt: p}", "&one {name: a, prompt: p}, {<<: *one, name: b}")
    tasks = load_manifest(text).spec.tasks.inline
    assert tasks is not None
    assert [(task.name, task.prompt) for task in tasks] == [("a", "p"), ("b", "p")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("\n", "is empty"),
        ("a: 1\n---\nb: 2\n", "has 2 documents, expected one; move the others to files of their own"),
        ("a:\n\tb: 1\n", "the line has a tab; indent with spaces"),
        ("kind: Pod\n", "is missing; write apiVersion: rollout.dev/v1alpha1"),
        ("- a\n", "is a list, expected a mapping"),
        ("a: [\n", "is not valid YAML"),
        ("a: \x01\n", "is not valid YAML"),
        ("a: *b\n", "is not valid YAML"),
        ("a: !!python/name:os.system x\n", "is missing; write apiVersion"),
        ("a: &a [*a]\n", "is nested more than"),
        ("[" * 3000 + "]" * 3000 + "\n", "is nested more than"),
        ("{" * 100_000, "is nested more than"),
        ("\udc80: \n", "is not valid YAML"),
        ("? [a]\n: b\n", "is missing; write apiVersion"),
        ("<<: 5\n", "'<<' takes a mapping"),
        (f"a: {'9' * 5000}\n", "is missing; write apiVersion"),
        ("/no/such/file", "'/no/such/file' cannot be read: No such file or directory"),
        ("a\0b", "cannot be read"),
        ("x" * 4_000_000 + "\n", "is larger than"),
    ],
)
def test_file_other_than_a_manifest_is_refused_in_one_line(text: str, message: str) -> None:
    found = problems(text)
    assert any(message in problem.message for problem in found), found


def test_nested_aliases_do_not_fill_the_memory() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert "an alias counts each time that it is used" in only("\n".join(lines) + "\n").message


def test_wrong_kind_is_reported_and_its_fields_are_not_checked() -> None:
    problem = only(HEAD.replace("RolloutJob", "Rolloutjob") + "  nonsense: 1\n")
    assert (problem.path, problem.line, problem.message) == ("kind", 2, 'is "Rolloutjob", expected RolloutJob')


def test_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "job.yaml", tmp_path):
        assert problems(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
WHOLE = yaml.safe_load(QUICKSTART.read_text())


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    return [path, *(place for key, below in inner for place in places(below, (*path, key)))]


PLACES = places(WHOLE)


@given(st.sampled_from(PLACES), JSON)
def test_any_wrong_value_is_a_problem_with_its_place_or_a_valid_job(place: tuple[str | int, ...], value: Any) -> None:
    def changed(node: Any, rest: tuple[str | int, ...]) -> Any:
        if not rest:
            return value
        key = rest[0]
        items = node.items() if isinstance(node, dict) else enumerate(node)
        copy = {name: changed(below, rest[1:]) if name == key else below for name, below in items}
        return copy if isinstance(node, dict) else list(copy.values())

    text = json.dumps(changed(WHOLE, place)) + "\n"
    try:
        load_manifest(text)
    except ManifestError:
        assert all(problem.message and problem.line == 1 for problem in problems(text))


@given(st.text(max_size=200))
def test_any_text_is_a_job_or_a_clear_refusal(text: str) -> None:
    with pytest.raises(ManifestError):
        load_manifest(text + "\n")


def test_pages_about_the_manifest_have_every_field_with_its_meaning() -> None:
    pages = sorted((QUICKSTART.parents[2] / "docs").glob("manifest*.md"))
    page = "".join(page.read_text() for page in pages)

    rows = {
        line.split("`")[1]: line.rstrip(" |").rpartition("| ")[2] for line in page.splitlines() if line[:3] == "| `"
    }

    def check(schema: dict[str, Any], prefix: str) -> None:
        for name, field in schema["properties"].items():
            inner = field.get("items", field)
            path = f"{prefix}{name}{'[]' if 'items' in field and 'properties' in inner else ''}"
            meaning = field.get("description", "").replace("|", "\\|")
            assert rows.get(path) == meaning, f"docs/manifest*.md: the row of `{path}` should end with: {meaning}"
            if "properties" in inner and path != "model.server":
                check(inner, f"{path}.")

    definition = definitions()["rolloutjobs.yaml"]["spec"]["versions"][0]
    check(definition["schema"]["openAPIV3Schema"]["properties"]["spec"], "")


@pytest.mark.parametrize(
    "agent", ["{}", "{type: Coding}", "{type: SWE, tools: [], mcpServers: [{name: files, command: [files]}]}"]
)
def test_missing_tool_call_parser_is_found_before_a_pod_starts(agent: str) -> None:
    server = "{model: {name: m}, engine: {image: vllm, version: 0.27.0}}"
    rest = f"  tasks: {{inline: [{{name: a, prompt: p}}]}}\n  output: {{uri: out}}\n  agent: {agent}\n"
    problem = only(f"{HEAD}{rest}  model: {{server: {server}}}\n")
    assert problem.message.startswith("model.server.toolCallParser is missing")
    assert "such as hermes" in problem.message
    load_manifest(f"{HEAD}{rest}  model: {{server: {server[:-1]}, toolCallParser: hermes}}}}\n")
    load_manifest(f"{HEAD}{rest}  model: {{serverRef: shared}}\n")


@pytest.mark.parametrize(
    "agent", ["{type: ReAct}", "{tools: []}", "{type: Command, command: [a]}", "{type: 'my:Agent'}"]
)
def test_agent_that_calls_tools_in_its_text_needs_no_parser(agent: str) -> None:
    server = "{model: {name: m}, engine: {image: vllm, version: 0.27.0}}"
    rest = f"  tasks: {{inline: [{{name: a, prompt: p}}]}}\n  output: {{uri: out}}\n  agent: {agent}\n"
    load_manifest(f"{HEAD}{rest}  model: {{server: {server}}}\n")


def test_patterns_in_words_are_those_of_fields() -> None:
    schema = json.dumps(json_schema(RolloutJob))
    assert [pattern for pattern in _FORMS if json.dumps(pattern) not in schema] == []


@pytest.mark.parametrize("command", ["", " ", "\n\t"])
def test_blank_command_is_refused(command: str) -> None:
    for fields in (
        {"setup": [command]},
        {"solution": [command]},
        {"verifier": {"commands": [command]}},
        {"verifier": {"commands": ["true"], "collect": [command]}},
        {"services": [{"name": "db", "health": {"command": command}}]},
    ):
        with pytest.raises(ValidationError, match="at least 1 character" if not command else "should match pattern"):
            Task.model_validate({"name": "t", "prompt": "p", **fields})
    # an argument of a program may be blank
    Task.model_validate({"name": "t", "prompt": "p", "services": [{"name": "db", "command": ["printf", " "]}]})
