"""Writes a small Hugging Face model directory without weights (Qwen3), for examples/serve-vllm-cpu.yaml.

python examples/tiny_hf.py DIRECTORY        (no requirements, no downloads)

The engine uses random weights (`--load-format dummy`). The output is random, but the engine computes as much as for a
trained model of this shape.
"""

import argparse
import itertools
import json
from pathlib import Path

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def main() -> None:
    """Read the command line and write the directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the model goes")
    sizes = {"layers": 6, "hidden": 768, "heads": 12, "kv-heads": 4, "ffn": 2048, "vocab": 8192, "context": 8192}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default: {default})")
    write(**vars(parser.parse_args()))


def write(
    directory: Path, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, context: int
) -> None:
    """Write config and tokenizer."""
    first_special = vocab - len(SPECIAL)
    ends = {"bos_token_id": first_special, "eos_token_id": first_special + 2}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": vocab,
        **ends,
    }
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    files = {
        "config.json": config,
        "generation_config.json": ends,
        "tokenizer.json": _tokenizer(vocab),
        "tokenizer_config.json": about,
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (directory / name).write_text(json.dumps(data, indent=1), encoding="utf-8")


def _tokenizer(vocab: int) -> dict[str, object]:
    """Return a byte-level BPE tokenizer: all bytes, unused tokens up to the vocabulary size, and special tokens."""
    ordinary = vocab - len(SPECIAL)
    tokens = [*_letters_of_bytes(), *(f"<{number}>" for number in range(256, ordinary)), *SPECIAL]
    token_flags = {"normalized": False, "single_word": False, "lstrip": False, "rstrip": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": ordinary + place, "content": word, **token_flags} for place, word in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [],
        },
    }


def _letters_of_bytes() -> list[str]:
    """Return the visible character of each byte in GPT-2's vocabulary: the byte itself, or a character from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unused_letters = itertools.count(256)
    return [chr(byte) if byte in visible else chr(next(unused_letters)) for byte in range(256)]


if __name__ == "__main__":
    main()
