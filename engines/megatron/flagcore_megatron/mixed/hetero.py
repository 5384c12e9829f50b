"""FlagScale's arguments for one job on several kinds of chips: meshes, layers of stages, and device types.

Source: FlagScale 16a2dd5, `flagscale/train/arguments.py`, `train/hetero` and `runner/runner_train.py`.

In trials, flagcore's own program runs meshes of equal sizes on the hosts of their node groups.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from flagcore_training.commands import parse_flags

from flagcore.contracts import Platform
from flagcore.domain.space import Candidate, KnobValue
from flagcore.domain.spec import AUTO, KIND, Spec, Task
from flagcore.errors import LaunchError, SpecError
from flagcore_megatron.mixed.rules import tied
from flagcore_megatron.predict import stage_layers
from flagcore_megatron.program.user_command import readable_command
from flagcore_megatron.space.knobs import BY_NAME, plain_values, program_runs_meshes
from flagcore_megatron.space.knobs import columns as row_of
from flagcore_megatron.space.meshes import (
    DP,
    MBS,
    MESHES,
    MICROBATCHES,
    PP,
    RECOMPUTE_CODES,
    RECOMPUTE_KNOBS,
    SIZES,
    Meshes,
    encoded,
    groups_of_row,
)
from flagcore_megatron.space.split import EXPERT_TENSOR
from flagcore_megatron.space.stages import FIRST, LAST, LAYOUT, parse_layout

ENABLE, MESH_FLAG = "--enable-hetero", "--hetero-process-meshes"
TYPES, CURRENT_TYPE = "--hetero-device-types", "--hetero-current-device-type"
LAYERS = "--hetero-pipeline-layer-split"
EXPERT_SIZES = "--expert-tensor-parallel-size-per-process-mesh"
SHARED_EMBEDDING = "--use-partial-reduce-for-shared-embedding"
OF_STAGES = tuple(f"--{name.replace('_', '-')}-per-stage-micro-batch" for name in RECOMPUTE_KNOBS[1:])
REPLACED = (ENABLE, MESH_FLAG, LAYERS, TYPES, *OF_STAGES)
"""Arguments of the user's command that a candidate's arguments replace."""
OF_MESHES = (SIZES["tp"], SIZES["cp"], SIZES["ep"])
"""Knobs whose arguments FlagScale replaces by the values of the rank's mesh."""
PROGRAM = "flagscale/train/train_gpt.py"
NOT_PASSED = (*OF_MESHES, EXPERT_TENSOR, LAYOUT, FIRST, LAST)
METHODS = {"uniform": 0, "block": 1}


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """A mesh: its node group, its TP, CP, EP, DP and PP, and the codes of its recompute knobs.

    `recompute` is empty if the mesh has the recompute of the whole job.
    """

    group: int
    sizes: tuple[int, ...]
    recompute: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """A candidate as a mixed job of FlagScale.

    `words` are FlagScale's arguments for meshes and device types, `stages` is the number of pipeline stages, and
    `groups` are the node groups that the job uses.
    """

    words: tuple[str, ...]
    stages: int
    groups: tuple[int, ...]


def command_runs_meshes(spec: Spec) -> bool:
    """Return whether a spec's command starts FlagScale with meshes, so that trials can run meshes."""
    command = readable_command(spec)
    return command is not None and ENABLE in command.arguments


def mixed_job(platform: Platform, candidate: Candidate) -> Mixed | None:
    """Return a candidate as a mixed job of FlagScale, or None if the command does not start one. Raises LaunchError."""
    command = readable_command(platform.task.spec)
    if command is None or ENABLE not in command.arguments:
        return None
    return mixed(platform, candidate.as_dict(), command.arguments)


def mixed(platform: Platform, values: Mapping[str, KnobValue], arguments: Sequence[str] = ()) -> Mixed:
    """Return a candidate as a mixed job. `arguments` are the arguments of the user's command. Raises LaunchError."""
    task = platform.task
    meshes = _meshes(task, values)
    stages = sum(mesh.sizes[4] for mesh in meshes)
    words = [ENABLE, MESH_FLAG, *(str(size) for mesh in meshes for size in mesh.sizes)]
    words += [LAYERS, *map(str, _layers(platform, values, stages)), *_device_types(task, meshes, arguments)]
    ends = [mesh.sizes[3] for mesh in (meshes[0], meshes[-1])]
    if tied(task) and ends[0] != ends[1] and values.get("use_distributed_optimizer"):
        words += [] if SHARED_EMBEDDING in arguments else [SHARED_EMBEDDING]
    words += _recompute(task, values, meshes)
    return Mixed(words=tuple(words), stages=stages, groups=tuple(sorted({mesh.group for mesh in meshes})))


def _device_types(task: Task, meshes: Sequence[Mesh], arguments: Sequence[str]) -> Iterator[str]:
    """Yield the arguments for the type of the devices of each mesh, and of the host that runs the command."""
    types = dict(parse_flags(arguments)).get(TYPES.removeprefix("--"), [])
    kinds = [group.kind for group in task.spec.cluster.groups] or types or [task.cluster.groups[0].chip.name]
    yield from (TYPES, *(kinds[mesh.group] for mesh in meshes))
    if len(set(kinds)) > 1 and (task.spec.cluster.hosts or not arguments):
        yield from (CURRENT_TYPE, KIND)
    elif CURRENT_TYPE not in arguments:
        yield from (CURRENT_TYPE, kinds[0])


def _meshes(task: Task, values: Mapping[str, KnobValue]) -> list[Mesh]:
    """Return the meshes of a candidate. If it lists none, each node group is a mesh with its TP, CP, EP and DP."""
    if not values.get(MESHES):
        sizes = {name: int(values.get(knob) or 1) for name, knob in SIZES.items()}
        if len(task.cluster.groups) == 1:
            return [Mesh(group=0, sizes=tuple(sizes.values()))]
        devices = sizes["tp"] * sizes["cp"] * sizes["dp"]
        each = [{**sizes, "pp": group.devices // devices} for group in task.cluster.groups]
        return [Mesh(group=number, sizes=tuple(mesh_sizes.values())) for number, mesh_sizes in enumerate(each)]
    table = Meshes.from_task(task)
    row = 1 + table.texts.index(str(values[MESHES]))
    if table.splits_data[row]:
        raise data_split_refused(values[MESHES])
    return [
        Mesh(
            group=group,
            sizes=tuple(int(table.codes[knob][row, place]) for knob in SIZES.values()),
            recompute=tuple(int(table.codes[knob][row, place]) for knob in RECOMPUTE_KNOBS),
        )
        for place, group in enumerate(table.groups[row].tolist())
        if group >= 0
    ]


def _layers(platform: Platform, values: Mapping[str, KnobValue], stages: int) -> list[int]:
    """Return the number of layers of each of a candidate's `stages` pipeline stages."""
    task = platform.task
    model, layout = task.spec.model, task.spec.train.settings.get(LAYOUT)
    if layout:
        return [stage.layers for stage in parse_layout(str(layout), model.num_layers, model.mtp_num_layers)]
    derived = stage_layers(task, row_of(task, values), platform.costs)
    return derived[0] if derived and derived[0] else [model.num_layers // stages] * stages


def _recompute(task: Task, values: Mapping[str, KnobValue], meshes: Sequence[Mesh]) -> Iterator[str]:
    """Yield the recompute arguments for meshes. For candidates without meshes, they follow from the knobs."""
    codes = [mesh.recompute for mesh in meshes]
    none, selective = RECOMPUTE_CODES[""], RECOMPUTE_CODES["selective"]
    if all(code in ((), none) for code in codes):
        return
    if len(set(codes)) > 1 and selective in codes:
        problem = "FlagScale recomputes some stages in full or not at all, but not selectively"
        raise LaunchError(f"{MESHES} = {values[MESHES]}: {problem}")
    if codes[0] == selective:
        yield from ("--recompute-granularity", "selective")
        return
    used = next(code for code in codes if code != none)
    yield from ("--recompute-granularity", "full", "--recompute-method", list(METHODS)[used[2] - 1])
    yield from ("--recompute-num-layers", str(used[3]))
    if len(set(codes)) == 1:
        return
    batch = task.spec.train.global_batch_size // (int(values.get("micro_batch_size") or 1) * meshes[0].sizes[3])
    of_meshes = [(int(code != none), max(code[2] - 1, 0), max(code[3], 1)) for code in codes]
    for number, flag in enumerate(OF_STAGES):
        rows = [[mesh.sizes[4], batch, own[number]] for mesh, own in zip(meshes, of_meshes, strict=True)]
        yield from (flag, *map(str, rows))


EQUAL = "mesh_equal_sizes"
"""The rule that the meshes of a trial have equal sizes.

Source: megatron-core 0.16 `parallel_state.py`, `initialize_model_parallel` accepts one TP, CP, EP and PP for all ranks,
and derives DP; `TransformerConfig` has one recompute for all stages."""


OF_DATA = "replicas_release"
"""The rule about the engines that can run a data split.

Source: FlagScale v0.3 (5c75bb7) has `--hetero-mode dp` (`megatron/megatron/arguments.py`), da4935e has no such
argument. Megatron-LM's `pretrain_gpt.py` (0.16) has one micro-batch size and number of micro-batches for all replicas
(`num_microbatches_calculator.py`)."""


def require_runnable(task: Task) -> None:
    """Raise SpecError if the spec lists meshes that trials cannot run."""
    listed = task.spec.space.get(MESHES, AUTO)
    table = Meshes.from_task(task)
    for number, text in enumerate(table.texts if not isinstance(listed, str) else (), start=1):
        if table.splits_data[number]:
            if not program_runs_meshes(task.spec):
                problem, fix = data_problem(), "remove it: flagcore's own trial program runs it, without train.command"
                raise SpecError(key=f"auto_tuner.space.{MESHES}", value=text, problem=problem, fix=fix)
            continue
        has_mesh = table.groups[number] >= 0
        sizes = [values[number][has_mesh] for knob, values in table.codes.items() if knob != PP]
        if any((size != size[0]).any() for size in sizes):
            problem = "has meshes of other sizes, which megatron-core cannot run"
            fix = f"give all meshes the same sizes and recompute except pp, or plan with `flag estimate` ({EQUAL})"
            raise SpecError(key=f"auto_tuner.space.{MESHES}", value=text, problem=problem, fix=fix)


def data_problem() -> str:
    """Return the problem of a data split: only flagcore's trial program can run it."""
    return f"splits the data, which Megatron-LM and FlagScale after 0.3 cannot run ({OF_DATA})"


def data_split_refused(meshes: object) -> LaunchError:
    """Return the error of a candidate with these `meshes`, a data split, that a user's command is to start."""
    fix = "give the number of a candidate without one, from the list of `flag estimate`"
    return LaunchError(f"{MESHES} = {meshes} {data_problem()}; {fix}")


def shares(task: Task, candidate: Candidate) -> list[dict[str, Any]]:
    """Return the replicas on each mesh of a candidate that splits the data, as the fields of `Share` in trial/job.py.

    The list is empty for other candidates.
    """
    table, row = Meshes.from_task(task), row_of(task, candidate.as_dict())
    code, replicas = int(row[MESHES][0]) if MESHES in row else 0, []
    if not table.splits_data[code]:
        return []
    number = int(table.number(row[MESHES])[0])
    for mesh_columns in table.of_replicas(row, number, task.spec.train.global_batch_size):
        values = {knob: BY_NAME[knob].axis(()).decode(int(mesh_columns[knob][0])) for knob in (MBS, *RECOMPUTE_KNOBS)}
        count, microbatches = (int(mesh_columns[knob][0]) for knob in (DP, MICROBATCHES))
        replicas.append({"replicas": count, "microbatches": microbatches, "values": values})
    return replicas


def on_groups(task: Task, candidate: Candidate) -> Task:
    """Return the task with only the node groups of a candidate, in the order of its meshes."""
    if len(task.cluster.groups) == 1:
        return task
    order = groups_of_row(task, row_of(task, candidate.as_dict()))
    return replace(task, cluster=replace(task.cluster, groups=tuple(task.cluster.groups[group] for group in order)))


def hosts_of(task: Task, candidate: Candidate) -> tuple[str, ...]:
    """Return the hosts on which a candidate runs, in the order of its meshes."""
    cluster = task.spec.cluster
    if not cluster.groups:
        return cluster.hosts[: cluster.nodes]
    return tuple(cluster.hosts[node] for node in _in_order(task, candidate, [each.nodes for each in cluster.groups]))


def devices_of(task: Task, candidate: Candidate) -> dict[int, int]:
    """Return the device of each rank. Devices are numbered over all nodes in the order of the node groups.

    The result is empty if there is only one group.
    """
    if len(task.cluster.groups) == 1:
        return {}
    return dict(enumerate(_in_order(task, candidate, [group.devices for group in task.cluster.groups])))


def _in_order(task: Task, candidate: Candidate, counts: Sequence[int]) -> list[int]:
    """Return the indices of all nodes or devices, sorted by the candidate's meshes. `counts` are the numbers of nodes
    or devices of each group."""
    ends = list(accumulate(counts))
    order = groups_of_row(task, {MESHES: encoded(task, candidate.as_dict().get(MESHES))})
    return [index for group in order for index in range(ends[group] - counts[group], ends[group])]


def as_asked(task: Task, candidate: Candidate, effective: Mapping[str, object]) -> dict[str, object]:
    """Return the `effective` values of a trial without those that follow from the candidate's meshes."""
    if candidate.as_dict().get(MESHES) is None:
        return dict(effective)
    plain = plain_values(task, candidate)
    return {name: value for name, value in effective.items() if name not in plain or value != plain[name]}
