"""Inserts one fault at a time into a copy of the sources, and reports whether the nearest tests fail.

`python tools/mutations.py [NAME ...]` inserts all faults of `mutations.yaml`, or the named ones. Each fault has a text
that occurs once in a file, its replacement, and the tests that should fail. Exits with 1 if no test fails, if the tests
fail without the fault, or if its text or one of its tests no longer exists.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tools" / "mutations.yaml"
LIMIT_SECONDS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A fault: `old`, which occurs once in `file`, becomes `new`; one of `tests` should fail."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def is_current(self) -> bool:
        """Return whether the fault's text occurs once in its file, and its tests exist."""
        path = ROOT / self.file
        if not path.is_file() or path.read_text(encoding="utf-8").count(self.old) != 1:
            return False
        return all(test_exists(test) for test in self.tests)


def main() -> None:
    """Insert the faults and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a fault of the table (default: all)")
    parser.add_argument("--check", action="store_true", help="only check that the texts and tests of the table exist")
    arguments = parser.parse_args()
    table = [Mutation(**row) for row in yaml.safe_load(TABLE.read_text(encoding="utf-8"))]
    chosen = [each for each in table if not arguments.names or each.name in arguments.names]
    stale = [each for each in chosen if not each.is_current()]
    for each in stale:
        print(f"stale      {each.name}: its text does not occur once in {each.file}, or a test is missing")
    unnoticed = [] if arguments.check else list(survivors(each for each in chosen if each not in stale))
    print(f"{len(chosen)} faults, {len(unnoticed)} unnoticed, {len(stale)} stale")
    sys.exit(1 if unnoticed or stale else 0)


def test_exists(test: str) -> bool:
    """Return whether a folder, a file or a single test, `FILE::NAME`, exists."""
    path, _, name = test.partition("::")
    path_of_test = ROOT / path
    return path_of_test.exists() and (not name or f"def {name}(" in path_of_test.read_text(encoding="utf-8"))


def survivors(mutations: Iterable[Mutation]) -> Iterable[Mutation]:
    """Yield the faults with which no test fails, and the faults whose tests fail, or cannot run, without them."""
    green: dict[tuple[str, ...], bool] = {}
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place)
        copy_sources(copy)
        for each in mutations:
            file, began, tests = copy / each.file, time.monotonic(), tuple(each.tests)
            if tests not in green:
                green[tests] = run_tests(copy, each.tests)[0] == 0
            original = file.read_text(encoding="utf-8")
            file.write_text(original.replace(each.old, each.new), encoding="utf-8")
            code, output = run_tests(copy, each.tests)
            file.write_text(original, encoding="utf-8")
            failed_tests = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
            state = ("noticed" if code == 1 else "UNNOTICED") if green[tests] else "FAILS"
            print(f"{state:10} {each.name} ({time.monotonic() - began:.0f} s)", *failed_tests[:1], flush=True)
            if state != "noticed":
                yield each


def copy_sources(folder: Path) -> None:
    """Copy the files tracked by git."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def run_tests(folder: Path, tests: list[str]) -> tuple[int, str]:
    """Run tests of a copy against the copy's sources. Returns pytest's exit code and output."""
    paths = [folder, *(file.parent for file in sorted(folder.glob("*/*/pyproject.toml")))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not long", *tests]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, f"FAILED the-time-limit of {LIMIT_SECONDS} s"
    return done.returncode, done.stdout


if __name__ == "__main__":
    main()
