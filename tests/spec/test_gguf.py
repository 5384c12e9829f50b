"""Shapes out of the headers of GGUF files that are not plain: experts, latent attention, heads by layer."""

from pathlib import Path
from typing import Any

import pytest

from flagcore.errors import SpecError
from flagcore.spec.models import context_length, gguf_shape

gguf = pytest.importorskip("gguf", reason="pip install gguf to make a header")


def header(folder: Path, arch: str, sizes: dict[str, Any], tensors: tuple[str, ...] = ()) -> str:
    import numpy as np

    file = folder / f"{arch}.gguf"
    writer = gguf.GGUFWriter(str(file), arch)
    for name, size in sizes.items():
        add = writer.add_array if isinstance(size, list) else writer.add_uint32
        add(f"{arch}.{name}", size)
    for name in tensors:
        writer.add_tensor(name, np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(file)


DENSE = {
    "block_count": 4,
    "embedding_length": 256,
    "feed_forward_length": 1024,
    "attention.head_count": 8,
    "attention.head_count_kv": 2,
    "vocab_size": 1000,
    "context_length": 4096,
}


def test_a_dense_model_with_tied_tables_and_biases(tmp_path: Path) -> None:
    file = header(tmp_path, "qwen2", DENSE, ("token_embd.weight", "blk.0.ffn_gate.weight", "blk.0.attn_q.bias"))
    found = gguf_shape(file)
    assert (found["num_layers"], found["kv_channels"], found["num_query_groups"]) == (4, 32, 2)
    assert (found["untie_embeddings_and_output_weights"], found["add_qkv_bias"]) == (False, True)
    assert context_length(file) == 4096
    assert "num_moe_experts" not in found


def test_heads_that_differ_by_layer_count_as_the_maximum(tmp_path: Path) -> None:
    found = gguf_shape(header(tmp_path, "deci", DENSE | {"attention.head_count_kv": [2, 4, 2, 2]}, ("output.weight",)))
    assert found["num_query_groups"] == 4


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    sizes = {"expert_count": 16, "expert_used_count": 4, "expert_feed_forward_length": 128}
    shared = {"expert_shared_count": 2, "leading_dense_block_count": 1}
    found = gguf_shape(header(tmp_path, "deepseek2moe", DENSE | sizes | shared, ("blk.1.ffn_gate_exps.weight",)))
    assert found["num_moe_experts"] == 16
    assert (found["moe_router_topk"], found["moe_ffn_hidden_size"], found["moe_first_dense_layers"]) == (4, 128, 1)
    assert found["moe_shared_expert_intermediate_size"] == 256
    assert found["gated_linear_unit"]


def test_latent_attention(tmp_path: Path) -> None:
    latent = {
        "attention.kv_lora_rank": 64,
        "attention.q_lora_rank": 96,
        "attention.key_length_mla": 48,
        "attention.value_length_mla": 32,
        "attention.key_length": 80,
        "rope.dimension_count": 16,
        "attention.head_count_kv": 1,
    }
    found = gguf_shape(header(tmp_path, "deepseek2", DENSE | latent, ("output.weight",)))
    assert found["multi_latent_attention"]
    assert (found["kv_lora_rank"], found["q_lora_rank"]) == (64, 96)
    assert (found["qk_head_dim"], found["qk_pos_emb_head_dim"], found["v_head_dim"]) == (32, 16, 32)
    assert found["num_query_groups"] == 8


def test_a_missing_size_is_named(tmp_path: Path) -> None:
    sizes = {name: size for name, size in DENSE.items() if name != "block_count"}
    with pytest.raises(SpecError, match=r"has no llama\.block_count"):
        gguf_shape(header(tmp_path, "llama", sizes))
