"""Converts configurations of fine-tuning frameworks to specs.

A framework runs on DeepSpeed, Megatron-LM or torch's FSDP2, which is the engine of the spec.
"""

import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from flagcore_importers.dialect import OFF, SUFFIXES, flat, name_of, placed, read_config
from flagcore_models.public import model_of
from flagcore_training.adapters import (
    NAMES,
    SHARED,
    TARGETS,
    absent_targets,
    adapter_section,
    add_parameters,
    by_own_name,
    layer_names,
    linear_layers,
)
from flagcore_training.commands import cluster_of, parse, with_places
from flagcore_training.frameworks import CONFIG, DEPTHS, MEGATRON, PROGRAM, RECOMPUTE, SIZES, Reading, framework_of
from flagcore_training.knobs import note_effects
from flagcore_training.lengths import assumed_lengths
from flagcore_training.peft import TABLE, Peft

from flagcore.domain.launch import Start
from flagcore.domain.model import Model
from flagcore.domain.spec import Adapter
from flagcore.domain.work import LONGEST, PACKED
from flagcore.errors import SpecError, join_errors
from flagcore.spec.models import model_from
from flagcore.spec.plain_data import Notes
from flagcore_trainers import fully_shard as fs
from flagcore_trainers.importing import MICRO, MICRO_KEY, STEPS, Imported, effects_of_deepspeed

CUT = 1024
"""The longest sample, in tokens, where a configuration limits none."""
SCHEDULES = {"interleaved1f1b": "interleaved", "zbvzerobubble": "zbv", "dualpipev": "dualpipev"}
STAGE, DEVICE = "zero_optimization.stage", "zero_optimization.offload_optimizer.device"
BUCKET, OVERLAP = "zero_optimization.reduce_bucket_size", "zero_optimization.overlap_comm"
OF_SHARDS = (fs.OFFLOAD, fs.COMPILE, "reshard", "shard", "replicate", "synchronizes")
"""Meanings that only jobs on FSDP have."""
PATHS = [
    f"{model}.layers.{layer}.{part}."
    for model in ("model", "model.language_model", "language_model.model")
    for part in ("self_attn", "mlp")
    for layer in range(64)
]
"""Where the patterns of adapters look for layers, which PEFT compares with whole paths."""
_ALL = re.compile(r"all(-linear)?|\*(_proj)?")
"""Names of all linear layers of a decoder."""
_QUANTIZED = re.compile(r"(?i)\b(gptq|awq|nf4|bnb-4bit|int4|(nv|mx)fp4|(fp|int)8)\b")
"""The format of weights in the name of a model."""
_FULL = ("full", "none", "false")
"""The kinds of adapters that are none."""
Part = tuple[dict[str, Any], dict[str, Any]]
"""A part of `train`, with the engine, and the values of its knobs."""


def spec_of(start: Start, directory: Path, model: str | None) -> Imported:
    """Return the data of a spec for a command of a framework, and notes. Raises SpecError."""
    notes, read = Notes(), Reading(framework_of(start.words) or "", start, directory)
    _check(read, notes)
    section = model_of(model, [read.value("model")], directory, notes)
    cluster = _cluster(read, start, notes)
    devices, micro = cluster["nodes"] * cluster["devices_per_node"], read.size("micro_batch_size")
    replicas = max(devices // math.prod(map(read.size, SIZES[:3])), 1)
    steps = read.number("accumulation") or max(1, -(-(read.number("samples") or 0) // (micro * devices)))
    total = read.number("global_batch_size") or micro * steps * replicas
    train: dict[str, Any] = {
        "seq_length": _longest(read, notes),
        "global_batch_size": total,
        "precision": _precision(read),
    }
    train |= {"attention": "unfused"} if read.is_on("unfused") else {}
    train |= {DEPTHS: depths} if (depths := read.value(DEPTHS)) is not None else {}
    train |= _lengths(read, train["seq_length"], notes) | _adapter(read, notes)
    if notes.problems:
        raise join_errors(notes.problems)
    shape = model_from(section, base=directory)
    own, baseline = _part(read, shape, devices, replicas, notes)
    is_split = read.is_on("fsdp") or baseline.get("zero_stage") == 3
    is_peft = "adapter" in train and not read.on_megatron and "own_adapters" not in read.row
    if is_peft and "targets" in train["adapter"]:
        named, other = by_own_name(shape, _targets(read.value("targets")))
        train["adapter"]["targets"] = adapter_section("lora", None, named).get("targets", train["adapter"]["targets"])
        if other:
            text = f"{', '.join(other)[:80]}: {shape.family} has these layers by other names: PEFT adapts none"
            notes.note("adapter", text, "train.adapter.targets")
    if shape.experts and "adapter" in train and not read.on_megatron and "lists_layers" in read.row:
        _list_layers(shape, train["adapter"], notes)
    if is_peft and shape.experts:
        add_parameters(shape, train["adapter"], read)
    is_left = shape.experts and "base" in train.get("adapter", {}) and not read.is_on("experts")
    if is_left and "casts" in read.row and not is_split:
        train["adapter"]["fp32_experts"] = True
        text = "without it, experts are not quantized, but cast to fp32"
        notes.note(read.keys["experts"].names[0], text, "train.adapter.fp32_experts")
    elif is_left:
        text = "are not quantized: transformers 5 leaves them in 16 bits, which earlier releases do not"
        notes.note("experts", text, "train.adapter")
    is_cast = "base" in train.get("adapter", {}) or baseline.get("zero_stage") or read.is_on("pure")
    if "adapter" in train and "loads_fp32" in read.row and not is_cast:
        train["adapter"]["base"] = "fp32"
        text = "is not set: weights are loaded in fp32, and frozen ones stay in it; bfloat16 halves their memory"
        notes.note(name_of(read.keys["pure"].names[0]), text, "train.adapter.base")
    if "command" not in own:
        own |= {"command": read.words, "directory": str(read.directory)}
        text = f"trials of {own['engine']} do not start it: the spec is for `flag estimate` and `flag export`"
        notes.note("command", text, "train.engine")
    own["command"] = [*with_places(own["command"], cluster["nodes"])]
    _note_unread(read, notes)
    targets = train.get("adapter", {}).get("targets")
    if absent := absent_targets(shape, targets and Adapter(targets=tuple(targets))):
        notes.note("adapter", f"{', '.join(absent)}: the model has no such layers", "train.adapter")
    if is_peft and Peft.of(shape).refuses(targets):
        text = f"PEFT 0.21 ends with an error, as it puts none beside out_proj of {shape.family}: name the other layers"
        notes.note("adapter", text, "train.adapter")
    of_stage = _of_stage(read, total, micro * replicas, notes)
    tuner: dict[str, Any] = {"baseline": {**baseline, "micro_batch_size": of_stage or micro}}
    names = {"deepspeed": (fs.AC, fs.TP, fs.CP), "fsdp2": (fs.STATES, fs.REDUCE)}.get(own["engine"], ())
    if fixed := {name: [baseline[name]] for name in names if name in baseline}:  # what no trial changes
        tuner["space"] = fixed
    return {"model": section, "cluster": cluster, "train": {**own, **train}, "auto_tuner": tuner}, notes.notes


def _check(read: Reading, notes: Notes) -> None:
    """Report what is not predicted, and sizes that are none."""
    for key, pattern in read.row["refused"].items():
        value = next((each for name, each in read.given.items() if name.partition(".")[0] == key), None)
        if value not in OFF and re.search(pattern, str(value)):
            problem = "is not predicted, as only next-token training of all weights or of LoRA, DoRA or QLoRA is"
            notes.report(key, problem, value=value, fix="describe it in a spec with engine: command")
    _check_together(read, notes)
    for name in ("longest", "micro_batch_size", "accumulation", "global_batch_size", *SIZES):
        if read.number(name) is None:
            for key, value in read.set_in_command(name).items():
                notes.report(key, "is not a positive whole number", value=value, fix="correct it")


def _check_together(read: Reading, notes: Notes) -> None:
    """Report keys that a framework refuses without, or beside, others: `needs` and `excludes` of `frameworks.yaml`."""
    for table, is_excluded in (("needs", False), ("excludes", True)):
        for entry, others in read.row.get(table, {}).items():
            key, _tilde, pattern = entry.partition("~")
            value = read.given.get(key)
            found = [each for each in others if read.given.get(each) not in OFF]
            if value in OFF or not re.search(pattern, str(value)) or bool(found) != is_excluded:
                continue
            names = ", ".join(found) if is_excluded else " or ".join(others)
            problem = f"is refused by the framework {'beside' if is_excluded else 'without'} {names}"
            notes.report(key, problem, value=value, fix=f"{'remove' if is_excluded else 'set'} {names}")


def _precision(read: Reading) -> str:
    """Return the precision of matrix products."""
    if read.is_on("fp16"):
        return "fp16"
    return "fp32" if read.is_on("fp32") and not read.is_on("bf16") else "bf16"


def _part(read: Reading, shape: Model, devices: int, replicas: int, notes: Notes) -> Part:
    """Return the part of `train` with the engine, and the values of its knobs."""
    is_ddp = devices > 1 and not (read.is_on("fsdp") or read.size(fs.EP) > 1)
    if read.on_megatron:
        return _on_megatron(read, shape)
    has_zero = read.is_on("deepspeed") or any(key.startswith("deepspeed.") for key in read.given)
    is_full = str(read.value("adapter") or "full").lower() in _FULL
    if shape.experts and is_full and not (has_zero or read.is_on("fsdp") or read.is_on("pure")):
        text = "autocast leaves the products of experts in the fp32 of the weights, which takes longer than predicted"
        notes.note("experts", text, "train.precision")  # transformers 5.24 `integrations/moe.py`, torch 2.13
    if is_ddp or has_zero:
        return on_deepspeed(read, shape.hidden_size, notes)
    own, baseline = on_fsdp(read, replicas)
    if devices > 1 and not read.is_on("fsdp"):
        notes.note("ddp", "replicas with different experts are predicted as if they shared weights", "train.engine")
    return own, baseline


def _note_unread(read: Reading, notes: Notes) -> None:
    """Add notes on the keys that are not in the predictions: a note for each reason."""
    reasons = dict[str, list[str]]()
    for each in read.unread():
        reasons.setdefault(f"not in the predictions{each.reason}", []).append(each.key)
    for text, keys in reasons.items():
        notes.note(", ".join(keys), text, "train")


def _of_stage(read: Reading, total: int, local: int, notes: Notes) -> int | None:
    """Return the micro-batch size of a pipeline, if it has one. `local`: the samples of all replicas' batches."""
    of_stage = read.number("pipeline_micro_batch") if read.size(fs.PP) > 1 else None
    if of_stage and (runs := total // local) > 1:
        micro = read.size("micro_batch_size")
        text = f"pipelines end after each local batch of {micro}, but are predicted as if once a step: {runs} times "
        text += f"the step of a spec with global_batch_size: {local} is nearer"
        notes.note(name_of(read.keys["micro_batch_size"].names[0]), text, "train.global_batch_size")
    return of_stage


def _longest(read: Reading, notes: Notes) -> int:
    """Return the length of a packed sequence, or of the longest sample."""
    if length := read.number("longest"):
        return length
    text = f"{CUT} is assumed, as nothing limits samples: write the longest of your data"
    notes.note("train.seq_length", text, "train.seq_length")
    return CUT


def _lengths(read: Reading, longest: int, notes: Notes) -> dict[str, Any]:
    """Return `train.lengths`. Samples that attend to each other are one sample."""
    is_packed = read.is_on("packed")
    if read.is_on("full") and not is_packed:
        return {}
    batching = PACKED if is_packed else "seq_length" if read.is_on("padded") else LONGEST
    return {"lengths": assumed_lengths(longest, batching, notes)}


def _adapter(read: Reading, notes: Notes) -> dict[str, Any]:
    """Return `train.adapter`."""
    kind = str(read.value("adapter") or "full").lower().replace("true", "lora")
    if kind in _FULL:
        return {}
    if kind not in ("lora", "qlora", "dora"):
        notes.report(
            name_of(read.keys["adapter"].names[0]), "is not predicted", value=kind, fix="use full, LoRA, DoRA or QLoRA"
        )
    targets = None if read.is_on("all_linear") else _targets(read.value("targets"))
    section = adapter_section(
        "dora" if read.is_on("dora") else kind, read.number("rank"), targets, _base(read, kind, notes)
    )
    _note_layers(targets, section, notes)
    further = {"quantized_experts": "base" in section and read.is_on("experts"), "dropout": read.is_on("dropout")}
    return {"adapter": section | {key: True for key, is_set in further.items() if is_set}}


def _list_layers(shape: Model, adapter: dict[str, Any], notes: Notes) -> None:
    """Set the targets of adapters beside all linear layers, which a framework lists by name. Experts are not linear.

    Gates of shared experts have no name in a spec: models with them keep what PEFT takes for all layers.
    """
    if "targets" not in adapter and shape.family not in TABLE["shared_gates"]:
        adapter["targets"] = [each for each in linear_layers(shape, experts=False) if each in TARGETS]
        if "down_proj" not in adapter["targets"]:
            text = "experts have none: transformers 5 has them as parameters, and linear layers are listed by name"
            notes.note("adapter", text, "train.adapter.targets")


def _note_layers(targets: Any, section: Mapping[str, Any], notes: Notes) -> None:
    """Add notes on the layers with adapters that are unknown, or of experts."""
    last = {name: name.rsplit(".", 1)[-1].strip("*") for name in layer_names(targets)}
    if other := [name for name, each in last.items() if not _ALL.fullmatch(name) and each not in (*NAMES, *TARGETS)]:
        text = "left out" if "targets" in section else "taken as all linear layers"
        notes.note("adapter", f"{', '.join(other)[:80]}: unknown layers, {text}", "train.adapter")
    found = [name for name in last if SHARED.search(name)]
    shared = found if len(found) < len(last) else []
    if apart := [name for name in last if "expert" in name and name not in (*other, *shared)]:
        text = "taken as layers of this name in all networks and experts"
        notes.note("adapter", f"{', '.join(apart)[:80]}: {text}", "train.adapter")
    if shared:
        notes.note("adapter", f"{', '.join(shared)[:80]}: left out, as their adapters are small", "train.adapter")


def _base(read: Reading, kind: str, notes: Notes) -> str | None:
    """Return the format of the weights below adapters, or None for that of the job."""
    if base := "int8" if read.is_on("int8") else "nf4" if read.is_on("nf4") or kind == "qlora" else None:
        return base
    if not (found := _QUANTIZED.search(str(read.value("model")))):
        return None
    base = "int8" if found[0].endswith("8") else "nf4"
    notes.note("model", f"its weights in {found[0]} are predicted as {base}", "train.adapter.base")
    return base


def _targets(targets: Any) -> Any:
    """Return the layers with adapters. Those that match a pattern are listed, as PEFT compares it with whole paths."""
    if isinstance(targets, str) and "(" in targets:
        with suppress(re.error):
            pattern = re.compile(targets)
            selected = [name for name in (*TARGETS, *NAMES) if any(pattern.fullmatch(path + name) for path in PATHS)]
            return selected or targets
    return targets


def _cluster(read: Reading, start: Start, notes: Notes) -> dict[str, Any]:
    """Return the section `cluster`: of the launcher, of the configuration, or the fewest devices that can run it."""
    if (command := parse(start.words, str(read.directory))) and command.option("nproc-per-node"):
        found = cluster_of(command, notes, start)
        if found["devices_per_node"] != "auto":
            return found
    nodes = read.number("nodes") or start.hosts * start.instances
    per_node = _per_node(read, nodes, start.devices or 0)
    visible = next((str(value) for name, value in read.around.items() if name.endswith("visible_devices")), "")
    fewest = _fewest(read)
    is_alone = re.search(read.row.get("alone", "$^"), read.text)
    if is_alone and per_node <= visible.count(",") > 0:
        text = "one process has all visible devices: layers that run on one after another are predicted as on one"
        notes.note("cluster", text, "cluster")
    if not per_node:
        per_node = fewest == 1 if is_alone else visible.count(",") + bool(visible)
    if not per_node:
        nodes, per_node = max(nodes, -(-fewest // 8)), min(fewest, 8)
        text = f"{nodes} x {per_node} is the fewest: give NPROC_PER_NODE=N or --num_processes N, or correct it"
        notes.note("cluster", text + ", and global_batch_size" * (not read.number("global_batch_size")), "cluster")
    return {"chip": "auto", "nodes": nodes, "devices_per_node": int(per_node)}


def _per_node(read: Reading, nodes: int, devices: int) -> int:
    """Return the processes of a host, or 0 if the command does not say so. `devices`: those of a host, or 0."""
    counts = [str(value).rpartition(":")[2] for value in read.values("per_node")]  # also NAME:8
    per_node = next((int(each) for each in counts if each.isdecimal()), devices)
    return per_node or (max(processes // nodes, 1) if (processes := read.number("processes")) else 0)


def _fewest(read: Reading) -> int:
    """Return the fewest devices that the layout of a job needs."""
    tensor, stages, context, experts = map(read.size, SIZES)
    replicas = read.size("shard") * read.size("replicate") * (experts if "apart" in read.row else 1)
    return math.lcm(tensor * stages * context * replicas, stages * experts)


def on_fsdp(read: Reading, replicas: int) -> Part:
    """Return the part of a job on FSDP2, or of one on a single device, which says nothing of replicas on more."""
    groups = math.gcd(read.size("replicate"), replicas)
    baseline: dict[str, Any] = {fs.REPLICATE: groups, fs.SHARD: replicas // groups} if replicas > 1 else {}
    baseline |= {name: size for name in SIZES if (size := read.size(name)) > 1}
    checkpoints = "selective" if "selective" in read.values("checkpointing") else "full"
    baseline[fs.AC] = checkpoints if read.has_checkpoints() else "none"
    baseline |= {name: True for name in (fs.OFFLOAD, fs.COMPILE) if read.is_on(name)}
    is_bf16, is_shared = _precision(read) == "bf16", read.is_on("fsdp")
    if not is_bf16 or (is_shared and not read.row.keys() & {"reduces", "keeps_16_bits"}) or _adapter(read, Notes()):
        read.drop("pure")
    elif read.is_on("pure"):  # the optimizer has the weights themselves
        baseline |= {fs.STATES: "bf16"} if is_shared else {fs.STATES: "bf16", fs.REDUCE: "bf16"}
    if is_bf16 and is_shared and "reduces" not in read.row:
        baseline[fs.REDUCE] = "bf16"  # accelerate 1.15 `FullyShardedDataParallelPlugin.set_mixed_precision`
    if fs.PP in baseline:
        baseline |= {fs.SCHEDULE: SCHEDULES.get(str(read.value(fs.SCHEDULE)).lower(), "1f1b"), fs.RESHARD: False}
    elif read.value("reshard") in (False, "SHARD_GRAD_OP"):
        baseline[fs.RESHARD] = False
    if fs.PP in baseline or read.value("reshard") not in (None, True, False, "FULL_SHARD", "SHARD_GRAD_OP"):
        read.drop("reshard")
    return {"engine": "fsdp2"}, baseline


def _on_megatron(read: Reading, model: Model) -> Part:
    """Return the part of a job on Megatron-LM, with its settings."""
    read.drop(*OF_SHARDS, "checkpointing", "deepspeed", "pure")
    baseline: dict[str, Any] = {name: size for name in SIZES if (size := read.size(name)) > 1}
    baseline["use_distributed_optimizer"] = read.is_on("use_distributed_optimizer")
    baseline["sequence_parallel"] = read.is_on("sequence_parallel") and read.size(fs.TP) > 1
    if (virtual := read.size("virtual_pipeline_model_parallel_size")) > 1:
        baseline["num_layers_per_virtual_pipeline_stage"] = -(-model.num_layers // (virtual * read.size(fs.PP)))
    baseline |= _recompute(read)
    names = {**{each: each for each in MEGATRON["settings"]}, **MEGATRON["ends"]}
    settings = {new: value for name, new in names.items() if (value := read.value(name)) not in OFF}
    if not model.experts:
        settings = {name: value for name, value in settings.items() if not name.startswith(("moe_", "expert_"))}
    return {"engine": "megatron", **({"settings": settings} if settings else {})}, baseline


def _recompute(read: Reading) -> dict[str, Any]:
    """Return the knobs of recomputation on Megatron-LM."""
    granularity = read.value(RECOMPUTE[0])
    if granularity not in ("selective", "full"):
        return {"use_recompute": False}
    usual = {RECOMPUTE[1]: "uniform", RECOMPUTE[2]: 1} if granularity == "full" else {}
    given = {name: value for name in RECOMPUTE if (value := read.value(name)) is not None}
    return {"use_recompute": True, **usual, **given}


def on_deepspeed(read: Reading, hidden_size: int, notes: Notes) -> Part:
    """Return the part of a job on DeepSpeed. If its configuration is a file here, trials start the command."""
    given, file = read.value("deepspeed"), Path(read.directory, str(read.value("deepspeed")))
    content = _configuration(read, given, file, notes)
    note_effects(effects_of_deepspeed((), content, "deepspeed."), notes)
    read.given = {key: value for key, value in read.given.items() if not key.startswith("deepspeed.")}
    read.drop(*OF_SHARDS, fs.PP, fs.EP, "pure")
    stage = str(content.get(STAGE) or 0).replace("auto", "2")  # accelerate 1.15 `utils/dataclasses.py`
    if stage not in ("0", "1", "2", "3"):
        raise SpecError(key=STAGE, value=stage, problem="is not a stage of ZeRO from 0 to 3", fix="correct it")
    baseline: dict[str, Any] = {"zero_stage": int(stage)}
    baseline["offload_optimizer"] = "cpu" if content.get(DEVICE) in ("cpu", True) else "none"
    baseline[fs.AC] = "full" if read.has_checkpoints() else "none"
    baseline |= {name: size for name in (fs.TP, fs.CP) if (size := read.size(name)) > 1}
    baseline |= _of_zero(content, hidden_size)
    has_trials = "set" in read.row and "deepspeed" in read.given and file.is_file()
    return {"engine": "deepspeed", **(_command(read, given) if has_trials else {})}, baseline


def _of_zero(content: Mapping[str, Any], hidden_size: int) -> dict[str, Any]:
    """Return the knobs of ZeRO that a configuration sets beside its stage."""
    baseline = {"overlap_comm": content[OVERLAP]} if type(content.get(OVERLAP)) is bool else {}
    if (bucket := content.get(BUCKET)) == "auto":  # transformers 4.57 `integrations/deepspeed.py`
        bucket = hidden_size**2
    baseline |= {"reduce_bucket_size": int(bucket)} if isinstance(bucket, (int, float)) else {}
    plus = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients")
    given = {name: content.get(f"zero_optimization.{name}") for name in plus}
    return baseline | {name: value for name, value in given.items() if type(value) in (int, bool)}


def _configuration(read: Reading, given: Any, file: Path, notes: Notes) -> dict[str, Any]:
    """Return the keys of a configuration of DeepSpeed: a mapping, a stage, a file, or the name of a preset."""
    if isinstance(given, dict):
        return dict(flat(given))
    if isinstance(given, int) and given:  # True: the stage is the default of accelerate's `DeepSpeedPlugin`
        return {STAGE: 2 if given is True else given, DEVICE: read.value("offloaded_states")}
    if isinstance(given, str) and os.path.isfile(file):
        return dict(flat(read_config(given, str(read.directory), key="deepspeed")))
    if named := re.search(r"z(?:ero)?_?([0-3])", str(given)):
        text = f"{given} is not a file in this folder: ZeRO {named[1]} is taken from its name"
        notes.note("deepspeed", text, "auto_tuner.baseline")
        return {STAGE: int(named[1]), DEVICE: "cpu" if "offload" in str(given) else None}
    if given not in OFF:
        fix = "start from the folder to which its path belongs"
        raise SpecError(key="deepspeed", value=given, problem="is not here", fix=fix)
    content = {key[10:]: value for key, value in read.given.items() if key.startswith("deepspeed.")}
    if not content:
        notes.note("ddp", "without DeepSpeed and FSDP, replicas are predicted as ZeRO 0", "train.engine")
    return content


def _command(read: Reading, file: str) -> dict[str, Any]:
    """Return the keys of `train` for trials: the command with changed copies of a configuration of DeepSpeed.

    The arguments that transformers compares with that configuration change alike.
    """

    words, own = [*read.words], {"deepspeed", STEPS, MICRO}
    for name, _value, start, end in reversed([*placed(words)]):
        if name in own:
            del words[start : min(end, start + 2)]
    has_file = any(re.search(PROGRAM, each) and after.endswith(SUFFIXES) for each, after in pairwise(words))
    form = read.row["set"] if has_file else "--{}"  # without a file of settings, programs read options

    def word(name: str, value: object) -> str:
        return f"{form.format(name)}={str(value).lower() if isinstance(value, bool) else value}"

    words += [word("deepspeed", CONFIG), word(STEPS, f"{{{STEPS}}}")]
    values = sorted({1, 2, 4, 8, 16, 32, read.size("micro_batch_size")})
    row = {"key": MICRO_KEY, "flag": word(MICRO, "{}"), "values": values, "label": "MBS"}
    trial = [word(name, value) for name, value in read.row["trial"].items()]
    program = {"config": file, "knobs": {"micro_batch_size": row}, "trial_args": trial}
    return {"command": words, "directory": str(read.directory), "program": program}
