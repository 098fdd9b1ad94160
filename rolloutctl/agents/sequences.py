"""A batch in verl's form (`DataProto`: batch, non_tensor_batch, meta_info) as prompts, and trajectories as such a batch.

verl itself is not needed: any class of that form is taken, and the same class is returned. A column is a list, or a numpy
array of objects where the columns that came in are arrays.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rolloutctl.trajectories import Trajectory

S = TypeVar("S")
"""A class of that form; `non_tensor_batch` has a column a name, with an entry a row."""


def prompts_of(sequences: Any) -> list[str]:
    """The text of each row, from the column `messages` or `raw_prompt`: text, or messages of a system and a user.

    Raises ValueError naming the row that has none.
    """
    columns = sequences.non_tensor_batch
    name = next((name for name in ("messages", "raw_prompt") if name in columns), None)
    if name is None:
        raise ValueError(
            f"the batch has the columns {', '.join(columns) or 'none'}; expected messages or raw_prompt (verl: "
            "data.return_raw_chat=True)"
        )
    return [_text(value, f"{name}[{row}]") for row, value in enumerate(columns[name])]


def _text(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    parts = []
    for message in value:
        if message["role"] not in ("system", "user") or not isinstance(message["content"], str):
            raise ValueError(f"{where} has a message of {message['role']}; expected text of a system and a user alone")
        parts.append(message["content"])
    return "\n\n".join(parts)


def with_trajectories(
    sequences: S, trajectories: Sequence[Trajectory], failures: Sequence[Exception | None], *, include: bool
) -> S:
    """The batch with these columns: `responses` (text), `response_ids` and `response_mask` (1 for each token that the model
    sampled; None where it gave no ids), `final_rewards` (None where nothing was graded), `errors` (None, or why the
    row was lost to infrastructure), and with `include` the whole `trajectories`.
    """
    columns: dict[str, list[Any]] = {
        "responses": [trajectory.get_final_response() for trajectory in trajectories],
        "response_ids": [],
        "response_mask": [],
        "final_rewards": [trajectory.get_total_reward() for trajectory in trajectories],
        "errors": [None if failure is None else str(failure) for failure in failures],
    }
    for trajectory in trajectories:
        ids, mask = _response(trajectory)
        columns["response_ids"].append(ids)
        columns["response_mask"].append(mask)
    if include:
        columns["trajectories"] = [trajectory.to_dict() for trajectory in trajectories]
    make: Callable[..., S] = type(sequences)
    given: Any = sequences
    return make(
        batch=given.batch,
        non_tensor_batch={**given.non_tensor_batch, **_as_columns(given, columns)},
        meta_info=given.meta_info,
    )


def _response(trajectory: Trajectory) -> tuple[list[int] | None, list[int] | None]:
    """What follows the prompt. A conversation that was begun anew has several token sequences, and none is the response."""
    if len(trajectory.tokens) != 1 or 1 not in (branch := trajectory.tokens[0]).mask:
        return None, None
    start = branch.mask.index(1)
    return branch.token_ids[start:], branch.mask[start:]


def _as_columns(sequences: Any, columns: Mapping[str, list[Any]]) -> dict[str, Any]:
    if any(isinstance(column, list) for column in sequences.non_tensor_batch.values()):
        return dict(columns)
    import numpy as np  # DataProto needs it, and nothing else here does

    arrays = {}
    for name, values in columns.items():
        arrays[name] = np.empty(len(values), dtype=object)
        arrays[name][:] = values
    return arrays
