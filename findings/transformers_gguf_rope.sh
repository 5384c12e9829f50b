#!/bin/sh
# transformers reads a GGUF file of Llama 3.1, or of Qwen3 with YaRN, without the scaling of its rotary embedding.
#
# Topic: Configurations
# Package: transformers 5.24.0, with gguf 0.19.0
# Expected: The scaling of the file, as llama.cpp reads it, or a context of the length without it.
# Seen: Only the base of the embedding is read: factors in `rope_freqs.weight` (Llama 3.1) and `rope.scaling` keys (YaRN)
#   are dropped without a message, except for gpt-oss. The context stays that with the scaling, 131072 tokens. The last
#   number is the frequency of the slowest wave, in that of the model which was written.
# Hurts: Who evaluates or fine-tunes from GGUF files: answers to long prompts differ from those of llama.cpp.
# Date: 2026-11-29
# Output:
#     transformers 5.24.0, torch 2.13.0, gguf 0.19.0, accelerate 1.15.0
#     Llama 3.1: llama3, read as default; 8 times
#     Qwen3 with YaRN: yarn, read as default; 4 times
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile \
    transformers==5.24.0 torch==2.13.0 numpy==2.4.6 gguf==0.19.0 accelerate==1.15.0
cat > "$folder/look.py" << 'END'
import tempfile


def write(file: str, model, family: str) -> None:
    """Write a model with the keys and the tensor that llama.cpp's converter writes for a scaled rotary embedding."""
    import gguf
    import torch

    config, writer = model.config, gguf.GGUFWriter(file, family)
    rope, width = config.rope_parameters, config.head_dim
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if rope["rope_type"] == "llama3":
        unscaled = rope["rope_theta"] ** (-torch.arange(0, width, 2) / width)
        writer.add_tensor("rope_freqs.weight", (unscaled / model.model.rotary_emb.inv_freq).numpy())
    else:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.num_hidden_layers)
    for name, weights in model.state_dict().items():
        writer.add_tensor(names.get_name(name, (".weight",)), weights.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def look() -> None:
    """Print how the rotary embedding of a file is read, and how much longer the slowest wave should be."""
    from importlib.metadata import version

    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    sizes = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
    }  # fmt: skip
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768}
    packages = ("transformers", "torch", "gguf", "accelerate")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    ratios = []
    for name, family, kind, scaling, theta in (
        ("Llama 3.1", LlamaConfig, "llama3", llama3, 5e5),
        ("Qwen3 with YaRN", Qwen3Config, "yarn", yarn, 1e6),
    ):
        config = family(**sizes, rope_parameters={"rope_type": kind, "rope_theta": theta, **scaling})
        model = AutoModelForCausalLM.from_config(config)
        with tempfile.TemporaryDirectory() as folder:
            write(f"{folder}/model.gguf", model, config.model_type)
            loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf")
        assert loaded.config.max_position_embeddings == 131072
        slowest = [float(each.model.rotary_emb.inv_freq[-1]) for each in (model, loaded)]
        ratios.append(slowest[1] / slowest[0])
        print(f"{name}: {kind}, read as {loaded.config.rope_parameters['rope_type']}; {ratios[-1]:.0f} times")
    assert min(ratios) > 2


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
