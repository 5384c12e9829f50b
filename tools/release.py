"""Builds the distributions of a release in a folder, and tests them in an empty environment.

`python tools/release.py dist`. The core's wheel is built from its sdist, so that it requires the plugins by version
(see hatch_build.py). The names of these packages are bound to the files, so pip never gets them from an index. With
`--sbom`, the folder also has an inventory of the tested environment, for which `cyclonedx-bom` must be installed.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = sorted(file.parent for file in ROOT.glob("[ep]*/*/pyproject.toml"))
PLUGINS = {part.name for part in PARTS if part.parent.name == "plugins"}
VENDOR = "metax"
"""The extra that is installed alone."""
EXAMPLE = ROOT / "examples" / "train-cpu.yaml"


def main() -> None:
    """Build into the folder of the command line, then test the result."""
    folder = Path(sys.argv[1]).resolve()
    sbom = folder / "sbom.cdx.json" if "--sbom" in sys.argv[2:] else None
    shutil.rmtree(folder, ignore_errors=True)
    for source in (ROOT, *PARTS):
        _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source))
    wheels = sorted(map(str, folder.glob("*.whl")))
    if len(wheels) != 1 + len(PARTS):
        sys.exit(f"expected {1 + len(PARTS)} wheels, found {len(wheels)}: {', '.join(wheels)}")
    with tempfile.TemporaryDirectory() as place:
        try_out(wheels, Path(place), sbom)
    sums = [f"{sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(sums))
    print(*(Path(wheel).name for wheel in wheels), sep="\n")


def try_out(wheels: list[str], folder: Path, sbom: Path | None = None) -> None:
    """Install the core with one vendor's extra in a new environment in a folder, then all plugins, and use them."""
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    files = {Path(wheel).name.split("-")[0].replace("_", "-"): Path(wheel).as_uri() for wheel in wheels}
    bound = folder / "constraints.txt"
    bound.write_text("".join(f"{name} @ {uri}\n" for name, uri in files.items()))
    pip = (str(programs / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    _run(*pip, "--constraint", str(bound), f"flagcore[{VENDOR}] @ {files['flagcore']}")
    _require_plugins(programs, folder, {"cpu", VENDOR})
    if sbom:
        _run(sys.executable, "-m", "cyclonedx_py", "environment", str(programs / "python"), "--output-file", str(sbom))
        _drop_local_paths(sbom)
    _run(*pip, "--dry-run", "--constraint", str(bound), f"flagcore[all] @ {files['flagcore']}")
    _run(*pip, "--no-deps", *wheels)
    _require_plugins(programs, folder, PLUGINS)
    shutil.copy(EXAMPLE, folder)
    command = [str(programs / "flag"), "estimate", EXAMPLE.name, "--top", "3"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n")
    if done.returncode or re.search(r"^plugin \w+ ", done.stderr, re.MULTILINE):
        sys.exit("the example cannot be estimated, or a plugin failed: see above")


def _drop_local_paths(sbom: Path) -> None:
    """Remove the references of an inventory to files of this machine."""
    data = json.loads(sbom.read_text())
    for each in data["components"]:
        references = each.get("externalReferences", [])
        each["externalReferences"] = [found for found in references if not found["url"].startswith("file:")]
    sbom.write_text(json.dumps(data, indent=2) + "\n")


def _require_plugins(programs: Path, folder: Path, expected: set[str]) -> None:
    """End this program unless exactly these plugins are installed and work."""
    command = [str(programs / "flag"), "plugins", "list", "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    found = {each["name"]: each["status"] for each in json.loads(done.stdout)}
    if found != dict.fromkeys(expected, "loaded"):
        sys.exit(f"expected the plugins {sorted(expected)}; found {found}")


def _run(*command: str, cwd: Path = ROOT) -> None:
    """Run a command; a failure ends this program."""
    print("+", *command, flush=True)
    done = subprocess.run(command, cwd=cwd, check=False)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
