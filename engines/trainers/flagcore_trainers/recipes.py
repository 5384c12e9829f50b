"""Converts configurations of fine-tuning frameworks to specs. `recipes.yaml` has their keys.

A framework runs on DeepSpeed, Megatron-LM or torch's FSDP2, which is the engine of the spec.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from flagcore_models.public import model_of
from flagcore_training.adapters import NAMES, TARGETS, absent_targets, adapter_section, layer_names
from flagcore_training.commands import cluster_of, flat, parse, parse_flags
from flagcore_training.lengths import assumed_lengths

from flagcore.domain.launch import Start
from flagcore.domain.lengths import LONGEST, PACKED
from flagcore.domain.model import Model
from flagcore.domain.spec import Adapter
from flagcore.errors import SpecError, join_errors
from flagcore.spec.models import model_from
from flagcore.spec.plain_data import Notes, package_yaml
from flagcore_trainers import fully_shard as fs
from flagcore_trainers.importing import MICRO, MICRO_KEY, STEPS, Imported
from flagcore_trainers.start import CONFIG, SUFFIXES, read_config

TABLES: Any = package_yaml(__package__, "recipes.yaml")
COMMON, MEGATRON = TABLES.pop("common"), TABLES.pop("megatron")
CUT = 1024
"""The longest sample, in tokens, where a configuration limits none."""
OFF = (None, False, "", "none", "no", "false", 0)
CONFIG_FLAGS = ("--config", "-c", "--config_file", "--config-file", "--accelerate_config")
SIZES = (fs.TP, fs.PP, fs.CP, fs.EP)
SCHEDULES = {"interleaved1f1b": "interleaved", "zbvzerobubble": "zbv", "dualpipev": "dualpipev"}
RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")
STAGE, DEVICE = "zero_optimization.stage", "zero_optimization.offload_optimizer.device"
BUCKET, OVERLAP = "zero_optimization.reduce_bucket_size", "zero_optimization.overlap_comm"
PATHS = [
    f"{model}.layers.{layer}.{part}."
    for model in ("model", "model.language_model", "language_model.model")
    for part in ("self_attn", "mlp")
    for layer in range(64)
]
"""Where the patterns of adapters look for layers, which PEFT compares with whole paths."""
_ALL = re.compile(r"all(-linear)?|\*(_proj)?")
"""Names of all linear layers of a decoder."""
_PROGRAM = re.compile(r"\.py$|^(train|sft|pt|llm|automodel|[a-z_]+(\.[a-z_]+)+\.\w+)$")
"""The word before the first argument of a program."""
_WORD = re.compile(r"([a-z_][\w.]*)=(.*)")
Part = tuple[dict[str, Any], dict[str, Any]]
"""A part of `train`, with the engine, and the values of its knobs."""


def framework_of(words: Sequence[str]) -> str | None:
    """Return the framework that a command starts, or None."""
    return next((name for name, row in TABLES.items() if re.search(row["starts"], " ".join(words))), None)


class Reading:
    """The settings of a command, of the files that it names, and of the variables around it, by meaning."""

    def __init__(self, framework: str, start: Start, directory: Path) -> None:
        self.row, self.words, self.directory = TABLES[framework], start.words, directory
        self.text = " ".join(start.words)
        own, common = self.row["keys"], COMMON["keys"]
        self.keys = {name: (*own.get(name, ()), *common.get(name, ())) for name in {**own, **common}}
        content: dict[str, Any] = {}
        for file in _files(start.words):
            content |= dict(flat(read_config(file, str(directory), key="command")))
        around = {key.removeprefix("ENV."): value for key, value in content.items() if key.startswith("ENV.")}
        self.around = {key.lower(): _scalar(str(value)) for key, value in {**start.job, **start.envs, **around}.items()}
        files = {key.replace("-", "_"): value for key, value in content.items() if not key.startswith("ENV.")}
        options = dict(_options(start.words))
        self.given = {**self.row.get("named", {}).get(str(options.get("accelerate_config")), {}), **files, **options}
        mark, variables = self.row.get("megatron", "$^"), {"use_mca", "use_megatron_bridge"}
        self.on_megatron = bool(re.search(mark, self.text) or mark in self.given or variables & {*self.around})
        self.defaults = {**self.row["defaults"], **(self.row.get("megatron_defaults", {}) if self.on_megatron else {})}

    def values(self, name: str) -> list[Any]:
        """Return the values of the keys of a meaning that are set, or else the framework's own value."""
        found = []
        for entry in self.keys.get(name, (name,)):
            key, tilde, pattern = entry.lstrip("!").partition("~")
            if (value := self.given.get(key, self.around.get(key))) is not None:
                value = bool(re.search(pattern, str(value))) if tilde else value
                found.append(value in OFF if entry.startswith("!") else value)
        return found or [self.defaults.get(name)]

    def value(self, name: str) -> Any:
        """Return the first value of a meaning, or None."""
        return self.values(name)[0]

    def is_on(self, name: str) -> bool:
        """Return whether any key of a meaning is on."""
        return any(value not in OFF for value in self.values(name))

    def number(self, name: str) -> int | None:
        """Return the first positive number of a meaning, or None. The first of several words counts."""
        firsts = (value[0] if isinstance(value, list) and value else value for value in self.values(name))
        texts = (str(each).replace("_", "").removesuffix(".0") for each in firsts)
        return next((int(text) for text in texts if text.isdecimal() and int(text)), None)

    def size(self, name: str) -> int:
        """Return a number of a meaning, by default 1."""
        return self.number(name) or 1

    def unread(self) -> list[str]:
        """Return the keys that are neither read, nor off, nor known to be harmless."""
        read = {entry.lstrip("!").partition("~")[0] for entries in self.keys.values() for entry in entries}
        read |= {*self.row["refused"], *SIZES}
        if self.on_megatron:
            read |= {each for part in MEGATRON.values() for each in part} | {*RECOMPUTE}
        known = re.compile("|".join((self.row["harmless"], COMMON["harmless"], TABLES["ms-swift"]["harmless"])))
        read |= {key for key in self.given if ".pipeline." in key and self.size(fs.PP) == 1}
        others = ((key, value) for key, value in self.given.items() if value not in (*OFF, []) and key not in read)
        return [key for key, value in others if not (known.fullmatch(key) or known.fullmatch(f"{key}~{value}"))]


def _scalar(text: str) -> Any:
    with suppress(yaml.YAMLError):
        return yaml.safe_load(text)
    return text


def _options(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the options of a command, and its words KEY=VALUE, with their values."""
    for word in words:
        if match := _WORD.fullmatch(word):
            yield match[1], _scalar(match[2])
    for name, values in parse_flags([word for word in words if not _WORD.fullmatch(word)]):
        kept = [value for value in values if not value.endswith(SUFFIXES)] or values[:1]
        yield name.replace("-", "_"), True if not kept else _scalar(kept[0]) if len(kept) == 1 else kept


def _files(words: Sequence[str]) -> Iterator[str]:
    """Yield the files of a command with settings: of its launcher first. That of a program is its first argument."""
    for before, word in zip(("", *words), words, strict=False):
        name, _equals, value = word.partition("=")
        if name in CONFIG_FLAGS and value:
            yield value
        elif word.endswith(SUFFIXES) and (before in CONFIG_FLAGS or _PROGRAM.search(before)):
            yield word


def spec_of(start: Start, directory: Path, model: str | None) -> Imported:
    """Return the data of a spec for a command of a framework, and notes. Raises SpecError."""
    notes, read = Notes(), Reading(framework_of(start.words) or "", start, directory)
    for key, pattern in read.row["refused"].items():
        value = next((each for name, each in read.given.items() if name.partition(".")[0] == key), None)
        if value not in OFF and re.search(pattern, str(value)):
            problem = "is not predicted, as only next-token training of all weights or of LoRA, DoRA or QLoRA is"
            notes.report(key, problem, value=value, fix="describe it in a spec with engine: command")
    for name in ("longest", "micro_batch_size", "accumulation", "global_batch_size", *SIZES):
        given = {key: read.given.get(key) for key in read.keys.get(name, (name,))}
        wrong = [each for each in given.items() if each[1] not in (*OFF, "auto")] if read.number(name) is None else []
        for key, value in wrong:
            notes.report(key, "is not a positive whole number", value=value, fix="correct it")
    section = model_of(model, [read.value("model")], directory, notes)
    cluster = _cluster(read, start, notes)
    devices, micro = cluster["nodes"] * cluster["devices_per_node"], read.size("micro_batch_size")
    replicas = max(devices // math.prod(map(read.size, SIZES[:3])), 1)
    steps = read.number("accumulation") or max(1, -(-(read.number("samples") or 0) // (micro * devices)))
    total = read.number("global_batch_size") or micro * steps * replicas
    precision = "fp16" if read.is_on("fp16") else "fp32" if read.is_on("fp32") and not read.is_on("bf16") else "bf16"
    train: dict[str, Any] = {"seq_length": _longest(read, notes), "global_batch_size": total, "precision": precision}
    train |= {"attention": "unfused"} if read.is_on("unfused") else {}
    train |= _lengths(read, train["seq_length"], notes) | _adapter(read, notes)
    if notes.problems:
        raise join_errors(notes.problems)
    shape = model_from(section, base=directory)
    targets = train.get("adapter", {}).get("targets")
    if absent := absent_targets(shape, targets and Adapter(targets=tuple(targets))):
        notes.note("adapter", f"{', '.join(absent)}: the model has no such layers", "train.adapter")
    is_ddp = devices > 1 and not (read.is_on("fsdp") or read.size(fs.EP) > 1)
    if read.on_megatron:
        own, baseline = _on_megatron(read, shape)
    elif is_ddp or read.is_on("deepspeed") or any(key.startswith("deepspeed.") for key in read.given):
        own, baseline = _on_deepspeed(read, shape.hidden_size, notes)
    else:
        own, baseline = _on_fsdp(read, replicas)
        if read.is_on("pure") and precision == "bf16" and not ("adapter" in train or read.is_on("fsdp")):
            baseline |= {fs.STATES: "bf16", fs.REDUCE: "bf16"}  # the optimizer has the weights themselves
        if devices > 1 and not read.is_on("fsdp"):
            notes.note("ddp", "replicas with different experts are predicted as if they shared weights", "train.engine")
    if offloaded := [each for each in read.values("checkpointing") if str(each).startswith("offload")]:
        text = f"{offloaded[0]}: predicted as full, with checkpoints on the device and without their copies"
        notes.note(read.keys["checkpointing"][0], text, "auto_tuner.baseline")
    if "command" not in own:
        text = f"trials of {own['engine']} do not start it: the spec is for `flag estimate`"
        notes.note("command", text, "train.engine")
    if others := read.unread():
        notes.note(", ".join(others), "not in the predictions", "train")
    of_stage = read.number("pipeline_micro_batch") if read.size(fs.PP) > 1 else None
    if of_stage and (runs := total // (micro * replicas)) > 1:
        text = f"pipelines end after each local batch of {micro}, but are predicted as if once a step: {runs} times "
        text += f"the step of a spec with global_batch_size: {micro * replicas} is nearer"
        notes.note(read.keys["micro_batch_size"][0], text, "train.global_batch_size")
    tuner: dict[str, Any] = {"baseline": {**baseline, "micro_batch_size": of_stage or micro}}
    names = {"deepspeed": (fs.AC, fs.TP, fs.CP), "fsdp2": (fs.STATES, fs.REDUCE)}.get(own["engine"], ())
    if fixed := {name: [baseline[name]] for name in names if name in baseline}:  # what no trial changes
        tuner["space"] = fixed
    return {"model": section, "cluster": cluster, "train": {**own, **train}, "auto_tuner": tuner}, notes.notes


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
    if kind in ("full", "none", "false"):
        return {}
    if kind not in ("lora", "qlora", "dora"):
        notes.report(read.keys["adapter"][0], "is not predicted", value=kind, fix="use full, LoRA, DoRA or QLoRA")
    base = "int8" if read.is_on("int8") else "nf4" if read.is_on("nf4") or kind == "qlora" else None
    if not base and (
        found := re.search(r"(?i)\b(gptq|awq|nf4|bnb-4bit|int4|(nv|mx)fp4|(fp|int)8)\b", str(read.value("model")))
    ):
        base = "int8" if found[0].endswith("8") else "nf4"
        notes.note("model", f"its weights in {found[0]} are predicted as {base}", "train.adapter.base")
    targets = None if read.is_on("all_linear") else read.value("targets")
    if isinstance(targets, str) and "(" in targets:
        with suppress(re.error):
            pattern = re.compile(targets)
            selected = [name for name in (*TARGETS, *NAMES) if any(pattern.fullmatch(path + name) for path in PATHS)]
            targets = selected or targets
    section = adapter_section("dora" if read.is_on("dora") else kind, read.number("rank"), targets, base)
    last = {name: name.rsplit(".", 1)[-1].strip("*") for name in layer_names(targets)}
    if other := [name for name, each in last.items() if not _ALL.fullmatch(name) and each not in (*NAMES, *TARGETS)]:
        text = "left out" if "targets" in section else "taken as all linear layers"
        notes.note("adapter", f"{', '.join(other)[:80]}: unknown layers, {text}", "train.adapter")
    if apart := [name for name in last if "expert" in name and name not in other]:
        text = "taken as layers of this name in all networks and experts"
        notes.note("adapter", f"{', '.join(apart)[:80]}: {text}", "train.adapter")
    return {"adapter": section}


def _cluster(read: Reading, start: Start, notes: Notes) -> dict[str, Any]:
    """Return the section `cluster`: of the launcher, of the configuration, or the fewest devices that can run it."""
    if (command := parse(start.words, str(read.directory))) and command.option("nproc-per-node"):
        found = cluster_of(command, notes, start)
        if found["devices_per_node"] != "auto":
            return found
    nodes = read.number("nodes") or start.hosts * start.instances
    counts = [str(value).rpartition(":")[2] for value in read.values("per_node")]  # also NAME:8
    per_node = next((int(each) for each in counts if each.isdecimal()), start.devices or 0)
    visible = next((str(value) for name, value in read.around.items() if name.endswith("visible_devices")), "")
    if processes := read.number("processes"):
        per_node = per_node or max(processes // nodes, 1)
    tensor, stages, context, experts = map(read.size, SIZES)
    replicas = read.size("shard") * read.size("replicate") * (experts if "apart" in read.row else 1)
    fewest = math.lcm(tensor * stages * context * replicas, stages * experts)
    is_alone = re.search(read.row.get("alone", "$^"), read.text)
    if is_alone and per_node <= visible.count(",") > 0:
        text = "one process has all visible devices: layers that run on one after another are predicted as on one"
        notes.note("cluster", text, "cluster")
    if not per_node:
        per_node = fewest == 1 if is_alone else visible.count(",") + bool(visible)
    if not per_node:
        nodes, per_node = max(nodes, -(-fewest // 8)), min(fewest, 8)
        text = f"{nodes} x {per_node} is the fewest: give a command with NPROC_PER_NODE=N, or correct it"
        notes.note("cluster", text + ", and global_batch_size" * (not read.number("global_batch_size")), "cluster")
    return {"chip": "auto", "nodes": nodes, "devices_per_node": int(per_node)}


def _on_fsdp(read: Reading, replicas: int) -> Part:
    """Return the part of a job on FSDP2, or of one on a single device."""
    groups = math.gcd(read.size("replicate"), replicas)
    baseline: dict[str, Any] = {fs.REPLICATE: groups, fs.SHARD: replicas // groups}
    baseline |= {name: size for name in SIZES if (size := read.size(name)) > 1}
    checkpoints = "selective" if "selective" in read.values("checkpointing") else "full"
    baseline[fs.AC] = checkpoints if read.is_on("checkpointing") else "none"
    baseline |= {name: True for name in (fs.OFFLOAD, fs.COMPILE) if read.is_on(name)}
    if fs.PP in baseline:
        baseline |= {fs.SCHEDULE: SCHEDULES.get(str(read.value(fs.SCHEDULE)).lower(), "1f1b"), fs.RESHARD: False}
    elif read.value("reshard") in (False, "SHARD_GRAD_OP"):
        baseline[fs.RESHARD] = False
    return {"engine": "fsdp2"}, baseline


def _on_megatron(read: Reading, model: Model) -> Part:
    """Return the part of a job on Megatron-LM, with its settings."""
    baseline: dict[str, Any] = {name: size for name in SIZES if (size := read.size(name)) > 1}
    baseline["use_distributed_optimizer"] = read.is_on("use_distributed_optimizer")
    baseline["sequence_parallel"] = read.is_on("sequence_parallel") and read.size(fs.TP) > 1
    if (virtual := read.size("virtual_pipeline_model_parallel_size")) > 1:
        baseline["num_layers_per_virtual_pipeline_stage"] = -(-model.num_layers // (virtual * read.size(fs.PP)))
    granularity = read.value(RECOMPUTE[0])
    baseline["use_recompute"] = granularity in ("selective", "full")
    if baseline["use_recompute"]:
        baseline |= {RECOMPUTE[1]: "uniform", RECOMPUTE[2]: 1} if granularity == "full" else {}
        baseline |= {name: value for name in RECOMPUTE if (value := read.value(name)) is not None}
    names = {**{each: each for each in MEGATRON["settings"]}, **MEGATRON["ends"]}
    settings = {new: value for name, new in names.items() if (value := read.value(name)) not in OFF}
    if not model.num_moe_experts:
        settings = {name: value for name, value in settings.items() if not name.startswith(("moe_", "expert_"))}
    return {"engine": "megatron", **({"settings": settings} if settings else {})}, baseline


def _on_deepspeed(read: Reading, hidden_size: int, notes: Notes) -> Part:
    """Return the part of a job on DeepSpeed. If its configuration is a file here, trials start the command."""
    given, file = read.value("deepspeed"), Path(read.directory, str(read.value("deepspeed")))
    content = {key[10:]: value for key, value in read.given.items() if key.startswith("deepspeed.")}
    if isinstance(given, dict):
        content = dict(flat(given))
    elif type(given) is int:
        content = {STAGE: given, DEVICE: read.given.get("deepspeed_config.offload_optimizer_device")}
    elif isinstance(given, str) and file.is_file():
        content = dict(flat(read_config(given, str(read.directory), key="deepspeed")))
    elif named := re.search(r"z(?:ero)?_?([0-3])", str(given)):
        content = {STAGE: int(named[1]), DEVICE: "cpu" if "offload" in str(given) else None}
        text = f"{given} is not a file in this folder: ZeRO {named[1]} is taken from its name"
        notes.note("deepspeed", text, "auto_tuner.baseline")
    elif given not in OFF:
        fix = "start from the folder to which its path belongs"
        raise SpecError(key="deepspeed", value=given, problem="is not here", fix=fix)
    elif not content:
        notes.note("ddp", "without DeepSpeed and FSDP, replicas are predicted as ZeRO 0", "train.engine")
    stage = str(content.get(STAGE) or 0)
    if stage not in ("0", "1", "2", "3"):
        raise SpecError(key=STAGE, value=stage, problem="is not a stage of ZeRO from 0 to 3", fix="correct it")
    baseline: dict[str, Any] = {"zero_stage": int(stage)}
    baseline["offload_optimizer"] = "cpu" if content.get(DEVICE) == "cpu" else "none"
    baseline[fs.AC] = "full" if read.is_on("checkpointing") else "none"
    baseline |= {name: size for name in (fs.TP, fs.CP) if (size := read.size(name)) > 1}
    baseline |= {"overlap_comm": content[OVERLAP]} if type(content.get(OVERLAP)) is bool else {}
    if (bucket := content.get(BUCKET)) == "auto":  # transformers 4.57 `integrations/deepspeed.py`
        bucket = hidden_size**2
    baseline |= {"reduce_bucket_size": int(bucket)} if isinstance(bucket, (int, float)) else {}
    plus = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients")
    baseline |= {name: value for name in plus if type(value := content.get(f"zero_optimization.{name}")) in (int, bool)}
    if (device := content.get("zero_optimization.offload_param.device")) not in OFF:
        notes.note("deepspeed.zero_optimization.offload_param.device", f"not in the predictions ({device})", "train")
    has_trials = "set" in read.row and "deepspeed" in read.given and file.is_file()
    return {"engine": "deepspeed", **(_command(read, given) if has_trials else {})}, baseline


def _command(read: Reading, file: str) -> dict[str, Any]:
    """Return the keys of `train` for trials: the command with changed copies of a configuration of DeepSpeed.

    The arguments that transformers compares with that configuration change alike.
    """

    def word(name: str, value: object) -> str:
        return f"{read.row['set'].format(name)}={str(value).lower() if isinstance(value, bool) else value}"

    words, skips = list[str](), False
    for each in read.words:
        is_option = each.partition("=")[0] in ("--deepspeed", f"--{STEPS}", f"--{MICRO}", "deepspeed", STEPS, MICRO)
        words += [] if is_option or skips else [each]
        skips = is_option and "=" not in each
    words += [word("deepspeed", CONFIG), word(STEPS, f"{{{STEPS}}}")]
    values = sorted({1, 2, 4, 8, 16, 32, read.size("micro_batch_size")})
    row = {"key": MICRO_KEY, "flag": word(MICRO, "{}"), "values": values, "label": "MBS"}
    trial = [word(name, value) for name, value in read.row["trial"].items()]
    program = {"config": file, "knobs": {"micro_batch_size": row}, "trial_args": trial}
    return {"command": words, "directory": str(read.directory), "program": program}
