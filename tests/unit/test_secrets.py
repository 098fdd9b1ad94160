"""Keys do not appear in help pages, logs and tracebacks: no signature and no repr shows them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import agent_runtime
import rollout_operator
import rolloutctl

SECRET_FIELDS = {"environ", "token", "api_key", "server_keys", "secret", "password"}
SOURCES = sorted(
    path
    for package in (agent_runtime, rollout_operator, rolloutctl)
    for path in Path(package.__path__[0]).rglob("*.py")
)


def defaults(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (ast.unparse(default) for default in (*node.args.defaults, *node.args.kw_defaults) if default)


def printed_fields(tree: ast.Module) -> Iterator[str]:
    """Return the fields of data classes that their repr shows."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(item) for item in node.decorator_list):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and "repr=False" not in ast.unparse(field):
                    yield ast.unparse(field.target)


def test_no_signature_and_no_repr_shows_keys() -> None:
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        assert "os.environ" not in set(defaults(tree)), f"{path}: help() prints the whole environment; use None"
        assert not SECRET_FIELDS & set(printed_fields(tree)), f"{path}: use field(repr=False)"
