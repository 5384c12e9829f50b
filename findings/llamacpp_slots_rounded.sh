#!/bin/sh
# llama.cpp allocates half more than `n_ctx` for 12 slots: the context of a slot is rounded up to 256 tokens.
#
# Topic: Caches
# Package: xllamacpp 2026.10.11549
# Expected: 4096 cells in all, 341 for each of 12 slots, or fewer: the log says "rounding down".
# Seen: Each slot has 512 cells, 6144 in all, which the log calls rounding down. With 3 slots, it is an eighth more. A
#   unified cache has 4096.
# Hurts: Who divides a device's memory among many slots by `n_ctx`.
# Date: 2026-11-29
# Output:
#     xllamacpp 2026.10.11549
#     n_ctx 4096, 1 slot: 4096 cells
#     n_ctx 4096, 3 slots: 4608 cells
#     n_ctx 4096, 12 slots: 6144 cells
#     n_ctx 4096, 12 slots, unified: 4096 cells
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


def write(file: str, hidden: int = 64, width: int = 16, vocab: int = 300) -> None:
    """Write a model of one layer with the architecture of Llama and random weights."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("llama")
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    writer.add_token_list(["<pad>", "<eos>", "<bos>", *letters, *(f"t{i}" for i in range(vocab - 259))])
    writer.add_token_scores([0.0] * vocab)
    writer.add_token_types([3] * 3 + [6] * 256 + [1] * (vocab - 259))
    square, keys = (hidden, hidden), (2 * width, hidden)
    shapes = {
        "token_embd": (vocab, hidden), "output_norm": (hidden,), "blk.0.attn_norm": (hidden,), "blk.0.attn_q": square,
        "blk.0.attn_k": keys, "blk.0.attn_v": keys, "blk.0.attn_output": square, "blk.0.ffn_norm": (hidden,),
        "blk.0.ffn_gate": square, "blk.0.ffn_up": square, "blk.0.ffn_down": square,
    }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def look() -> None:
    """Print the cells that the server logs at its start."""
    from importlib.metadata import version

    print("xllamacpp", version("xllamacpp"))
    code = """if True:
        import os
        import sys
        import time
        import xllamacpp
        values = xllamacpp.CommonParams()
        values.model.path, values.n_ctx, values.warmup, values.verbosity = sys.argv[1], 4096, False, 5
        values.n_parallel, values.kv_unified = map(int, sys.argv[2:])
        server = xllamacpp.Server(values)
        time.sleep(1)  # a thread writes the log
        os._exit(0)
    """
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        write(f"{folder}/model.gguf")
        for slots, unified in ((1, 0), (3, 0), (12, 0), (12, 1)):
            command = [sys.executable, "-c", code, f"{folder}/model.gguf", str(slots), str(unified)]
            log = subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True).stderr
            line = [line for line in log.splitlines() if "llama_kv_cache: size =" in line][-1]
            each = int(line.split("(")[1].split()[0])
            cells.append(each * (1 if unified else slots))
            print(f"n_ctx 4096, {slots} slot{'s' * (slots > 1)}{', unified' * unified}: {cells[-1]} cells")
    assert cells == [4096, 4608, 6144, 4096]


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
