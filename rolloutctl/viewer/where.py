"""Conditions of filters such as `reward < 0.5 and tag == "hard" and tools > 20`. The page parses them
(frontend/src/where.ts), so that the report needs no server; this translates the parsed condition to SQL.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rollout_api.nesting import as_recorded

Condition = Mapping[str, Any]
"""`{"op": "and" | "or", "terms": […]}`, `{"op": "not", "term": …}`, `{"op": "text", "value": …}`, or a comparison
`{"op": "==" | "!=" | "<" | "<=" | ">" | ">=" | "in", "field": …, "value": …}`. `in`: the field contains the value.
"""

_MOST_TERMS: Final = 200
_DEEPEST: Final = 50
"""Most terms inside one another. SQLite's parser fails at about 100."""
_LARGEST: Final = 2**63 - 1
"""Largest whole number in SQLite."""
_COMPARISONS: Final = {"==": "IS", "!=": "IS NOT", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
TEXT_FIELDS: Final = ("task", "tag", "ended", "reason", "message", "error", "label")
"""Fields that plain words are looked up in."""
WORDS: Final = "words"
"""Column with these fields in lower case."""


class WrongCondition(ValueError):
    """The condition has another form, or names an unknown field."""


def sql(where: Condition | None, kinds: Mapping[str, str]) -> tuple[str, list[Any]]:
    """Return a condition as SQL with its values, given the kinds of all fields. Every part is true or false: a comparison
    with a missing value is false. Raises WrongCondition.
    """
    values: list[Any] = []
    return ("1" if where is None else _Translation(kinds, values).of(as_recorded(where))), values


class _Translation:
    def __init__(self, kinds: Mapping[str, str], values: list[Any]) -> None:
        self._kinds, self._values = kinds, values
        self._terms = 0

    def of(self, where: object, depth: int = 1) -> str:
        self._terms += 1
        if not isinstance(where, Mapping) or self._terms > _MOST_TERMS or depth > _DEEPEST:
            raise WrongCondition(
                f"a condition must be an object, with at most {_MOST_TERMS} terms, {_DEEPEST} of them inside one another"
            )
        op = where.get("op")
        if op in ("and", "or"):
            terms = [self.of(term, depth + 1) for term in _listed(where.get("terms"))]
            return f"({f' {op.upper()} '.join(terms)})"
        if op == "not":
            return f"NOT {self.of(where.get('term'), depth + 1)}"
        if op == "text":
            self._values.append(str(where.get("value")).lower())
            return f"(instr({WORDS}, ?) > 0)"
        field, value = where.get("field"), where.get("value")
        if not isinstance(field, str) or field not in self._kinds:
            raise WrongCondition(f"{field!r} is not a field")
        if not isinstance(value, str | int | float | None):
            raise WrongCondition(f"{field}: a value must be a text, a number, true, false or none")
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise WrongCondition(f"{field}: {value} is too large; the largest number is {_LARGEST}")
        return self._comparison(op, field, value)

    def _comparison(self, op: object, field: str, value: object) -> str:
        column, kind = f'"{field}"', self._kinds[field]
        if op == "in":
            if kind == "list":
                self._values.append(str(value))
                return f"(? IN {_items(column)})"
            self._values.append(str(value).lower())
            return f"(instr(lower(coalesce({column}, '')), ?) > 0)"
        if op not in _COMPARISONS:
            raise WrongCondition(f"{op!r} is not a comparison")
        is_equality = op in ("==", "!=")
        if not is_equality and (value is None or isinstance(value, str) != (kind == "text") or kind == "list"):
            return "0"  # numbers and texts have no common order
        self._values.append(value)
        if kind == "list":
            return f"({'' if op == '==' else 'NOT '}coalesce(? IN {_items(column)}, 0))"  # of NULL, IN is NULL
        if is_equality:
            return f"({column} {_COMPARISONS[str(op)]} ?)"
        return f"({column} IS NOT NULL AND {column} {op} ?)"


def _items(column: str) -> str:
    return f"(SELECT value FROM json_each({column}))"


def _listed(terms: object) -> Sequence[object]:
    if not isinstance(terms, Sequence) or isinstance(terms, str) or not terms:
        raise WrongCondition("`and` and `or` need terms")
    return terms
