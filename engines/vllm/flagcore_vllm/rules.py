"""vLLM's legality rules, and the merges of candidates that it treats as equal."""

import numpy as np
from flagcore_models.layers import latent_layers, state_bytes
from flagcore_serving.load import routing
from flagcore_serving.space import adapters, placement, rules
from flagcore_serving.space.hardware import DP, EP, INSTANCES, PP, PREFILL_DECODE, TP, Hardware, most_images
from flagcore_serving.space.knobs import (
    ASYNC,
    CONTEXT,
    DRAFTED,
    EAGER,
    EXCHANGE,
    KV,
    OVERLAP,
    PREFIX,
    REDUNDANT,
    SHARING,
    SPECULATION,
    TRANSFER,
)
from flagcore_serving.space.roles import Roles, language
from flagcore_serving.space.weights import SHARED, cached_heads

from flagcore.domain.knob import in_versions
from flagcore.domain.space import BoolArray, Columns, IntArray, KnobValue, Merge, Rule
from flagcore.domain.spec import Task
from flagcore.i18n import N_
from flagcore_vllm import connectors
from flagcore_vllm.connectors import CONFIG
from flagcore_vllm.profile import GRAPHS
from flagcore_vllm.space import (
    BLOCK,
    CHUNKED,
    CPU_BLOCK,
    IMAGES,
    MLA_CPU_BLOCK,
    NEED_DRAFT_MODEL,
    PROGRAM,
    SEQS,
    THREADS,
    TOKENS,
    batch_defaults,
    block_tokens,
    is_async,
    limits,
    scales_yarn,
)

ENCODERS_SINCE = ">=0.16"
"""The releases with `--mm-encoder-only`, with which an encoder does not load the language model (0.14 has none)."""
NIXL, P2P = "NixlConnector", "P2pNcclConnector"
P2P_RELEASES = "<0.24"
EMBEDDINGS = "ec-transfer-config"
EVEN_EXPERTS = ("deepseek_v4",)
"""Values of model_type whose experts are the same number on each rank (vLLM 0.32 `models/deepseek_v4`, and issue 52435:
256 experts on 3 ranks fail an assertion). Other models' ranks may have different numbers."""
PADDED_SHARED = ">=0.28"
"""Releases that pad the shared experts of these models to whole blocks on each rank (`DeepseekV4MLP` of vLLM 0.28 and
0.33 in `models/deepseek_v4/nvidia/model.py`; pull request 46001 of 2026-06-18)."""
STAGED = ">=0.30"
"""Releases that plan drafts without stages (`create_draft_parallel_config` in `config/speculative.py` of 0.30 to 0.32).
Up to 0.29, a draft has the stages of the model, and its class must have the interface `SupportsPP`."""
STAGED_DRAFTS = {"glm4_moe_lite": "", "nemotron_h": "", "bailing_hybrid": ">=0.28"}
STAGED_DRAFTS |= dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), ">=0.29")
"""Earlier releases in which the draft class of a model_type has it: classes `*MTP*` of 0.24, 0.26, 0.28, 0.29."""


FITTED = ">=0.14"
"""Releases that take auto or -1 as the longest context that fits (pull request 29431 of December 2025)."""


def rules_of(task: Task) -> tuple[Rule, ...]:
    """Return vLLM's legality rules for candidates."""
    hardware, experts, kind = Hardware.of(task), task.spec.model.experts, task.spec.model.family
    given = list(connectors.connectors(others := PROGRAM.parse(task.spec).others))
    unhybrid = connectors.without_hybrid(others)
    own_offload = any("spec_module_path" in str(each) for each in given)  # may copy between cores
    version = PROGRAM.version(task.spec)
    is_padded = kind in EVEN_EXPERTS and (in_versions(PADDED_SHARED, version) or not version)
    layouts = (
        *rules.split_rules(task, attention_and_experts=True, span=True, whole={SHARED} if is_padded else ()),
        rules.vocabulary(task),
        rules.rule(
            "expert_parallel",
            (TP, DP, EP),
            N_("{EP} must be 1 or {TP} x {DP}: vLLM's expert parallelism is a switch"),
            lambda c: (c[EP] > 1) & (c[EP] != c[TP] * c[DP]),
        ),
        *(each for each in rules.forbidden(task, PROGRAM) if each.name != "offload_on_cores" or not own_offload),
    )
    groups = cached_heads(task.spec.model)
    sharing = rules.rule(
        "sharing",
        (TP, PREFILL_DECODE, SHARING),
        N_("{SHARING} must divide the {TP} / {groups} copies of the cache, and needs {PREFILL_DECODE} unset"),
        lambda c: (c[SHARING] > 1) & ((c[TP] % (groups * np.maximum(c[SHARING], 1)) != 0) | (c[PREFILL_DECODE] > 0)),
        groups=groups,
    )
    even_experts = rules.rule(
        "even_experts",
        (EP, REDUNDANT),
        N_("{EP} must divide the {experts} experts with {REDUNDANT}"),
        lambda c: ((c[REDUNDANT] > 0) | (kind in EVEN_EXPERTS)) & ((experts + c[REDUNDANT]) % c[EP].clip(1) != 0),
        experts=experts,
    )
    mtp = PROGRAM.code(SPECULATION, "mtp")
    has_stages = in_versions(STAGED_DRAFTS.get(kind, STAGED), version) or not version
    images = most_images(task.spec.serve.loads)
    return (
        *layouts,
        *placement.rules(task, layouts, version=PROGRAM.version(task.spec), encoders=ENCODERS_SINCE),
        placement.of_each_kind(task, even_experts),
        sharing,
        rules.rule(  # 0.32 `v1/core/kv_cache_utils.py`: _promote_local_kv_cache_specs
            "states_need_hybrid",
            (TP,),
            N_("{option} turns the hybrid cache manager off, without which vllm starts no model with states"),
            lambda c: (c[TP] > 0) & bool(unhybrid and state_bytes(task.spec.model)),
            option=unhybrid or connectors.NO_HYBRID,
        ),
        rules.rule(
            "staged_drafts",
            (PP, SPECULATION),
            N_("{PP} > 1 with {SPECULATION} = mtp needs vllm {releases}: this model's draft class has no stages"),
            lambda c: (c[PP] > 1) & (c[SPECULATION] == mtp) & (not has_stages),
            releases=STAGED,
        ),
        rules.rule(
            "fitted_context",
            (CONTEXT,),
            N_("{CONTEXT} = auto needs vllm {releases}"),
            lambda c: (c[CONTEXT] < 0) & bool(version and not in_versions(FITTED, version)),
            releases=FITTED,
        ),
        *_transfer_rules(task),
        *([_overlap_rule(task)] if not version or in_versions(">=0.11.1", version) else []),
        rules.rule(
            "threads_on_cores",
            (INSTANCES, TP, THREADS),
            N_("threads x {TP} x {INSTANCES} must not exceed the {cards} cores"),
            lambda c: (c[THREADS] * c[TP] > hardware.share(c[INSTANCES])) & hardware.on_cores,
            cards=hardware.cards,
        ),
        rules.rule(
            "tokens_hold_sequences",
            (TP, PP, SEQS, TOKENS, CONTEXT, CHUNKED),
            N_("max_num_batched_tokens must be at least max_num_seqs"),
            lambda c: np.less(*limits(task, c)),
        ),
        rules.rule(
            "whole_prompts",
            (TP, PP, SEQS, TOKENS, CONTEXT, CHUNKED),
            N_("without enable_chunked_prefill, max_num_batched_tokens must be at least {CONTEXT}"),
            lambda c: (c[CHUNKED] == 0) & (limits(task, c)[0] < c[CONTEXT]),
        ),
        *rules.speculation_rules(task, PROGRAM, NEED_DRAFT_MODEL, "speculative-config.model", "mtp"),
        *rules.context_rules(task, scales_yarn=scales_yarn(task)),
        *adapters.adapter_rules(task, adapters.RANKS),
        _block_rule(task),
        rules.rule(
            "images_of_request",
            (IMAGES,),
            N_("limit_mm_per_prompt must be at least {images}, the most images of a request"),
            lambda c: c[IMAGES] < images,
            images=images,
        ),
    )


def _overlap_rule(task: Task) -> Rule:
    """Return the rule for the exchange of two overlapped batches (0.33 `config/vllm.py`): not the default one."""
    is_amd = task.cluster.groups[0].chip.architecture.startswith("gfx")
    words = ["deepep_low_latency", "deepep_high_throughput", "nixl_ep"]
    codes = [PROGRAM.code(EXCHANGE, word) for word in [*words, *["allgather_reducescatter"] * is_amd]]
    return rules.rule(
        "overlapped_exchange",
        (OVERLAP, EXCHANGE),
        N_("two_batch_overlap needs {EXCHANGE} = {words}"),
        lambda c: (c[OVERLAP] == 1) & ~np.isin(c[EXCHANGE], [*codes, *[0] * is_amd]),
        words=", ".join(words),
    )


def _transfer_rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules for the connectors that move caches between instances."""
    version, p2p = PROGRAM.version(task.spec), PROGRAM.code(TRANSFER, P2P)
    others = PROGRAM.parse(task.spec).others
    encodes = placement.broken_by_code(task, lambda parts: parts[-1].kind == routing.ENCODE)
    model = task.spec.model
    heads = np.inf if latent_layers(model) or state_bytes(model) else cached_heads(model)

    def unequal(parts: Roles) -> bool:
        first, *others = language(parts)
        return any(each.tp != first.tp for each in others)

    def staged(parts: Roles) -> bool:
        pair = [each for each in parts if each.kind in (routing.PREFILL, routing.DECODE)]
        sizes = {each.kind: each.tp for each in pair}
        fewer, more = sorted(sizes.values()) if pair else (1, 1)
        # 0.33 `kv_connector/v1/nixl/base_worker.py`, `_validate_remote_agent_handshake`
        copies = bool(pair) and sizes[routing.PREFILL] > max(sizes[routing.DECODE], heads)
        return copies or more % fewer != 0 or max((each.pp for each in pair), default=1) > 1

    by_nixl, by_p2p = (placement.broken_by_code(task, check) for check in (staged, unequal))
    return (
        rules.rule(
            "transfer_release",
            (PREFILL_DECODE, TRANSFER),
            N_("P2pNcclConnector needs vllm {releases}"),
            lambda c: (
                (c[PREFILL_DECODE] > 0) & (c[TRANSFER] == p2p) & (not (version and in_versions(P2P_RELEASES, version)))
            ),
            releases=P2P_RELEASES,
        ),
        rules.rule(
            "own_transfer_config",
            (PREFILL_DECODE,),
            N_("{PREFILL_DECODE} sets kv-transfer-config: remove it from serve.engine_args"),
            lambda c: (c[PREFILL_DECODE] > 0) & (CONFIG in others),
        ),
        rules.rule(
            "own_embeddings_config",
            (PREFILL_DECODE,),
            N_("enc in {PREFILL_DECODE} sets ec-transfer-config: remove it from serve.engine_args"),
            lambda c: encodes[c[PREFILL_DECODE]] & (EMBEDDINGS in others),
        ),
        rules.rule(
            "embeddings_on_host",
            (PREFILL_DECODE,),
            N_("enc in {PREFILL_DECODE} needs one host: a folder passes the embeddings"),
            lambda c: encodes[c[PREFILL_DECODE]] & (Hardware.of(task).hosts > 1),
        ),
        rules.rule(
            "transfer_of_kinds",
            (PREFILL_DECODE, TRANSFER),
            N_(
                "NixlConnector needs pp1, TP sizes of which one divides the other, and no copies of KV heads where "
                "prefill has the larger TP; P2pNcclConnector needs equal TP sizes"
            ),
            lambda c: np.where(c[TRANSFER] == p2p, by_p2p[c[PREFILL_DECODE]], by_nixl[c[PREFILL_DECODE]]),
        ),
    )


def _block_rule(task: Task) -> Rule:
    """Return the rule for the block sizes that the attention backend supports."""
    if not Hardware.of(task).on_cores:
        problem = N_("{knob} must be 1 or a multiple of 16, and a size that attention_backend supports")
        return rules.block_rule(PROGRAM, BLOCK, problem, lambda sizes: (sizes % 16 != 0) & (sizes != 1))
    if latent_layers(task.spec.model):
        problem = N_("{knob} must be 16 for vLLM's CPU kernels for latent attention")
        return rules.block_rule(PROGRAM, BLOCK, problem, lambda sizes: sizes != MLA_CPU_BLOCK)
    problem = N_("{knob} must be a multiple of 32 for vLLM's CPU attention")
    return rules.block_rule(PROGRAM, BLOCK, problem, lambda sizes: sizes % 32 != 0)


def merges(task: Task) -> tuple[Merge, ...]:
    """Return merges that ignore knobs without effect, and that treat vLLM's defaults as not set."""

    def batch(c: Columns) -> dict[str, IntArray]:
        tokens, seqs = batch_defaults(task, c[TP] * c[PP])
        fits = (c[TOKENS] == 0) | (c[TOKENS] >= seqs)
        return {
            TOKENS: np.where(c[TOKENS] == tokens, 0, c[TOKENS]),
            SEQS: np.where((c[SEQS] == seqs) & fits, 0, c[SEQS]),
        }

    defaults: dict[str, KnobValue] = {ASYNC: "on" if is_async(task) else "off"}
    if Hardware.of(task).on_cores and not latent_layers(task.spec.model):
        defaults[BLOCK] = CPU_BLOCK
    return (
        *rules.merges_of_kinds(),
        Merge(name="batch_by_default", knobs=(TP, PP, SEQS, TOKENS), canonical=batch),
        *rules.same_as_unset(PROGRAM, defaults),
        rules.no_drafts(),
        rules.tower_merge(task),
        rules.ignoring("no_graphs_is_eager", (EAGER, GRAPHS), lambda c: c[EAGER] == 1),
        *rules.exchange_merge(task, PROGRAM),
        *_forced_block(task),
        *adapters.adapter_merges(task, PROGRAM.parse(task.spec).others),
    )


def _forced_block(task: Task) -> tuple[Merge, ...]:
    """Return the merge that ignores block sizes below those that states of linear attention force."""
    if not state_bytes(task.spec.model):
        return ()

    def is_forced(c: Columns) -> BoolArray:
        return np.less(c[BLOCK], block_tokens(task, {**c, BLOCK: np.zeros_like(c[BLOCK])}))

    return (rules.ignoring("forced_block", (TP, KV, PREFIX, SPECULATION, DRAFTED, BLOCK), is_forced),)
