"""Lists the flags and variables of an engine's release that have no class in the engine's `settings.yaml`.

`python tools/settings.py ENGINE SOURCE [--write FILE]`. SOURCE is the folder of an unpacked wheel or source archive
(`pip download --no-deps ENGINE==RELEASE`). `--write` adds the names of the release to those of the engine's tests,
`engines/ENGINE/tests/settings.txt`.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from flagcore_serving.space.program import Program

PYTHON = r"""["'\0]({name})["'\0]|^ +({name}) = \w*Env"""
CODE = {
    ".py": PYTHON,
    ".so": PYTHON,
    **dict.fromkeys((".c", ".cc", ".cpp", ".cu", ".cuh", ".h"), r'env\w*\("({name})"()'),
}
"""How files read variables, by their ending. A compiled library contains the names as texts."""


def main() -> int:
    """Print the names without a class, one a line. Return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("source", type=Path)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    program: Program = import_module(f"flagcore_{options.engine}.engine").PROGRAM
    flags = sorted(program.flags_in((str(options.source),)))
    variables = sorted({*found(options.source, program.settings.prefixes.split())})
    if options.write:
        names = sorted({*options.write.read_text("utf-8").split(), *flags, *variables})
        text = textwrap.fill(" ".join(names), 120, break_on_hyphens=False, break_long_words=False)
        options.write.write_text(text + "\n", encoding="utf-8")
    unclassed = program.unclassed([*flags, *variables])
    print("\n".join(unclassed) or f"all {len(flags)} flags and {len(variables)} variables have a class")
    return bool(unclassed)


def found(source: Path, prefixes: list[str]) -> Iterator[str]:
    """Yield the environment variables that start with one of `prefixes`, and that files in a folder read."""
    name = rf"(?:{'|'.join(prefixes)})[A-Z0-9_]*[A-Z0-9]"
    for path in source.rglob("*"):
        if path.suffix in CODE and path.is_file():
            pattern = CODE[path.suffix].replace("{name}", name).encode()
            yield from (
                "".join(each.decode() for each in pair) for pair in re.findall(pattern, path.read_bytes(), re.M)
            )


if __name__ == "__main__":
    sys.exit(main())
