"""SGLang's legality rules, and the merges of candidates that it treats as equal."""

import numpy as np
from flagcore_models.layers import latent_layers
from flagcore_serving.space import adapters, placement, rules
from flagcore_serving.space.hardware import DP, EP, TP, Hardware, longest_request
from flagcore_serving.space.knobs import BACKEND, EAGER, EXCHANGE, REDUNDANT, SPECULATION
from flagcore_serving.space.weights import SHARED

from flagcore.domain.knob import in_versions
from flagcore.domain.space import BoolArray, Columns, KnobValue, Merge, Rule
from flagcore.domain.spec import Task
from flagcore.i18n import N_
from flagcore_sglang.program import CHUNK, DRAFT_FLAG, NEED_DRAFT_MODEL, PAGE, POLICY, PREFILL, PROGRAM, SPANNING
from flagcore_sglang.space import chunk_sizes, own_page, page_sizes

ENCODERS_SINCE = ">=0.5.7"
"""The releases with `--encoder-only` and `--language-only`."""


def rules_of(task: Task) -> tuple[Rule, ...]:
    """Return SGLang's legality rules for candidates."""
    experts = task.spec.model.experts or 1
    longest = longest_request(task)
    is_whole = task.spec.envs.get("SGLANG_SHARED_EXPERT_TP1", "").lower() in ("1", "true")  # 0.5.23 `deepseek_v2.py`
    layouts = rules.split_rules(task, attention_and_experts=True, span=True, whole={SHARED} if is_whole else ())
    layouts += (rules.vocabulary(task),)
    expert_parallel = rules.rule(
        "expert_parallel",
        (TP, DP, EP, REDUNDANT),
        N_("{EP} must divide {TP} x {DP} (SGLang's tp-size), and the {experts} experts with {REDUNDANT}"),
        lambda c: (
            (c[EP] > 1) & (((c[TP] * c[DP]) % c[EP].clip(1) != 0) | ((experts + c[REDUNDANT]) % c[EP].clip(1) != 0))
        ),
        experts=experts,
    )
    spanning = [PROGRAM.code(EXCHANGE, word) for word in SPANNING]
    spanning_experts = rules.rule(
        "spanning_experts",
        (TP, DP, EP, EXCHANGE),
        N_("{EP} must be {TP} x {DP} with {EXCHANGE} = {words}: SGLang sets it"),
        lambda c: np.isin(c[EXCHANGE], spanning) & (c[EP] != c[TP] * c[DP]) & (experts > 1),
        words=", ".join(SPANNING),
    )
    return (
        *layouts,
        *placement.rules(task, layouts, version=PROGRAM.version(task.spec), encoders=ENCODERS_SINCE),
        placement.of_each_kind(task, expert_parallel),
        placement.of_each_kind(task, spanning_experts),
        *rules.forbidden(task, PROGRAM),
        rules.rule(
            "chunk_of_pages",
            (TP, DP, PAGE, CHUNK),
            N_("chunked_prefill_size must be a multiple of page_size"),
            lambda c: (c[CHUNK] != -1) & (chunk_sizes(task, c) % np.maximum(c[PAGE], 1) != 0),
        ),
        rules.rule(
            "whole_prompts",
            (CHUNK, PREFILL),
            N_(
                "without chunks max_prefill_tokens (default {default}) must be at least {longest}, the tokens of the "
                "longest request"
            ),
            lambda c: (c[CHUNK] == -1) & (PROGRAM.values(c, PREFILL) < longest),
            default=PROGRAM.defaults[PREFILL],
            longest=longest,
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
    return rules.rule(
        "value_release",
        tuple(codes),
        N_("sglang {version} does not have {missing_words}"),
        lambda c: np.any([np.isin(c[name], missing_codes) for name, missing_codes in codes.items()], axis=0),
        version=version,
        missing_words=missing_words,
    )


def merges(task: Task) -> tuple[Merge, ...]:
    """Return merges that ignore knobs without effect, and that treat SGLang's defaults as not set."""
    defaults: dict[str, KnobValue] = {POLICY: "fcfs"}
    has_backend = BACKEND in task.spec.space or BACKEND in PROGRAM.parse(task.spec).fixed
    has_default_page = bool(own_page(task)) or not (has_backend or latent_layers(task.spec.model))

    def is_default_page(c: Columns) -> BoolArray:
        c = {BACKEND: np.zeros_like(c[PAGE]), **c}
        unset: BoolArray = page_sizes(task, c) == page_sizes(task, {**c, PAGE: 0 * c[PAGE]})
        return unset

    on_cores = Hardware.of(task).on_cores
    return (
        *((rules.ignoring("page_by_default", (SPECULATION, PAGE), is_default_page),) if has_default_page else ()),
        *rules.merges_of_kinds(),
        *rules.same_as_unset(PROGRAM, defaults),
        rules.no_drafts(),
        rules.tower_merge(task),
        *rules.exchange_merge(task, PROGRAM),
        *adapters.adapter_merges(task, PROGRAM.parse(task.spec).others),
        *((rules.ignoring("no_graphs_on_cores", (EAGER,), lambda c: True),) if on_cores else ()),
    )
