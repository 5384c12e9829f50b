"""What the free text of a source tells of its settings."""

from typing import Any

import pytest
from flagcore_megatron.space.production import read_notes

OVERLAP, EXPERTS = "overlap_grad_reduce", "overlap_moe_expert_parallel_comm"
DISPATCHER, BACKEND = "moe_token_dispatcher_type", "moe_flex_dispatcher_backend"
IMPL, SCOPE = "cuda_graph_impl", "cuda_graph_scope"
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
    "capacity factor 1 + pad to capacity, grouped gemm, permute fusion, first 1 layer dense": {
        "moe_expert_capacity_factor": 1.0,
        "moe_pad_expert_input_to_capacity": True,
        "moe_grouped_gemm": True,
    },
    "CE fusion": {"cross_entropy_loss_fusion": True},
    "cross-entropy fusion (TE)": {"cross_entropy_loss_fusion": True},
    "activation offload expert_fc1+moe_act": {
        "fine_grained_activation_offloading": True,
        "offload_modules": "expert_fc1,moe_act",
    },
    "optimizer CPU offload": {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True},
    "fp32 grad accum": {"accumulate_allreduce_grads_in_fp32": True},
    "grad_reduce_in_fp32=False": {"accumulate_allreduce_grads_in_fp32": False},
    "recompute_modules=mlp,moe_act; tp-comm-overlap on": {"recompute_modules": "mlp,moe_act", "tp_comm_overlap": True},
    "LoRA": {"trainable": "adapters"},
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
