"""How a candidate is started: flagcore's trial program, or the user's own command."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from flagcore.contracts import Platform
from flagcore.domain.candidate import Candidate
from flagcore.domain.launch import Launch
from flagcore.domain.spec import AUTO, SettingValue, Spec
from flagcore.engines.megatron import hetero, production, trial_program
from flagcore.engines.megatron.command.checks import check_command
from flagcore.engines.megatron.command.launch import own_launch
from flagcore.engines.megatron.command.reference import reference_launch
from flagcore.engines.megatron.mesh_trials import data_problem, hosts_of, on_groups, runs_meshes, shares
from flagcore.engines.megatron.meshes import MESHES
from flagcore.engines.megatron.options import schedule
from flagcore.engines.megatron.predict import with_layout
from flagcore.engines.megatron.release_check import release_problems
from flagcore.errors import LaunchError, NoDevice, SpecError, join_errors

PROGRAM = "flagcore.engines.megatron.trial"


def ready(spec: Spec, modules: Mapping[str, str] = trial_program.MODULES) -> None:
    """Raise SpecError or NoDevice unless trials of `spec` can run here.

    For a user's own command only the command and the settings are checked.
    """
    train = spec.train
    listed = spec.space.get(MESHES, AUTO)
    if (
        not isinstance(listed, str)
        and any(listed)
        and not (hetero.runs_meshes(spec) or (runs_meshes(spec) and spec.cluster.groups))
    ):
        problem, fix = "cannot run in trials", "remove it; `flag estimate` can predict it"
        raise SpecError(key=f"auto_tuner.space.{MESHES}", value=list(listed), problem=problem, fix=fix)
    if train.command is not None:
        check_command(spec)
    for key, value in train.settings.items():
        _require_in_megatron(key, value)
    if train.command is not None:
        return
    if spec.cluster.groups:
        _check_groups(spec)
    if spec.cluster.nodes != 1 and not spec.on_each_host:
        problem = "is more than one, but trials start on this machine"
        fix = "list the hosts in cluster.hostfile and set auto_tuner.launcher to ssh or slurm, or set a train.command"
        raise SpecError(key="cluster.nodes", value=spec.cluster.nodes, problem=problem, fix=fix)
    trial_program.check(train)
    if missing := [needed for module, needed in modules.items() if not trial_program.installed(module, needed)]:
        raise NoDevice(
            f"trials need {' and '.join(missing)}, not installed here; pip install --no-deps "
            f"{' '.join(map(repr, missing))} (torch: the build for this device), or set a train.command"
        )
    if problems := release_problems(spec, trial_program.release()):
        raise join_errors(problems)


def _check_groups(spec: Spec) -> None:
    """Raise SpecError unless the trial program can start on all node groups."""
    groups = spec.cluster.groups
    chips, problem = [group.chip for group in groups], ""
    if not spec.on_each_host:
        problem, fix = (
            "are several chips, but one machine has one",
            "list the hosts in cluster.hostfile, and set the launcher",
        )
    elif len({group.devices_per_node for group in groups}) > 1:
        problem, fix = "have other numbers of devices per node", "start trials on as many devices of each host"
    elif len(set(chips)) > 1:
        problem, fix = "are several chips: trials start the same software on all hosts", "name groups of one chip"
    if problem:
        fix += "; to run trials otherwise, set a train.command that starts on all groups; `flag estimate` predicts"
        raise SpecError(key="cluster.groups", value=chips, problem=problem, fix=fix)


def ready_to_probe(spec: Spec) -> None:
    """Raise SpecError or NoDevice unless the trial program can run a single rank of `spec` here."""
    if spec.train.command is not None:
        problem = "cannot be probed: a probe runs flagcore's own trial program"
        raise SpecError(key="train.command", value=" ".join(spec.train.command), problem=problem, fix="remove it")
    ready(replace(spec, cluster=replace(spec.cluster, nodes=1)))


def _require_in_megatron(key: str, value: SettingValue) -> None:
    """Raise SpecError for a setting that no release of Megatron supports."""
    if _only_predicted(key, value):
        problem = "is only predicted by `flag estimate`: megatron-core 0.16 does not support it in a trial"
        raise SpecError(key=f"train.settings.{key}", value=value, problem=problem, fix="remove it")


def _only_predicted(key: str, value: SettingValue) -> bool:
    """Return whether Megatron-core 0.16 lacks the setting or this value of it."""
    if key == "pipeline_schedule":
        return schedule(value) is not None
    if key == "moe_recompute_level":
        return value != "full"
    return key in ("recompute_num_layers_per_stage", "offload_stages") or (key, value) == ("trainable", "adapters")


def launch(platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
    """Return how to start `candidate`; write the trial program's job into `folder`.

    With `for_real` and without a user's command, the launch runs Megatron-LM's `pretrain_gpt.py`. Raises SpecError or
    LaunchError if the launch cannot be built.
    """
    train, values = platform.task.spec.train, with_layout(platform, candidate)
    if (for_real or train.command is not None) and shares(platform.task, candidate):
        raise LaunchError(f"{MESHES} = {candidate.as_dict()[MESHES]} {data_problem()}")
    if train.command is not None:
        mixed = hetero.mixed_job(platform, candidate)
        return own_launch(platform, values, folder, mixed, for_real=for_real)
    if for_real:
        for key, value in train.settings.items():
            _require_in_megatron(key, value)
        named = {**production.assumed(platform.task, candidate), **train.settings}
        spec = replace(platform.task.spec, work=replace(train, settings=named))
        meshes = hetero.mixed(platform, candidate.as_dict()) if values.get(MESHES) else None
        task = platform.task if meshes else on_groups(platform.task, candidate)
        return reference_launch(replace(task, spec=spec), values, folder, meshes)
    planned = replace(_program(trial_program.job(platform, candidate, folder), folder), warm=True)
    if platform.task.spec.on_each_host:
        planned = replace(planned, hosts=hosts_of(platform.task, candidate))
        if platform.support.distributed_backend == "gloo":
            return replace(planned, environment={"GLOO_SOCKET_IFNAME": "{interface}"})
    return planned


def probe_launch(platform: Platform, candidate: Candidate, rank: int, folder: str, device: int = 0) -> Launch:
    """Return how to start a probe of one rank. Raises LaunchError if its job file cannot be written."""
    return _program(trial_program.job(platform, candidate, folder, {"rank": rank, "device": device}), folder)


def _program(job: Mapping[str, object], folder: str) -> Launch:
    file = Path(folder, "job.json")
    try:
        file.write_text(json.dumps(job, indent=1), encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"{file} cannot be written: {error.strerror or error}") from None
    return Launch(argv=(sys.executable, "-m", PROGRAM, str(file)), folder=folder)
