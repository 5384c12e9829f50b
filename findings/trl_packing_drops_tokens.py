"""TRL's default packing drops the end of each sample that is longer than a sequence.

Topic: Data
Package: trl 1.16.0
Expected: All tokens are trained, in as few sequences as fit.
Seen: The default, `bfd`, cuts a sample at the length of a sequence and drops the rest: 19 of 49 tokens here.
  `bfd_split` and `wrapped` keep all tokens, in 7 sequences instead of 4.
Hurts: Who derives steps and epochs from the number of tokens: an epoch is shorter, and long samples lose their ends.
Date: 2026-11-28
Output:
    trl 1.16.0, packing_strategy of SFTConfig: bfd
    bfd: 30 of 49 tokens in 4 sequences
    bfd_split: 49 of 49 tokens in 7 sequences
    wrapped: 49 of 49 tokens in 7 sequences
"""

import os
import subprocess
import sys
import tempfile
import textwrap

PACKAGES = ["trl==1.16.0", "transformers==5.24.0", "torch==2.13.0"]


def look() -> None:
    """Print how many tokens of five samples each strategy keeps, for sequences of 8 tokens."""
    import trl
    from datasets import Dataset
    from trl import SFTConfig, pack_dataset

    samples = Dataset.from_dict({"input_ids": [list(range(length)) for length in (10, 3, 25, 7, 4)]})
    print(f"trl {trl.__version__}, packing_strategy of SFTConfig: {SFTConfig.packing_strategy}")
    kept = {}
    for strategy in ("bfd", "bfd_split", "wrapped"):
        packed = pack_dataset(samples, 8, strategy=strategy)
        kept[strategy] = sum(len(row["input_ids"]) for row in packed)
        print(f"{strategy}: {kept[strategy]} of 49 tokens in {len(packed)} sequences")
    assert kept["bfd"] < 49


def main() -> None:
    """Install the packages in a temporary folder, look, and compare with the output in the docstring."""
    with tempfile.TemporaryDirectory() as folder:
        python = f"{folder}/bin/python"
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        seen = subprocess.run(
            [python, __file__, "look"],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HOME": folder},
        ).stdout
    print(seen, end="")
    assert seen == textwrap.dedent(__doc__.split("Output:\n")[1]), "the output changed"


if __name__ == "__main__":
    look() if sys.argv[1:] else main()
