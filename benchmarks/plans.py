"""Measures the processor time of plans and, with another checkout, its ratio to theirs in turns.

    python benchmarks/plans.py --base ../flagcore-before

Both run in this environment. Outputs, which are JSON where a command has it, must be equal. Nothing is kept between
commands, except for `export`, which runs after the estimate that names it. The last line of stdout is one JSON object.
"""

import argparse
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MODEL = ("--model", "Qwen/Qwen3-32B", "--devices", "8")
NODES = ("estimate", "--top", "3", "--devices", "8", "--nodes")
PLANS: dict[str, tuple[str, ...]] = {
    "help": ("--help",),
    "estimate": ("estimate", *MODEL, "--chip", "H20", "--top", "3", "--json"),
    "export": ("export", *MODEL, "--chip", "H20", "--to", "vllm", "--output", "-"),
    "size": ("size", "{size}", "--rate", "20", "--json"),
    "sglang": (*NODES, "4", "--model", "deepseek-ai/DeepSeek-V3", "--chip", "H200", "--engine", "sglang", "--json"),
    "vllm": (*NODES, "2", "--model", "Qwen/Qwen3-235B-A22B", "--chip", "H20", "--json"),
    "rl": ("estimate", "{rl}", "--top", "3", "--json"),
    "mixed": ("estimate", "{mixed}", "--top", "3", "--json"),
}
BEFORE = {"export": "estimate"}
"""Commands that run after another one, whose plan they may find."""
SIZED = """
model: Qwen/Qwen3-32B
cluster: {chip: H200, nodes: 1, devices_per_node: 8}
serve: {engine: vllm, slo: {ttft_s: {p99: 1.0}, tpot_s: {p99: 0.03}}}
"""
MIXED = f"""
model: Qwen/Qwen3-32B
cluster:
  groups: [{", ".join(f"{{chip: {chip}}}" for chip in ("H100", "A100-80GB", "H20", "A800", "L40S", "B200"))}]
train: {{engine: megatron, global_batch_size: 256, seq_length: 4096, precision: bf16}}
"""
RL = """
model: Qwen/Qwen3-8B
cluster: {chip: H100-SXM, nodes: 2, devices_per_node: 8}
rl:
  engine: nemo-rl
  trainer: {engine: megatron}
  rollout: {engine: vllm}
  prompts: 64
  samples: 32
  prompt_len: {mean: 130, longest: 512}
  answer_len: {mean: 900, longest: 3584}
  mini_batch: 512
  reference: true
  staleness: 1
"""
MAIN = "import sys; from flagcore.cli.main import main; sys.exit(main())"


def main() -> None:
    """Print one JSON object with the median processor seconds of each plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, help="another checkout to compare with")
    parser.add_argument("--compiled", type=Path, help="the folder of a compiled build, see `make test-compiled`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=PLANS, nargs="+", default=list(PLANS), help="measure these plans")
    options = parser.parse_args()
    compiled = [options.compiled.resolve()] if options.compiled else []
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        trees = [[*compiled, _linked(ROOT, Path(folder, "here"))]]
        trees += [[_linked(options.base.resolve(), Path(folder, "base"))]] if options.base else []
        os.environ["PYTHONPYCACHEPREFIX"] = f"{folder}/compiled"  # as after an installation
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        specs = {name: Path(folder, f"{name}.yaml") for name in ("size", "mixed", "rl")}
        for name, text in (("size", SIZED), ("mixed", MIXED), ("rl", RL)):
            specs[name].write_text(text)
        for name in options.only:
            words, first = ([each.format(**specs) for each in PLANS[key]] for key in (name, BEFORE.get(name, name)))
            caches = [Path(folder, f"{name}{number}") if name in BEFORE else None for number in range(len(trees))]
            pairs = [*zip(trees, caches, strict=True)]
            for tree, cache in pairs:
                _measured(tree, first, cache)  # compiles modules, too
            runs = [[_measured(tree, words, cache) for tree, cache in pairs] for _ in range(options.rounds)]
            seconds = [statistics.median(found[0] for found in column) for column in zip(*runs, strict=True)]
            figures[name] = {"cpu_s": round(seconds[0], 2)}
            if options.base:
                figures[name] |= {"base_cpu_s": round(seconds[1], 2), "ratio": round(seconds[0] / seconds[1], 3)}
                figures[name]["is_same"] = len({output for found in runs for _, output in found}) == 1
            print(name, figures[name], file=sys.stderr, flush=True)
    print(json.dumps(figures))


def _linked(tree: Path, folder: Path) -> Path:
    """Return a folder with links to the packages of a checkout: one entry of the path, as after an installation."""
    folder.mkdir()
    parts = (path.parent for kind in ("engines", "plugins", "extras") for path in tree.glob(f"{kind}/*/pyproject.toml"))
    for package in (tree / "flagcore", *(found for part in parts for found in part.glob("flagcore_*"))):
        (folder / package.name).symlink_to(package)
    return folder


def _measured(tree: Sequence[Path], arguments: Sequence[str], cache: Path | None) -> tuple[float, str]:
    """Return the processor seconds of a command with the packages in folders, and its output.

    `cache`: where it may keep plans. None: it keeps none.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, tree))}
    environment |= {"XDG_CACHE_HOME": str(cache), "FLAGCORE_CACHE": "on" if cache else "off"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", MAIN, *arguments]
    found = subprocess.run(command, cwd="/", env=environment, check=False, capture_output=True, text=True)
    if found.returncode:
        sys.exit(f"flag {shlex.join(arguments)} with {tree[0]}: {found.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, found.stdout


if __name__ == "__main__":
    main()
