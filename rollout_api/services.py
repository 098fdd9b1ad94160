"""Services of a task: programs such as databases that run beside the agent's workspace."""

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from rollout_api.base import ApiModel, Command, Seconds, named_program
from rollout_api.files import TASK_FILES, Dockerfile, TaskFile
from rollout_api.sandbox import AbsolutePath, EnvVar, UserName

ServiceName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-_.a-z0-9]*[a-z0-9])?$", max_length=63)]
VolumeName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
MOST_SERVICES = 16
"""Most services of a task; all of them share the resources of one workspace."""


def _mountable(volumes: dict[str, str]) -> dict[str, str]:
    """Return volumes as they are. Raises ValueError for one that cannot be mounted."""
    for name, path in volumes.items():
        parts = path.split("/")[1:]
        if {"", ".", ".."} & {*parts} or parts[0] in ("proc", "dev", "sys"):
            raise ValueError(f"volume {name!r}: {path!r} cannot be a volume's folder; expected one below the root")
    return volumes


Volumes = Annotated[dict[VolumeName, AbsolutePath], Field(max_length=32), AfterValidator(_mountable)]


class ServiceState(StrEnum):
    """`Started`: its command runs. `Healthy`: its health check succeeds. `Completed`: its command has ended with 0."""

    STARTED = "Started"
    HEALTHY = "Healthy"
    COMPLETED = "Completed"


class HealthCheck(ApiModel):
    """A command that succeeds when a service is ready. The agent starts when all services are."""

    command: Command
    """Command, run in the service until it succeeds."""
    seconds: Seconds = 60
    """Time after which the service has failed."""
    timeout_seconds: Seconds = 30
    """Time limit of one try."""


class TaskService(ApiModel):
    """A program in a workspace of its own, with the network of the agent's workspace. Only in `Overlay`."""

    name: ServiceName
    """Name, which the agent and other services can use as a host name."""
    dockerfile: Dockerfile | None = None
    """Dockerfile of its files; on a cluster, over the same base image as the task's. The task's own when left out."""
    command: Annotated[
        list[Annotated[str, StringConstraints(max_length=65_536)]], Field(max_length=256), AfterValidator(named_program)
    ] = []
    """Program and arguments, or one text for the shell. ENTRYPOINT of its Dockerfile when left out."""
    args: Annotated[list[Annotated[str, StringConstraints(max_length=65_536)]], Field(max_length=256)] = []
    """Arguments of `command`. If both are left out, CMD of its Dockerfile."""
    aliases: Annotated[list[ServiceName], Field(max_length=16)] = []
    """Further host names."""
    files: Annotated[list[TaskFile], Field(max_length=TASK_FILES)] = []
    """Files that are written before it starts."""
    env: Annotated[list[EnvVar], Field(max_length=256)] = []
    """Variables of its environment."""
    user: UserName | None = None
    """User of its command; that of its image when left out."""
    working_dir: AbsolutePath | None = None
    """Folder in which its command starts; that of its image when left out."""
    depends_on: Annotated[dict[ServiceName, ServiceState], Field(max_length=MOST_SERVICES)] = {}
    """Services that must be in a state before it starts."""
    health: HealthCheck | None = None
    """How it is known to be ready."""
    completes: bool = False
    """Whether the agent starts only after its command has ended with 0, as that of a database migration."""
    volumes: Volumes = {}
    """Folders that it shares with others, by the volume's name. An empty volume gets the content of the folder that
    it replaces.
    """


def services_problem(services: list[TaskService]) -> str | None:
    """Return why these services cannot start in any order; None if they can."""
    known = {service.name: service for service in services}
    for service in services:
        for name, state in service.depends_on.items():
            if name not in known:
                return f"service {service.name!r} depends on {name!r}, which is not a service of this task"
            # Its Dockerfile may have a HEALTHCHECK.
            if state is ServiceState.HEALTHY and known[name].health is None and known[name].dockerfile is None:
                return f"service {service.name!r} waits until {name!r} is Healthy, but {name!r} has no health check"
    begun: set[str] = set()
    while len(begun) < len(known):
        ready = {name for name, service in known.items() if service.depends_on.keys() <= begun}
        if ready <= begun:
            circle = ", ".join(sorted(known.keys() - begun))
            return f"services {circle} wait for each other; remove one of their dependsOn"
        begun |= ready
    return None
