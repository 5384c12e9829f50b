"""Builds the command that FlagScale's runner starts for training: torchrun, the entrypoint, flattened arguments.

Source: FlagScale 0.6 to 0.9, `flagscale/runner/runner_train.py` and `flagscale/runner/utils.py`.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flagcore_importers.dialect import flat
from flagcore_megatron.space.knobs import SPACE_KNOBS

from flagcore.domain.files import read_regular
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
