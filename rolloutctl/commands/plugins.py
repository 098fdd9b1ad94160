"""`rolloutctl plugins`: list the available plugins, or describe one."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from agent_runtime.extensions import ExtensionError
from agent_runtime.plugins.registry import Description, describe_plugin, registry
from rolloutctl.manifest import use_modules_in
from rolloutctl.ui.console import Form, FormOption, answer_described, answer_json, answer_table, harmless, out


def plugins(
    name: Annotated[str | None, typer.Argument(help="A name, or module:Class; all plugins when left out.")] = None,
    form: FormOption = Form.TEXT,
) -> None:
    """List the plugins that a manifest can name, or describe one: its hooks and its options."""
    if name is None:
        _list(form)
        return
    use_modules_in(Path.cwd())
    found = describe_plugin(name)
    if form is Form.JSON:
        answer_json(asdict(found))
    else:
        _describe(found)


def _list(form: Form) -> None:
    """List all plugins. A plugin that cannot be loaded is listed with its error."""
    found: dict[str, Description | str] = {}
    for name in registry.names():
        try:
            found[name] = describe_plugin(name)
        except ExtensionError as error:
            found[name] = str(error)
    if form is Form.JSON:
        answer_json([asdict(p) if isinstance(p, Description) else {"name": n, "error": p} for n, p in found.items()])
        return
    answer_described("", ["name", "kinds", "hooks", "about"], [_row(name, plugin) for name, plugin in found.items()])


def _row(name: str, plugin: Description | str) -> list[str | Text]:
    if isinstance(plugin, str):
        return [name, "", "", Text(harmless(plugin), "red")]
    return [name, ", ".join(plugin.kinds), ", ".join(plugin.hooks), plugin.about.split("\n\n")[0]]


def _describe(plugin: Description) -> None:
    out.print(Text(plugin.name, "bold"))
    out.print(Text(harmless(plugin.about)), soft_wrap=True)
    out.print(Text(f"kinds: {', '.join(plugin.kinds) or 'none; it only observes'}"), soft_wrap=True)
    out.print(Text(f"hooks: {', '.join(plugin.hooks)}"), soft_wrap=True)
    options: dict[str, Any] = plugin.options.get("properties", {})
    required = plugin.options.get("required", [])
    rows = [
        [
            name,
            "required" if name in required else str(schema.get("default")),
            str(schema.get("type", "")),
            str(schema.get("description", "")),
        ]
        for name, schema in options.items()
    ]
    if rows:
        answer_table("", ["config", "default", "form", "meaning"], rows)
    else:
        out.print("It takes no options.")
