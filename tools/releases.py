"""Lists the releases of engines and libraries that flagcore's rules name, and the newest of each on PyPI. Commits are
those of repositories whose sources a rule was read in.

`python tools/releases.py [--rules]`. A rule names a release in its data or in its source, such as `vllm 0.33`. With
`--rules`, the places are listed. `docs/engines-really.md` has the same releases without the newest, which come from
`pip index versions`.
"""

import argparse
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).parents[1]
SOURCES = ("engines/*/flagcore_*", "extras/*/flagcore_*", "plugins/*/flagcore_*")
"""The folders with the rules of engines, trainers, importers and vendors."""
PACKAGES = {
    "accelerate": "accelerate",
    "aiconfigurator-core": "aiconfigurator-core",
    "aiperf": "aiperf",
    "axolotl": "axolotl",
    "bitsandbytes": "bitsandbytes",
    "deepspeed": "deepspeed",
    "dynamo": "ai-dynamo",
    "emerging-optimizers": "emerging-optimizers",
    "flaggems": "flag-gems",
    "flagscale": "flag-scale",
    "flash-linear-attention": "flash-linear-attention",
    "liger-kernel": "liger-kernel",
    "llama-factory": "llamafactory",
    "lmdeploy": "lmdeploy",
    "megatron-bridge": "megatron-bridge",
    "megatron-core": "megatron-core",
    "ms-swift": "ms-swift",
    "nemo automodel": "nemo-automodel",
    "openrlhf": "openrlhf",
    "peft": "peft",
    "ray": "ray",
    "sglang": "sglang",
    "tensorrt_llm": "tensorrt_llm",
    "torch": "torch",
    "torch_npu": "torch-npu",
    "torchao": "torchao",
    "torchtitan": "torchtitan",
    "transformer-engine": "transformer-engine",
    "transformers": "transformers",
    "trl": "trl",
    "verl": "verl",
    "vllm": "vllm",
    "vllm-ascend": "vllm-ascend",
    "xllamacpp": "xllamacpp",
}
"""The distributions on PyPI, by the name that rules use in any case. NeMo-RL, slime and MindSpeed have none."""
NAMED = re.compile(rf"\b({'|'.join(PACKAGES)}) (?:@?v?(\d+(?:\.\d+)+)(?![\w.]*\d)|@?([0-9a-f]{{8}})\b)", re.IGNORECASE)

Seen = Mapping[str, Mapping[str, list[str]]]
"""Places (`file:line`) that name a release, by package and release: the newest first, then commits."""


def seen(root: Path = ROOT) -> Seen:
    """Return where the rules below a folder name releases."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for folder in (folder for pattern in SOURCES for folder in sorted(root.glob(pattern))):
        for path in sorted(each for each in folder.rglob("*") if each.suffix in (".py", ".yaml")):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                for name, release, commit in NAMED.findall(line):
                    place = f"{path.relative_to(root)}:{number}"
                    found[PACKAGES[name.lower()]][release or f"@{commit}"].append(place)
    return {
        name: {release: places[release] for release in sorted(places, key=_age, reverse=True)}
        for name, places in sorted(found.items())
    }


def _age(release: str) -> Version:
    """Return a key by which commits are older than all releases."""
    return Version("0.dev0" if release.startswith("@") else release)


def table(found: Seen) -> str:
    """Return the releases as a table for the documentation."""
    rows = [f"| `{name}` | {', '.join(releases)} |" for name, releases in found.items()]
    return "\n".join(["| package | releases on which rules were seen |", "| --- | --- |", *rows])


def newest(package: str) -> str:
    """Return the newest release of a package in pip's index, or why there is none."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--ignore-requires-python", package]
    result = subprocess.run(command, capture_output=True, text=True)
    found = re.match(r"\S+ \((\S+)\)", result.stdout)
    return found[1] if found else f"unknown: {result.stderr.strip().splitlines()[-1:]}"


def main() -> None:
    """Print the newest release of each package and those on which rules were seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rules", action="store_true", help="also list the places that name each release")
    options = parser.parse_args()
    for name, releases in seen().items():
        print(f"{name}: newest {newest(name)}; rules seen on {', '.join(releases)}")
        for release, places in releases.items() if options.rules else ():
            print(f"  {release}", *places, sep="\n    ")


if __name__ == "__main__":
    main()
