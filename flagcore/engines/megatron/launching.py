"""How a candidate is started: flagcore's trial program, or the user's own command."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

from flagcore.contracts import Platform
from flagcore.domain.candidate import Candidate, KnobValue
from flagcore.domain.launch import Launch
from flagcore.domain.spec import SettingValue, Spec, TrainSpec
from flagcore.engines.megatron.command.checks import check_command
from flagcore.engines.megatron.command.launch import own_launch
from flagcore.engines.megatron.command.reference import reference_launch
from flagcore.engines.megatron.knobs import BY_NAME, columns
from flagcore.engines.megatron.options import DEFAULTS, TRIAL, schedule
from flagcore.engines.megatron.predict import layout_texts
from flagcore.engines.megatron.split import EACH, SPLIT
from flagcore.engines.megatron.stages import LAYOUT
from flagcore.errors import LaunchError, NoDevice, SpecError

PROGRAM = "flagcore.engines.megatron.trial"
MODULES = {"torch": "torch", "megatron.core": "megatron-core>=0.16,<0.17"}
"""What trials import, and the pip requirement that brings it."""
SEED = 1234
PRECISIONS = ("bf16", "fp16", "fp32")
TRIAL_SETTINGS = (
    "recompute_modules",
    "expert_tensor_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    LAYOUT,
)
"""Settings that the trial program takes."""


def ready(spec: Spec, modules: Mapping[str, str] = MODULES) -> None:
    """Raise SpecError or NoDevice unless trials of `spec` can run here; a user's own command brings its own means."""
    train = spec.train
    _settings_run(train)
    if train.command is not None:
        check_command(spec)
        return
    if spec.cluster.groups:
        chips, problem = [group.chip for group in spec.cluster.groups], "are more kinds of chips than one machine has"
        fix = "plan with `flag estimate`; to run trials, give a train.command that starts on all groups"
        raise SpecError(key="cluster.groups", value=chips, problem=problem, fix=fix)
    cannot = {
        "train.precision": (train.precision, train.precision in PRECISIONS, f"use {', '.join(PRECISIONS)}"),
        "train.attention": (train.attention, train.attention == "flash", "use flash"),
        "train.implementation": (train.implementation, train.implementation in (None, "local"), "leave it out"),
        "cluster.nodes": (spec.cluster.nodes, spec.cluster.nodes == 1, "use 1"),
    }
    for key, (value, works, fix) in cannot.items():
        if not works:
            problem = "is not what flagcore's own trial program can run"
            raise SpecError(key=key, value=value, problem=problem, fix=f"{fix}, or give a train.command")
    missing = [requirement for module, requirement in modules.items() if not _installed(module)]
    if missing:
        raise NoDevice(
            f"trials need {' and '.join(missing)}, not installed here; pip install 'flagcore[megatron]', "
            "or give a train.command"
        )


def ready_to_probe(spec: Spec) -> None:
    """Raise SpecError or NoDevice unless the trial program can play a rank of `spec`, on however many nodes."""
    if spec.train.command is not None:
        problem = "is not what a probe runs: it plays flagcore's own trial program"
        raise SpecError(key="train.command", value=" ".join(spec.train.command), problem=problem, fix="leave it out")
    ready(replace(spec, cluster=replace(spec.cluster, nodes=1)))


def _settings_run(train: TrainSpec) -> None:
    """Raise SpecError for a setting that what runs the trials cannot run."""
    for key, value in train.settings.items():
        _require_in_megatron(key, value)
        if train.command is None and not trial_runs(train.precision, key, value):
            problem, fix = "is not what flagcore's own trial program can run", "leave it out, or give a train.command"
            raise SpecError(key=f"train.settings.{key}", value=value, problem=problem, fix=fix)


def _require_in_megatron(key: str, value: SettingValue) -> None:
    if _only_predicted(key, value):
        problem = "is predicted by `flag estimate`, but no trial can run it: megatron-core 0.16 does not know it"
        raise SpecError(key=f"train.settings.{key}", value=value, problem=problem, fix="leave it out")


def _only_predicted(key: str, value: SettingValue) -> bool:
    """Return whether Megatron-core 0.16 has no such setting, or not with this value."""
    if key == "pipeline_schedule":
        return schedule(value) is not None
    if key == "moe_recompute_level":
        return value != "full"
    return key in ("recompute_num_layers_per_stage", "offload_stages") or (key, value) == ("trainable", "adapters")


def trial_runs(precision: str, key: str, value: SettingValue) -> bool:
    """Return whether the trial program takes a setting, or runs the same way without it."""
    does: dict[str, tuple[SettingValue, ...]] = {
        "pipeline_schedule": (value,),
        "moe_expert_imbalance": (value,),
        "trainable": ("all",),
        "overlap_p2p_comm": (True,),
        "accumulate_allreduce_grads_in_fp32": (precision == "bf16",),
        **{name: (default,) for name, default in DEFAULTS[TRIAL].items()},
    }
    return key in TRIAL_SETTINGS or value in does.get(key, (False, "fp32", "none"))


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def launch(platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
    """Return how to start `candidate`; the trial program's job is written into `folder`.

    Without a command of the user, the job itself is Megatron-LM's own program. Raises SpecError or LaunchError if that
    cannot be done.
    """
    train, values = platform.task.spec.train, with_layout(platform, candidate)
    if train.command is not None:
        return own_launch(platform, values, folder, for_real=for_real)
    if for_real:
        for key, value in train.settings.items():
            _require_in_megatron(key, value)
        return reference_launch(platform.task, values, folder)
    return _program(_job(platform, candidate, folder), folder)


def with_layout(platform: Platform, candidate: Candidate) -> dict[str, KnobValue]:
    """Return a candidate's values with the layout of its stages in place of `balanced`, none for an even split.

    A layout has its virtual stages, too: Megatron takes no number of layers beside it.
    """
    values = candidate.as_dict()
    if values.pop(SPLIT, None) != "balanced":
        return values
    (text,) = layout_texts(platform.task, columns(platform.task, candidate.as_dict()), platform.costs)
    return values | ({LAYOUT: text, EACH: None} if text else {})


def probe_launch(platform: Platform, candidate: Candidate, rank: int, folder: str, device: int = 0) -> Launch:
    """Return how to start the trial program as one rank. Raises LaunchError if its job cannot be written."""
    return _program(_job(platform, candidate, folder, {"rank": rank, "device": device}), folder)


def _program(job: Mapping[str, object], folder: str) -> Launch:
    file = Path(folder, "job.json")
    try:
        file.write_text(json.dumps(job, indent=1), encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"{file} cannot be written: {error.strerror or error}") from None
    return Launch(argv=(sys.executable, "-m", PROGRAM, str(file)), folder=folder)


def _job(
    platform: Platform, candidate: Candidate, folder: str, probe: Mapping[str, int] | None = None
) -> dict[str, object]:
    """Return the job of the trial program as plain data; with `probe`, of one `rank` on one `device`."""
    task, support = platform.task, platform.support
    spec, train = task.spec, task.spec.train
    return {
        "model": asdict(spec.model),
        "train": {
            "seq_length": train.seq_length,
            "global_batch_size": train.global_batch_size,
            "precision": train.precision,
            "train_iters": spec.control.train_iters,
            "seed": SEED,
            "balanced_routing": probe is not None,
        },
        "candidate": with_layout(platform, candidate) | _trial_settings(train),
        "device": {
            "type": support.device_type,
            "backend": support.distributed_backend,
            "preload": list(support.preload),
            "threads_per_rank": _threads(platform) if support.shared_devices else 1,
        },
        "output": folder,
        "probe": probe,
    }


def _trial_settings(train: TrainSpec) -> dict[str, object]:
    given = {key: train.settings[key] for key in TRIAL_SETTINGS if key in train.settings}
    return {
        key: str(value).split(",") if BY_NAME[key].kind in ("words", "ints") else value for key, value in given.items()
    }


def _threads(platform: Platform) -> int:
    """Return how many threads each rank may use so that together they fill the node's devices, which are cores."""
    group = platform.task.cluster.groups[0]
    return max(1, group.chip.devices_per_node // group.devices_per_node)
