"""Usual instances of SWE-bench: those whose fields show, before any task is made of them, that it will be a valid one.

Ten thousand instances are validated before the first rollout, and this takes a third of the time of making their tasks. An
instance that is not usual need not be wrong: its task is made, to see.
"""

from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Json, StringConstraints, Tag, ValidationError

from agent_runtime.tasks.instance import Instance
from rollout_api.base import ShortText, TaskName

CHARACTERS: Final = 30_000
"""Most that all texts of one have but the issue's, a quote counted five times, as the shell's quoting does.

So what is made of the paths in them keeps its bounds. A command its 65,536 characters: quoted, a file has at most half as
much again as its test's name. A file its 204,800: JSON needs at most six characters for one of ASCII.
"""

_Issue = Annotated[str, StringConstraints(min_length=1, max_length=100_000)]
_Commit = Annotated[str, StringConstraints(pattern="^[0-9a-f]{7,64}$")]
_Patch = Annotated[str, StringConstraints(pattern=r"(^|\n)diff --git ")]
_Texts = Annotated[list[ShortText], Field(max_length=5_000)]  # of two lists, which make one of at most 10,000
_Names = Annotated[
    Annotated[_Texts, Tag("list")] | Annotated[Json[_Texts], Tag("str")],
    Discriminator(lambda value: type(value).__name__),
]


class UsualInstance(BaseModel):
    """The fields of an instance, none of which a task could refuse."""

    model_config = ConfigDict(strict=True)

    instance_id: TaskName
    repo: ShortText
    base_commit: _Commit
    problem_statement: _Issue
    patch: _Patch | None = None
    test_patch: _Patch
    FAIL_TO_PASS: Annotated[_Names, Field(min_length=1)]
    PASS_TO_PASS: _Names
    image: ShortText | None = None
    image_name: ShortText | None = None
    docker_image: ShortText | None = None
    test_cmd: ShortText | None = None
    version: str | None = None
    working_dir: None = None

    @property
    def is_short(self) -> bool:
        """Whether nothing that is made of it can be too long."""
        text = "".join([self.patch or "", self.test_patch, self.test_cmd or "", *self.FAIL_TO_PASS, *self.PASS_TO_PASS])
        return text.isascii() and len(text) + 4 * text.count("'") <= CHARACTERS


def usual(instance: Instance) -> UsualInstance | None:
    """The instance, if it is a usual one."""
    try:
        found = UsualInstance.model_validate(instance)
    except ValidationError:
        return None
    return found if found.is_short else None
