"""A ROLL configuration as one mapping, as Hydra makes it: `defaults` below it, overrides over it, `${...}` filled in."""

import re
from collections.abc import Mapping
from typing import Any

import yaml

from rolloutctl.convert.base import Note, Source, UnusableInput, read_mapping

DEEPEST = 20
"""References inside of references; those that lead to themselves have no end."""
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


OVERRIDE = re.compile(r"(~|\+{0,2})([\w.]+)(?:=(.*))?$", re.DOTALL)
"""Hydra's `key=value`, `+key=value`, `++key=value`, `~key`."""

KEYS = ("exp_name", "seed", "pretrain", "output_dir", "sequence_length", "custom_envs")
"""Values that are read, although others may refer to them too."""


def composed(source: Source, notes: list[Note]) -> dict[str, Any]:
    """The file's values over those of its defaults. Raises UnusableInput."""
    values: dict[str, Any] = {}
    for number, entry in enumerate(source.values.get("defaults", [])):
        where = f"defaults[{number}]"
        name, _, package = str(entry).partition("@")
        if entry == "_self_":
            continue
        if not isinstance(entry, str) or package not in ("", "_here_", "_global_"):
            notes.append(Note(where, f"{entry!r} is not read: only files that are put at the top are"))
            continue
        path = source.path.parent / f"{name}.yaml"
        try:
            values = _over(values, read_mapping(path))
        except UnusableInput as error:
            raise UnusableInput(f"{where}: {path} {error}") from error
    own = {key: value for key, value in source.values.items() if key not in ("defaults", "hydra")}
    whole = _over(values, own)
    for override in source.overrides:
        _override(whole, override)
    filled = {key: _filled(value, whole, key, 0) for key, value in whole.items()}
    # What only stands there to be referred to is in the places that refer to it.
    referred = {name.partition(".")[0] for name in _REFERENCE.findall(str(whole))}
    return {key: value for key, value in filled.items() if key not in referred or key in KEYS}


def _override(values: dict[str, Any], override: str) -> None:
    """Change one value as Hydra does: without a plus only a key that is there. Raises UnusableInput."""
    parsed = OVERRIDE.match(override)
    if parsed is None or (parsed[3] is None) != (parsed[1] == "~"):
        raise UnusableInput(f"override {override!r}: expected KEY=VALUE, +KEY=VALUE, ++KEY=VALUE or ~KEY")
    sign, (*above, name) = parsed[1], parsed[2].split(".")
    place: Any = values
    for part in above:
        if sign.startswith("+") and isinstance(place, dict):
            place.setdefault(part, {})
        place = place.get(part) if isinstance(place, dict) else None
    if not isinstance(place, dict) or (not sign.startswith("+") and name not in place):
        raise UnusableInput(
            f"override {override!r}: the file has no key {parsed[2]}; add one with +{override.lstrip('~')}"
        )
    if sign == "~":
        del place[name]
        return
    try:
        place[name] = yaml.safe_load(parsed[3])
    except yaml.YAMLError as error:
        raise UnusableInput(f"override {override!r}: {parsed[3]!r} is not a YAML value") from error


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _over(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def _filled(value: Any, whole: Mapping[str, Any], where: str, depth: int) -> Any:
    if depth > DEEPEST:
        raise UnusableInput(f"{where}: its references lead to one another more than {DEEPEST} deep")
    if isinstance(value, dict):
        return {key: _filled(item, whole, f"{where}.{key}", depth) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, whole, f"{where}[{number}]", depth) for number, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    if alone := _REFERENCE.fullmatch(value):
        return _filled(_referred(alone[1], whole, where), whole, where, depth + 1)
    return _REFERENCE.sub(lambda found: str(_filled(found[0], whole, where, depth + 1)), value)


def _referred(name: str, whole: Mapping[str, Any], where: str) -> Any:
    found: Any = whole
    for part in name.split("."):
        if not isinstance(found, dict) or part not in found:
            raise UnusableInput(f"{where}: refers to ${{{name}}}, which is nowhere")
        found = found[part]
    return found
