"""Starts a candidate, a shorter step or a probe of one rank, with the trial program or the user's own command."""

import functools
import math
import statistics
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from typing import Any

import numpy as np
from flagcore_training.frameworks import kept_framework, refuse_trials
from flagcore_training.kinds import layer_kinds
from flagcore_training.layout import Layout, Training
from flagcore_training.reading import INVALID_JSON
from flagcore_training.stages import stage
from flagcore_training.start import installed, missing_layers, program_launch, shared_job
from flagcore_vendorkit.metrics import METRICS, NoMetrics, interquartile_range, read_metrics

from flagcore.contracts import Costs, Platform, Probes
from flagcore.domain.knob import in_versions
from flagcore.domain.launch import Launch
from flagcore.domain.prediction import RankPrediction
from flagcore.domain.probe import RankMeasurement
from flagcore.domain.space import Candidate, Columns, KnobValue
from flagcore.domain.spec import AUTO, SettingValue, Spec, Task, TrainSpec
from flagcore.errors import NoDevice, SpecError, join_errors
from flagcore.i18n import N_, _
from flagcore_megatron.command.checks import check_command, release_problems
from flagcore_megatron.command.launch import framework_launch, own_launch, reference_launch
from flagcore_megatron.layers.fastest import layouts, virtual_stages
from flagcore_megatron.mixed import hetero
from flagcore_megatron.mixed.hetero import data_split_refused, hosts_of, on_groups, shares
from flagcore_megatron.predict import inputs, rank_figures
from flagcore_megatron.program.user_command import DISTRIBUTION
from flagcore_megatron.space import production
from flagcore_megatron.space.knobs import BY_NAME, names_several_chips, plain_values, program_runs_meshes
from flagcore_megatron.space.knobs import columns as row_of
from flagcore_megatron.space.meshes import DP, MESHES, PP, by_kinds, stage_devices
from flagcore_megatron.space.options import DEFAULTS, is_hybrid, runs, schedule, settings_in_force, takes_layouts
from flagcore_megatron.space.split import LAYERS_PER_VIRTUAL, SPLIT
from flagcore_megatron.space.stages import LAYOUT, PATTERN, pattern_text
from flagcore_megatron.trial.job import TrialCandidate

PROGRAM = "flagcore_megatron.trial"
NEEDS_TRITON = ">=0.18"
"""Releases of megatron-core that import triton, which they do not declare and CPU builds of torch do not bring: models
of 0.17.1 can be imported without it, those of 0.18.0 and 0.19.2 cannot."""


def release() -> str | None:
    """Return the installed release of megatron-core, or None if it is not installed."""
    with suppress(PackageNotFoundError):
        return version(DISTRIBUTION)
    return None


def modules_of(installed_release: str | None) -> dict[str, str]:
    """Return the modules that trials import with a release of megatron-core, with their pip requirements."""
    found = {"torch": "torch", "megatron.core": "megatron-core>=0.12"}
    return {**found, "triton": "triton"} if in_versions(NEEDS_TRITON, installed_release or "0") else found


MODULES = modules_of(release())
"""Modules that trials import, with their pip requirements."""
LOCAL, TRANSFORMER_ENGINE = "local", "transformer_engine"
PRECISIONS = ("bf16", "fp16", "fp32")
EIGHT_BITS = ("fp8", "mxfp8")
ACCEPTED_KEYS = frozenset(field.name for field in fields(TrialCandidate))
"""Knobs and settings that the trial program accepts."""
TRANSFORMER_ENGINE_SETTINGS = (
    *("tp_comm_overlap", "moe_grouped_gemm", "fp8_recipe", "use_precision_aware_optimizer"),
    *("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
)
"""Settings that only transformer-engine supports."""
ACCEPTED_VALUES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "moe_token_dispatcher_type": dict.fromkeys((LOCAL, TRANSFORMER_ENGINE), ("alltoall", "allgather")),
    "cp_comm_type": {LOCAL: ("all_gather",), TRANSFORMER_ENGINE: ("p2p", "all_gather", "a2a")},
    "cross_entropy_fusion_impl": {LOCAL: ("native",), TRANSFORMER_ENGINE: ("native", "te")},
}
"""The only values that the trial program accepts for these settings, by implementation."""


def ready(spec: Spec) -> None:
    """Raise SpecError or NoDevice if trials of `spec` cannot run on this machine.

    For a user's own command, only the command and the settings are checked.
    """
    train = spec.train
    listed = spec.space.get(MESHES, AUTO)
    runs_meshes = hetero.command_runs_meshes(spec) or (program_runs_meshes(spec) and spec.cluster.groups)
    if not isinstance(listed, str) and any(listed) and not runs_meshes:
        problem, fix = "cannot run in trials", "remove it; `flag estimate` can predict it"
        raise SpecError(key=f"auto_tuner.space.{MESHES}", value=list(listed), problem=problem, fix=fix)
    refuse_trials(spec)
    if train.command is not None:
        check_command(spec)
    for key, value in train.settings.items():
        _require_in_megatron(key, value)
    if train.command is None:
        _check_program(spec)


def _check_program(spec: Spec) -> None:
    """Raise SpecError or NoDevice if flagcore's own trial program cannot run trials of `spec` on this machine."""
    if spec.cluster.groups:
        _check_groups(spec)
    if spec.cluster.nodes != 1 and not spec.on_each_host:
        problem = "is more than one, but trials start on this machine"
        fix = "list the hosts in cluster.hostfile and set auto_tuner.launcher to ssh or slurm, or set a train.command"
        raise SpecError(key="cluster.nodes", value=spec.cluster.nodes, problem=problem, fix=fix)
    check(spec.train)
    if layers := missing_layers(spec.model):
        problem, fix = "has layers that flagcore's trial program does not have", "set a train.command"
        raise SpecError(key="model", value=", ".join(layers), problem=problem, fix=fix)
    if missing := [requirement for module, requirement in MODULES.items() if not installed(module, requirement)]:
        public = "'flagcore[megatron]' (install the vendor's build of torch first, if there is one)"
        install = public if "torch" in missing else f"--no-deps {' '.join(map(repr, missing))}"
        problem = f"trials need {' and '.join(missing)}, not installed here"
        raise NoDevice(f"{problem}; pip install {install}, or set a train.command")
    if problems := release_problems(spec, release()):
        raise join_errors(problems)


def _check_groups(spec: Spec) -> None:
    """Raise SpecError if the trial program cannot start on all node groups."""
    groups = spec.cluster.groups
    chips, problem = [group.chip for group in groups], ""
    if not spec.on_each_host:
        problem = "are several chips, but one machine has one"
        fix = "list the hosts in cluster.hostfile, and set the launcher"
    elif len({group.devices_per_node for group in groups}) > 1:
        problem, fix = "have other numbers of devices per node", "start trials on as many devices of each host"
    elif names_several_chips(spec):
        problem, fix = "are several chips: trials start the same software on all hosts", "name groups of one chip"
    if problem:
        fix += "; to run trials otherwise, set a train.command that starts on all groups; `flag estimate` predicts"
        raise SpecError(key="cluster.groups", value=chips, problem=problem, fix=fix)


def _require_in_megatron(key: str, value: SettingValue) -> None:
    """Raise SpecError if flagcore can only predict a setting or its value, because megatron-core 0.16 lacks it."""
    only_predicted = key == "offload_stages" or (key, value) == ("fp8_dot_product_attention", True)
    if only_predicted or (key == "pipeline_schedule" and schedule(value) is not None):
        problem = "is only predicted by `flag estimate`: megatron-core 0.16 does not support it in a trial"
        raise SpecError(key=f"train.settings.{key}", value=value, problem=problem, fix="remove it")


def launch(platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
    """Return the launch of `candidate`, and write the trial program's job file into `folder`.

    With `for_real` and without a user's command, the launch runs Megatron-LM's `pretrain_gpt.py`. Raises SpecError or
    LaunchError if the launch cannot be built.
    """
    train, values = platform.task.spec.train, with_layout(platform, candidate)
    if (for_real or train.command is not None) and shares(platform.task, candidate):
        raise data_split_refused(candidate.as_dict()[MESHES])
    if for_real and kept_framework(platform.task.spec):
        return framework_launch(platform.task.spec, values, folder)
    if train.command is not None:
        return own_launch(platform, values, folder, hetero.mixed_job(platform, candidate), for_real=for_real)
    if for_real:
        for key, value in train.settings.items():
            _require_in_megatron(key, value)
        settings = {**production.assumed(platform.task, candidate), **train.settings}
        spec = replace(platform.task.spec, work=replace(train, settings=settings))
        meshes = hetero.mixed(platform, candidate.as_dict()) if values.get(MESHES) else None
        task = platform.task if meshes else on_groups(platform.task, candidate)
        launch = reference_launch(replace(task, spec=spec), values, folder, meshes)
        if modules := platform.support.preload:
            first = f"import {', '.join(modules)} as the first modules of the program"
            launch = replace(launch, missing=f"{launch.missing}; {first}")
        if platform.support.device_type == "cpu":  # megatron/training/initialize.py of 0.12 to 0.19
            launch = replace(launch, missing=f"{launch.missing}; Megatron-LM starts on accelerators only")
        return launch
    planned = replace(program_launch(job(platform, candidate, folder), folder, PROGRAM), warm=True)
    if platform.task.spec.on_each_host:
        return replace(planned, hosts=hosts_of(platform.task, candidate))
    return planned


def with_layout(platform: Platform, candidate: Candidate) -> dict[str, KnobValue]:
    """Return a candidate's knob values with the layout of its stages in place of `balanced`.

    An even split needs no layout. A layout includes the virtual stages, so the number of layers per virtual stage,
    which Megatron then refuses, is unset. A hybrid model has bars in its pattern instead.
    """
    task = platform.task
    values = plain_values(task, candidate)
    is_balanced, is_pattern = values.pop(SPLIT, None) == "balanced", is_hybrid(task.spec.model)
    if not is_balanced and not is_pattern:
        return values
    ((_, ((row, costs), *_)),) = by_kinds(task, row_of(task, candidate.as_dict()), platform.costs)
    train, layout = inputs(task, row, costs)
    if is_pattern:
        return values | _pattern(task, train, layout)
    (text,) = layouts(train, layout)
    return values | ({LAYOUT: text, LAYERS_PER_VIRTUAL: None} if text else {})


def _pattern(task: Task, train: Training, layout: Layout) -> dict[str, KnobValue]:
    """Return the hybrid pattern of a candidate, if it is not that of the job.

    A release without bars, and explicit numbers of layers of the ends, keep the pattern. So does an even split without
    virtual stages in a command without a pattern, whose program has it.
    """
    given = str(settings_in_force(task.spec).get(PATTERN) or "")
    (chunks,), is_whole = virtual_stages(train, layout), not takes_layouts(task.spec)
    stages = int(layout.pipeline[0] * layout.virtual[0])
    if not chunks and (is_whole or layout.first_layers[0] or layout.last_layers[0]):
        stages = 1
    if task.spec.train.command is not None and not given and not chunks and layout.virtual[0] == 1:
        return {}
    text = pattern_text(task.spec.model, chunks or [task.spec.model.num_layers // stages] * stages, given)
    return {PATTERN: text, LAYERS_PER_VIRTUAL: None} if text and text != given else {}


MIN_MICROBATCHES = 4
"""Minimum number of micro-batches. With fewer, the fixed costs of a step would dominate its time."""

MICROBATCHES_PER_STAGE = 2
"""Micro-batches per stage with which the pipeline fills and memory reaches its peak, in every schedule.

1F1B has 1 in flight per stage, interleaved fewer than 2, and DualPipe requires 2 (deepseek-ai/DualPipe `dualpipe.py`).
"""


def shorter_batch(task: Task, candidate: Candidate, share: float) -> int | None:
    """Return the smallest legal global batch size of at least `share` times the task's, or None if it is not smaller.

    The number of micro-batches is a multiple of the number of stages, which interleaved schedules require
    (megatron-core `schedules.py`).
    """
    values = plain_values(task, candidate)
    data, pipeline, micro_batch = (int(values.get(knob) or 1) for knob in (DP, PP, "micro_batch_size"))
    microbatches = task.spec.train.global_batch_size // (data * micro_batch)
    min_microbatches = max(MIN_MICROBATCHES, MICROBATCHES_PER_STAGE * pipeline, math.ceil(share * microbatches))
    count = math.ceil(min_microbatches / pipeline) * pipeline
    return count * data * micro_batch if count < microbatches else None


def check(train: TrainSpec) -> None:
    """Raise SpecError for anything in `train` that the trial program cannot run with the installed layers."""
    layers = train.implementation or (TRANSFORMER_ENGINE if installed("transformer_engine") else LOCAL)
    precisions = PRECISIONS + (EIGHT_BITS if layers == TRANSFORMER_ENGINE else ())
    requirements = {
        "train.implementation": (layers, layers == LOCAL or installed("transformer_engine"), "install it"),
        "train.precision": (train.precision, train.precision in (AUTO, *precisions), f"use {', '.join(precisions)}"),
        "train.attention": (train.attention, train.attention == "flash", "use flash"),
        "train.adapter": (train.adapter and train.adapter.kind, train.adapter is None, "remove it"),
        "train.lengths": (train.lengths and train.lengths.batching, train.lengths is None, "use `flag estimate`"),
        **{
            f"train.settings.{key}": (value, trial_runs(key, value, layers), "remove it")
            for key, value in train.settings.items()
        },
    }
    for key, (value, is_met, fix) in requirements.items():
        if not is_met:
            problem = f"is not supported by flagcore's own trial program with {layers} layers"
            raise SpecError(key=key, value=value, problem=problem, fix=f"{fix}, or set a train.command")


def trial_runs(key: str, value: SettingValue, layers: str = LOCAL) -> bool:
    """Return whether the trial program accepts a setting, or runs the same way without it."""
    harmless_values: dict[str, tuple[SettingValue, ...]] = {
        "pipeline_schedule": (value,),
        "moe_expert_imbalance": (value,),
    }
    if key in ACCEPTED_VALUES:
        return value in ACCEPTED_VALUES[key][layers]
    is_harmless = value in harmless_values.get(key, (False, "fp32", "none"))
    if key in TRANSFORMER_ENGINE_SETTINGS and layers != TRANSFORMER_ENGINE:
        return is_harmless or (key == "moe_grouped_gemm" and installed("grouped_gemm"))
    return is_harmless or key in ACCEPTED_KEYS


def as_installed(platform: Platform) -> Platform:
    """Return `platform` with transformer-engine's layers, if it can be imported and the spec names no implementation.

    Otherwise the spec stays unchanged: the trial program runs megatron-core's own, unfused layers.
    """
    modules = (*platform.support.preload, "transformer_engine.pytorch")
    if not _chooses_layers(platform) or not installed("transformer_engine") or not _imports(modules):
        return platform
    task = platform.task
    work = replace(task.spec.train, implementation=TRANSFORMER_ENGINE)
    return replace(platform, task=replace(task, spec=replace(task.spec, work=work)))


def installation_notes(platform: Platform) -> tuple[str, ...]:
    """Return a note if transformer-engine cannot be imported although the device supports it."""
    if not _chooses_layers(platform):
        return ()
    text = N_(
        "transformer-engine does not import here: trials run megatron-core's own layers, without fused kernels, "
        "FP8 and overlap of tensor-parallel messages; a job with transformer-engine is faster"
    )
    return (_(text),)


def _chooses_layers(platform: Platform) -> bool:
    """Return whether the spec names no implementation of layers, and the device may support transformer-engine."""
    train = platform.task.spec.train
    is_named = train.command is not None or train.implementation is not None
    return not is_named and platform.support.device_type not in (None, "cpu")


@functools.cache
def _imports(modules: tuple[str, ...]) -> bool:
    """Return whether modules can be imported after torch, in a separate process, which a driver may crash."""
    try:
        code = f"import torch, {', '.join(modules)}"
        process = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return process.returncode == 0


def job(
    platform: Platform, candidate: Candidate, folder: str, probe: Mapping[str, int] | None = None
) -> dict[str, object]:
    """Return the trial program's job, as in its job file. For a probe, `probe` contains its `rank` and `device`."""
    task = platform.task
    spec, train = task.spec, task.spec.train
    shared = shared_job(platform, folder)
    return shared | {
        "train": {
            **shared["train"],
            "balanced_routing": probe is not None,
            "implementation": train.implementation or LOCAL,
        },
        "candidate": _settings(train) | with_layout(platform, candidate),
        "probe": probe,
        "shares": shares(task, candidate),
        "nodes": len(hosts_of(task, candidate)) if spec.on_each_host and probe is None else 1,
    }


def _settings(train: TrainSpec) -> dict[str, object]:
    values = {**DEFAULTS[runs(train)], **train.settings}
    return {
        key: str(value).split(",") if BY_NAME[key].kind in ("words", "ints") else value
        for key, value in values.items()
        if key in ACCEPTED_KEYS
    }


PROBE_FIGURES = (
    *("stage", "static_bytes", "peak_forward_backward_bytes", "peak_optimizer_bytes", "peak_allocated_bytes"),
    *("device_used_bytes", "microbatches_run"),
)
"""Whole numbers in the metrics of a probe that are fields of `RankMeasurement`."""


class MegatronProbes(Probes):
    """Probes by the trial program."""

    def ready(self, spec: Spec) -> None:
        """Raise SpecError or NoDevice if the trial program cannot run a single rank of `spec` on this machine."""
        if spec.train.command is not None:
            problem = "cannot be probed: a probe runs flagcore's own trial program"
            raise SpecError(key="train.command", value=" ".join(spec.train.command), problem=problem, fix="remove it")
        ready(replace(spec, cluster=replace(spec.cluster, nodes=1)))

    def predict(self, task: Task, columns: Columns, rank: int, costs: Costs, *, alone: bool = True) -> RankPrediction:
        return rank_figures(task, columns, rank, costs, alone=alone)

    def launch(self, platform: Platform, candidate: Candidate, rank: int, folder: str, device: int = 0) -> Launch:
        """Return the launch of a probe of one rank. Raises LaunchError if its job file cannot be written."""
        return program_launch(job(platform, candidate, folder, {"rank": rank, "device": device}), folder, PROGRAM)

    def stage_ranks(self, task: Task, columns: Columns) -> tuple[int, ...]:
        """Return the first rank of each stage; the pipeline is the outermost dimension of Megatron's ranks."""
        return tuple(accumulate(stage_devices(task, columns)[:-1], initial=0))

    def ranks(self, task: Task, candidate: Candidate, costs: Costs) -> tuple[int, ...]:
        """Return the ranks to probe: the first rank of each selected stage.

        The stages are the first and the last one, those predicted to need the most memory and the most time, and a
        stage with experts.
        """
        row = row_of(task, candidate.as_dict())
        train, layout = inputs(task, row, costs)
        width, stages = (int(layout.tensor[0] * layout.context[0] * layout.data[0]), int(layout.pipeline[0]))
        figures = [rank_figures(task, row, each * width, costs) for each in range(stages)]
        stages_to_probe = {
            0,
            stages - 1,
            max(range(stages), key=lambda each: figures[each].device_used_bytes),
            max(range(stages), key=lambda each: figures[each].compute_time_s or 0.0),
        }
        kinds, every = layer_kinds(train.model), [np.array([float(each)]) for each in range(stages)]
        numbers = [stage(train.model, layout, each, train.options).numbers for each in every]
        expert_stages = [place for place, each in enumerate(numbers) if np.any(kinds.with_experts(each))]
        if expert_stages and stages_to_probe.isdisjoint(expert_stages):
            stages_to_probe.add(expert_stages[0])
        return tuple(each * width for each in sorted(stages_to_probe))

    def read(self, task: Task, folder: str) -> RankMeasurement:
        """Return the trial program's measurement of one rank. Raises NoMetrics if there is none."""
        data = read_metrics(folder)
        try:
            steps: list[dict[str, Any]] = data["steps"][task.spec.control.warmup_iters :]
            if not steps:
                raise NoMetrics(f"the probe wrote {len(data['steps'])} steps, and all of them are warm-up")
            compute, optimizer = ([float(step[name]) for step in steps] for name in ("compute_s", "optimizer_s"))
            reserved_bytes = data["peak_reserved_bytes"]
            return RankMeasurement(
                **{name: int(data[name]) for name in PROBE_FIGURES},
                reserved_bytes=None if reserved_bytes is None else int(reserved_bytes),
                compute_time_s=statistics.median(compute),
                compute_spread_s=interquartile_range(compute),
                optimizer_time_s=statistics.median(optimizer),
                optimizer_spread_s=interquartile_range(optimizer),
                steps=len(steps),
                microbatches=int(data["num_microbatches"]),
                versions={name: str(version) for name, version in data["versions"].items()},
            )
        except INVALID_JSON as error:
            raise NoMetrics(f"{METRICS} is not complete ({type(error).__name__}: {error})") from None
