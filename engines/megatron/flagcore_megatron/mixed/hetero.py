"""FlagScale's arguments for one job on several kinds of chips: meshes, layers of stages, and device types.

Source: FlagScale 16a2dd5, `flagscale/train/arguments.py`, `train/hetero` and `runner/runner_train.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from flagcore_training.commands import parse_flags

from flagcore.contracts import Platform
from flagcore.domain.space import Candidate, KnobValue
from flagcore.domain.spec import KIND, Spec, Task
from flagcore.errors import LaunchError
from flagcore_megatron.mixed.equal_meshes import data_split_refused
from flagcore_megatron.mixed.rules import tied
from flagcore_megatron.predict import stage_layers
from flagcore_megatron.program.user_command import readable_command
from flagcore_megatron.space.knobs import columns as row_of
from flagcore_megatron.space.meshes import MESHES, RECOMPUTE_CODES, RECOMPUTE_KNOBS, SIZES, Meshes
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
