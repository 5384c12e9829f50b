#!/bin/sh
# A chat of 20 turns leaves 31 copies of all windows of a model on the host: llama.cpp's server makes two in each turn.
#
# Topic: Caches
# Package: xllamacpp 2026.10.11549
# Expected: One copy for each 8192 tokens, which the log calls the smallest spacing.
# Seen: Each prompt leaves two checkpoints, four tokens apart, and a slot keeps them until it has 32, whatever the
#   spacing. Each has the last window of all layers with windows. `--ctx-checkpoints` limits them.
# Hurts: Who plans the host's memory: a slot of Gemma 3 27B, which has 52 layers of windows, keeps up to 14 GB.
# Date: 2026-11-29
# Output:
#     xllamacpp 2026.10.11549
#     31 checkpoints with 4.2 thousand tokens of both layers with windows of 128
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
import subprocess
import sys
import tempfile


def write(file: str, window: int, hidden: int = 64, width: int = 16, vocab: int = 300) -> None:
    """Write a model of two layers with the architecture of Gemma 3 and random weights."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(file, "gemma3")
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_block_count(2)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(window)
    writer.add_tokenizer_model("llama")
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    writer.add_token_list(["<pad>", "<eos>", "<bos>", *letters, *(f"t{i}" for i in range(vocab - 259))])
    writer.add_token_scores([0.0] * vocab)
    writer.add_token_types([3] * 3 + [6] * 256 + [1] * (vocab - 259))
    queries, keys = (4 * width, hidden), (2 * width, hidden)
    layer = {
        "attn_norm": (hidden,), "attn_q": queries, "attn_k": keys, "attn_v": keys, "attn_q_norm": (width,),
        "attn_k_norm": (width,), "attn_output": (hidden, 4 * width), "post_attention_norm": (hidden,),
        "ffn_norm": (hidden,), "ffn_gate": (hidden, hidden), "ffn_up": (hidden, hidden), "ffn_down": (hidden, hidden),
        "post_ffw_norm": (hidden,),
    }  # fmt: skip
    shapes = {"token_embd": (vocab, hidden), "output_norm": (hidden,)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def look() -> None:
    """Print the checkpoints that a chat of 20 turns leaves on the host, as the server logs them."""
    from importlib.metadata import version

    print("xllamacpp", version("xllamacpp"))
    code = """if True:
        import os
        import sys
        import time
        import xllamacpp
        values = xllamacpp.CommonParams()
        values.model.path, values.n_ctx, values.warmup, values.verbosity = sys.argv[1], 4096, False, 5
        values.n_parallel = 1
        server = xllamacpp.Server(values)
        for turn in range(1, 21):
            prompt = [3 + token % 250 for token in range(200 * turn)]
            server.handle_completions({"prompt": prompt, "n_predict": 2, "cache_prompt": True})
        time.sleep(1)  # a thread writes the log
        os._exit(0)
    """
    with tempfile.TemporaryDirectory() as folder:
        write(f"{folder}/model.gguf", window=128)
        command = [sys.executable, "-c", code, f"{folder}/model.gguf"]
        server = subprocess.run(command, check=True, stderr=subprocess.PIPE)
    kept = []
    for line in server.stderr.decode(errors="replace").splitlines():
        if "created context checkpoint" in line:
            kept.append(float(line.split("size = ")[1].split()[0]))
        elif "erasing" in line and "context checkpoint" in line:
            kept.pop(0)
    layer = 2 * 2 * 16 * 2  # bytes of a token: keys and values of two heads of 16 in fp16
    tokens = sum(kept) * 2**20 / (2 * layer)
    print(f"{len(kept)} checkpoints with {tokens / 1000:.1f} thousand tokens of both layers with windows of 128")
    assert len(kept) > 25
    assert tokens > 128 * 25


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
