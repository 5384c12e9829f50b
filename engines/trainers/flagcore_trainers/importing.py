"""Converts commands of DeepSpeed and torchtitan to specs: the command stays, and its configuration is the baseline.

Sources: DeepSpeed 0.19 `launcher/runner.py` and `runtime/config.py`; the recipes of torchtitan's `train_configs`.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flagcore_importers.dialect import Dialect, Reading, flat, name_of, placed, read_config
from flagcore_importers.values import count_of, positive
from flagcore_models.public import model_of
from flagcore_training.commands import UserCommand, cluster_of, parse, with_places
from flagcore_training.knobs import joined, note_effects
from flagcore_vendorkit.settings import Settings, read_settings

from flagcore.domain.engine import Unmodelled
from flagcore.domain.launch import Start
from flagcore.domain.spec import ImportNote
from flagcore.errors import SpecError, join_errors
from flagcore.spec.plain_data import Notes, lookup, package_yaml
from flagcore_trainers import start as files
from flagcore_trainers.fully_shard import AC, CP, PP, TP
from flagcore_trainers.start import CONFIG_FILE, option, read_toml

Imported = tuple[dict[str, Any], Sequence[ImportNote]]
TABLES: Any = package_yaml(__package__, "importing.yaml")
MICRO, STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
"""Arguments of Hugging Face's Trainer, and of scripts that follow it."""
MICRO_BATCH = "micro_batch_size"
MICRO_KEY = "train_micro_batch_size_per_gpu"
SIZES = {MICRO: MICRO_KEY, STEPS: STEPS}
"""The key of DeepSpeed's configuration for each of these arguments."""


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """Return the values of the options of a command by their names as they are written, with dashes."""
    found = ((words[start].partition("=")[0], value) for _name, value, start, _end in placed(words))
    return {name: value for name, value in found if name.startswith("--")}


GROUPS = ("tensor_parallel.autotp_size", "sequence_parallel_size")
"""Keys of DeepSpeed with the sizes of groups of ranks that share a sample."""
BATCH_KEYS = ("train_batch_size", MICRO_KEY, STEPS)


def check_sizes(content: Mapping[str, Any], config: str) -> None:
    """Raise SpecError if a size of a batch in a configuration of DeepSpeed is neither a positive number nor `auto`."""
    for key in BATCH_KEYS:
        value = content.get(key)
        if value not in (None, "auto") and positive(str(value).removesuffix(".0")) is None:
            fix = f"correct {config}"
            raise SpecError(key=key, value=value, problem="is neither a positive whole number nor auto", fix=fix)


def processes(words: Sequence[str], directory: str) -> int | None:
    """Return the number of processes that a command starts on a host, or None if it does not say so."""
    command = parse(words, directory)
    if command is None:
        return _launched(words)[0]
    given = command.option("nproc-per-node")
    return positive(given.value) if given else None


def _launched(words: Sequence[str]) -> tuple[int | None, int]:
    """Return the devices of a host (or None) and the number of hosts (or 0) of the `deepspeed` launcher's options."""
    included = str(option(words, "include") or "").split("@")
    listed = [len(each.partition(":")[2].split(",")) for each in included if ":" in each]
    devices = positive(option(words, "num_gpus")) or (listed[0] if listed else None)
    return devices, positive(option(words, "num_nodes")) or len(listed)


def spec_of_deepspeed(start: Start, flags: Sequence[str], directory: Path, model: str | None) -> Imported:
    """Return the data of a spec for a command with a configuration of DeepSpeed, and notes. Raises SpecError."""
    words, notes = list(start.words), Notes()
    given = next(((flag, value) for flag in flags if isinstance(value := files.flag_value(words, flag), str)), None)
    if given is None:
        raise _no_program(words)
    flag, config = given
    content = read_config(config, str(directory), key=flag)
    check_sizes(content, config)
    cluster = _cluster(start, str(directory), notes)
    total, share = _batch(words, content, cluster, notes)
    length = positive(option(words, *TABLES["length_flags"]))
    if length is None:
        notes.report("train.seq_length", "is not in the command", fix="add --max_seq_len N to the command")
    section = model_of(model, [option(words, *TABLES["model_flags"])], directory, notes)
    if notes.problems:
        raise join_errors(notes.problems)
    _note_contradictions(words, content, config, share, notes)
    program = dict[str, Any]()
    if option(words, MICRO) is not None:  # Hugging Face's Trainer compares its arguments with the configuration
        words = _set(words, STEPS, "{gradient_accumulation_steps}")
        values = sorted({1, 2, 4, 8, 16, 32, _sizes(words, content)[0]})
        row = {"key": MICRO_KEY, "flag": f"--{MICRO}", "values": values, "label": "MBS"}
        program = {"knobs": {"micro_batch_size": row}}
    if _note_unpredicted(words, content, directory, notes):
        program["fixed"] = {"recompute": 2}
    precision = next((name for name in ("bf16", "fp16") if _is_on(content, name, option(words, name))), "fp32")
    train: dict[str, Any] = {"engine": "deepspeed", "seq_length": length}
    train |= {"global_batch_size": total, "precision": precision}
    words = [*with_places(words, cluster["nodes"])]
    train |= {"command": words, "directory": str(directory), **({"program": program} if program else {})}
    notes.note("command", f"keys of {config} are the baseline, and trials change copies of it", "train")
    return {"model": section, "cluster": cluster, "train": train, "auto_tuner": {}}, notes.notes


def _sizes(words: Sequence[str], content: Mapping[str, Any]) -> list[int]:
    """Return the micro-batch size and the number of micro-batches of the configuration, or else of the command."""
    return [positive(content.get(key)) or count_of(option(words, name)) for name, key in SIZES.items()]


def _batch(
    words: Sequence[str], content: Mapping[str, Any], cluster: Mapping[str, Any], notes: Notes
) -> tuple[int, float | None]:
    """Return the global batch size, and the micro-batch size that follows from that of the configuration, if known.

    The ranks of a group train on the same samples (transformers 5.24 `Trainer.get_total_train_batch_size`). DeepSpeed
    0.19.8 counts those of AutoTP as replicas in `train_batch_size`, and those of a sequence once (`runtime/config.py`).
    """
    micro, accumulated = _sizes(words, content)
    tensor, sequence = (count_of(lookup(content, key)) for key in GROUPS)
    is_known = cluster["devices_per_node"] != "auto"
    per_node = count_of(cluster["devices_per_node"]) if is_known else tensor * sequence
    ranks, total = cluster["nodes"] * per_node // sequence, positive(content.get("train_batch_size"))
    if total is None:
        total = micro * accumulated * max(1, ranks // tensor)
        text = "is that of the command's devices, groups, micro-batch and steps"
        if not is_known:
            text = f"{total}: with one replica on a host, as the command has no number; multiply it by the number"
        notes.note("train.global_batch_size", text, "train.global_batch_size")
        return total, None
    if is_known and total % (micro * max(1, ranks)):
        text = f"{total} is no multiple of the micro-batch {micro} x {ranks} replicas: the baseline is another"
        notes.note("train_batch_size", text, "train.global_batch_size")
    return max(1, total // tensor), total / (accumulated * max(1, ranks)) if is_known else None


def _note_contradictions(
    words: Sequence[str], content: Mapping[str, Any], config: str, share: float | None, notes: Notes
) -> None:
    """Add a note on each size of the command that differs from that of the configuration, or from `share`."""
    follows = None if share is None else int(share) if share.is_integer() else round(share, 3)
    for name, key in SIZES.items():
        own, given = option(words, name), positive(content.get(key))
        other = given or (follows if name == MICRO else None)
        if positive(own) and other and positive(own) != other:
            of = f"of {config}" if given else f"of train_batch_size in {config}"
            notes.note(f"--{name}", f"{own} contradicts {other} {of}", "train.command")


def _note_unpredicted(words: Sequence[str], content: Mapping[str, Any], directory: Path, notes: Notes) -> bool:
    """Add notes on what changes the time or memory of a step, but not the predictions.

    Returns whether the script stores the inputs of layers only.
    """
    device = lookup(content, "zero_optimization.offload_optimizer.device")
    if device not in (None, "none", "cpu"):
        text = f"{device} is not tuned: the baseline has none instead"
        notes.note("zero_optimization.offload_optimizer.device", text, "train")
    note_effects(effects_of_deepspeed(words, content), notes)
    if own := [*_of_script(words)]:
        notes.note(", ".join(own), "of the script, unknown to flagcore: not in the predictions", "train.command")
    checkpoints = [*_turned_on(words, CHECKPOINTS)]
    for found in checkpoints[:1]:
        notes.note(found, "is taken as the recompute of whole layers in backward", "train.program.fixed")
    for text in files.own_configurations(words, directory):
        notes.note("config", text, "train.command")
    if count_of(stages := option(words, "pipe_parallel_size", "pipeline_parallel_size")) > 1:
        notes.note("pipe_parallel_size", f"not in the predictions ({stages}): all devices count as replicas", "train")
    return bool(checkpoints)


def _of_script(words: Sequence[str]) -> Iterator[str]:
    """Yield the options of a script that no table knows."""
    read = {*TABLES["length_flags"], *TABLES["model_flags"], *TABLES["launcher_flags"], *SIZES}
    for name in options_of(words):
        switch = f"--{re.sub('^(no|disable|without)_', '', plain := name_of(name))}"
        if plain not in read and not DEEPSPEED.is_listed(plain) and not CHECKPOINTS.fullmatch(switch):
            yield name


CHECKPOINTS = re.compile(
    r"--(?!no_|disable_|without_)(\w+_)?((grad(ient)?|act(ivation)?s?)_?(ckpt|checkpoint(ing|s)?)"
    r"|checkpoint_(activations|layers)|recompute(_activations)?)"
)
"""Options of scripts that store the inputs of layers only. Others of the same names have values that turn them off."""


def effects_of_deepspeed(words: Sequence[str], content: Mapping[str, Any], prefix: str = "") -> list[Unmodelled]:
    """Return the effects of a configuration's keys and of a command's options that predictions do not include.

    Options that have no class are those of the user's own script. `prefix`: what users read before the keys.
    """
    given = dict(flat(content))
    stage, device = (given.get(f"zero_optimization.{key}") for key in ("stage", "offload_optimizer.device"))
    idle = [OF_ZERO_3] * (stage not in (3, "3")) + [OF_OFFLOAD] * (device in (None, "none"))
    found = [
        (key, f"{prefix}{key}", value)
        for key, value in given.items()
        if not (DEEPSPEED.is_listed(key) and any(each.fullmatch(key) for each in idle))
    ]
    options = {name: value for name, value in options_of(words).items() if not DEEPSPEED.unclassed([name[2:]])}
    return _effects(DEEPSPEED, [*found, *((name.removeprefix("--"), name, each) for name, each in options.items())])


DEEPSPEED, TORCHTITAN = (read_settings(__package__, f"settings/{name}.yaml") for name in ("deepspeed", "torchtitan"))
"""The classes of the settings of DeepSpeed with Hugging Face's Trainer, and of torchtitan."""
OF_ZERO_3 = re.compile(r"zero_optimization\.((stage3_|mics_|leaf_module|offload_param)[\w.]*|sub_group_size)")
"""Keys that other stages of ZeRO ignore. Source: DeepSpeed 0.19 `runtime/engine.py`."""
OF_OFFLOAD = re.compile(
    r"zero_optimization\.(round_robin_gradients|offload_optimizer\.\w+)|zero_force_ds_cpu_optimizer"
)
"""Keys that do nothing without an optimizer on the host."""


def _effects(settings: Settings, given: Iterable[tuple[str, str, Any]]) -> list[Unmodelled]:
    """Return the effects of settings with their names for users and their values. Those without a class have one."""
    found = list[Unmodelled]()
    for name, shown, value in given:
        if not settings.is_listed(name) and value != {}:
            found.append(settings.unknown(name, shown))
        elif effect := settings.unmodelled(name, {"true": True, "false": False}.get(str(value).lower(), value), shown):
            found.append(effect)
    return joined(found)


def _turned_on(words: Sequence[str], options: re.Pattern[str]) -> Iterator[str]:
    """Yield the options of a command that match a pattern and are not turned off, as they are written."""
    for name, value in options_of(words).items():
        is_off = str(value).lower() in ("false", "0", "none", "adamw_torch", "adamw_torch_fused", "adamw_hf")
        if options.fullmatch(f"--{name_of(name)}") and not is_off:
            yield name


def _no_program(words: Sequence[str]) -> SpecError:
    """Return the error for a script: candidates change the words of the program's own command."""
    return SpecError(key="train.command", value=" ".join(words), problem="is a script", fix="give what it starts")


def _is_on(content: Mapping[str, Any], name: str, flag: object) -> bool:
    section = content.get(name, content.get(name.replace("bf16", "bfloat16")))  # the old name
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
    if option(words, "hostfile") and not positive(option(words, "num_nodes")):
        notes.note("cluster.nodes", f"{nodes}: the hosts of --hostfile are not read", "cluster")
    return {"chip": "auto", "nodes": nodes, "devices_per_node": devices or "auto"}


TITAN = Dialect(starts="torchtitan", keys=TABLES["titan_keys"])
DEGREES = (TP, CP, PP)
TOKENS = TITAN.keys["micro_tokens"][0]
"""The option of releases after 0.3 that counts the tokens of a local batch, not its samples."""
FILES_OF_MODEL = ("hf_assets_path", "tokenizer_path")
SIZE = re.compile(r"\d+(?:\.\d+)?[bme](?![a-z])")
"""The parts of a name that state the number of parameters or experts, such as 30b and 128e."""


def starts_torchtitan(command: UserCommand | None) -> bool:
    """Return whether a command starts torchtitan's trainer."""
    if command is None:
        return False
    return "torchtitan.train" in command.program or option(command.arguments, CONFIG_FILE) is not None


def titan(words: Sequence[str], content: Mapping[str, Any]) -> Reading:
    """Return the settings of torchtitan: those of a command over those of its file, or of its registry."""
    options = {name: value for name, value, _start, _end in placed(words)}
    return Reading(TITAN, {**_of_registry(options), **dict(flat(content)), **options}, {})


def _of_registry(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a named configuration of torchtitan sets, and the options do not, by first keys of meanings."""
    row = TABLES["titan_registry"].get(str(options.get("config")).replace("-", "_"), ())
    names = ("seq_length", "micro_batch_size", TP, AC)
    given = zip(names, row, strict=False)
    return {TITAN.keys[name][0]: value for name, value in given if not {*TITAN.keys[name]} & options.keys()}


def first_of(read: Reading, target: str) -> tuple[str, Any]:
    """Return the first key of a target that is set, and its value: an empty text and None without one."""
    return next(iter(read.found(target).items()), ("", None))


def spec_of_torchtitan(start: Start, directory: Path, model: str | None, knobs: Sequence[str]) -> Imported:
    """Return the data of a spec for a torchtitan command, and notes. `knobs`: those of the engine. Raises SpecError."""
    words, notes = list(start.words), Notes()
    command = parse(words, str(directory))
    if command is None:
        raise _no_program(words)
    file = option(words, CONFIG_FILE)
    content = read_toml(str(file), directory) if file else {}
    read = titan(words, content)
    key, value = first_of(read, "micro_batch_size")
    if key and positive(value) is None:
        notes.report(key, "is not a positive whole number", value=value, fix="correct it")
    cluster = cluster_of(command, notes, start)
    _check_degrees(read, command, cluster, notes)
    sizes = [read.number(name) or 1 for name in DEGREES]
    length, micro, total = map(read.number, ("seq_length", "micro_batch_size", "global_batch_size"))
    tokens, step_tokens = map(read.number, ("micro_tokens", "step_tokens"))
    if tokens and length:
        micro, total = tokens // length, step_tokens and step_tokens // length
        if tokens % length or sizes[2] > 1:
            text = "must be a multiple of the context length, without pipeline stages"
            notes.report(f"--{TOKENS}", text, value=tokens, fix=f"write a multiple of {length}, without stages")
    for key, value in (("training.seq_len", length), ("training.local_batch_size", micro or total)):
        if value is None:
            fix = f"add --{key} N to the command" + ("" if file else ": its configuration is a Python function")
            notes.report(f"--{key}", "is not in the command", fix=fix)
    size = _titan_batch(cluster, sizes, micro or 1, total, notes)
    section = model_of(model, _titan_names(read), directory, notes)
    if notes.problems:
        raise join_errors(notes.problems)
    program = _titan_program(read, sizes[2], knobs if file else None, notes)
    if not file and (rows := _registry_rows(words)):
        program["knobs"] = rows
    if tokens and length and micro:
        values = {str(each * length): each for each in sorted({1, 2, 4, 8, 16, micro})}
        row = {"flag": f"--{TOKENS}", "values": values, "default": str(tokens), "label": "tokens"}
        program["knobs"] = {**program.get("knobs", {}), MICRO_BATCH: row}
    note_effects(effects_of_torchtitan(command.arguments, content), notes)
    train: dict[str, Any] = {"engine": "torchtitan", "seq_length": length, "global_batch_size": size}
    train |= {
        "precision": "bf16",
        "command": [*with_places(_without_shards(words, read), cluster["nodes"])],
        "directory": str(directory),
    }
    train |= {"program": program} if program else {}
    return {"model": section, "cluster": cluster, "train": train, "auto_tuner": {}}, notes.notes


def _titan_program(read: Reading, stages: int, knobs: Sequence[str] | None, notes: Notes) -> dict[str, Any]:
    """Return the section `train.program`. `knobs`: those of the engine; None for releases with a subcommand."""
    program: dict[str, Any] = {} if knobs is None else {"trial_args": TABLES["old_trial"]}
    if stages > 1:
        program["fixed"] = {"zero_stage": 3, PP: stages}
        notes.note(first_of(read, PP)[0], "stays as it is in all trials", "train.program")
    if knobs is not None:
        found = {name: first_of(read, name) for name in TITAN.keys if name in knobs}
        rows = {name: _titan_row(name, *each) for name, each in found.items() if each[0]}
        program["knobs"] = {**rows, AC: rows.get(AC, {"flag": f"--{TITAN.keys[AC][0]}"})}
    return program


def _registry_rows(words: Sequence[str]) -> dict[str, Any]:
    """Return rows with the values of knobs that the registry sets, and the command does not, and of an old option."""
    given = {name: value for name, value, _start, _end in placed(words)}
    found = {name: _of_registry(given).get(TITAN.keys[name][0]) for name in (MICRO_BATCH, TP, AC)}
    if any(each.startswith("activation-checkpoint:") for each in words):
        found.pop(AC, None)
    rows = {name: {"default": value} for name, value in found.items() if value not in (None, 1, "selective")}
    key = TITAN.keys[AC][0]  # an option of releases before the subcommand
    return {**rows, AC: _titan_row(AC, key, given[key])} if key in given else rows


def _without_shards(words: list[str], read: Reading) -> list[str]:
    """Return a command that shares weights among as many ranks as other sizes leave."""
    for key in (key for key, value in read.found("shard").items() if value != -1):
        words = [word for word in _set(words, key, "") if word] if option(words, key) else words
        words = [*(word for word in words if word != f"--{key}"), f"--{key}=-1"]
    return words


def _titan_batch(
    cluster: Mapping[str, Any], sizes: Collection[int], micro: int, total: int | None, notes: Notes
) -> int:
    """Return the global batch size. `sizes`: the degrees of parallelism of a replica. `total`: what the job sets."""
    replicas = cluster["nodes"] * count_of(cluster["devices_per_node"])
    for size in sizes:
        replicas = max(1, replicas // size)
    if cluster["devices_per_node"] == "auto" and total is None:
        text = "is that of one device on a host, as the command has no number: multiply it by the number"
        notes.note("train.global_batch_size", text, "train.global_batch_size")
    if total and cluster["devices_per_node"] != "auto" and total % (micro * replicas):
        text = f"{total} is no multiple of the micro-batch {micro} x {replicas} replicas: the baseline is another"
        notes.note("training.global_batch_size", text, "train.global_batch_size")
    return total or micro * replicas


def _titan_row(name: str, key: str, value: object) -> dict[str, Any]:
    """Return the row of a knob. If the engine does not try the value, it is the only one."""
    value = positive(value) or value
    is_usual = name != "micro_batch_size" or value in (1, 2, 4, 8, 16)
    return {"flag": f"--{key}", "default": value, **({} if is_usual else {"values": [value]})}


def _check_degrees(read: Reading, command: UserCommand, cluster: dict[str, Any], notes: Notes) -> None:
    """Report degrees of data parallelism that are no sizes, or need another number of devices than the command has.

    An empty number of hosts in the command becomes the one that the degrees need.
    """
    product, is_whole = 1, True
    for target in ("replicate", "shard", *DEGREES):
        key, value = first_of(read, target)
        if target == "shard" and (not key or str(value) == "-1"):
            is_whole, value = False, 1
        if (size := positive(value) if key else 1) is None:
            notes.report(key, "is not a positive whole number", value=value, fix="correct it")
            return
        product *= size
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


def effects_of_torchtitan(words: Sequence[str], content: Mapping[str, Any]) -> list[Unmodelled]:
    """Return the effects of a file's keys and of a command's options that predictions do not include."""
    given = dict(flat(content))
    for written, value in options_of(words).items():
        if name_of(written) in TABLES["launcher_flags"]:
            continue
        section, _, key = (name := written[2:]).rpartition(".")
        positive, is_no = f"{section}.{key[3:]}", key.startswith(("no-", "no_"))
        if is_no and TORCHTITAN.is_listed(positive) and not TORCHTITAN.is_listed(name):
            name, value = positive, False
        given[name] = ",".join(map(str, value)) if isinstance(value, list) else value
    found = [(key, key, value) for key, value in given.items()]
    if kind := FORMATS.search(name := str(given.get("config"))):
        found.append((f"config.{kind[0]}", f"--config {name}", True))
    return _effects(TORCHTITAN, found)


FORMATS = re.compile("float8|mxfp8|nvfp4|lora")
"""What the name of a configuration in Python says of its layers. Source: `config_registry.py` of torchtitan 0.3."""


def _titan_names(read: Reading) -> list[str]:
    """Return the possible names of a model: of its files, of its kind and size, and of its configuration.

    The flavor decides on the shape: files of another size, or of a flavor without one, are those of a tokenizer.
    """
    section = {key: str(own) for key in ("name", "flavor", *FILES_OF_MODEL) if (own := read.given.get(f"model.{key}"))}
    paths = [section.get(each, "") for each in FILES_OF_MODEL]
    if flavor := section.get("flavor", "").lower():
        sizes = {*SIZE.findall(flavor)}
        own_sizes = [{*SIZE.findall(each.lower().rstrip("/").rpartition("/")[2])} for each in paths]
        paths = [each for each, own in zip(paths, own_sizes, strict=True) if sizes and (sizes <= own or not own)]
    own = str(read.given.get("config") or "").replace("_", "-")
    kinds = [each for each in (f"{section['name']}-{section.get('flavor')}" if "name" in section else "", own) if each]
    spelled = [re.sub(r"(?i)^(llama)-?(\d)(?:_(\d))?", r"\1-\2.\3", each).replace(".-", "-") for each in kinds]
    listed = TABLES["titan_registry"].get(own.replace("-", "_"), ())[4:]
    return [*filter(None, paths), *listed, *kinds, *spelled]
