"""Legality rules that follow from settings, which are the same for all candidates."""

from collections.abc import Iterator

import numpy as np
from flagcore_training.layout import WHOLE_STEP
from flagcore_training.schedules import SCHEDULES

from flagcore.domain.knob import in_versions
from flagcore.domain.space import BoolArray, Columns, Rule
from flagcore.domain.spec import SettingValue, Task
from flagcore.i18n import N_, Message
from flagcore_megatron.space.knobs import FULL
from flagcore_megatron.space.meshes import DP, EP, MBS, PP, SP
from flagcore_megatron.space.options import (
    MUON_SHARDED_SINCE,
    Settings,
    graphs,
    is_hybrid,
    numbers,
    precision,
    release,
    schedule,
    settings_in_force,
)
from flagcore_megatron.space.rules import (
    DIST_OPT,
    DIST_OPT_SETTINGS,
    EXPERT_OVERLAP,
    RECOMPUTE,
    UNPIPED_MTP_OVERLAP_SINCE,
    recomputes,
    rule,
)
from flagcore_megatron.space.split import LAYERS_PER_VIRTUAL, SPLIT, Split


def settings_with_rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules of all enabled settings, including those that flagcore assumes for production."""
    settings, split = settings_in_force(task.spec), Split.from_task(task)
    sharded, depths = bool(settings.get("use_megatron_fsdp")), task.spec.model.mtp_num_layers
    offloaded = numbers(settings.get("offload_stages"))
    piped_depths = 0 if in_versions(UNPIPED_MTP_OVERLAP_SINCE, release(task.spec)) else depths
    is_muon = "muon" in str(settings.get("optimizer"))
    is_unsharded = is_muon and not in_versions(MUON_SHARDED_SINCE, release(task.spec))
    has_parts = bool(graphs(settings) - WHOLE_STEP)

    rules = (
        *(rule(name, lambda c: (c[DIST_OPT] == 0) & (not sharded), name=name) for name in DIST_OPT_SETTINGS),
        rule("use_torch_fsdp2", lambda c: (c[PP] > 1) | (c[EP] > 1) | (c[DIST_OPT] == 1)),
        rule("optimizer", lambda c: (c[DIST_OPT] == 1) & is_unsharded, release=MUON_SHARDED_SINCE.lstrip(">=")),
        rule("tp_comm_overlap", lambda c: c[SP] == 0),
        rule(
            EXPERT_OVERLAP,
            lambda c: (
                is_hybrid(task.spec.model)
                | (c[EP] == 1)
                | recomputes(c, FULL)
                | ((c[PP] > 1) & (split.virtual(c) == 1))
                | ((c[PP] == 1) & (piped_depths > 0))
                | (depths > 1)
            ),
            release=UNPIPED_MTP_OVERLAP_SINCE.lstrip(">="),
        ),
        *(
            rule(name, lambda c: recomputes(c, FULL) & has_parts)
            for name in ("cuda_graph_impl", "cuda_graph_scope")
            if name == "cuda_graph_impl" or name in task.spec.train.assumed
        ),
        rule("offload_stages", lambda c: c[PP] <= max(offloaded, default=-1)),
        rule("cpu_offloading_num_layers", lambda c: (c[PP] > 1) | (c[RECOMPUTE] > 0)),
        _schedule_rule(settings.get("pipeline_schedule"), split, task.spec.train.global_batch_size),
        *_requirement_rules(task, settings),
    )
    return tuple(rule for rule in rules if settings.get(rule.name))


def _requirement_rules(task: Task, settings: Settings) -> Iterator[Rule]:
    """Yield a rule that rejects every candidate, for each setting that requires another setting that is off."""
    is_flex = settings.get("moe_token_dispatcher_type") == "flex"
    narrow: tuple[str, bool] = ("moe_token_dispatcher_type: flex", is_flex)
    if release(task.spec):  # other programs of published runs have such a dispatch, too
        is_ncclep = is_flex and settings.get("moe_flex_dispatcher_backend") == "ncclep"
        narrow = ("moe_flex_dispatcher_backend: ncclep", is_ncclep)
    requirements = {
        "overlap_param_gather": ("overlap_grad_reduce", settings.get("overlap_grad_reduce")),
        "moe_flex_dispatcher_backend": ("moe_token_dispatcher_type: flex", is_flex),
        "moe_dispatch_fwd_dtype": narrow,
        "moe_combine_bwd_dtype": narrow,
        "fp8_recipe": ("fp8_format", "fp8" in precision(task.spec.train, settings)),
        "cuda_graph_scope": ("cuda_graph_impl", settings.get("cuda_graph_impl", "none") != "none"),
    }
    for name, (requirement, is_met) in requirements.items():
        if not is_met and name in task.spec.train.settings:
            message = Message("{name} needs {requirement}", name=name, requirement=requirement)
            yield Rule(name=name, knobs=(DP,), message=message, broken=lambda c: np.ones(c[DP].shape, dtype=np.bool_))


def _schedule_rule(setting: SettingValue, split: Split, batch: int) -> Rule:
    """Return the rule about the virtual stages of a schedule.

    Interleaved schedules require virtual stages, 1F1B allows any number, and all others have a fixed number. DualPipe
    and DualPipeV need two micro-batches per stage, DualPipe even numbers of stages and of micro-batches (source: its
    repository).
    """
    name = schedule(setting)
    min_virtual = 2 if name is None and str(setting or "1f1b").lower() != "1f1b" else 1
    fixed_virtual = SCHEDULES[name].parts if name else None
    is_dual = name in ("dualpipe", "dualpipev")
    text = N_("pipeline_schedule: {setting} needs virtual stages")
    if fixed_virtual is not None:
        text = N_("pipeline_schedule: {setting} needs {virtual} virtual stages or none")
    message = Message(text, setting=str(setting), virtual=fixed_virtual)
    if name == "dualpipev":
        message = Message("{first}, and at least two micro-batches per stage", first=message)
    if name == "dualpipe":
        text = N_("{first}, even numbers of stages and of micro-batches, and at least two micro-batches per stage")
        message = Message(text, first=message)

    def broken(c: Columns) -> BoolArray:
        virtual = split.virtual(c)
        wrong = (virtual < min_virtual) if fixed_virtual is None else (virtual > 1) & (virtual != fixed_virtual)
        if is_dual:
            microbatches = batch // np.maximum(c[MBS] * c[DP], 1)
            wrong |= microbatches < 2 * c[PP]
            if name == "dualpipe":
                wrong |= (c[PP] % 2 != 0) | (microbatches % 2 != 0)
        return (c[PP] > 1) & wrong

    knobs = (PP, SPLIT, LAYERS_PER_VIRTUAL, DP, MBS) if is_dual else (PP, SPLIT, LAYERS_PER_VIRTUAL)
    return Rule(name="pipeline_schedule", knobs=knobs, message=message, broken=broken)
