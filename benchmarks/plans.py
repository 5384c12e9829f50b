"""Measures the processor time of plans and, with another checkout, its ratio to theirs in turns.

    python benchmarks/plans.py --base ../flagcore-before

Both run in this environment. Outputs are JSON, which must be equal. The last line of stdout is one JSON object.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MODEL = ("--model", "Qwen/Qwen3-32B", "--devices", "8")
PLANS: dict[str, tuple[str, ...]] = {
    "estimate": ("estimate", *MODEL, "--chip", "H20", "--top", "3"),
    "size": ("size", "{spec}", "--rate", "20"),
}
SIZED = """
model: Qwen/Qwen3-32B
cluster: {chip: H200, nodes: 1, devices_per_node: 8}
serve: {engine: vllm, slo: {ttft_s: {p99: 1.0}, tpot_s: {p99: 0.03}}}
"""
MAIN = "import sys; from flagcore.cli.main import main; sys.exit(main())"


def main() -> None:
    """Print one JSON object with the median processor seconds of each plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, help="another checkout to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=PLANS, help="measure one plan")
    options = parser.parse_args()
    trees = [ROOT, *([options.base.resolve()] if options.base else [])]
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder, "size.yaml")
        spec.write_text(SIZED)
        for name in [options.only] if options.only else PLANS:
            arguments = [each.format(spec=spec) for each in (*PLANS[name], "--json")]
            rounds = [[_measured(tree, arguments) for tree in trees] for _ in range(options.rounds)]
            seconds = [statistics.median(found[0] for found in runs) for runs in zip(*rounds, strict=True)]
            figures[name] = {"cpu_s": round(seconds[0], 2)}
            if options.base:
                outputs = {output for found in rounds for _, output in found}
                figures[name] |= {"base_cpu_s": round(seconds[1], 2), "ratio": round(seconds[0] / seconds[1], 3)}
                figures[name]["is_same"] = len(outputs) == 1
            print(name, figures[name], file=sys.stderr)
    print(json.dumps(figures))


def _measured(tree: Path, arguments: list[str]) -> tuple[float, str]:
    """Return the processor seconds of a command with the packages of a checkout, and its output."""
    parts = [path.parent for kind in ("engines", "plugins", "extras") for path in tree.glob(f"{kind}/*/pyproject.toml")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tree, *parts)))}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", MAIN, *arguments]
    found = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, found.stdout


if __name__ == "__main__":
    main()
