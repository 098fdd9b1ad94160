"""JSON schemas of models, with the docstrings of fields as descriptions.

Pydantic's `use_attribute_docstrings` would do it, but parses the source of all models at every start of a program. Only
error messages and the definitions of Kubernetes need it.
"""

import ast
import inspect
import itertools
import textwrap
from functools import cache
from typing import Any

from pydantic import BaseModel

from rollout_api.base import ApiModel


@cache
def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of a model's input. It is shared: do not change it."""
    schema = model.model_json_schema(by_alias=True)
    models = _subclasses(ApiModel)
    for name, found in (*schema.get("$defs", {}).items(), (model.__name__, schema)):
        for field, text in _docstrings(models[name]).items() if name in models else ():
            found["properties"][field].setdefault("description", text)
    return schema


def _docstrings(model: type[ApiModel]) -> dict[str, str]:
    """Return the docstrings of a model's fields, by alias."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__[: model.__mro__.index(ApiModel)]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in itertools.pairwise(tree.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(words))):
                    texts[model.model_fields[key].alias or key] = inspect.cleandoc(words)
    return texts


def _subclasses(base: type[ApiModel]) -> dict[str, type[ApiModel]]:
    found = {base.__name__: base}
    for model in base.__subclasses__():
        found |= _subclasses(model)
    return found
