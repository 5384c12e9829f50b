"""Builds the distributions of a release in a folder, and tries them out in an empty environment.

`python tools/release.py dist`. The core's wheel is built from its sdist: only so does it ask for the plugins by version
(see hatch_build.py). Our own packages are installed from the folder, never from an index.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = ("cpu", "nvidia", "amd", "metax", "iluvatar", "cambricon", "ascend", "mthreads", "hygon", "kunlunxin")
EXAMPLE = ROOT / "examples" / "train-cpu.yaml"


def main() -> None:
    """Build into the folder that the command line names, then try it out."""
    folder = Path(sys.argv[1]).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    for source in (ROOT, *(ROOT / "plugins" / name for name in PLUGINS)):
        _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source))
    wheels = sorted(map(str, folder.glob("*.whl")))
    if len(wheels) != 1 + len(PLUGINS):
        sys.exit(f"expected {1 + len(PLUGINS)} wheels, found {len(wheels)}: {', '.join(wheels)}")
    with tempfile.TemporaryDirectory() as place:
        try_out(wheels, Path(place))
    print(*(Path(wheel).name for wheel in wheels), sep="\n")


def try_out(wheels: list[str], folder: Path) -> None:
    """Install the wheels in a new environment in a folder, and estimate an example with them."""
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    _run(str(programs / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wheels)
    shutil.copy(EXAMPLE, folder)
    _run(str(programs / "flag"), "plugins", "list", cwd=folder)
    command = [str(programs / "flag"), "estimate", EXAMPLE.name, "--top", "3"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n")
    if done.returncode or re.search(r"^plugin \w+ ", done.stderr, re.MULTILINE):
        sys.exit("the example cannot be estimated, or a plugin failed: see above")


def _run(*command: str, cwd: Path = ROOT) -> None:
    """Run a command; a failure ends this program."""
    print("+", *command, flush=True)
    done = subprocess.run(command, cwd=cwd, check=False)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
