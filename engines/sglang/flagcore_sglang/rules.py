"""SGLang's legality rules, and the merges of candidates that it treats as equal."""

import numpy as np
from flagcore_models.layers import latent_layers
from flagcore_serving.space import adapters, placement, rules
from flagcore_serving.space.hardware import DP, EP, TP, Hardware, longest_request
from flagcore_serving.space.knobs import BACKEND, EAGER, EXCHANGE, REDUNDANT

from flagcore.domain.knob import in_versions
from flagcore.domain.space import KnobValue, Merge, Rule
from flagcore.domain.spec import Task
from flagcore.i18n import N_, Message
from flagcore_sglang.servers import ENCODERS_SINCE
from flagcore_sglang.space import (
    CHUNK,
    DRAFT_FLAG,
    NEED_DRAFT_MODEL,
    PAGE,
    POLICY,
    PREFILL,
    PROGRAM,
    SPANNING,
    chunk_sizes,
)

NAMES = {
    "CHUNK": CHUNK,
    "DP": DP,
    "EP": EP,
    "EXCHANGE": EXCHANGE,
    "PAGE": PAGE,
    "PREFILL": PREFILL,
    "REDUNDANT": REDUNDANT,
    "TP": TP,
}
"""The names of knobs in messages of rules, by their fields."""


def rules_of(task: Task) -> tuple[Rule, ...]:
    """Return SGLang's legality rules for candidates."""
    experts = task.spec.model.experts or 1
    longest = longest_request(task)
    layouts = rules.split_rules(task, attention_and_experts=True, span=True)
    expert_parallel = Rule(
        name="expert_parallel",
        knobs=(TP, DP, EP, REDUNDANT),
        message=Message(
            "{EP} must divide {TP} x {DP} (SGLang's tp-size), and the {experts} experts with {REDUNDANT}",
            **NAMES,
            experts=experts,
        ),
        broken=lambda c: (
            (c[EP] > 1) & (((c[TP] * c[DP]) % c[EP].clip(1) != 0) | ((experts + c[REDUNDANT]) % c[EP].clip(1) != 0))
        ),
    )
    spanning = [PROGRAM.code(EXCHANGE, word) for word in SPANNING]
    spanning_experts = Rule(
        name="spanning_experts",
        knobs=(TP, DP, EP, EXCHANGE),
        message=Message(
            "{EP} must be {TP} x {DP} with {EXCHANGE} = {words}: SGLang sets it", **NAMES, words=", ".join(SPANNING)
        ),
        broken=lambda c: np.isin(c[EXCHANGE], spanning) & (c[EP] != c[TP] * c[DP]) & (experts > 1),
    )
    return (
        *layouts,
        *placement.rules(task, layouts, version=PROGRAM.version(task.spec), encoders=ENCODERS_SINCE),
        placement.of_each_kind(task, expert_parallel),
        placement.of_each_kind(task, spanning_experts),
        *rules.forbidden(task, PROGRAM),
        Rule(
            name="chunk_of_pages",
            knobs=(TP, DP, PAGE, CHUNK),
            message=Message("{CHUNK} must be a multiple of {PAGE}", **NAMES),
            broken=lambda c: (c[CHUNK] != -1) & (chunk_sizes(task, c) % np.maximum(c[PAGE], 1) != 0),
        ),
        Rule(
            name="whole_prompts",
            knobs=(CHUNK, PREFILL),
            message=Message(
                "without chunks {PREFILL} (default {default}) must be at least {longest}, the tokens of the "
                "longest request",
                **NAMES,
                default=PROGRAM.defaults[PREFILL],
                longest=longest,
            ),
            broken=lambda c: (c[CHUNK] == -1) & (PROGRAM.values(c, PREFILL) < longest),
        ),
        *rules.speculation_rules(
            task,
            PROGRAM,
            # If the model has layers for multi-token prediction, EAGLE uses them and needs no draft model, like NEXTN.
            [each for each in NEED_DRAFT_MODEL if each != "EAGLE" or task.spec.model.mtp_num_layers == 0],
            DRAFT_FLAG,
            "NEXTN",
        ),
        _value_release(task),
        *rules.context_rules(task),
        *adapters.adapter_rules(task),
        rules.block_rule(
            PROGRAM,
            PAGE,
            N_("{knob} must be a size that attention_backend supports"),
            lambda sizes: np.zeros_like(sizes, dtype=np.bool_),
        ),
    )


def _value_release(task: Task) -> Rule:
    """Return the rule for values that the task's release does not support. An unknown release supports all."""
    version = PROGRAM.version(task.spec)
    missing = {
        name: [word for releases, words in specifiers.items() if not in_versions(releases, version) for word in words]
        for name, specifiers in PROGRAM.word_releases.items()
    }
    codes = {name: [PROGRAM.code(name, word) for word in words] for name, words in missing.items()}
    missing_words = "; ".join(f"{name} = {', '.join(words)}" for name, words in missing.items() if words)
    return Rule(
        name="value_release",
        knobs=tuple(codes),
        message=Message("sglang {version} does not have {missing_words}", version=version, missing_words=missing_words),
        broken=lambda c: np.any([np.isin(c[name], missing_codes) for name, missing_codes in codes.items()], axis=0),
    )


def merges(task: Task) -> tuple[Merge, ...]:
    """Return merges that ignore knobs without effect, and that treat SGLang's defaults as not set."""
    defaults: dict[str, KnobValue] = {POLICY: "fcfs"}
    has_backend = BACKEND in task.spec.space or BACKEND in PROGRAM.parse(task.spec).fixed
    if not has_backend and not latent_layers(task.spec.model):
        defaults[PAGE] = 1
    on_cores = Hardware.of(task).on_cores
    return (
        *rules.merges_of_kinds(),
        *rules.same_as_unset(PROGRAM, defaults),
        rules.no_drafts(),
        rules.tower_merge(task),
        *rules.exchange_merge(task, PROGRAM),
        *adapters.adapter_merges(task, PROGRAM.parse(task.spec).others),
        *((rules.ignoring("no_graphs_on_cores", (EAGER,), lambda c: True),) if on_cores else ()),
    )
