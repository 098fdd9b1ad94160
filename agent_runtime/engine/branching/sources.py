"""Rollouts that continue from a turn of another one (`tasks.branch`).

The source's records are read when the run starts, and written to `branches/<group>.json.zst` of that run, with the
layers of the snapshot. Afterwards the source may change or be deleted.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from agent_runtime.recording.build_steps import FOLDER as BUILDS_FOLDER
from agent_runtime.recording.build_steps import parse_entry
from agent_runtime.recording.job_record import JobRecord, task_list
from agent_runtime.recording.layers import Layers
from agent_runtime.recording.reader import NoSuchRun, RunReader, open_run
from agent_runtime.recording.segments import RecordCorrupt, compress, decompress, json_bytes, validated
from agent_runtime.recording.store import StorageError, Store, local_folder
from agent_runtime.recording.stream import StreamRecord
from agent_runtime.tasks import TaskProblem, TaskSourceError, TaskSourceUnavailable, load_tasks
from agent_runtime.tasks.place import SourcePlace
from rollout_api.base import ApiModel
from rollout_api.files import Dockerfile
from rollout_api.model import ModelSpec
from rollout_api.records import (
    AttemptRecord,
    CheckpointRecord,
    IntentRecord,
    Layer,
    ObservationsRecord,
    PolicySpan,
    Record,
    ResponseRecord,
    SnapshotRecord,
)
from rollout_api.rollout_job import RolloutJob
from rollout_api.sandbox import SandboxOverrides
from rollout_api.services import TaskService
from rollout_api.tasks import Task, TaskBranch, Tasks, TaskVerifier

UNCOPIED: Final[dict[str, object]] = {"logprobs": None, "routed_experts": None, "agent_seconds": None}
"""Fields of an answer that its copy does not have."""
NEEDS_SNAPSHOT = (
    "a task with services can only be branched at a turn with a snapshot of its own, because its tool calls cannot be run "
    "again: set sandbox.snapshotEveryTurns to 1 in the source"
)


class Origin(ApiModel):
    """The recorded state from which a group continues."""

    job: str
    """URI of the source's run."""
    earlier_jobs: list[str] = []
    """URIs of the runs that the source's own rollouts were branched from."""
    index: int
    attempt: int
    turn: int
    strict: bool
    task: Task
    """The source's task, with its sandbox."""
    task_file: str | None = None
    """Absolute path of the file or folder that lists the task, if it is on this machine. It has hidden files."""
    snapshot: SnapshotRecord | None
    """The latest snapshot at or before the turn."""
    snapshot_results: int
    """Number of records of tool results in `prefix` whose calls the snapshot includes, and that need not run again; 0
    without a snapshot.
    """
    layers_uri: str
    """Output of the source, which has the snapshot's layers until `fix_origins` has copied them."""
    prefix: list[Record]
    """Copies of the source's model calls and tool results up to the turn."""

    @property
    def name(self) -> str:
        """Return a name that no other state has, wherever its run is stored."""
        return f"{self.job.rpartition('/')[2]}/{self.index}/{self.turn}"

    @property
    def private(self) -> list[Path]:
        """Return what has the task with its hidden files on this machine."""
        folders = (local_folder(uri) for uri in (self.job, *self.earlier_jobs))
        files = [Path(self.task_file)] if self.task_file else []
        return [*files, *(folder for folder in folders if folder is not None)]


class _Run:
    """A source run, opened once for all entries that refer to it."""

    def __init__(self, output: Store, reader: RunReader, base_dir: Path, environ: Mapping[str, str]) -> None:
        self.output, self.reader = output, reader
        self._base_dir, self._environ = base_dir, environ
        self._listed: Sequence[Task] | None = None

    async def task(self, group: int) -> Task:
        """Return the task of a group. Raises ValueError."""
        tasks, store = self.reader.job.spec.tasks, self.reader.store
        if tasks.branch is not None:
            origin = await read_origin(store, group)
            if origin is None:
                raise ValueError(f"its group {group} is a branch that has never begun")
            return origin.task
        if tasks.stream is not None:
            submitted = await StreamRecord(store).entry(group)
            if submitted is None:
                raise ValueError(f"group {group} was never submitted to the source")
            return submitted.task
        if self._listed is None:
            loaded = await asyncio.to_thread(load_tasks, tasks, self._base_dir, self._environ)
            if task_list(loaded.tasks) != self.reader.job_file.tasks:
                raise ValueError("the source's tasks have changed since it began")
            self._listed = loaded.tasks
        if group >= len(self._listed):
            raise ValueError(
                f"the source has {len(self._listed) * self.reader.job.spec.group_size} rollouts; lower index"
            )
        return self._listed[group]

    def _task_file(self) -> str | None:
        source = self.reader.job.spec.tasks.from_
        path = None if source is None else SourcePlace(source, self._base_dir, {}).local_path
        return None if path is None else str(path.absolute())

    async def branched(self, entry: TaskBranch) -> Task:
        """Return the task of an entry, under the name of its branches. Raises ValueError."""
        spec = self.reader.job.spec
        if spec.agent.is_program:
            raise ValueError(
                f"its agent {spec.agent.type} is a program, whose processes are not restored, so it cannot be branched; "
                "use an agent that calls the model through its context"
            )
        if spec.agent.mcp_servers:
            raise ValueError("its agent has MCP servers, whose state is not restored, so it cannot be branched")
        task = await self.task(entry.index // spec.group_size)
        if task.environment is not None or task.steps:
            what = "acts in an environment" if task.environment is not None else "has steps"
            raise ValueError(f"its task {what}, so that a branch cannot continue in the middle; branch other tasks")
        return task.model_copy(update={"name": f"{task.name[:150]}@{entry.index}.{entry.turn}"})

    async def origin(self, entry: TaskBranch, task: Task, *, keeps_ids: bool) -> Origin:
        """Return the origin of its branches, as recorded at this moment. Raises ValueError."""
        reader = self.reader
        seal = reader.seals.get(entry.index)
        attempts = await reader.attempts(entry.index)
        attempt = seal.result.attempt if seal is not None else max(attempts, default=0)
        records = await reader.journal(entry.index, attempt)
        last = last_turn(records)
        if any(isinstance(record, CheckpointRecord) and record.turn <= entry.turn for record in records):
            raise ValueError(
                f"its agent kept checkpoints of its workspace up to turn {entry.turn}, and the workspace that it "
                "used then "
                "cannot be restored; branch it at an earlier turn"
            )
        if entry.turn > last:
            known = "no turn with its tool results yet" if last < 0 else f"turns 0 to {last} to branch from"
            raise ValueError(f"turn {entry.turn} is not recorded: it has {known}")
        changed = next((r.task for r in reversed(records) if isinstance(r, AttemptRecord) and r.task is not None), None)
        if changed is not None:  # a plugin of that job changed the task
            task = changed.model_copy(update={"name": task.name})
        sandbox = task.sandbox.apply(reader.job.spec.sandbox)
        own = {name: getattr(sandbox, name) for name in SandboxOverrides.model_fields}
        task = with_its_builds(task.model_copy(update={"sandbox": SandboxOverrides(**own)}), reader.job.spec.tasks)
        snapshot, snapshot_results = latest_snapshot(records, entry.turn)
        prefix = copied(records, entry.turn, keeps_ids=keeps_ids)
        if task.services and (snapshot is None or snapshot_results < len(results_in(prefix))):
            raise ValueError(f"{why_no_snapshot(records, entry.turn)}; {NEEDS_SNAPSHOT}")
        earlier = await read_origin(reader.store, entry.index // reader.job.spec.group_size)
        return Origin(
            job=reader.store.uri,
            earlier_jobs=[] if earlier is None else [earlier.job, *earlier.earlier_jobs],
            index=entry.index,
            attempt=attempt,
            turn=entry.turn,
            strict=entry.strict,
            task=task,
            task_file=self._task_file() if earlier is None else earlier.task_file,
            snapshot=snapshot,
            snapshot_results=snapshot_results,
            layers_uri=self.output.uri,
            prefix=prefix,
        )


def with_its_builds(task: Task, source: Tasks) -> Task:
    """Return a task whose Dockerfiles have what its job gave to all of them. Not the secrets: a recorded run may be of
    others, and names variables of the environment.
    """
    given = source.dockerfiles
    if given is None:
        return task

    def complete(dockerfile: Dockerfile | None) -> Dockerfile | None:
        if dockerfile is None:
            return None
        args, bases = {**given.args, **dockerfile.args}, {**given.bases, **dockerfile.bases}
        return dockerfile.model_copy(update={"args": args, "bases": bases})

    def completed(part: TaskVerifier | TaskService) -> TaskVerifier | TaskService:
        return part.model_copy(update={"dockerfile": complete(part.dockerfile)})

    return task.model_copy(
        update={
            "dockerfile": complete(task.dockerfile),
            "verifier": task.verifier and completed(task.verifier),
            "services": list(map(completed, task.services)),
        }
    )


class _Runs:
    """The runs to which the entries of one job refer."""

    def __init__(self, base_dir: Path, environ: Mapping[str, str]) -> None:
        self._base_dir, self._environ = base_dir, environ
        self._opened: dict[str, _Run] = {}

    async def open(self, job: str) -> _Run:
        """Return the run in that folder or at that URI. Raises ValueError, NoSuchRun, RecordCorrupt, StorageError."""
        uri = job.rstrip("/")
        if "://" not in uri:
            folder = (self._base_dir / uri).resolve()
            if not folder.parent.is_dir():
                raise ValueError(f"the folder {folder.parent} does not exist; give the folder or URI of a run")
            uri = str(folder)
        if uri not in self._opened:
            parent, _, name = uri.rpartition("/")
            output = Store.open(parent, self._environ)
            self._opened[uri] = _Run(output, await open_run(output, name), self._base_dir, self._environ)
        return self._opened[uri]


async def find_origins(
    job: RolloutJob, base_dir: Path, environ: Mapping[str, str], run: Store | None = None
) -> list[Origin]:
    """Return the origin of each group of a job with `tasks.branch`: from `run`, the job's own run, if recorded there,
    else from the source.

    Raises TaskSourceError with all problems.
    """
    kind, problems = TaskSourceError, list[TaskProblem]()
    origins: list[Origin] = []
    names: set[str] = set()
    runs = _Runs(base_dir, environ)
    for number, entry in enumerate(job.spec.tasks.branch or []):
        try:
            origin = None if run is None else await read_origin(run, number)
            if origin is None:
                source = await runs.open(entry.job)
                _refuse_other_agent(source.reader.job, job, entry.turn)
                task = await source.branched(entry)
                if task.name in names:
                    task = task.model_copy(update={"name": f"{task.name}-{number}"})
                keeps_ids = same_tokens(source.reader.job.spec.model, job.spec.model)
                origin = await source.origin(entry, task, keeps_ids=keeps_ids)
                _refuse_spent_budget(origin, job)
            names.add(origin.task.name)
            origins.append(origin)
        except (ValueError, NoSuchRun, RecordCorrupt, StorageError) as error:
            where = f"tasks.branch[{number}]: rollout {entry.index} of {entry.job}"
            problems.append(TaskProblem(where, None, str(error)))
            kind = TaskSourceUnavailable if isinstance(error, RecordCorrupt | StorageError) else kind
    if problems:
        raise kind(problems)
    return origins


async def fix_origins(record: JobRecord, found: Sequence[Origin], environ: Mapping[str, str]) -> dict[int, Origin]:
    """Write the origins of a run's groups; existing ones are kept. Raises TaskSourceError, RecordCorrupt, StorageError."""
    origins = {}
    written = [await read_origin(record.store, group) for group in range(len(found))]
    for job, uri in {
        o.job: o.layers_uri for o, standing in zip(found, written, strict=True) if standing is None
    }.items():
        await _adopt_builds(record, Store.open(uri, environ), job.rpartition("/")[2])
    for group, (origin, standing) in enumerate(zip(found, written, strict=True)):
        if standing is None:
            output = Store.open(origin.layers_uri, environ)
            for layer in origin.snapshot.all_layers if origin.snapshot else []:
                if not await _take_over(layer, output, record):
                    # The layers were deleted with the source in the meantime. Without a snapshot, all calls run again.
                    origin = origin.model_copy(update={"snapshot": None})
            await record.store.create(_key(group), compress(json_bytes(origin)))
            standing = await read_origin(record.store, group)
            assert standing is not None, "written above"
        origins[group] = standing
    return origins


async def _take_over(layer: Layer, output: Store, record: JobRecord) -> bool:
    """Have a run name a layer of this output, which is copied if the run has another one. Returns whether it is stored.
    Raises RecordCorrupt if a layer to copy is missing.
    """
    own = Layers(record.output, record.store)
    if output.uri == record.output.uri:
        await own.name(layer)
        return await own.has(layer)
    await own.keep(Layers(output, record.store).load(layer), layer.bytes)
    return True


async def _adopt_builds(record: JobRecord, output: Store, name: str) -> None:
    """Have the run use what Dockerfiles and setups have become in a run of another output, or the same. Another build of the
    same instructions has other files than those in which that run's agents worked.
    """
    source = output.below(name)
    keys = [meta.key for meta in await source.list(BUILDS_FOLDER)]

    async def adopt(key: str, data: bytes | None) -> None:
        entry = None if data is None else parse_entry(data)
        if data is None or entry is None:
            return
        if not await _take_over(entry.layer, output, record):
            raise RecordCorrupt(key, f"the layer of {entry.step!r} is missing, which the branches of {source.uri} need")
        if await record.store.create(key, data):
            return
        other = parse_entry(await record.store.get(key) or b"")
        if other is None or (other.layer, other.over) != (entry.layer, entry.over):
            message = (
                f"the step {entry.step!r} has another result in {source.uri} than in other runs: use a job for each"
            )
            raise TaskSourceError([TaskProblem("tasks.branch", None, message)])

    await asyncio.gather(*map(adopt, keys, await source.get_all(keys)))


async def read_origin(run: Store, group: int) -> Origin | None:
    """Return the origin of a group in a branching run; None before it is written. Raises RecordCorrupt."""
    key = _key(group)
    data = await run.get(key)
    if data is None:
        return None
    return validated(key, Origin.model_validate_json, decompress(key, data))


def last_turn(records: Sequence[Record]) -> int:
    """Return the last turn from which an agent can continue: its tool results are recorded, and none of them ended the
    rollout.
    """
    results = results_in(records)
    # Calls of a turn may have been run one by one, with a record each.
    ended = {record.turn for record in results} - {record.turn for record in results if _stops(record)}
    # A turn without tool calls has no results. It is complete because another turn followed.
    begun = [record.turn for record in records if isinstance(record, IntentRecord)]
    return max((*ended, max(begun, default=0) - 1))


def _stops(record: ObservationsRecord) -> bool:
    return any(result.stop for result in record.results)


def results_in(records: Sequence[Record]) -> list[ObservationsRecord]:
    return [record for record in records if isinstance(record, ObservationsRecord)]


def latest_snapshot(records: Sequence[Record], turn: int) -> tuple[SnapshotRecord | None, int]:
    """Return the latest snapshot for branches of a turn, and the number of records of tool results before it.

    Their turns do not say which calls a snapshot includes: an agent may run a turn's calls one by one, and after turns
    of a sub-agent.
    """
    copies = len(results_in(copied(records, turn, keeps_ids=False)))
    found: tuple[SnapshotRecord | None, int] = None, 0
    results = 0
    for record in records:
        if isinstance(record, ObservationsRecord):
            results += 1
        elif isinstance(record, SnapshotRecord) and record.layers and record.turn <= turn and results <= copies:
            found = record, results
    return found


def why_no_snapshot(records: Sequence[Record], turn: int) -> str:
    """Return why there is no snapshot with the results of all calls up to a turn. Pure."""
    failed = [r.message for r in records if isinstance(r, SnapshotRecord) and r.turn == turn and not r.layers]
    return f"the snapshot of turn {turn} failed: {failed[0]}" if failed else f"there is no snapshot of turn {turn}"


def copied(records: Sequence[Record], turn: int, *, keeps_ids: bool) -> list[Record]:
    """Return copies of the records up to and including `turn`, for another rollout.

    Another rollout sampled their tokens, so they get no policy version, and nothing trains on them. If another model
    continues, their ids are left out too, because they may mean something else to it.
    """
    found: list[Record] = []
    for record in records:
        if isinstance(record, IntentRecord) and record.turn > turn:
            break  # later results of earlier turns do not exist yet at that turn
        if isinstance(record, IntentRecord | ObservationsRecord) and record.turn <= turn:
            found.append(record.model_copy(update={"agent_seconds": None}))
        elif isinstance(record, ResponseRecord) and record.turn <= turn:
            ids = record.completion_token_ids
            changes: dict[str, object] = {"policy_spans": [PolicySpan(tokens=len(ids), version=None)] if ids else []}
            if not keeps_ids:
                changes |= {
                    "prompt_token_ids": None,
                    "completion_token_ids": None,
                    "prompt_keep": 0,
                    "policy_spans": [],
                }
            found.append(record.model_copy(update=changes | UNCOPIED))
    return found


def same_tokens(source: ModelSpec | None, own: ModelSpec | None) -> bool:
    """Whether both models use the same token ids, judging by their names."""
    return source is not None and own is not None and _model_name(source) == _model_name(own)


def _model_name(spec: ModelSpec) -> str:
    if spec.endpoint is not None:
        return spec.endpoint.name
    if spec.server is not None:
        return spec.server.model.model_dump_json()
    return spec.server_ref or spec.function or "scripted"


def _refuse_other_agent(source: RolloutJob, own: RolloutJob, turn: int) -> None:
    """Raise ValueError unless the agent can repeat the source's turns, which a replay requires."""
    if own.spec.agent.max_turns <= turn + 1:
        raise ValueError(
            f"spec.agent.maxTurns is {own.spec.agent.max_turns}, and {turn + 1} turns are copied; raise it"
        )
    if own.spec.agent.mcp_servers:
        raise ValueError(
            "spec.agent.mcpServers: remove them; a branch starts after the turns in which they would start"
        )
    for field in ("type", "tools", "system_prompt"):
        theirs, ours = getattr(source.spec.agent, field), getattr(own.spec.agent, field)
        if theirs != ours:
            name = "systemPrompt" if field == "system_prompt" else field
            raise ValueError(
                f"spec.agent.{name} is {ours!r} here and was {theirs!r} there; a branch must have its source's settings"
            )


def _refuse_spent_budget(origin: Origin, own: RolloutJob) -> None:
    """Raise ValueError if the copied turns use up the branch's budget."""
    budget = own.spec.agent.token_budget
    usages = [record.usage for record in origin.prefix if isinstance(record, ResponseRecord)]
    copied_tokens = sum(usage.prompt_tokens + usage.completion_tokens for usage in usages)
    if budget is not None and copied_tokens >= budget:
        raise ValueError(
            f"spec.agent.tokenBudget is {budget}, and the copied turns have {copied_tokens} tokens; raise it"
        )


def _key(group: int) -> str:
    return f"branches/{group}.json.zst"
