"""Converts commands of DeepSpeed and torchtitan to specs: the command stays, and its configuration is the baseline.

Sources: DeepSpeed 0.19 `launcher/runner.py` and `runtime/config.py`; the recipes of torchtitan's `train_configs`.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from flagcore_training.commands import UserCommand, cluster_of, parse

from flagcore.domain.launch import Start
from flagcore.domain.spec import ImportNote
from flagcore.errors import SpecError, join_errors
from flagcore.spec.models import absolute_model, model_from, public_name
from flagcore.spec.plain_data import Notes, read_text
from flagcore_trainers import start as files
from flagcore_trainers.fully_shard import AC

Imported = tuple[dict[str, Any], Sequence[ImportNote]]
MODEL_FLAGS = ("model_name_or_path", "model_name", "model", "pretrained_model_name_or_path", "base_model")
LENGTH_FLAGS = (
    *("max_seq_len", "max_seq_length", "model_max_length", "seq_length", "seq_len", "block_size", "cutoff_len"),
    *("max_length", "max_len", "sequence_length"),
)
MICRO, STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
"""Arguments of Hugging Face's Trainer, and of scripts that follow it."""


def option(words: Sequence[str], *names: str) -> Any:
    """Return the value of the first of the options that the command sets, written with - or _, or None."""
    flags = [f"--{each}" for name in names for each in dict.fromkeys((name, name.replace("_", "-")))]
    return next((value for flag in flags if (value := files.flag_value(words, flag)) is not None), None)


def number(value: object) -> int | None:
    """Return a positive whole number, or None for anything else, such as `auto`."""
    return int(str(value)) if str(value).isdecimal() and int(str(value)) > 0 else None


GROUPS = ("tensor_parallel.autotp_size", "sequence_parallel_size")
"""Keys of DeepSpeed with the sizes of groups of ranks that share a sample."""
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", STEPS)


def check_sizes(content: Mapping[str, Any], config: str) -> None:
    """Raise SpecError if a size of a batch in a configuration of DeepSpeed is neither a positive number nor `auto`."""
    for key in BATCH_KEYS:
        value = content.get(key)
        if value not in (None, "auto") and number(str(value).removesuffix(".0")) is None:
            fix = f"correct {config}"
            raise SpecError(key=key, value=value, problem="is neither a positive whole number nor auto", fix=fix)


def processes(words: Sequence[str], directory: str) -> int | None:
    """Return the number of processes that a command starts on a host, or None if it does not say so."""
    command = parse(words, directory)
    if command is None:
        return _launched(words)[0]
    given = command.option("nproc-per-node")
    return number(given.value) if given else None


def _launched(words: Sequence[str]) -> tuple[int | None, int]:
    """Return the devices of a host (or None) and the number of hosts (or 0) of the `deepspeed` launcher's options."""
    included = str(option(words, "include") or "").split("@")
    listed = [len(each.partition(":")[2].split(",")) for each in included if ":" in each]
    devices = number(option(words, "num_gpus")) or (listed[0] if listed else None)
    return devices, number(option(words, "num_nodes")) or len(listed)


def _model(given: str | None, names: Sequence[object], directory: Path, notes: Notes) -> str:
    """Return the model. `names`: what the command calls it, which may be a path elsewhere."""
    for name in filter(None, (given, *map(str, filter(None, names)))):
        with suppress(SpecError):
            model_from(name, base=directory)
            return absolute_model(name, directory)
        if given is None and (known := public_name(name.rstrip("/"))):
            notes.note("model", f"has the shape of {known}, as its name says", "model")
            return known
    if given is not None:
        model_from(given, base=directory)  # raises the error
    fix = "give its Hugging Face directory or public name as --model"
    notes.report("model", "is not known from the command", value=next(filter(None, names), None), fix=fix)
    return ""


def spec_of_deepspeed(start: Start, flags: Sequence[str], directory: Path, model: str | None) -> Imported:
    """Return the data of a spec for a command with a configuration of DeepSpeed, and notes. Raises SpecError."""
    words, notes = list(start.words), Notes()
    config = next((value for flag in flags if isinstance(value := files.flag_value(words, flag), str)), None)
    if config is None:
        raise _no_program(words)
    content = files.read_config(config, str(directory), key=flags[0])
    check_sizes(content, config)
    cluster = _cluster(start, str(directory), notes)
    devices = cluster["nodes"] * (number(cluster["devices_per_node"]) or 1)
    micro, micro_flag = content.get("train_micro_batch_size_per_gpu"), option(words, MICRO)
    steps, steps_flag, total = content.get(STEPS), option(words, STEPS), number(content.get("train_batch_size"))
    micro_size = number(micro) or number(micro_flag) or 1
    accumulated, is_known = number(steps) or number(steps_flag) or 1, cluster["devices_per_node"] != "auto"
    share = total / (accumulated * devices) if total and is_known else None
    if total is None:
        total = micro_size * accumulated * devices
        text = "is that of the command's devices, micro-batch and steps"
        if not is_known:
            text = f"{total}: with one device on a host, as the command has no number; multiply it by the number"
        notes.note("train.global_batch_size", text, "train.global_batch_size")
    elif is_known and total % (micro_size * devices) and not any(files.value_at(content, key) for key in GROUPS):
        text = f"{total} is no multiple of the micro-batch {micro_size} x {devices} devices: the baseline is another"
        notes.note("train_batch_size", text, "train.global_batch_size")
    length = number(option(words, *LENGTH_FLAGS))
    if length is None:
        notes.report("train.seq_length", "is not in the command", fix="add --max_seq_len N to the command")
    section = _model(model, [option(words, *MODEL_FLAGS)], directory, notes)
    if notes.problems:
        raise join_errors(notes.problems)
    program = dict[str, Any]()
    if micro_flag is not None:  # Hugging Face's Trainer compares its arguments with the configuration
        words = _set(words, STEPS, "{gradient_accumulation_steps}")
        values = sorted({1, 2, 4, 8, 16, 32, micro_size})
        row = {"key": "train_micro_batch_size_per_gpu", "flag": f"--{MICRO}", "values": values, "label": "MBS"}
        program = {"knobs": {"micro_batch_size": row}}
    follows = None if share is None else int(share) if share.is_integer() else round(share, 3)
    for name, own, other in ((MICRO, micro_flag, number(micro) or follows), (STEPS, steps_flag, number(steps))):
        if number(own) and other and number(own) != other:
            of = f"of {config}" if number(steps if name == STEPS else micro) else f"of train_batch_size in {config}"
            notes.note(f"--{name}", f"{own} contradicts {other} {of}", "train.command")
    device = files.value_at(content, "zero_optimization.offload_optimizer.device")
    if device not in (None, "none", "cpu"):
        text = f"{device} is not tuned: the baseline has none instead"
        notes.note("zero_optimization.offload_optimizer.device", text, "train")
    if untold := [f"{name} {option(words, name[2:])}" for name in _turned_on(words, NOT_PREDICTED)]:
        notes.note(untold[0].split()[0], f"not in the predictions: {', '.join(untold)}", "train")
    for key in KEYS_NOT_PREDICTED:
        if str(value := files.value_at(content, key)).lower() not in OFF:
            notes.note(key, f"not in the predictions ({value})", "train")
    for found in [*_turned_on(words, CHECKPOINTS)][:1]:
        program["fixed"] = {"recompute": 2}
        notes.note(found, "is taken as the recompute of whole layers in backward", "train.program.fixed")
    for text in own_configurations(words, directory):
        notes.note("config", text, "train.command")
    if (number(stages := option(words, "pipe_parallel_size", "pipeline_parallel_size")) or 1) > 1:
        notes.note("pipe_parallel_size", f"not in the predictions ({stages}): all devices count as replicas", "train")
    precision = next((name for name in ("bf16", "fp16") if _is_on(content, name, option(words, name))), "fp32")
    train = {"engine": "deepspeed", "seq_length": length, "global_batch_size": total, "precision": precision}
    train |= {"command": words, "directory": str(directory), **({"program": program} if program else {})}
    notes.note("command", f"keys of {config} are the baseline, and trials change copies of it", "train")
    return {"model": section, "cluster": cluster, "train": train, "auto_tuner": {}}, notes.notes


CHECKPOINTS = re.compile(
    r"--(?!no_|disable_|without_)(\w+_)?((grad(ient)?|act(ivation)?s?)_?(ckpt|checkpoint(ing|s)?)"
    r"|checkpoint_(activations|layers)|recompute(_activations)?)"
)
"""Options of scripts that store the inputs of layers only. Others of the same names have values that turn them off."""


NOT_PREDICTED = re.compile(
    r"--((use_|enable_)?(q?lora|peft|dora|adapter)(_\w+)?|load_in_[48]bit|(quantization_)?bits?"
    r"|freeze_\w+|optim|torch_compile|use_liger(_kernel)?|auto_find_batch_size|neftune_\w+|packing|group_by_length)"
)
"""Options of Hugging Face's Trainer, and of scripts with it, that change the time or memory of a step."""
KEYS_NOT_PREDICTED = (
    *("zero_optimization.offload_param.device", "zero_optimization.mics_shard_size"),
    *("activation_checkpointing.cpu_checkpointing", "compile.enabled", "pipeline.stages", "elasticity.enabled"),
)
"""Keys of DeepSpeed's configuration that do so, and are no knobs."""


def _turned_on(words: Sequence[str], options: re.Pattern[str]) -> Iterator[str]:
    """Yield the options of a command that match a pattern and are not turned off, as they are written."""
    for word in words:
        name = word.partition("=")[0]
        if options.fullmatch(f"--{name[2:].replace('-', '_')}") and name.startswith("--"):
            value = str(files.flag_value(words, name)).lower()
            if value not in ("false", "0", "no", "off", "none", "adamw_torch", "adamw_torch_fused", "adamw_hf"):
                yield name


PASSED = {
    "initialize": ("config", "config_params"),
    "TrainingArguments": ("deepspeed",),
    "DeepSpeedPlugin": ("hf_ds_config",),
}
"""The keywords of calls that take a configuration, or the name of its file."""


def own_configurations(words: Sequence[str], directory: Path) -> Iterator[str]:
    """Yield a line for each call in scripts of a command that passes a dictionary as the configuration."""
    for word in words:
        path = Path(directory, word)
        if path.suffix != ".py" or not path.is_file():
            continue
        with suppress(SyntaxError, ValueError, SpecError):
            tree = ast.parse(read_text(path, file=word, key="train.command"))
            nodes = [*ast.walk(tree)]
            assigned = [each for each in nodes if isinstance(each, ast.Assign) and _is_dictionary(each.value)]
            names = {name.id for each in assigned for name in each.targets if isinstance(name, ast.Name)}
            for call in (each for each in nodes if isinstance(each, ast.Call)):
                keywords = PASSED.get(getattr(call.func, "attr", getattr(call.func, "id", "")), ())
                values = [each.value for each in call.keywords if each.arg in keywords]
                if any(_is_dictionary(each) or getattr(each, "id", "") in names for each in values):
                    place = f"{word}:{call.lineno}"
                    yield f"{place} passes a configuration of its own: candidates need the file of the command there"


def _is_dictionary(value: ast.expr) -> bool:
    is_call = isinstance(value, ast.Call) and getattr(value.func, "id", "") == "dict"
    return isinstance(value, ast.Dict) or is_call


def _no_program(words: Sequence[str]) -> SpecError:
    """Return the error for a script: candidates change the words of the program's own command."""
    return SpecError(key="train.command", value=" ".join(words), problem="is a script", fix="give what it starts")


def _is_on(content: Mapping[str, Any], name: str, flag: object) -> bool:
    section = content.get(name)
    value = section.get("enabled") if isinstance(section, Mapping) else None
    return value is True or (value in (None, "auto") and str(flag).lower() == "true")


def _set(words: Sequence[str], name: str, value: str) -> list[str]:
    """Return a command with another value of an option, which it may lack."""
    for place, word in enumerate(words):
        if word in (f"--{name}", f"--{name.replace('_', '-')}"):
            return [*words[: place + 1], value, *words[place + 2 :]]
    kept = [word for word in words if not word.startswith((f"--{name}=", f"--{name.replace('_', '-')}="))]
    return [*kept, f"--{name}", value]


def _cluster(start: Start, directory: str, notes: Notes) -> dict[str, Any]:
    """Return the section `cluster` from the options of the `deepspeed` launcher, of torchrun, or of what is around."""
    words = list(start.words)
    if command := parse(words, directory):
        return cluster_of(command, notes, start)
    own, hosts = _launched(words)
    devices, nodes = own or start.devices, hosts or start.hosts * start.instances
    if devices is None:
        notes.note("cluster.devices_per_node", "is not in the command; auto is the number on this machine", "cluster")
    if option(words, "hostfile") and not number(option(words, "num_nodes")):
        notes.note("cluster.nodes", f"{nodes}: the hosts of --hostfile are not read", "cluster")
    return {"chip": "auto", "nodes": nodes, "devices_per_node": devices or "auto"}


TITAN_KEYS: Mapping[str, Sequence[str]] = {
    "tensor_model_parallel_size": ("parallelism.tensor_parallel_degree", "training.tensor_parallel_degree"),
    "context_parallel_size": ("parallelism.context_parallel_degree", "experimental.context_parallel_degree"),
    "pipeline_model_parallel_size": ("parallelism.pipeline_parallel_degree", "experimental.pipeline_parallel_degree"),
    "micro_batch_size": ("training.local_batch_size", "training.batch_size"),
    AC: ("activation_checkpoint.mode",),
    "reshard_after_forward": ("parallelism.fsdp_reshard_after_forward",),
    "compile": ("compile.enable", "training.compile"),
    "seq_length": ("training.seq_len",),
    "global_batch_size": ("training.global_batch_size",),
}
"""The keys of each meaning, the newest first. Options have the same names."""
CONFIG_FILE = "job.config_file"
FILES_OF_MODEL = ("hf_assets_path", "tokenizer_path")
SIZE = re.compile(r"\d+(?:\.\d+)?[bme](?![a-z])")
"""The parts of a name that state the number of parameters or experts, such as 30b and 128e."""
REPLICATE_KEYS = ("parallelism.data_parallel_replicate_degree", "training.data_parallel_replicate_degree")
SHARD_KEYS = ("parallelism.data_parallel_shard_degree", "training.data_parallel_shard_degree")
HARMLESS = re.compile(
    r"(job|profiling|profiler|metrics|checkpoint|lr_scheduler|validat\w+|dataloader|comm|fault_tolerance|debug)\..*"
    r"|model\.(name|flavor|norm_type|hf_assets_path|tokenizer_path|print_after_conversion)"
    r"|optimizer\.(name|lr|eps|beta\d?|beta1|beta2|weight_decay|implementation)"
    r"|training\.(steps|max_norm|dataset\w*|data\..*|data_\w+_style|warmup_steps|seed|deterministic|gc_\w+|debug_mode"
    r"|mixed_precision_reduce|data_parallel_degree|decay_\w+|num_decays)"
    r"|activation_checkpoint\.selective_ac_option|parallelism\.pipeline_parallel_schedule\w*|experimental\.custom_\w+"
)
"""Keys that change neither the time nor the memory of a step, or belong to values that are noted on their own."""
OFF = ("", "0", "1", "-1", "none", "false", "[]", "{}", "float32", "disabled", "no", "off")
"""Values, in lower case, that turn something off."""
OLD_TRIAL = ["--training.steps", "{steps}", "--metrics.log_freq", "1", "--job.dump_folder", "{folder}"]
"""The arguments of trials for releases with TOML files. What they write goes to the folder of the trial."""


def starts_torchtitan(command: UserCommand | None) -> bool:
    """Return whether a command starts torchtitan's trainer."""
    if command is None:
        return False
    return "torchtitan.train" in command.program or option(command.arguments, CONFIG_FILE) is not None


def spec_of_torchtitan(start: Start, directory: Path, model: str | None, knobs: Sequence[str]) -> Imported:
    """Return the data of a spec for a torchtitan command, and notes. `knobs`: those of the engine. Raises SpecError."""
    words, notes = list(start.words), Notes()
    command = parse(words, str(directory))
    if command is None:
        raise _no_program(words)
    file = option(words, CONFIG_FILE)
    content = read_toml(str(file), directory) if file else {}
    found = {}
    for name, keys in TITAN_KEYS.items():
        for key in keys:
            if (value := option(words, key)) is None:
                value = files.value_at(content, key)
            if value is not None:
                value = {"true": True, "false": False}.get(str(value).lower(), number(value) or value)
                found[name] = (key, value)
                break
    key, value = found.get("micro_batch_size", ("", 1))
    if number(value) is None:
        notes.report(key, "is not a positive whole number", value=value, fix="correct it")
    cluster = cluster_of(command, notes, start)
    _check_degrees(command, content, cluster, notes)
    sizes = {name: number(found[name][1]) or 1 for name in list(TITAN_KEYS)[:3] if name in found}
    replicas = cluster["nodes"] * (number(cluster["devices_per_node"]) or 1)
    for size in sizes.values():
        replicas = max(1, replicas // size)
    length, micro = (number(found[name][1]) if name in found else None for name in ("seq_length", "micro_batch_size"))
    total = number(found["global_batch_size"][1]) if "global_batch_size" in found else None
    for key, value in (("training.seq_len", length), ("training.local_batch_size", micro or total)):
        if value is None:
            fix = f"add --{key} N to the command" + ("" if file else ": its configuration is a Python function")
            notes.report(f"--{key}", "is not in the command", fix=fix)
    if cluster["devices_per_node"] == "auto" and total is None:
        text = "is that of one device on a host, as the command has no number: multiply it by the number"
        notes.note("train.global_batch_size", text, "train.global_batch_size")
    if total and cluster["devices_per_node"] != "auto" and total % ((micro or 1) * replicas):
        text = f"{total} is no multiple of the micro-batch {micro or 1} x {replicas} replicas: the baseline is another"
        notes.note("training.global_batch_size", text, "train.global_batch_size")
    section = _model(model, _titan_names(content, words), directory, notes)
    if notes.problems:
        raise join_errors(notes.problems)
    program: dict[str, Any] = {"trial_args": OLD_TRIAL} if file else {}
    rows = {
        name: {"flag": f"--{key}", "default": value, **({} if _is_usual(name, value) else {"values": [value]})}
        for name, (key, value) in found.items()
        if name in knobs and file
    }
    if file:  # other releases have a subcommand
        rows.setdefault(AC, {"flag": f"--{TITAN_KEYS[AC][0]}"})
    fixed = {"pipeline_model_parallel_size": sizes.get("pipeline_model_parallel_size", 1)}
    if fixed["pipeline_model_parallel_size"] > 1:
        program["fixed"] = {"zero_stage": 3, **fixed}
        notes.note(found["pipeline_model_parallel_size"][0], "stays as it is in all trials", "train.program")
    program |= {"knobs": rows} if rows else {}
    for key, value in _not_predicted(content, command.arguments).items():
        notes.note(key, f"not in the predictions ({value})", "train")
    for key in SHARD_KEYS:
        if (option(words, key) or files.value_at(content, key)) not in (None, -1, "-1"):
            words = [word for word in _set(words, key, "") if word] if option(words, key) else words
            words = [*(word for word in words if word != f"--{key}"), f"--{key}=-1"]  # what other sizes leave
    size = total or (micro or 1) * replicas
    train = {"engine": "torchtitan", "seq_length": length, "global_batch_size": size, "precision": "bf16"}
    train |= {"command": words, "directory": str(directory), **({"program": program} if program else {})}
    return {"model": section, "cluster": cluster, "train": train, "auto_tuner": {}}, notes.notes


def _check_degrees(command: UserCommand, content: Mapping[str, Any], cluster: dict[str, Any], notes: Notes) -> None:
    """Report degrees of data parallelism that are no sizes, or need another number of devices than the command has.

    An empty number of hosts in the command becomes the one that the degrees need.
    """
    product, is_whole = 1, True
    for keys in (REPLICATE_KEYS, SHARD_KEYS, *[*TITAN_KEYS.values()][:3]):
        given = ((key, option(command.words, key) or files.value_at(content, key)) for key in keys)
        key, value = next((each for each in given if each[1] is not None), ("", 1))
        if str(value) == "-1" and keys == SHARD_KEYS:
            is_whole = False
        elif (size := number(value)) is None:
            notes.report(key, "is not a positive whole number", value=value, fix="correct it")
            return
        else:
            product *= size
        is_whole = is_whole and (bool(key) or keys != SHARD_KEYS)
    per_host, hosts = cluster["devices_per_node"], command.option("nnodes")
    if per_host == "auto":
        return
    if is_whole and hosts and not hosts.value and product > per_host and product % per_host == 0:
        cluster["nodes"] = product // per_host
        text = f"{cluster['nodes']}, as the degrees of parallelism need {product} devices: --nnodes has no value"
        notes.note("cluster.nodes", text, "cluster.nodes")
    devices = per_host * cluster["nodes"]
    if product != devices and (is_whole or devices % product):
        text = f"the degrees of parallelism need {'' if is_whole else 'a multiple of '}{product} devices: not {devices}"
        notes.note("parallelism", text, "cluster")


def _not_predicted(content: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Return the keys of a file and the options that are set, neither read nor harmless, with their values."""
    given = dict(_flat(content))
    names = (word[2:].partition("=")[0] for word in words if word.startswith("--"))
    given |= {name: option(words, name) for name in names if "." in name}
    read = {*SHARD_KEYS, *(key for keys in TITAN_KEYS.values() for key in keys)}
    return {
        key: value
        for key, value in given.items()
        if key not in read and not HARMLESS.fullmatch(key) and str(value).lower() not in OFF
        if key != "compile.components" or "model" not in str(value)
    }


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _is_usual(name: str, value: object) -> bool:
    """Return whether a value is among those that the engine tries."""
    return not (name == "micro_batch_size" and number(value) not in (1, 2, 4, 8, 16))


def _titan_names(content: Mapping[str, Any], words: Sequence[str]) -> list[str]:
    """Return the possible names of a model: of its files, of its kind and size, and of its configuration.

    The flavor decides on the shape: files of another size, or of a flavor without one, are those of a tokenizer.
    """
    section = dict(content.get("model") or {})
    section |= {key: own for key in ("name", "flavor", *FILES_OF_MODEL) if (own := option(words, f"model.{key}"))}
    paths = [str(section.get(each) or "") for each in FILES_OF_MODEL]
    if flavor := str(section.get("flavor") or "").lower():
        sizes = {*SIZE.findall(flavor)}
        own_sizes = [{*SIZE.findall(each.lower().rstrip("/").rpartition("/")[2])} for each in paths]
        paths = [each for each, own in zip(paths, own_sizes, strict=True) if sizes and (sizes <= own or not own)]
    own = str(option(words, "config") or "").replace("_", "-")
    kinds = [each for each in (f"{section['name']}-{section.get('flavor')}" if "name" in section else "", own) if each]
    spelled = [re.sub(r"(?i)^(llama)-?(\d)(?:_(\d))?", r"\1-\2.\3", each).replace(".-", "-") for each in kinds]
    return [*filter(None, paths), *kinds, *spelled]


def read_toml(file: str, directory: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises SpecError."""
    text = read_text(Path(directory, file), file=file, key=f"--{CONFIG_FILE}")
    try:
        content: dict[str, Any] = import_module("tomllib").loads(text)
    except ImportError:
        raise SpecError(key=f"--{CONFIG_FILE}", value=file, problem="needs Python 3.11", fix="use it") from None
    except ValueError as error:
        fix = "correct it"
        raise SpecError(key=f"--{CONFIG_FILE}", value=file, problem=f"is not valid TOML: {error}", fix=fix) from None
    return content
