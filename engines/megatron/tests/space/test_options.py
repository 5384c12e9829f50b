"""From settings and the free text of a source to the options of physics, and what a published run leaves out."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from flagcore_megatron.engine import ENGINE
from flagcore_megatron.predict import layout_of, training
from flagcore_megatron.space.knobs import candidate_columns
from flagcore_megatron.space.options import options
from flagcore_megatron.space.production import read_notes
from flagcore_models.mixers.gated_delta_net import GatedDeltaNet
from flagcore_training.layout import WHOLE_STEP, Options

from engines.models.tests.examples import COMPRESSED, layer_of, mixed
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.spec import Adapter
from flagcore.errors import NotModelled, SpecError
from flagcore.tuner.stages.build import check
from tests.checks import given, refuses
from tests.product import tasks

SHARDED = {"use_distributed_optimizer": True, "data_parallel_size": 4}
AWARE = {"use_precision_aware_optimizer": True}
LATENT = dataclasses.replace(tasks.EXPERTS, **tasks.LATENT)
WIDE = dataclasses.replace(tasks.EXPERTS, num_moe_experts=16)
INTERLEAVED = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}


IMPL, SCOPE = "cuda_graph_impl", "cuda_graph_scope"
SCOPES = ("full_iteration", "attn,moe_preprocess", "moe", "moe,moe_router", "mlp")
"""Parts that Transformer Engine's graphs do not capture in a model whose layers all have experts of any load."""


def options_of(settings: dict[str, Any] | None = None, **train: Any) -> Options:
    return options(tasks.task(LATENT, settings=settings or {}, **train))


def published(values: dict[str, Any], notes: str = "", *, model: Any = tasks.EXPERTS, **train: Any) -> Options:
    return options(ENGINE.published(tasks.task(model, **train), values, notes)[0])


def overlaps(found: Options) -> tuple[bool, bool]:
    return found.overlap_grad_reduce, found.overlap_param_gather


COMMAND = ("torchrun", "pretrain_gpt.py")
SWITCHES = {
    "overlap_moe_expert_parallel_comm": "overlap_expert_comm",
    "use_megatron_fsdp": "fsdp",
    "cross_entropy_loss_fusion": "cross_entropy_fusion",
    "account_for_embedding_in_pipeline_split": "account_for_embedding",
    "account_for_loss_in_pipeline_split": "account_for_loss",
    **{name: name for name in ("overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap", "fp8_param_gather")},
}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fsdp": (
        {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"},
        {"fsdp": True, "whole": {"weights"}},
    ),
    "schedule": ({"pipeline_schedule": "ZB_H1"}, {"schedule": "zb-h1"}),
    "engine's schedule": ({"pipeline_schedule": "1f1b"}, {"schedule": None}),
    "modules": ({"recompute_modules": "layernorm,mlp"}, {"recompute_modules": {"layernorm", "mlp"}}),
    "gradients in bf16": ({"grad_reduce_in_bf16": True}, {"grad_bytes": 2}),
    "widths": (
        {**AWARE, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "bf16", "main_params_dtype": "fp16"},
        {"precision_aware_optimizer": True, "exp_avg_bytes": 1, "exp_avg_sq_bytes": 2, "main_param_bytes": 2},
    ),
    "FP8 in whose scales Megatron holds main parameters": (
        {**AWARE, "fp8_recipe": "tensorwise", "exp_avg_dtype": "bf16"},
        {"precision_aware_optimizer": False, "exp_avg_bytes": 2},
    ),
    "FP8 of transformer-engine's Adam": ({**AWARE, "fp8_recipe": "delayed"}, {"precision_aware_optimizer": True}),
    "FP8 and narrow main parameters": (
        {**AWARE, "fp8_recipe": "mxfp8", "main_params_dtype": "fp16"},
        {"precision_aware_optimizer": True, "main_param_bytes": 2},
    ),
    "offload of all": (
        {**AWARE, "optimizer_cpu_offload": True},
        {"precision_aware_optimizer": True, "optimizer_offload_fraction": 1.0},
    ),
    "offload of some": (
        {**AWARE, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
        {"precision_aware_optimizer": True, "optimizer_offload_fraction": 0.5},
    ),
    "offload of none": ({"optimizer_offload_fraction": 0.5}, {"optimizer_offload_fraction": 0.0}),
    "activations": (
        {"fine_grained_activation_offloading": True, "offload_modules": "core_attn", "offload_stages": "0,2"},
        {"offload_modules": {"core_attn"}, "offload_stages": (0, 2)},
    ),
    "flex": ({"moe_token_dispatcher_type": "flex"}, {"dispatcher": "flex"}),
    "dropout": ({"hidden_dropout": 0.1}, {"dropout": True}),
    "imbalance": ({"moe_expert_imbalance": 2.0}, {"expert_imbalance": 2.0}),
    "a capacity": ({"moe_expert_imbalance": 2.0, "moe_expert_capacity_factor": 1.5}, {"expert_imbalance": 1.5}),
    "filled up to a capacity": (
        {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True},
        {"expert_imbalance": 1.5, "padded_experts": True},
    ),
    "layer graphs": ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn"}, {"graphs": {"attn"}}),
    "a graph of all": (
        {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"},
        {"graphs": WHOLE_STEP, "fused_experts": True},
    ),
    "graphs of whole layers": (
        {"cuda_graph_impl": "transformer_engine"},
        {"graphs": {"attn", "mamba", "mlp", "moe_router", "moe_preprocess"}},
    ),
    "no loss of routers": ({"moe_router_load_balancing_type": "none"}, {"router_loss": False}),
    "no graphs": ({"cuda_graph_impl": "none", "cuda_graph_scope": "full_iteration"}, {"graphs": frozenset()}),
    "switches": (
        {**dict.fromkeys(SWITCHES, True), "overlap_p2p_comm": False, "delay_wgrad_compute": True},
        {**dict.fromkeys(SWITCHES.values(), True), "copied_loss": True, "overlap_p2p_comm": False},
    ),
}
OFFLOADS = {"fine_grained_activation_offloading": True}


@pytest.mark.parametrize("name", SETTINGS)
def test_setting_becomes_an_option_and_the_others_stay(name: str) -> None:
    settings, expected = SETTINGS[name]
    plain = options_of(command=COMMAND)
    assert options_of(settings, command=COMMAND) == dataclasses.replace(plain, **expected)


@pytest.mark.parametrize(
    ("release", "words", "settings", "whole"),
    [
        ("0.17.1", ("--use-megatron-fsdp",), {}, {"states", "weights", "gradients"}),
        ("0.18.0", ("--use-megatron-fsdp",), {}, set()),
        ("0.17.1", ("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads"), {}, {"weights"}),
        ("0.17.1", (), {"use_megatron_fsdp": True}, set()),  # whose launch names the strategy
    ],
)
def test_a_command_with_megatron_fsdp_shards_by_itself_since_0_18(
    release: str, words: tuple[str, ...], settings: dict[str, Any], whole: set[str]
) -> None:
    found = options_of(settings, command=(*COMMAND, *words), engine_version=release)
    assert (found.fsdp, found.whole) == (True, whole)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"exp_avg_dtype": "bf16"}, "exp_avg_dtype"),
        ({"optimizer_cpu_offload": True}, "optimizer_cpu_offload"),
        ({"delay_wgrad_compute": True}, "delay_wgrad_compute"),
        ({"offload_modules": "core_attn"}, "offload_modules"),
        ({"fine_grained_activation_offloading": True}, "fine_grained_activation_offloading"),
        ({"moe_pad_expert_input_to_capacity": True}, "moe_pad_expert_input_to_capacity"),
        ({"moe_shared_expert_overlap": True, "moe_token_dispatcher_type": "flex"}, "moe_shared_expert_overlap"),
        ({"optimizer": "muon", "use_megatron_fsdp": True}, "optimizer"),
        ({"optimizer": "lion", "use_torch_fsdp2": True}, "optimizer"),
        ({"optimizer": "sgd", "use_precision_aware_optimizer": True}, "use_precision_aware_optimizer"),
        ({"recompute_modules": "moe_act"}, "recompute_modules"),
        ({"recompute_modules": "moe", "overlap_moe_expert_parallel_comm": True}, "overlap_moe_expert_parallel_comm"),
        ({"recompute_modules": "moe", "offload_modules": "moe_act", **OFFLOADS}, "offload_modules"),
        ({"offload_modules": "attn_proj", **OFFLOADS}, "offload_modules"),
        ({"offload_modules": "fused_group_mlp", **OFFLOADS}, "offload_modules"),
        ({"cuda_graph_impl": "full_iteration", "cuda_graph_scope": "attn"}, "cuda_graph_scope"),
        *(({IMPL: "transformer_engine", SCOPE: scope}, SCOPE) for scope in SCOPES),
        ({"cp_comm_type": "a2a+p2p"}, "cp_comm_type"),
        ({"recompute_modules": "shared_experts", "moe_shared_expert_overlap": True}, "recompute_modules"),
        (
            {"pipeline_model_parallel_layout": "EttttL", "account_for_loss_in_pipeline_split": True},
            "pipeline_model_parallel_layout",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_refused(settings: dict[str, Any], key: str) -> None:
    with refuses(f"train.settings.{key}"):
        options_of(settings)


@pytest.mark.parametrize(("module", "needed"), [("mla_up_proj", {}), ("moe_act", {"moe_grouped_gemm": True})], ids=str)
def test_a_module_needs_a_model_that_has_it(module: str, needed: dict[str, Any]) -> None:
    settings = {"recompute_modules": module}
    assert options_of({**settings, **needed}).recompute_modules == {module}
    with pytest.raises(SpecError):
        options(tasks.task(settings=settings))


def test_parts_of_graphs_depend_on_the_model_the_release_and_the_capacity() -> None:
    graphs = {"cuda_graph_impl": "transformer_engine"}
    fixed = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    assert options_of({**graphs, "cuda_graph_scope": "moe", **fixed}).graphs == {"moe"}
    assert options_of({**graphs, "cuda_graph_scope": "moe"}, engine_version="0.15.3").graphs == frozenset()
    assert options_of({"cuda_graph_impl": "local", "cuda_graph_scope": "moe_preprocess"}).graphs == {"moe_preprocess"}
    assert options(tasks.task(settings={**graphs, "cuda_graph_scope": "mlp"})).graphs == {"mlp"}
    with refuses("train.settings.cuda_graph_scope"):
        options(tasks.task(settings={**graphs, "cuda_graph_scope": "moe_router"}))


def test_the_norm_of_gated_delta_net_is_a_module_since_0_19() -> None:
    states = GatedDeltaNet(key_heads=2, value_heads=4, key_dim=8, value_dim=8, kernel=4)
    settings = {"recompute_modules": "gdn_norm_out,mlp"}
    hybrid = mixed(tasks.DENSE, states, 2)
    job = tasks.task(hybrid, settings=settings, engine_version="0.19.2")
    assert options(job).recompute_modules == {"gdn_norm_out", "mlp"}
    for model, version in ((hybrid, "0.18.0"), (tasks.DENSE, "0.19.2")):
        with refuses("train.settings.recompute_modules"):
            options(tasks.task(model, settings=settings, engine_version=version))


def test_an_unmodelled_schedule_is_reported_as_unknown() -> None:
    with pytest.raises(NotModelled, match="zigzag"):
        options_of({"pipeline_schedule": "zigzag"})


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("fp16", 2), ("bf16", 4), ("fp8", 4), ("nvfp4", 4)])
def test_gradients_are_as_wide_as_megatron_keeps_them(precision: str, width: int) -> None:
    assert options_of(precision=precision).grad_bytes == width
    assert options_of({"accumulate_allreduce_grads_in_fp32": True}, precision=precision).grad_bytes == 4


def test_defaults_match_the_runner() -> None:
    trial, command = options_of(), options_of(command=COMMAND)
    assert (trial.dispatcher, command.dispatcher) == ("alltoall", "allgather")
    for each in (trial, command):
        assert overlaps(each) == (False, False)
        assert not each.grouped_gemm


def test_flags_of_a_custom_command_are_settings() -> None:
    flags = ("--overlap-grad-reduce", "--recompute-modules", "mlp", "layernorm", "--exp-avg-dtype=bf16")
    extra = ("--use-precision-aware-optimizer", "--no-overlap-p2p-communication", "--moe-grouped-gemm", "--lr", "1e-4")
    found = options_of(command=(*COMMAND, *flags, *extra))
    assert found.overlap_grad_reduce
    assert found.grouped_gemm
    assert not found.overlap_p2p_comm
    assert found.recompute_modules == {"mlp", "layernorm"}
    assert found.exp_avg_bytes == 2
    assert not training(tasks.task(command=(*COMMAND, "--transformer-impl", "local"))).transformer_engine
    assert training(tasks.task(command=COMMAND)).transformer_engine


def test_settings_win_over_a_command_of_megatron_and_may_not_contradict_another() -> None:
    with pytest.raises(SpecError, match=r"contradicts train\.command"):
        options_of({"exp_avg_dtype": "fp8"}, command=("train", "--exp-avg-dtype", "bf16"))
    for value in (True, False):
        found = options_of({"overlap_grad_reduce": value}, command=(*COMMAND, "--overlap-grad-reduce"))
        assert found.overlap_grad_reduce is value


def test_published_run_overlaps_its_exchange_with_a_distributed_optimizer() -> None:
    tuned, plain = published(SHARDED), published({})
    assert overlaps(tuned) == (True, True)
    assert overlaps(plain) == overlaps(published(SHARDED, "no overlap-grad-reduce")) == (False, False)
    assert (tuned.dispatcher, tuned.grouped_gemm) == ("alltoall", True)
    assert not published(SHARDED, implementation="local").grouped_gemm


@pytest.mark.parametrize(
    ("model", "name", "fused"),
    [
        (tasks.EXPERTS, "Nemotron-3-Nano-30B-A3B", (True, False)),
        (tasks.EXPERTS, "openai/gpt-oss-120b", (False, True)),
        (tasks.EXPERTS, "deepseek-ai/deepseek-moe-16b-base", (True, True)),
        (LATENT, "moonshotai/Moonlight-16B-A3B", (False, False)),
        (LATENT, "deepseek-ai/DeepSeek-V3", (True, True)),
    ],
)
def test_published_run_fuses_what_positions_and_recipes_allow(model: Any, name: str, fused: tuple[bool, ...]) -> None:
    found = published({}, model=dataclasses.replace(model, name=name))
    assert (found.rope_fusion, found.router_fusion) == fused


def test_published_run_has_the_narrow_head_and_the_graphs_of_its_recipe() -> None:
    heads = [
        published({}, "full-iteration graph", model=dataclasses.replace(LATENT, name=name), precision=precision)
        for name, precision in (("DeepSeekV3", "mxfp8"), ("DeepSeekV3", "bf16"), ("Qwen3-30B-A3B", "mxfp8"))
    ]
    assert ["head" in each.mxfp8_modules for each in heads] == [True, False, False]
    assert [each.attention_kernel for each in heads] == [""] * 3
    many, chip = {**SHARDED, "expert_model_parallel_size": 8}, dataclasses.replace(tasks.CHIP, name="GB300")
    deepseek = dataclasses.replace(LATENT, name="DeepSeek-V3")
    assert (
        published(many, "full-iteration graph", model=deepseek, precision="mxfp8", chip=chip).attention_kernel
        == "mxfp8"
    )
    runs = [
        published(many, "HybridEP", model=dataclasses.replace(tasks.EXPERTS, name=name), precision=precision, chip=chip)
        for name, precision in (("Qwen3-30B-A3B", "bf16"), ("Qwen3.5-35B-A3B", "bf16"), ("Qwen3-30B-A3B", "mxfp8"))
    ]
    assert [(len(each.graphs), each.overlap_expert_comm) for each in runs] == [(0, False), (3, False), (1, True)]
    flash = dataclasses.replace(mixed(tasks.EXPERTS, COMPRESSED, 4), name="DeepSeek-V4-Flash")
    found = published({**many, "expert_model_parallel_size": 64}, model=flash, precision="mxfp8", chip=chip)
    assert (found.graphs, found.recompute_modules) == (WHOLE_STEP, frozenset({"mla_up_proj"}))
    on_hopper = dataclasses.replace(tasks.CHIP, name="H100-SXM")
    for name, interval in (("Moonlight-16B-A3B", 5), ("DeepSeek-V2-Lite", 0)):
        model = dataclasses.replace(LATENT, name=name)
        assert published(many, "alltoall", model=model, chip=on_hopper).gc_interval == interval


def test_published_run_overlaps_tensor_parallelism_only_in_a_fully_tuned_run() -> None:
    tuned = {**SHARDED, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    assert published(tuned, model=tasks.DENSE).tp_comm_overlap
    assert not published(tuned, "tp-comm-overlap off", model=tasks.DENSE).tp_comm_overlap
    for missing in ("use_distributed_optimizer", "sequence_parallel", "tensor_model_parallel_size"):
        values = {key: value for key, value in tuned.items() if key != missing}
        assert not published(values, model=tasks.DENSE).tp_comm_overlap
    assert not published(tuned).tp_comm_overlap
    assert not published(tuned, model=tasks.DENSE, implementation="local").tp_comm_overlap
    assert not published(tuned, model=tasks.DENSE, attention="unfused").tp_comm_overlap


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"expert_model_parallel_size": 4}, ("alltoall", False)),
        ({"expert_model_parallel_size": 8}, ("flex", False)),
        ({"expert_model_parallel_size": 8, **INTERLEAVED}, ("flex", True)),
        ({"expert_model_parallel_size": 8, **INTERLEAVED, "recompute_granularity": "full"}, ("flex", False)),
    ],
)
def test_published_run_sends_tokens_to_other_nodes_once(values: dict[str, Any], found: tuple[str, bool]) -> None:
    cluster = Cluster(groups=(NodeGroup(chip=tasks.CHIP, nodes=4, devices_per_node=4),))
    task, *_ = ENGINE.published(dataclasses.replace(tasks.task(WIDE), cluster=cluster), values, "")
    assert (options(task).dispatcher, options(task).overlap_expert_comm) == found


@pytest.mark.parametrize(("tensor", "size"), [(1, 1), (2, 2), (4, 1)])
def test_published_run_splits_experts_like_other_layers_if_it_can(tensor: int, size: int) -> None:
    values = {"expert_model_parallel_size": 8, "tensor_model_parallel_size": tensor}
    task, values, *_ = ENGINE.published(tasks.task(WIDE, devices=16), values, "")
    assert layout_of(task, candidate_columns(values)).expert_tensor.tolist() == [size]


@pytest.mark.parametrize(
    ("precision", "latent", "layers"), [("bf16", 64, 0), ("mxfp8", 64, 0), ("nvfp4", None, 0), ("nvfp4", 64, 1 + 8)]
)
def test_published_run_of_a_hybrid_keeps_parts_in_more_bits(precision: str, latent: int | None, layers: int) -> None:
    layer = layer_of(WIDE, None, "experts")
    model = dataclasses.replace(WIDE, num_layers=50, layers=(layer,) * 50, mtp_num_layers=2, moe_latent_size=latent)
    options = published({}, model=model, precision=precision)
    assert (options.wide_layers, options.wide_mtp) == (layers, precision != "bf16")
    assert (bool(options.wide_modules), bool(options.mxfp8_modules)) == (layers > 0, layers > 0)


def test_published_run_that_names_moments_but_not_main_parameters_holds_these_whole() -> None:
    assert not published({}, "exp_avg bf16").precision_aware_optimizer
    assert published({}, "exp_avg bf16; main_params_dtype=fp32").precision_aware_optimizer


def test_published_run_of_a_model_named_after_adapters_trains_these() -> None:
    adapter = published({}, model=dataclasses.replace(tasks.DENSE, name="some 70B LoRA r8")).adapter
    assert adapter == Adapter(rank=8, targets=("q_proj", "k_proj", "v_proj"))
    assert published({}, model=dataclasses.replace(tasks.DENSE, name="flora-7b")).adapter is None


@pytest.mark.parametrize(
    ("notes", "rank", "targets"),
    [
        ("LoRA", 32, "all-linear"),
        ("LoRA; LoRA r8 on qkv+proj; packed", 8, ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("PEFT on fc1+fc2 only", 32, ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_notes_on_adapters_name_rank_and_layers(notes: str, rank: int, targets: object) -> None:
    assert published({}, notes).adapter == Adapter(rank=rank, targets=targets)


def test_published_run_that_packs_offline_has_the_settings_of_recipes_for_fine_tuning() -> None:
    notes, values = "SFT; packed sequences (offline packing to 2048)", {"use_distributed_optimizer": True}
    tuned, other = published(values, notes), published(values, "packing")
    assert (tuned.rope_fusion, tuned.overlap_grad_reduce, tuned.one_by_one) == (False, False, True)
    assert (other.rope_fusion, other.overlap_grad_reduce) == (True, True)
    assert published(values, notes, settings={"apply_rope_fusion": True}).rope_fusion
    assert published(values, notes, model=dataclasses.replace(tasks.DENSE, name="Llama-3.1-8B")).rope_fusion
    assert not published(values, notes, engine_version="0.20.0").one_by_one
    hybrid = dataclasses.replace(WIDE, num_layers=2, layers=(layer_of(WIDE, None, "experts"),) * 2)
    assert published(values, notes, model=hybrid).rope_fusion  # without rotary embeddings


def test_notes_on_schedules_mention_unfused_attention_and_waits_for_messages() -> None:
    task, *_ = ENGINE.published(tasks.task(), {}, "schedule=ZB-H1")
    assert not training(task).flash
    assert not options(task).overlap_p2p_comm
    task, *_ = ENGINE.published(tasks.task(), {"pipeline_schedule": "zb-h1"}, "")
    assert training(task).flash


def test_a_record_overrides_its_notes_and_these_override_defaults() -> None:
    notes = "DeepEP; cross-entropy fusion"
    reported = published({}, notes, settings={"moe_token_dispatcher_type": "allgather"})
    assert (reported.dispatcher, reported.cross_entropy_fusion) == ("allgather", True)
    assert published({}, notes).dispatcher == "flex"


def test_layout_of_a_published_run_gives_its_virtual_stages() -> None:
    task = tasks.task(devices=2, settings={"pipeline_model_parallel_layout": "Et|t|t|tL"})
    found, values, *_ = ENGINE.published(task, {"pipeline_model_parallel_size": 2}, "")
    assert layout_of(found, ENGINE.columns(found, values)).virtual.tolist() == [2.0]


def test_counting_embedding_and_loss_as_layers_allows_an_even_split() -> None:
    model = dataclasses.replace(tasks.DENSE, num_layers=6)
    settings = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    for arguments, legal in (({}, False), (settings, True)):
        task = tasks.task(model, settings=arguments)
        _, broken = check(ENGINE.columns(task, {"pipeline_model_parallel_size": 4}), ENGINE.rules(task), ())
        assert broken is not legal


def test_settings_of_all_candidates_replace_missing_knobs() -> None:
    settings = {"num_layers_in_first_pipeline_stage": 1, "expert_tensor_parallel_size": 1}
    task = tasks.task(tasks.EXPERTS, settings=settings)
    values = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    layout = layout_of(task, ENGINE.columns(task, values))
    np.testing.assert_array_equal([layout.first_layers, layout.last_layers, layout.expert_tensor], [[1], [0], [1]])


@pytest.mark.parametrize(("precision", "kept"), [("bf16", False), ("fp8", True), ("mxfp8", True), ("mxfp4", False)])
def test_published_runs_in_8_bits_keep_their_weights_in_fp8(precision: str, kept: bool) -> None:
    values = {"use_distributed_optimizer": True}
    assert published(values, precision=precision).fp8_param_gather is kept
    assert not published({"use_distributed_optimizer": False}, precision=precision).fp8_param_gather
    assert not published(values, settings={"fp8_param_gather": False}, precision=precision).fp8_param_gather


OVERLAP, EXPERTS = "overlap_grad_reduce", "overlap_moe_expert_parallel_comm"
DISPATCHER, BACKEND = "moe_token_dispatcher_type", "moe_flex_dispatcher_backend"
SAYS: dict[str, dict[str, Any]] = {
    "cuda_graph_impl=transformer_engine; cuda_graph_scope=['attn', 'moe_router', 'moe_preprocess']": {
        IMPL: "transformer_engine",
        SCOPE: "attn,moe_preprocess,moe_router",
    },
    "cuda_graph_impl=full_iteration; tp_comm_overlap_rs=True": {IMPL: "local", SCOPE: "full_iteration"},
    "cuda_graph_impl=none; cuda_graph_scope=full_iteration": {IMPL: "none", SCOPE: "full_iteration"},
    "cuda-graph attn+moe_router+moe_preprocess": {IMPL: "transformer_engine", SCOPE: "attn,moe_preprocess,moe_router"},
    "full-iteration CUDA graph": {IMPL: "local", SCOPE: "full_iteration"},
    "moe_flex_dispatcher_backend=hybridep": {DISPATCHER: "flex", BACKEND: "hybridep"},
    "dispatcher=DeepEP; ": {DISPATCHER: "flex", BACKEND: "deepep"},
    "dispatcher=A2A; ": {DISPATCHER: "alltoall"},
    "dispatcher = AllToAll": {DISPATCHER: "alltoall"},
    "DeepEP": {DISPATCHER: "flex", BACKEND: "deepep"},
    "cp_comm_type=a2a": {"cp_comm_type": "a2a"},
    "moe_a2a_overlap=True": {EXPERTS: True},
    "A2A overlap; +1f1b EP overlap": {EXPERTS: True},
    "pp_layout=Et*4|(t*4|)*14tmL; vboost": {"pipeline_model_parallel_layout": "Et*4|(t*4|)*14tmL"},
    "no overlap (tp-comm-overlap off, no overlap-grad-reduce)": {
        OVERLAP: False,
        "overlap_param_gather": False,
        "tp_comm_overlap": False,
    },
    "overlap-grad-reduce; --overlap-param-gather": {OVERLAP: True, "overlap_param_gather": True},
    "--no-overlap-grad-reduce": {OVERLAP: False},
    "precision-aware optimizer exp_avg bf16; fp8-param-gather": {
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": "bf16",
        "exp_avg_sq_dtype": "bf16",
        "fp8_param_gather": True,
    },
    "FSDP=8 (Megatron-FSDP)": {"use_megatron_fsdp": True},
    "FSDP on; disable log param norm": {"use_megatron_fsdp": True},
    "FSDP=1": {"use_megatron_fsdp": False},
    "capacity factor 1, grouped gemm, permute fusion, first 1 layer dense": {
        "moe_expert_capacity_factor": 1.0,
        "moe_pad_expert_input_to_capacity": True,
        "moe_grouped_gemm": True,
    },
    "CE fusion": {"cross_entropy_loss_fusion": True},
    "cross-entropy fusion (TE)": {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
    "activation offload expert_fc1+moe_act": {
        "fine_grained_activation_offloading": True,
        "offload_modules": "expert_fc1,moe_act",
    },
    "optimizer CPU offload": {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True},
    "fp32 grad accum": {"accumulate_allreduce_grads_in_fp32": True},
    "grad_reduce_in_fp32=False": {"accumulate_allreduce_grads_in_fp32": False},
    "recompute_modules=mlp,moe_act; tp-comm-overlap on": {"recompute_modules": "mlp,moe_act", "tp_comm_overlap": True},
    "interleaved 1F1B": {"pipeline_schedule": "interleaved"},
    "schedule=V-Half": {"pipeline_schedule": "V-Half"},
    "ZB-2p": {"pipeline_schedule": "zb-2p"},
    "vboost; not well tuned; recompute cell empty; CUDA_DEVICE_MAX_CONNECTIONS=1; bf16 params": {},
    "cuda_graph_impl=magic; moe_expert_imbalance=0.1; =; ]]] [": {},
    "": {},
}


@pytest.mark.parametrize("notes", SAYS)
def test_notes_report_settings_and_the_rest_is_ignored(notes: str) -> None:
    assert read_notes(notes) == SAYS[notes]


def test_names_with_values_take_precedence_over_phrases() -> None:
    assert read_notes("alltoall; dispatcher=DeepEP")[DISPATCHER] == "flex"


SEEN = {"images_per_sequence": 2, "image_width": 56, "image_height": 84}
SEEING = dataclasses.replace(tasks.DENSE, vision=tasks.VISION)


def test_images_bring_the_vision_tower() -> None:
    task = tasks.task(SEEING, settings={**SEEN, "freeze_vision_model": True})
    tower = given(training(task).tower)
    assert (tower.images, tower.tokens, tower.frozen, tower.frozen_mergers) == (2.0, 6, True, False)
    assert training(tasks.task(SEEING)).tower is None
    for each, named in ((task, False), (tasks.task(SEEING), True)):
        (found,) = (note for note in ENGINE.unmodelled(each) if note.name == "model.vision_config")
        assert bool(found.why) == named
    seeing = dataclasses.replace(tasks.EXPERTS, vision=tasks.VISION)
    recorded = tasks.task(seeing, settings={"recompute_modules": "moe_act"})
    assert ENGINE.unmodelled(recorded)  # before `published` completes its settings, without grouped products


@pytest.mark.parametrize(
    ("model", "settings", "key"),
    [
        (tasks.DENSE, SEEN, "images_per_sequence"),
        (SEEING, {**SEEN, "images_per_sequence": 1000}, "images_per_sequence"),
        (SEEING, {"images_per_sequence": 2}, "images_per_sequence"),
        (SEEING, {"freeze_vision_projection": True}, "freeze_vision_projection"),
    ],
)
def test_images_need_a_tower_sizes_and_place(model: Any, settings: dict[str, Any], key: str) -> None:
    with refuses(f"train.settings.{key}"):
        options(tasks.task(model, settings=settings))


@pytest.mark.parametrize(
    ("train", "natural"),
    [
        ({"adapter": Adapter()}, True),
        ({"adapter": Adapter(), "settings": {"moe_expert_imbalance": 1.0}}, False),
        ({"adapter": Adapter(), "settings": {"moe_expert_capacity_factor": 1.5}}, False),
        ({}, False),
        ({"command": (*COMMAND, "--data-path", "text")}, True),
        ({"command": (*COMMAND, "--data-path", "text", "--moe-router-force-load-balancing")}, False),
        ({"command": (*COMMAND, "--data-path", "text", "--mock-data")}, False),
        ({"adapter": Adapter(), "flags": ("--moe-router-force-load-balancing",)}, False),
    ],
)
def test_experts_of_real_data_have_the_loads_of_real_text_and_a_warning(train: dict[str, Any], natural: bool) -> None:
    task = tasks.task(tasks.EXPERTS, **train)
    assert (options(task).routing_spread > 0.0) == natural
    assert ("moe_expert_imbalance" in [each.name for each in ENGINE.unmodelled(task)]) == natural
