"""What FlagScale's runner starts for a tree that trains: torchrun, the entrypoint, and the flattened arguments.

Source: FlagScale 0.6 to 0.9, `flagscale/runner/runner_train.py` and `flagscale/runner/utils.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flagcore.engines.megatron.knobs import SPACE_KNOBS
from flagcore.importers.flagscale.engines import TABLES
from flagcore.importers.flagscale.source import Source

Entry = tuple[str, Any]
"""A key of the tree and its value: one argument."""
SECTIONS = ("system", "model", "data")
RUNNER, TASK = "experiment.runner", "experiment.task"
FOLDERS = {
    "checkpoint": {"save": "checkpoints", "load": "checkpoints"},
    "logging": {"wandb_save_dir": "wandb", "tensorboard_dir": "tensorboard"},
}
"""Folders below exp_dir that FlagScale sets where a tree does not."""
NOT_PASSED = ("log_dir", "details_dir", "scripts_dir", "pids_dir")
PORT = 29500
"""FlagScale takes a free port; over several nodes, all of them must know it."""
MISSING = "???"
"""OmegaConf's value of a key that must be given: no trial starts with it."""
PLACEHOLDER = re.compile(r"x{3,}(\s+x{3,})*|<[^<>]+>|\?{2,3}", re.IGNORECASE)
"""Text of FlagScale's examples that stands for a value to give."""
_KNOBS = {knob.name for knob in SPACE_KNOBS}
_RUN_TRAIN = Path("flagscale", "runner", "runner_train.py")


def take_entries(source: Source) -> list[Entry]:
    """Take the sections `system`, `model` and `data` of `train` as arguments, in FlagScale's order.

    Of equal keys at the top of two sections the later value takes the earlier place.
    """
    exp_dir = source.at("experiment.exp_dir") or None
    merged: dict[str, Entry] = {}
    for section in SECTIONS:
        given = source.section(f"train.{section}")
        if section == "system":
            given = _with_folders(given, exp_dir)
            if source.at(f"{RUNNER}.no_shared_fs") is True:
                given["no_shared_fs"] = True
        for name, value in given.items():
            key = f"train.{section}.{name}"
            if name in merged:
                before = merged[name]
                source.note(before[0], f"dropped ({before[1]}): {key} is used")
            merged[name] = (key, value)
    return [entry for each in merged.values() for entry in _flattened(*each)]


def _with_folders(system: Mapping[str, Any], exp_dir: object) -> dict[str, Any]:
    made = dict(system)
    for section, folders in FOLDERS.items():
        given = made.get(section)
        if not isinstance(exp_dir, str) or not isinstance(given, (dict, type(None))):
            continue
        own = {name: given[name] for name in folders if given and isinstance(given.get(name), str)}
        paths = {name: os.path.join(exp_dir, folder) for name, folder in folders.items()} | own
        made[section] = {**(given or {}), **{name: os.path.abspath(path) for name, path in paths.items()}}
    return made


def _flattened(key: str, value: Any) -> Iterator[Entry]:
    if key.rpartition(".")[2] in NOT_PASSED:
        return
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _flattened(f"{key}.{name}", each)
    else:
        yield key, value


def words(entries: Iterable[Entry]) -> list[str]:
    """Return arguments as FlagScale writes them: true is a switch, false nothing, a list several values, null None.

    A knob that is null is left out, as by FlagScale's tuner; a placeholder becomes MISSING.
    """
    found: list[str] = []
    for key, value in entries:
        name = key.rpartition(".")[2].replace("-", "_")
        if value is False or (value is None and name in _KNOBS):
            continue
        values = value if isinstance(value, list) else [] if value is True else [value]
        values = [MISSING if is_placeholder(each) else each for each in values]
        found += [f"--{name.replace('_', '-')}", *map(str, values)]
    return found


def is_placeholder(value: object) -> bool:
    """Return whether a value stands for one that is still to be given."""
    return isinstance(value, str) and PLACEHOLDER.fullmatch(value.strip()) is not None


def take_command(source: Source, arguments: list[str], nodes: int, devices: int, host: str) -> dict[str, Any]:
    """Take the keys of the runner and return what starts a job: `command`, and its `directory`.

    `host` is the first node. Without FlagScale on this machine there is no directory, and trials cannot start. Sets
    PYTHONPATH under experiment.envs.
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
    where = {"directory": str(root)} if root else {"engine_version": TABLES["engine_version"]}
    before = source.take("experiment.cmds.before_start")
    prefix = ["bash", "-c", f'{before}\nexec "$@"', "before_start"] if before else []
    command = [*prefix, *_torchrun(source, nodes, devices, host), entrypoint, *arguments]
    return {"command": command, **where}


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
    found = [str(launcher)]
    for name, value in options.items():
        if value is not None and value is not False:
            found += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return found


def find_root(file: str) -> Path | None:
    """Return FlagScale's folder, or None.

    It is the working directory, one above the tree, one of PYTHONPATH, or one of the packages of torchrun or flagcore.
    """
    listed = [Path(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    torchrun = shutil.which("torchrun")
    packages = sorted(Path(torchrun).parent.parent.glob("lib/python3*/site-packages")) if torchrun else []
    installed = [folder for each in (*packages, *map(Path, sys.path)) for folder in (each / "flag_scale", each)]
    for place in (Path.cwd(), *Path(file).resolve().parents, *listed, *installed):
        if (place / _RUN_TRAIN).is_file():
            return place.resolve()
    return None


def _python_path(root: Path) -> str:
    """Return PYTHONPATH as the runner exports it: FlagScale and Megatron-LM in its order, then the user's folders."""
    megatron = root / "third_party" / "Megatron-LM"
    if not megatron.is_dir() and (root / "megatron" / "megatron").is_dir():
        megatron = root / "megatron"  # FlagScale 0.6
    text = (root / _RUN_TRAIN).read_text(encoding="utf-8", errors="replace")
    folders = [megatron, root] if "{megatron_dir}:{root_dir}" in text else [root, megatron]
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
