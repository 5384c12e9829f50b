"""The adapters (LoRA) of a serving job: their folders, and the slots and the rank that a server has for them."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from flagcore.domain.space import BoolArray, Columns, FloatArray, KnobValue, Merge, Rule
from flagcore.domain.spec import Task
from flagcore.errors import SpecError
from flagcore.i18n import N_
from flagcore.spec.plain_data import read_mapping
from flagcore_serving.job import EngineArg, ServeSpec
from flagcore_serving.load.traffic import ADAPTER
from flagcore_serving.space.knobs import RANK, SLOTS
from flagcore_serving.space.rules import ignoring, rule

SWITCH = "enable-lora"
CONFIG = "adapter_config.json"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM for the largest rank (0.33 `config/lora.py`)."""
DEFAULT_RANK = 16


def check_adapters(serve: ServeSpec) -> None:
    """Raise SpecError if requests use adapters that are not given, or a folder has no adapter."""
    if (number := serve.loads[0].adapters) and not serve.adapters:
        problem, fix = f"is missing, but requests use {number} adapters", "list the folders of the adapters"
        raise SpecError(key="serve.adapters", problem=problem, fix=fix)
    for folder in serve.adapters:
        if not Path(folder, CONFIG).is_file():
            raise SpecError(key="serve.adapters", value=folder, problem=f"has no {CONFIG}", fix="give a PEFT adapter")


def words(serve: ServeSpec, values: Mapping[str, KnobValue], others: Mapping[str, EngineArg], flag: str) -> list[str]:
    """Return the command-line words that load the adapters of a job: `flag` names them and their folders."""
    if not serve.loads[0].adapters:
        return []
    result = [] if others.get(SWITCH) else [f"--{SWITCH}"]
    if serve.adapters and flag not in others:
        named = (f"{ADAPTER.format(number=number)}={folder}" for number, folder in enumerate(serve.adapters))
        result += [f"--{flag}", *named]
    if values.get(RANK) is None and (rank := _rank(serve)) != DEFAULT_RANK:
        result += ["--max-lora-rank", str(rank)]
    return result


def adapter_settings(
    task: Task, columns: Columns, others: Mapping[str, EngineArg], *, slots: int, on_host: object
) -> dict[str, FloatArray]:
    """Return the fields of `Settings` for adapters, which are all 0 if the server has none.

    `slots`: the engine's default. `on_host`: how many adapters the host keeps, at least as many as have slots.
    """
    serve = task.spec.serve
    has_adapters = bool(serve.loads[0].adapters or others.get(SWITCH))
    number = np.where(columns[SLOTS] > 0, columns[SLOTS], slots).astype(np.float64)
    rank = np.where(columns[RANK] > 0, columns[RANK], _rank(serve)).astype(np.float64)
    kept = np.maximum(float(on_host) if isinstance(on_host, int | float) else 0.0, number)
    fields = {"adapter_slots": number, "adapter_rank": rank, "adapters_on_host": kept}
    return {name: np.where(has_adapters, values, 0.0) for name, values in fields.items()}


def adapter_rules(task: Task, ranks: Sequence[int] = ()) -> tuple[Rule, ...]:
    """Return the rules that all adapters fit into a slot, and that its rank is one of `ranks`, if these are given."""
    rank = _largest_rank(task.spec.serve)
    text = N_("{knob} must be at least {rank}, the rank of an adapter")
    at_least = rule("adapter_rank", (RANK,), text, lambda c: (c[RANK] > 0) & (c[RANK] < rank), knob=RANK, rank=rank)
    text, values = N_("{knob} must be {values}"), ", ".join(map(str, ranks))
    known = rule("adapter_ranks", (RANK,), text, partial(_is_none_of, ranks=(0, *ranks)), knob=RANK, values=values)
    return (at_least, known) if ranks else (at_least,)


def _is_none_of(columns: Columns, ranks: Sequence[int]) -> BoolArray:
    # np.isin would import numpy.ma, which is slow
    return np.asarray(np.all([columns[RANK] != rank for rank in ranks], axis=0))


def adapter_merges(task: Task, others: Mapping[str, EngineArg]) -> tuple[Merge, ...]:
    """Return the merges that ignore the knobs of a server without adapters. Raises SpecError if requests use some."""
    if number := task.spec.serve.loads[0].adapters:
        if others.get(SWITCH) is False:
            problem = f"is off, but requests use {number} adapters"
            raise SpecError(
                key=f"serve.engine_args.{SWITCH}", value=False, problem=problem, fix="remove one of the two"
            )
        return ()
    if others.get(SWITCH):
        return ()
    return tuple(ignoring(f"no_adapters_{name}", (name,), lambda c: True) for name in (SLOTS, RANK))


def rank_of(folder: str) -> int:
    """Return the rank of the adapter in a folder, or 0 if its file cannot be read."""
    with suppress(SpecError):
        rank = read_mapping(Path(folder, CONFIG), file=CONFIG).get("r")
        return max(rank, 0) if isinstance(rank, int) else 0
    return 0


def _largest_rank(serve: ServeSpec) -> int:
    return max(map(rank_of, serve.adapters), default=0)


def _rank(serve: ServeSpec) -> int:
    """Return the smallest rank of a slot that holds all adapters, or vLLM's default if theirs is not known."""
    rank = _largest_rank(serve)
    return next((each for each in RANKS if each >= rank), rank) if rank else DEFAULT_RANK
