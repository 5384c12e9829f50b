"""Writes a small GGUF model of a real architecture (Qwen3) with random weights, for examples/serve-cpu.yaml.

python examples/tiny_gguf.py tiny.gguf        (takes a second; needs numpy and gguf, downloads nothing)

The output is random, but the server computes as much as for a trained model of this shape.
"""

import argparse
import itertools
import string
from collections.abc import Iterator

import gguf
import numpy as np

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    """Read the command line and write the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="where the model goes")
    sizes = {"layers": 6, "hidden": 768, "heads": 12, "kv-heads": 4, "ffn": 2048, "vocab": 8192, "context": 8192}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default: {default})")
    write(**vars(parser.parse_args()))


def write(file: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, context: int) -> None:
    """Write the model with matrices in q8_0: 8 bits per weight and one scale per 32 weights."""
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_name("tiny-qwen3")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(hidden // heads)
    writer.add_value_length(hidden // heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    _add_tokenizer(writer, vocab)
    random = np.random.default_rng(0)
    for name, shape in _tensors(layers, hidden, heads, kv_heads, ffn, vocab):
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, dtype=np.float32))
            continue
        weights = random.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = hidden // heads
    yield "token_embd.weight", (vocab, hidden)
    for layer in range(layers):
        block = {
            "attn_norm": (hidden,),
            "attn_q": (heads * width, hidden),
            "attn_k": (kv_heads * width, hidden),
            "attn_v": (kv_heads * width, hidden),
            "attn_q_norm": (width,),
            "attn_k_norm": (width,),
            "attn_output": (hidden, heads * width),
            "ffn_norm": (hidden,),
            "ffn_gate": (ffn, hidden),
            "ffn_up": (ffn, hidden),
            "ffn_down": (hidden, ffn),
        }
        for name, shape in block.items():
            yield f"blk.{layer}.{name}.weight", shape
    yield "output_norm.weight", (hidden,)
    yield "output.weight", (vocab, hidden)


def _add_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    """Add a byte-level BPE tokenizer: all bytes, then pieces of lower-case letters, each merged from two others."""
    merges = list(itertools.islice(_pairs(), size - 256 - len(SPECIAL)))
    tokens = [*_letters_of_bytes(), *(left + right for left, right in merges), *SPECIAL]
    if len(tokens) != size:
        raise SystemExit(f"vocab = {size} must be from {256 + len(SPECIAL)} to {len(tokens)}")
    ordinary = size - len(SPECIAL)
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * ordinary + [gguf.TokenType.CONTROL] * len(SPECIAL))
    writer.add_token_merges([f"{left} {right}" for left, right in merges])
    writer.add_bos_token_id(ordinary)
    writer.add_eos_token_id(ordinary + 2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT)


def _letters_of_bytes() -> list[str]:
    """Return the visible character of each byte in GPT-2's vocabulary: the byte itself, or a character from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unused_letters = itertools.count(256)
    return [chr(byte) if byte in visible else chr(next(unused_letters)) for byte in range(256)]


def _pairs() -> Iterator[tuple[str, str]]:
    letters = string.ascii_lowercase
    for length in (1, 2, 3):
        for first in itertools.product(letters, repeat=length):
            for last in letters:
                yield "".join(first), last


if __name__ == "__main__":
    main()
