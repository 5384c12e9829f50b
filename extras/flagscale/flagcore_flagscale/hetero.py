"""Translates jobs on several kinds of chips: `hetero_...` keys become node groups, meshes and a layout of layers.

Source of the checks: FlagScale 16a2dd5, `flagscale/train/arguments.py`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any

from flagcore_megatron.importing.arguments import Flags
from flagcore_megatron.space.meshes import MESHES, SIZES, SPLIT, mesh_text

from flagcore.domain.chip import Chip, normalize_name
from flagcore.spec.clusters import HostLine
from flagcore_flagscale.experiment import Machines
from flagcore_flagscale.source import Source

LAYOUT, LAYERS = "pipeline_model_parallel_layout", "hetero_pipeline_layer_split"
MESHES_KEY, TYPES = "hetero_process_meshes", "hetero_device_types"
SPACE = "experiment.auto_tuner.space"
MAX_LISTED = 4096
"""Maximum number of meshes in a space. If there are more, the planner chooses among them."""
EXPERT_SIZES = "expert_tensor_parallel_size_per_process_mesh"
_STAGES = "_per_stage_micro_batch"
OLD_KEYS = ("hetero_mode", "hetero_pipeline_stages", "hetero_micro_batch_sizes", "process_meshes")

Sizes = tuple[int, ...]
"""TP, CP, EP, DP and PP of a mesh."""


@dataclass(frozen=True, kw_only=True)
class Hetero:
    """A job on several meshes, which are groups of devices with their own parallel sizes."""

    sizes: tuple[Sizes, ...]
    types: tuple[str, ...]
    layers: tuple[int, ...] = ()
    recompute: tuple[str, ...] = ()

    @property
    def devices(self) -> list[int]:
        """The devices of each mesh."""
        return [tensor * context * data * stages for tensor, context, _, data, stages in self.sizes]

    @property
    def is_plain(self) -> bool:
        """Whether all meshes have the same sizes, so that the pipeline has one size of each kind."""
        equal = len({each[:4] for each in self.sizes}) == 1 and len(set(self.recompute)) <= 1
        return equal and [kind for kind, _ in groupby(self.types)] == list(dict.fromkeys(self.types))

    @property
    def groups(self) -> list[tuple[str, int]]:
        """The type and the devices of each node group: one for each type, or one for each mesh of a single type."""
        pairs = list(zip(self.types, self.devices, strict=True))
        if len(set(self.types)) == 1:
            return [(self.types[0], sum(self.devices))] if self.is_plain else pairs
        return [(kind, sum(count for each, count in pairs if each == kind)) for kind in dict.fromkeys(self.types)]


def hetero_of(source: Source, flags: Flags) -> Hetero | None:
    """Return the meshes, or None if `enable_hetero` is off. Raises SpecError for keys that FlagScale refuses."""
    _check_release(source, flags)
    if not flags.get("enable_hetero"):
        return None
    flat, types = flags.get(MESHES_KEY), flags.get(TYPES)
    if not _are_sizes(flat) or len(flat) % 5:
        fix = "give tp, cp, ep, dp and pp of each mesh"
        raise source.error(_key(flags, MESHES_KEY), "must be five numbers for each mesh", value=flat, fix=fix)
    sizes = tuple(tuple(flat[start : start + 5]) for start in range(0, len(flat), 5))
    if not isinstance(types, list) or len(types) != len(sizes):
        problem = f"must be a name for each of {len(sizes)} meshes"
        raise source.error(_key(flags, TYPES), problem, value=types, fix="give one for each mesh")
    if flags.get("standalone_embedding_stage"):
        key, problem = flags.key("standalone_embedding_stage"), "cannot be combined with meshes in FlagScale"
        raise source.error(key, problem, value=True, fix="set it to false")
    stages, wanted = sum(each[4] for each in sizes), flags.get("pipeline_model_parallel_size", 1)
    if wanted != stages:
        problem, fix = "is not the number of stages of all meshes", f"set it to {stages}"
        raise source.error(_key(flags, "pipeline_model_parallel_size", "train.system"), problem, value=wanted, fix=fix)
    layers, number = flags.get(LAYERS), flags.get("num_layers")
    if layers is not None and not (_are_sizes(layers, least=0) and (len(layers), sum(layers)) == (stages, number)):
        problem, fix = f"must be the layers of {stages} stages, {number} in all", "correct it, or leave it out"
        raise source.error(flags.key(LAYERS), problem, value=layers, fix=fix)
    recompute = tuple(_recompute_of(source, flags, sizes)) if flags.get("recompute_granularity") else ()
    return Hetero(sizes=sizes, types=tuple(map(str, types)), layers=tuple(layers or ()), recompute=recompute)


def _key(flags: Flags, name: str, section: str = "train.system.hetero") -> str:
    """Return the full key of a flag; for a missing flag, its usual key in `section`."""
    return flags.key(name) if flags.has(name) else f"{section}.{name}"


def _check_release(source: Source, flags: Flags) -> None:
    """Raise SpecError for keys of FlagScale before 0.6. The error names the current keys.

    Source: FlagScale v0.3 (5c75bb7), `megatron/megatron/arguments.py`; `process_meshes` (TP, DP and PP of each mesh)
    from 9838ede.
    """
    key = next((name for name in OLD_KEYS if flags.get(name) is not None), None)
    if key is None:
        return
    keys = f"{MESHES_KEY} with tp, cp, ep, dp and pp of each mesh, and {LAYERS} with the layers of each stage"
    fix = f"use enable_hetero: true, {keys}"
    if flags.get("hetero_mode") == "dp" or flags.get("hetero_micro_batch_sizes") is not None:
        fix = f"split layers instead of data: enable_hetero, {MESHES_KEY} and {LAYERS}"
    problem = "is a key of FlagScale before 0.6, which its program no longer knows"
    raise source.error(flags.key(key), problem, value=flags.get(key), fix=fix)


def _are_sizes(value: object, least: int = 1) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int and each >= least for each in value)


def _recompute_of(source: Source, flags: Flags, sizes: Sequence[Sizes]) -> Iterator[str]:
    """Yield the recomputation of each mesh: empty, `selective`, `full`, or `blockN` with N layers."""
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
    granularity, method, number = (flags.get(name) for name in names)
    rows = [_of_stages(flags.get(name + _STAGES)) for name in names]
    start = 0
    for each in sizes:
        stages = slice(start, start := start + each[4])
        found = [[value for stage in row[stages] for value in stage] for row in rows]
        values = [max(set(own), key=own.count) if own else None for own in found]
        if len({each if each[0] else (0,) for each in zip(*filter(None, found), strict=False)}) > 1:
            text = f"differs within a mesh: {values} is used for stages {stages.start} to {stages.stop - 1}"
            source.note(flags.key(names[0] + _STAGES), text, "auto_tuner.baseline")
        is_full = values[0] == 1 if values[0] is not None else granularity == "full"
        own_method = ("uniform", "block")[values[1]] if values[1] in (0, 1) else method
        layers = values[2] if values[2] is not None else number
        if not is_full:
            yield "selective" if values[0] is None and granularity == "selective" else ""
        else:
            yield f"block{layers}" if own_method == "block" and layers else "full"


def _of_stages(rows: object) -> list[list[int]]:
    """Return the values of the micro-batches of each stage. A row such as `[stages, count, value, ...]` is for several
    stages, and repeats each value for `count` micro-batches."""
    found: list[list[int]] = []
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, list) and len(row) >= 3 and all(type(each) is int for each in row):
            pairs = zip(row[1::2], row[2::2], strict=False)
            found += [[value for count, value in pairs for _ in range(count)]] * row[0]
    return found


def hetero_cluster(source: Source, hetero: Hetero, found: Machines, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the section `cluster` with a node group for each device type. `names` maps each type to its chip."""
    types, lines = list(dict.fromkeys(hetero.types)), found.lines
    has_types = {line.kind for line in lines} == set(types)
    if has_types and (len(types) > 1 or hetero.is_plain):
        groups: list[dict[str, Any]] = [_named(kind, names) for kind in types]
        section = {"hostfile": found.section["hostfile"]}
    else:
        if lines:
            text = f"dropped: its types must be those of {TYPES}, {', '.join(types)}, each on nodes of its own"
            source.note("experiment.runner.hostfile", text, "cluster.hostfile")
        pairs, section = hetero.groups, {}
        if is_tuned(source) and sum(hetero.devices) < found.nodes * found.devices and not found.nodes % len(types):
            pairs = [(kind, found.nodes // len(types) * found.devices) for kind in types]
            text = f"{found.nodes} nodes without a host file are divided evenly over {len(types)} types"
            source.note("experiment.runner.nnodes", text, "cluster.groups")
        groups = [{**_named(kind, names), **_nodes(devices, found.devices)} for kind, devices in pairs]
    if len(groups) == 1:
        groups[0].pop("name", None)
    return {**section, "groups": groups} if len(groups) > 1 else {**section, **groups[0]}


def _named(kind: str, names: Mapping[str, str]) -> dict[str, str]:
    return {"chip": names[kind], **({} if names[kind] == kind else {"name": kind})}


def is_tuned(source: Source) -> bool:
    """Return whether the configuration contains a space of the auto-tuner."""
    space = source.at(SPACE)
    return isinstance(space, dict) and bool(space)


def _nodes(devices: int, per_node: int) -> dict[str, Any]:
    """Return the keys for the nodes of a group of `devices`. A mesh on a part of a node counts as a separate node."""
    nodes = devices // per_node if devices % per_node == 0 else 1
    return {"nodes": nodes, "devices_per_node": devices // nodes}


def mixed_baseline(hetero: Hetero, baseline: Mapping[str, Any], *, derived: bool) -> dict[str, Any]:
    """Return a baseline with meshes in place of parallel sizes. `derived`: whether flagcore chooses the layer split."""
    recompute = ("use_recompute", *(f"recompute_{name}" for name in ("granularity", "method", "num_layers")))
    if hetero.is_plain:
        tensor, context, expert, data, _ = hetero.sizes[0]
        stages = sum(each[4] for each in hetero.sizes)
        sizes = {"tp": tensor, "pp": stages, "cp": context, "ep": expert, "dp": data}
        own = {SIZES[name]: size for name, size in sizes.items() if size > 1 or SIZES[name] in baseline}
        off = {"use_recompute": False} if set(hetero.recompute) == {""} else {}
        split = {SPLIT: "balanced"} if derived and stages > 1 else {}
        kept = {name: each for name, each in baseline.items() if not (off and name in recompute)}
        return {**kept, **own, **off, **split}
    own_knobs = {*SIZES.values(), *recompute, "num_layers_per_virtual_pipeline_stage"}
    text = _meshes_text(hetero.types, hetero.sizes, hetero.recompute)
    return {MESHES: text, **{name: each for name, each in baseline.items() if name not in own_knobs}}


def meshes_problem(
    hetero: Hetero, batch: Any, samples: Any, cluster: Mapping[str, Any], lines: Sequence[HostLine]
) -> str:
    """Return why the meshes do not fit the global batch, the micro-batch or the cluster; empty if they fit."""
    if "groups" not in cluster:
        return ""
    first, *others = (sizes[3] for sizes in hetero.sizes)
    if not (type(batch) is int and type(samples) is int and samples > 0):
        return ""  # the rules of the spec report it
    if any(samples * first % size for size in others):
        return f"micro_batch_size x DP of the first mesh, {samples * first}, is no multiple of the DP of all meshes"
    if batch % (samples * first):
        return f"{samples * first} samples at once do not divide a global batch of {batch}"
    for group, (kind, devices) in zip(cluster["groups"], hetero.groups, strict=True):
        found = _devices_of(group, kind, lines)
        if found and found != devices:
            return f"its meshes use {devices} of {found} devices of {kind}"
    return ""


def _devices_of(group: Mapping[str, Any], kind: str, lines: Sequence[HostLine]) -> int:
    """Return the number of devices of a node group, or 0 if unknown.

    If the group does not state them, the slots of the hosts of type `kind` in the host file are counted.
    """
    of_hosts = sum(line.slots or 0 for line in lines if line.kind == kind)
    return int(group.get("nodes", 0) * group.get("devices_per_node", 0)) or of_hosts


def _meshes_text(types: Sequence[str], sizes: Sequence[Sizes], recompute: Sequence[str] = ()) -> str:
    """Return the value of the knob `meshes`."""
    is_one = len(set(types)) == 1
    names = [f"{kind}#{number}" for number, kind in enumerate(types, start=1)] if is_one else types
    parts = zip(names, sizes, recompute or [""] * len(sizes), strict=True)
    return " + ".join(mesh_text(name, dict(zip(SIZES, own, strict=True)), words) for name, own, words in parts)


def fixed_settings(source: Source, flags: Flags, hetero: Hetero, mtp_layers: int) -> dict[str, Any]:
    """Return the settings of all candidates: the tensor-parallel size of experts, and, if the auto-tuner has no space,
    the layers of each stage."""
    sizes, fixed = flags.get(EXPERT_SIZES), dict[str, Any]()
    if _are_sizes(sizes):
        fixed["expert_tensor_parallel_size"] = sizes[0]
        if len(set(sizes)) > 1:
            flags.note(EXPERT_SIZES, f"predictions use {sizes[0]} for all meshes", "train.settings")
    key = f"{SPACE}.{LAYERS}"
    if is_tuned(source) and source.take(key) is not None:
        source.note(key, "the best split of each candidate is derived", "auto_tuner.space")
    if is_tuned(source) or not hetero.layers:
        return fixed
    text = "meshes and layers of all candidates are those of the tree; remove it and space.meshes to search them"
    flags.note(LAYERS, text, f"train.settings.{LAYOUT}")
    stages = [f"t*{count}" if count else "" for count in hetero.layers]
    return {**fixed, LAYOUT: f"E{'|'.join(stages)}{'m' * mtp_layers}L"}


def chip_names(source: Source, types: Sequence[str], chips: Sequence[Chip]) -> dict[str, str]:
    """Return the chip of each device type. If several chips match a type, one with known figures is used."""
    names: dict[str, str] = {}
    for kind in dict.fromkeys(types):
        meant = [chip for chip in chips if chip.matches_name(kind)]
        like = [chip for chip in chips if normalize_name(chip.name).startswith(normalize_name(kind))]
        like.sort(key=lambda chip: (not chip.memory_bytes, not chip.dense_flops_per_second, len(chip.name)))
        names[kind] = next((chip.name for chip in (*meant, *like)), kind)
        if not meant and like:
            text = f"{kind} may be {', '.join(chip.name for chip in like)}: correct it if it is not {names[kind]}"
            source.note(f"train.system.hetero.{TYPES}", text, "cluster.groups")
    return names


def meshes_of_space(
    source: Source, hetero: Hetero, cluster: Mapping[str, Any], baseline: Mapping[str, Any], lines: Sequence[HostLine]
) -> list[str] | str:
    """Return the meshes that the space allows on a `cluster`: `auto` if the planner chooses them, and empty if there is
    only one node group."""
    entries = source.take(f"{SPACE}.{MESHES_KEY}")
    if "groups" not in cluster:
        return ""
    if not is_tuned(source):
        return [baseline[MESHES]] if MESHES in baseline else "auto"
    if not isinstance(entries, list) or len(entries) != 5 * len(hetero.sizes) or set(map(str, entries)) == {"auto"}:
        return "auto"
    counts = hetero.devices
    if len(groups := cluster["groups"]) == len(counts):
        known = [_devices_of(group, kind, lines) for group, (kind, _) in zip(groups, hetero.groups, strict=True)]
        counts = known if all(known) else counts
    choices = [_sizes(entries[5 * place : 5 * place + 5], count) for place, count in enumerate(counts)]
    number = math.prod(map(len, choices))
    if not 0 < number <= MAX_LISTED:
        text = f"dropped: {number} meshes; the planner chooses from all that are legal"
        source.note(f"{SPACE}.{MESHES_KEY}", text, f"auto_tuner.space.{MESHES}")
        return "auto"
    alike = (sizes for sizes in product(*choices) if len({(each[1], each[2] == 1) for each in sizes}) == 1)
    return [_meshes_text(hetero.types, sizes) for sizes in alike] or "auto"


def _sizes(entries: Sequence[Any], devices: int) -> list[Sizes]:
    """Return the sizes of one mesh that the entries allow. An entry is a number, a list, or `auto` for all divisors."""
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    choices = [entry if isinstance(entry, list) else divisors if entry == "auto" else [entry] for entry in entries]
    tensor, context, expert, data, stages = ([each for each in choice if type(each) is int] for choice in choices)
    return [
        (t, c, e, d, p)
        for t, c, e, d, p in product(tensor, context, expert, data, stages)
        if t * c * d * p == devices and (t * c * d) % e == 0
    ]
