#!/bin/sh
# mlx-lm reads a configuration that transformers 5 has written with another base of the rotary embedding.
#
# Topic: Configurations
# Package: mlx-lm 0.32.2, with transformers 5.24.0
# Expected: The base of the file, 500000, as of Llama 3.
# Seen: transformers 5 writes `rope_theta` into `rope_parameters` only. mlx-lm's Llama, Mixtral, DeepSeek-V3 and Phi-3
#   ignore this key and take their own default without a warning. Its Qwen3 reads it.
# Hurts: Who serves a model that was fine-tuned and saved with transformers 5: answers to long prompts become worse.
# Date: 2026-11-28
# Output:
#     mlx-lm 0.32.2, transformers 5.24.0
#     config.json: rope_theta None, rope_parameters {'rope_theta': 500000.0, 'rope_type': 'default'}
#     mlx-lm's llama: rope_theta 10000
#     mlx-lm's mixtral: rope_theta 1000000.0
#     mlx-lm's deepseek_v3: rope_theta 10000.0
#     mlx-lm's phi3: rope_theta 10000
#     mlx-lm's qwen3: rope_theta 500000.0
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile mlx-lm==0.32.2 'mlx[cpu]==0.32.4' transformers==5.24.0
cat > "$folder/look.py" << 'END'
import tempfile


def look() -> None:
    """Print the base that mlx-lm reads from configurations of transformers."""
    from importlib import import_module
    from importlib.metadata import version
    from pathlib import Path

    import transformers
    from mlx_lm.utils import load_config

    print(f"mlx-lm {version('mlx-lm')}, transformers {transformers.__version__}")
    read = {}
    for kind in ("Llama", "Mixtral", "DeepseekV3", "Phi3", "Qwen3"):
        config = getattr(transformers, f"{kind}Config")(
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0}
        )
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            written = load_config(Path(folder))
        if not read:
            print(f"config.json: rope_theta {written.get('rope_theta')}, rope_parameters {written['rope_parameters']}")
        name = written["model_type"]
        read[name] = import_module(f"mlx_lm.models.{name}").ModelArgs.from_dict(written).rope_theta
        print(f"mlx-lm's {name}: rope_theta {read[name]}")
    assert read["llama"] != read["qwen3"] == 500000


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
