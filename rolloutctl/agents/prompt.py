"""A prompt put together from parts."""

from collections.abc import Callable, Mapping
from typing import Any, Self

from rolloutctl.agents.tools import described


class PromptBuilder:
    """Sections one after another, below an opening if there is one. In all of it `{name}` stands for the variable `name`."""

    def __init__(self, opening: str = "") -> None:
        self._opening = opening
        self._variables: dict[str, Any] = {}
        self._sections: list[str] = []

    def add_variable(self, name: str, value: object) -> Self:
        """What `{name}` stands for."""
        self._variables[name] = value
        return self

    def add_section(self, title: str, content: str) -> Self:
        """A title and what stands below it."""
        self._sections.append(f"{title}:\n{content}")
        return self

    def add_tools(self, tools: Mapping[str, Any], formatter: Callable[[str, Any], str] = described) -> Self:
        """A section that describes tools, each by `formatter(name, tool)`."""
        return self.add_section("Available Tools", "\n\n".join(formatter(name, tool) for name, tool in tools.items()))

    def add_context(self, context: Mapping[str, object]) -> Self:
        """A section of facts."""
        return self.add_section("Context", "\n".join(f"- {name}: {value}" for name, value in context.items()))

    def build(self) -> str:
        """The prompt."""
        prompt = "\n\n".join(filter(None, [self._opening, *self._sections]))
        for name, value in self._variables.items():
            prompt = prompt.replace(f"{{{name}}}", str(value))
        return prompt
