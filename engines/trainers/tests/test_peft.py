"""Adapters are those of PEFT, in programs that train models of transformers with it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flagcore_models.config import model_of_config
from flagcore_models.layers import layer_counts, weights_by_group
from flagcore_trainers.deepspeed import BUCKET, DEEPSPEED, MICRO, OFFLOAD, ZERO
from flagcore_trainers.fsdp2.engine import FSDP2
from flagcore_trainers.fully_shard.activations import activations
from flagcore_trainers.fully_shard.predict import memory_job
from flagcore_trainers.fully_shard.weights import layers_of_rank
from flagcore_trainers.meaning import layout_of, training, weights_of_rank
from flagcore_training.adapters import BASE_BYTES

from flagcore.domain.spec import Adapter
from tests.product.tasks import EXPERTS, costs, task

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 256}
SIZES |= {"num_attention_heads": 4, "num_experts_per_tok": 2}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
ROUTED = {**GROUPED, "num_experts": 8, "moe_intermediate_size": 48}
SHARED = {**ROUTED, "shared_expert_intermediate_size": 80}
DELTA = {f"linear_{name}": size for name, size in (("num_key_heads", 2), ("num_value_heads", 4))}
DELTA |= {f"linear_{name}_head_dim": 16 for name in ("key", "value")} | {"linear_conv_kernel_dim": 4}
ONE_DENSE = {**ROUTED, "first_k_dense_replace": 1}
LATENT = {**ONE_DENSE, "q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
LATENT |= {"num_key_value_heads": 4, "v_head_dim": 16, "n_shared_experts": 1}
INDEXED = {**LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64}
ATTENTION = {"layer_types": ["attention"] * 4, "shared_intermediate_size": 80}


NETWORK = ("gate_proj", "up_proj", "down_proj")


def fsdp2_columns() -> dict[str, Any]:
    return {knob.name: np.array([knob.axis(()).encode(knob.neutral)]) for knob in FSDP2.knobs}


@pytest.mark.parametrize(
    ("family", "sizes", "weights"),
    [  # of `get_peft_model` with `LoraConfig(r=8, target_modules="all-linear")`, peft 0.21.2 and transformers 5.24.0
        ("llama", GROUPED, 29_696),
        ("gemma3_text", GROUPED, 29_696),
        ("phi3", GROUPED, 23_552),
        ("gpt_oss", {**GROUPED, "num_experts": 8}, 14_336),
        ("mixtral", {**GROUPED, "num_experts": 8}, 188_672),
        ("minimax_m2", {**GROUPED, "num_experts": 8}, 188_672),
        ("olmoe", {**GROUPED, "num_experts": 8}, 188_672),
        ("hunyuan_v1_moe", {**GROUPED, "num_experts": 8}, 188_672),
        ("qwen2_moe", SHARED, 30_240),
        ("qwen3_moe", ROUTED, 127_232),
        ("qwen3_next", {**SHARED, **DELTA}, 130_016),
        ("qwen3_5_text", {**GROUPED, **DELTA}, 33_472),
        ("qwen3_5_moe_text", {**SHARED, **DELTA}, 34_016),
        ("glm4_moe", ONE_DENSE, 99_008),
        ("dots1", {**ONE_DENSE, "n_shared_experts": 1}, 99_008),
        ("ernie4_5_moe", ONE_DENSE, 99_008),
        ("deepseek_v3", LATENT, 103_872),
        ("deepseek_v32", INDEXED, 110_592),
        ("llama4_text", {**GROUPED, "num_experts": 8, "num_experts_per_tok": 1, "intermediate_size_mlp": 96}, 32_000),
        ("granitemoehybrid", {**GROUPED, **ATTENTION, "num_experts": 8}, 26_112),
    ],
)
def test_all_linear_layers_are_those_of_peft(family: str, sizes: dict[str, Any], weights: int) -> None:
    model = model_of_config({"model_type": family, **SIZES, **sizes}, name=family, file="config.json")
    job = task(model, engine="fsdp2", adapter=Adapter(rank=8))
    sharded = memory_job(job, fsdp2_columns(), fused_norm=False)
    assert layers_of_rank(sharded, layer_counts(model), only_trained=True)[0] == weights
    states, numbers = DEEPSPEED.described.state_bytes, DEEPSPEED.numbers(job, {ZERO: np.zeros(1, np.int64)})
    assert weights_of_rank(training(job, 0, 0, states), layout_of(numbers), only_trained=True) == weights


def test_experts_stay_in_16_bits_unless_the_adapter_says_that_they_are_quantized() -> None:
    plain = Adapter(kind="qlora", base="nf4", targets=("q_proj",))
    adapters = [replace(plain, quantized_experts=each) for each in (True, False)]
    jobs = [task(EXPERTS, engine="deepspeed", command=("x",), adapter=each) for each in adapters]
    columns = {name: np.full(1, code) for name, code in ((MICRO, 1), (OFFLOAD, 1), (ZERO, 0), (BUCKET, 0))}
    quantized, others = (DEEPSPEED.predict(job, columns, costs(job)).static_bytes[0] for job in jobs)
    experts = weights_by_group(EXPERTS)["experts"]
    assert others - quantized == pytest.approx(experts * (2.0 - BASE_BYTES["nf4"]))
    memory = [memory_job(each, fsdp2_columns(), fused_norm=False).base_bytes for each in jobs]
    assert memory == [(BASE_BYTES["nf4"], BASE_BYTES["nf4"]), (BASE_BYTES["nf4"], 2.0)]


def test_experts_in_fp32_need_twice_their_memory_and_perhaps_more_time() -> None:
    plain = Adapter(kind="qlora", base="nf4", targets=("q_proj",))
    jobs = [task(EXPERTS, engine="fsdp2", adapter=replace(plain, fp32_experts=each)) for each in (True, False)]
    memory = [memory_job(each, fsdp2_columns(), fused_norm=False).base_bytes for each in jobs]
    assert memory == [(BASE_BYTES["nf4"], 4.0), (BASE_BYTES["nf4"], 2.0)]
    assert [[each.time for each in FSDP2.unmodelled(job)] for job in jobs] == [[(1.0, 15.0)], []]


def test_adapters_beside_experts_store_a_second_copy_of_them() -> None:
    adapters = [Adapter(targets=("q_proj", *each)) for each in ((), NETWORK)]
    jobs = [task(EXPERTS, engine="fsdp2", adapter=each) for each in adapters]
    few, many = (activations(memory_job(job, fsdp2_columns(), fused_norm=False)).stored[0] for job in jobs)
    assert many - few > 2.0 * weights_by_group(EXPERTS)["experts"]
