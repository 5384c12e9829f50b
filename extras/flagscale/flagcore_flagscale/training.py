"""Translates a training configuration: `train.system`, `train.model` and `train.data` contain Megatron's flags.

Builds the command that FlagScale's runner starts for training: torchrun, the entrypoint, flattened arguments. Source:
FlagScale 0.6 to 0.9, `flagscale/runner/runner_train.py` and `flagscale/runner/utils.py`.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flagcore_importers.dialect import flat
from flagcore_megatron.importing.arguments import RECOMPUTE, SIZES, Flags, baseline_of, baseline_problem, options, shape
from flagcore_megatron.space.knobs import SPACE_KNOBS
from flagcore_megatron.space.meshes import MESHES, SPLIT

from flagcore.domain.chip import Chip
from flagcore.domain.files import read_regular
from flagcore_flagscale import hetero as mixed
from flagcore_flagscale.experiment import Machines, add_own_variables, control, machines
from flagcore_flagscale.source import TABLES, Source

Entry = tuple[str, Any]
"""One argument: its key in the configuration, and its value."""
SECTIONS = ("system", "model", "data")
RUNNER, TASK = "experiment.runner", "experiment.task"
FOLDERS = {
    "checkpoint": {"save": "checkpoints", "load": "checkpoints"},
    "logging": {"wandb_save_dir": "wandb", "tensorboard_dir": "tensorboard"},
}
"""The folders below exp_dir that FlagScale uses by default."""
NOT_PASSED = ("log_dir", "details_dir", "scripts_dir", "pids_dir")
PORT = 29500
"""The master port for jobs on several nodes. All nodes must know it, but FlagScale would use a random free port."""
MISSING = "???"
"""OmegaConf's mark of a mandatory key that has no value. No trial starts with it."""
PLACEHOLDER_PATTERN = re.compile(r"x{3,}(\s+x{3,})*|<[^<>]+>|\?{2,3}", re.IGNORECASE)
"""Placeholders in FlagScale's examples that the user must replace."""
_KNOBS = {knob.name for knob in SPACE_KNOBS}
_RUN_TRAIN = Path("flagscale", "runner", "runner_train.py")


def take_entries(source: Source) -> list[Entry]:
    """Take the sections `system`, `model` and `data` of `train`, and return them as arguments in FlagScale's order.

    If two sections have the same key at their top level, the later value gets the position of the earlier one.
    """
    exp_dir = source.at("experiment.exp_dir") or None
    entries_by_name: dict[str, Entry] = {}
    for section in SECTIONS:
        section_values = source.section(f"train.{section}")
        if section == "system":
            section_values = _with_folders(section_values, exp_dir)
            if source.at(f"{RUNNER}.no_shared_fs") is True:
                section_values["no_shared_fs"] = True
        for name, value in section_values.items():
            key = f"train.{section}.{name}"
            if name in entries_by_name:
                previous = entries_by_name[name]
                source.note(previous[0], f"dropped ({previous[1]}): {key} is used")
            entries_by_name[name] = (key, value)
    entries = flat(dict(entries_by_name.values()))
    return [(key, value) for key, value in entries if value != {} and not {*NOT_PASSED} & {*key.split(".")}]


def _with_folders(system: Mapping[str, Any], exp_dir: object) -> dict[str, Any]:
    result = dict(system)
    for section, folders in FOLDERS.items():
        values = result.get(section)
        if not isinstance(exp_dir, str) or not isinstance(values, (dict, type(None))):
            continue
        given_folders = {name: values[name] for name in folders if values and isinstance(values.get(name), str)}
        paths = {name: os.path.join(exp_dir, folder) for name, folder in folders.items()} | given_folders
        result[section] = {**(values or {}), **{name: os.path.abspath(path) for name, path in paths.items()}}
    return result


def command_words(entries: Iterable[Entry]) -> list[str]:
    """Return the command-line words of arguments in FlagScale's format.

    True is a switch, false is omitted, a list is several values, and null is the word None. As in FlagScale's tuner,
    knobs that are null are omitted. A placeholder becomes MISSING.
    """
    result: list[str] = []
    for key, value in entries:
        name = key.rpartition(".")[2].replace("-", "_")
        if value is False or (value is None and name in _KNOBS):
            continue
        values = value if isinstance(value, list) else [] if value is True else [value]
        values = [MISSING if is_placeholder(each) else each for each in values]
        result += [f"--{name.replace('_', '-')}", *map(str, values)]
    return result


def is_placeholder(value: object) -> bool:
    """Return whether a value is a placeholder that the user must replace."""
    return isinstance(value, str) and PLACEHOLDER_PATTERN.fullmatch(value.strip()) is not None


def take_command(source: Source, arguments: list[str], nodes: int, devices: int, host: str) -> dict[str, Any]:
    """Take the keys of the runner, and return the `command` of a job and its `directory`.

    `host` is the first node. If FlagScale is not on this machine, there is no directory, and trials cannot start. The
    function sets PYTHONPATH under experiment.envs.
    """
    entrypoint = source.take(f"{TASK}.entrypoint")
    if not isinstance(entrypoint, str):
        problem, fix = "is missing", "give FlagScale's program, such as flagscale/train/train_gpt.py"
        raise source.error(f"{TASK}.entrypoint", problem, value=entrypoint, fix=fix)
    root = find_root(source.file)
    if root is None:
        fix = "run flag in FlagScale's folder, or add it to PYTHONPATH"
        source.note(f"{TASK}.entrypoint", f"FlagScale is not on this machine, so trials cannot start: {fix}", "train")
    else:
        source.put("experiment.envs", {"PYTHONPATH": _python_path(root)})
    location = {"directory": str(root)} if root else {"engine_version": TABLES["engine_version"]}
    before_start = source.take("experiment.cmds.before_start")
    prefix = ["bash", "-c", f'{before_start}\nexec "$@"', "before_start"] if before_start else []
    return {"command": [*prefix, *_torchrun(source, nodes, devices, host), entrypoint, *arguments], **location}


def _torchrun(source: Source, nodes: int, devices: int, host: str) -> list[str]:
    """Return torchrun and its options for the first node."""

    def take(name: str, default: Any) -> Any:
        return source.take(f"{RUNNER}.{name}", default)

    if source.at(f"{RUNNER}.per_node_task") is True:
        source.take(f"{RUNNER}.per_node_task")
        nodes, host = 1, "localhost"
    launcher, rendezvous = take("backend", "torchrun"), take("rdzv_backend", "c10d")
    address, port = take("master_addr", host), take("master_port", 0 if (nodes, rendezvous) == (1, "c10d") else PORT)
    options = {
        "nnodes": nodes,
        "nproc_per_node": devices,
        "node_rank": 0,
        "rdzv_id": take("rdzv_id", "default"),
        "rdzv_backend": rendezvous,
        "rdzv_endpoint": take("rdzv_endpoint", f"{address}:{port}"),
        **{name: take(name, None) for name in TABLES["torchrun_options"]},
    }
    logging = source.at("experiment.exp_dir")
    log_dir = take("log_dir", os.path.join(logging, "logs", "details") if isinstance(logging, str) else None)
    if isinstance(log_dir, str):
        options["log_dir"] = os.path.join(os.path.abspath(log_dir), f"host_0_{host}")
    options |= {"redirects": take("redirects", 3), "tee": take("tee", 3)}
    result = [str(launcher)]
    for name, value in options.items():
        if value is not None and value is not False:
            result += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return result


def find_root(file: str) -> Path | None:
    """Return FlagScale's folder, or None if it is not found.

    It is searched in the working directory, the parent folders of the configuration, the folders of PYTHONPATH, the
    packages next to torchrun, and flagcore's own packages.
    """
    python_path = [Path(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    torchrun = shutil.which("torchrun")
    packages = sorted(Path(torchrun).parent.parent.glob("lib/python3*/site-packages")) if torchrun else []
    package_folders = [folder for each in (*packages, *map(Path, sys.path)) for folder in (each / "flag_scale", each)]
    for folder in (Path.cwd(), *Path(file).resolve().parents, *python_path, *package_folders):
        if (folder / _RUN_TRAIN).is_file():
            return folder.resolve()
    return None


def _python_path(root: Path) -> str:
    """Return the PYTHONPATH that the runner exports: FlagScale, Megatron-LM, then the user's folders."""
    megatron = root / "third_party" / "Megatron-LM"
    if not megatron.is_dir() and (root / "megatron" / "megatron").is_dir():
        megatron = root / "megatron"  # FlagScale 0.6
    text = read_regular(root / _RUN_TRAIN).decode("utf-8", errors="replace")
    folders = [megatron, root] if "{megatron_dir}:{root_dir}" in text else [root, megatron]
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


_TUNER, _PERFORMANCE = "experiment.auto_tuner", "experiment.auto_tuner.performance"
_MIB = 1 << 20


def training(source: Source, all_chips: Callable[[], Sequence[Chip]], unresolved: Sequence[str] = ()) -> dict[str, Any]:
    """Return the data of a spec for training. Raises SpecError for missing keys.

    `unresolved` keys of `train` become placeholders in the command, so that no trial starts.
    """
    entries = take_entries(source)
    flags = Flags(source, entries, "train.model.{name}")
    _check_supported(source)
    hetero, found = mixed.hetero_of(source, flags), machines(source)
    section = found.section
    if hetero is not None:
        section = mixed.hetero_cluster(source, hetero, found, mixed.chip_names(source, hetero.types, all_chips()))
    add_own_variables(source, section, found.lines if "hostfile" in section else ())
    sizes = {key: flags.get(key) for key in ("seq_length", "global_batch_size")}
    for key, value in sizes.items():
        if value is None:
            source.report(f"train.model.{key}", "is missing", fix="give it")
    model = shape(flags, _vocabulary(flags))
    if "rwkv" in str(source.at(key := "experiment.task.entrypoint")):
        source.note(key, "predictions are those of a plain decoder with attention", "model")
    baseline = baseline_of(flags, model, on_meshes=hetero is not None)
    if hetero is not None:
        baseline = mixed.mixed_baseline(hetero, baseline, derived=mixed.is_tuned(source))
    else:
        _note_places(flags, baseline)
    text = "used in the baseline, with the parallel sizes of train.system"
    flags.note("micro_batch_size", text, "auto_tuner.baseline")
    command = _command(source, entries, unresolved, found)
    train = {"engine": "megatron", **sizes, **options(flags, on_meshes=hetero is not None), **command}
    meshes, problem, devices = None, "", [found.nodes * found.devices]
    if hetero is not None:
        fixed = mixed.fixed_settings(source, flags, hetero, model.get("mtp_num_layers") or 0)
        train["settings"] = {**train.get("settings", {}), **fixed}
        meshes = mixed.meshes_of_space(source, hetero, section, baseline, found.lines)
        batch, samples, devices = sizes["global_batch_size"], baseline["micro_batch_size"], hetero.devices
        problem = mixed.meshes_problem(hetero, batch, samples, section, found.lines)
    if not problem and MESHES not in baseline:
        problem = baseline_problem(baseline, train, model, sum(devices))
    tuner = _tuner(source, baseline, problem, meshes)
    if found.nodes > 1 and "hostfile" in section and not source.at("experiment.runner.per_node_task"):
        tuner["launcher"] = "ssh"
    _set_memory(source, section)
    return {"model": model, "cluster": section, "train": train, "auto_tuner": tuner}


def _command(source: Source, entries: Sequence[Entry], unresolved: Sequence[str], found: Machines) -> dict[str, Any]:
    arguments = command_words([*entries, *((key, MISSING) for key in unresolved)])
    for key, value in entries:
        if is_placeholder(value):
            source.note(key, f"{value!r} is a placeholder: give the value, or trials cannot start", "train")
    command = take_command(source, arguments, found.nodes, found.devices, found.first_host)
    if source.take("experiment.exp_dir") is not None:
        text = "of the job itself; trials write into --run-dir"
        source.note("experiment.exp_dir", f"checkpoints and logs {text}", "train.command")
    return command


def _note_places(flags: Flags, baseline: Mapping[str, Any]) -> None:
    """Note the knobs that FlagScale's tuner does not change, because they are not in `train.system`."""
    for name in (*baseline, *RECOMPUTE):
        if name != "micro_batch_size" and flags.has(name) and not flags.key(name).startswith("train.system."):
            text = "FlagScale's tuner cannot change it outside of train.system; candidates replace it"
            flags.note(name, text, "auto_tuner.baseline")


def _tuner(source: Source, baseline: dict[str, Any], problem: str, meshes: list[str] | str | None) -> dict[str, Any]:
    """Return the section `auto_tuner`, without the baseline if there is a `problem` with it.

    `meshes` are the meshes of the space, for a job on several meshes.
    """
    space = _space(source, [knob.name for knob in SPACE_KNOBS if knob.name not in (SPLIT, MESHES)])
    even: dict[str, Any] = {SPLIT: None}  # FlagScale splits layers evenly
    section: dict[str, Any] = {"space": {**space, **(even if meshes is None else ({MESHES: meshes} if meshes else {}))}}
    if problem:
        text = f"cannot run: {problem}; the rule of thumb is the baseline instead"
        source.note("train.system", text, "auto_tuner")
    else:
        section["baseline"] = baseline
    steps = source.take(f"{_TUNER}.control.train_iters", 5)
    section |= {"control": {"train_iters": steps, **control(source, "train")}, "objective": _objective(source)}
    reason = "the default strategy is learned, which stops when little can be gained; predicted tries all"
    source.drop(f"{_TUNER}.algo", reason, "auto_tuner")
    return section


def _check_supported(source: Source) -> None:
    """Raise SpecError for a job that flagcore cannot represent."""
    key, backend = "experiment.task.backend", source.take("experiment.task.backend")
    if backend not in (None, "megatron"):
        problem, fix = "trains a model without Megatron's flags", "use a tree of the backend megatron"
        raise source.error(key, problem, value=backend, fix=fix)


def _vocabulary(flags: Flags) -> Any:
    size, fix = flags.get("vocab_size"), "give the number of tokens, also as an override: {}=32000"
    if size is None:
        key = "train.data.tokenizer.vocab_size"
        flags.source.report(key, "is missing", fix=fix.format(f"+{key}"))
    elif is_placeholder(size):
        key = flags.key("vocab_size")
        flags.source.report(key, "is a placeholder", value=size, fix=fix.format(key))
    return size


def _space(source: Source, knob_names: Any) -> dict[str, Any]:
    tree_space, space = source.section(f"{_TUNER}.space"), dict[str, Any]()
    for key, value in tree_space.items():
        tree_key = f"{_TUNER}.space.{key}"
        if key == "recompute_num_layers" and isinstance(value, list) and 0 in value:
            value = [each for each in value if each != 0]
            text = "0 is dropped: use_recompute switches recomputation off"
            source.note(tree_key, text, f"auto_tuner.space.{key}")
        if key in knob_names:
            space |= {} if value in (None, []) else {key: value}
        else:
            kinds = (why for part, why in TABLES["dropped_of_space"].items() if part in key)
            source.note(tree_key, f"dropped: {next(kinds)}", "auto_tuner.space")
    missing = [key for key in knob_names if key not in space]
    _note_space(source, space, missing)
    return space


def _note_space(source: Source, space: Mapping[str, Any], missing: Sequence[str]) -> None:
    """Note where a space means other values in FlagScale. `missing`: its knobs without values."""
    virtual = space.get(SIZES[4])
    if isinstance(virtual, list) and not {0, None} & {each for each in virtual if type(each) is int or each is None}:
        text = "FlagScale tries only pipelines of more than two stages; flagcore also tries shorter ones without them"
        source.note(f"{_TUNER}.space.{SIZES[4]}", text, f"auto_tuner.space.{SIZES[4]}")
    if missing:
        text = f"missing keys are auto, as in FlagScale: {', '.join(missing)}"
        source.note(f"{_TUNER}.space", text, "auto_tuner.space")
    if "auto" in space.values() or missing:
        text = "auto means every legal value; FlagScale's auto includes illegal values"
        source.note(f"{_TUNER}.space", text, "auto_tuner.space")


def _objective(source: Source) -> str:
    """Return the objective. For a fixed batch size and number of devices, times and rates rank candidates equally."""
    name, order = source.take(f"{_PERFORMANCE}.name"), source.take(f"{_PERFORMANCE}.order")
    key = "auto_tuner.objective"
    if name is not None:
        text = f"{name!r} is not used: flagcore times each step and uses the median"
        source.note(f"{_PERFORMANCE}.name", text, key)
    if order is not None:
        source.note(f"{_PERFORMANCE}.order", f"dropped ({order}): less time is better", key)
    return "step_time_s"


def _set_memory(source: Source, cluster: dict[str, Any]) -> None:
    section_key = f"{_TUNER}.memory_model"
    section = source.section(section_key)
    size, share = section.pop("gpu_memory", None), section.pop("gpu_utilization", None)
    name = section.pop("model_name", None)
    low_share, high_share = share if isinstance(share, list) and _is_share_pair(share) else (0.2, 0.8)
    if size is not None and (isinstance(size, bool) or not isinstance(size, (int, float)) or size <= 0):
        source.report(
            f"{section_key}.gpu_memory", "must be a number above 0, of MB", value=size, fix="use 80000 for 80 GB"
        )
        size = None
    if share is not None and not _is_share_pair(share):
        problem, fix = "must be two shares, from 0 to 1, the lower first", "use [0.2, 0.8]"
        source.report(f"{section_key}.gpu_utilization", problem, value=share, fix=fix)
    if size is not None:
        for nodes in cluster.get("groups", [cluster]):
            nodes["memory_per_device"] = int(size * high_share) * _MIB
        text = (
            f"{size} MB x {high_share}: is the memory limit of a trial; FlagScale's lower bound {low_share} is not used"
        )
        source.note(f"{section_key}.gpu_memory, gpu_utilization", text, "cluster.memory_per_device")
    elif share is not None:
        source.note(
            f"{section_key}.gpu_utilization", "dropped: gpu_memory is missing, so all memory may be used", "cluster"
        )
    if name is not None:
        source.note(f"{section_key}.model_name", f"dropped ({name}): flagcore has its own memory model", "cluster")
    for key, _ in flat(section):
        source.note(f"{section_key}.{key}", "dropped: unknown to flagcore", "cluster")


def _is_share_pair(value: object) -> bool:
    numbers = [each for each in value if type(each) in (int, float)] if isinstance(value, list) else []
    return len(numbers) == 2 == len(value) and 0.0 <= numbers[0] < numbers[1] <= 1.0  # type: ignore[arg-type]
