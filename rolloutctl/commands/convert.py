"""`rolloutctl convert`: convert another system's configuration into a manifest. Each system has its own module."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer
import yaml

from rollout_api.manifest import ManifestError, load_manifest
from rolloutctl.convert.base import Conversion, Converter, Source, UnusableInput, read_mapping
from rolloutctl.convert.real_work import REAL_WORK
from rolloutctl.convert.roll import ROLL
from rolloutctl.errors import CommandError
from rolloutctl.ui.console import out, say

CONVERTERS: tuple[Converter, ...] = (REAL_WORK, ROLL)
"""Converters in the order in which they are tried."""


def convert(
    config: Annotated[Path, typer.Argument(help="The other system's configuration, JSON or YAML.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Hydra overrides for a ROLL file: KEY=VALUE, +KEY=VALUE, ~KEY.")
    ] = None,
    file: Annotated[Path | None, typer.Option("-o", help="Manifest to write; standard output when left out.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    evaluation: Annotated[
        bool, typer.Option("--eval", help="Convert val_env_manager of a ROLL file instead of train_env_manager.")
    ] = False,
    llm_model: Annotated[str | None, typer.Option("--llm-model", help="Real Work's option of the same name.")] = None,
    llm_base_url: Annotated[
        str | None, typer.Option("--llm-base-url", help="Real Work's option of the same name.")
    ] = None,
    llm_temperature: Annotated[
        float | None, typer.Option("--llm-temperature", help="Real Work's option of the same name.")
    ] = None,
    llm_max_tokens: Annotated[
        int | None, typer.Option("--llm-max-tokens", help="Real Work's option of the same name.")
    ] = None,
    llm_timeout: Annotated[
        int | None, typer.Option("--llm-timeout", help="Real Work's option of the same name; seconds for one call.")
    ] = None,
) -> None:
    """Convert another system's configuration into a manifest, and report every key without a counterpart."""
    if file is not None and file.exists() and not force:
        raise CommandError(f"{file} exists already", hint="Name another file, or replace it with --force.")
    llm = {
        "model": llm_model,
        "base_url": llm_base_url,
        "temperature": llm_temperature,
        "max_tokens": llm_max_tokens,
        "timeout": llm_timeout,
    }
    converter, conversion = convert_file(
        config,
        evaluation=evaluation,
        overrides=overrides or (),
        llm={name: value for name, value in llm.items() if value is not None},
    )
    text = written(conversion.manifest)
    problem = _problem(text)
    for note in conversion.notes:
        say(f"{config}: {note}", "yellow")
    if file is None:
        out.file.write(text)
    else:
        file.write_text(text, encoding="utf-8")
        say(f"Wrote {file} from a configuration of {converter.system}; {len(conversion.notes)} notes are above.")
    if problem is not None:
        raise CommandError(
            f"The manifest is not valid yet:\n{problem}",
            hint="Correct the manifest; docs/manifest.md lists every field.",
        )
    if file is not None:
        say(f"  rolloutctl validate {file}")


def convert_file(
    path: Path,
    *,
    evaluation: bool = False,
    overrides: Sequence[str] = (),
    llm: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Converter, Conversion]:
    """Detect the system of a configuration file and return its manifest. Raises CommandError."""
    try:
        values = read_mapping(path)
    except UnusableInput as error:
        raise CommandError(f"{path}: {error}") from error
    converter = next((known for known in CONVERTERS if known.recognises(values)), None)
    if converter is None:
        known = " and ".join(known.system for known in CONVERTERS)
        raise CommandError(f"{path}: is not a supported configuration; expected one of {known}")
    try:
        return converter, converter.convert(Source(path, values, evaluation, overrides, llm))
    except UnusableInput as error:
        raise CommandError(
            f"{path}: {error}", hint=f"The file was read as a configuration of {converter.system}."
        ) from error


def written(manifest: dict[str, Any]) -> str:
    """Return a manifest as YAML, with keys in insertion order and long texts as blocks."""
    return yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _problem(text: str) -> str | None:
    try:
        load_manifest(text)
    except ManifestError as error:
        return str(error)
    return None


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
