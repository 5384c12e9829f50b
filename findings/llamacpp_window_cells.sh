#!/bin/sh
# llama.cpp gives a layer with a window of 128 tokens a cache of 768 to 2304 tokens for each slot.
#
# Topic: Caches
# Package: xllamacpp 2026.10.11549
# Expected: 128 cells of the cache for each slot, which is what the layer attends to.
# Seen: A slot also has room for a micro-batch (`n_ubatch`), rounded up to 256: 768 cells with the default of 512, and
#   2304 with 2048. Slots with caches of their own each have them; a unified cache has the windows of all slots and one
#   micro-batch.
# Hurts: Who raises `n_ubatch` for faster prompts on a model of windows such as Gemma 3: its caches triple.
# Date: 2026-11-28
# Output:
#     xllamacpp 2026.10.11549
#     1 slot, n_ubatch 512: 768 cells for windows, 4096 for the context
#     1 slot, n_ubatch 2048: 2304 cells for windows, 4096 for the context
#     4 slots, n_ubatch 512: 4 x 768 cells for windows, 4 x 1024 for the context
#     4 slots, n_ubatch 512, unified: 1024 cells for windows, 4096 for the context
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
    """Print the cells of both caches, which the server logs at its start."""
    from importlib.metadata import version

    print("xllamacpp", version("xllamacpp"))
    code = """if True:
        import os
        import sys
        import time
        import xllamacpp
        values = xllamacpp.CommonParams()
        values.model.path, values.n_ctx, values.warmup, values.verbosity = sys.argv[1], 4096, False, 5
        values.n_parallel, values.n_ubatch, values.kv_unified = map(int, sys.argv[2:])
        server = xllamacpp.Server(values)
        time.sleep(1)  # a thread writes the log
        os._exit(0)
    """
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        write(f"{folder}/model.gguf", window=128)
        for slots, batch, unified in ((1, 512, 0), (1, 2048, 0), (4, 512, 0), (4, 512, 1)):
            command = [sys.executable, "-c", code, f"{folder}/model.gguf", *map(str, (slots, batch, unified))]
            log = subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True).stderr
            sizes = [line.split("size = ")[1].split()[0] for line in log.splitlines() if "KV cache, size" in line]
            context, windows = sizes[-2:]
            times = f"{slots} x " if slots > 1 and not unified else ""
            print(
                f"{slots} slot{'s' * (slots > 1)}, n_ubatch {batch}{', unified' * unified}: "
                f"{times}{windows} cells for windows, {times}{context} for the context"
            )
            cells.append(int(windows))
    assert cells == [768, 2304, 768, 1024]


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
