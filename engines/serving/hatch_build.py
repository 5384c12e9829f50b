"""Compiles the simulation of the scheduler into a wheel, if the environment variable FLAGCORE_COMPILE is 1.

Such a wheel has the modules of MODULES twice: Python imports the compiled ones, and tools read the others. Without the
variable, and in an editable install, where a compiled module would outlive a change of its source, only the sources are
there. Results are the same, and take more than twice as long. It needs a C compiler.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "flagcore_serving"
MODULES = ("arrivals", "batches", "disaggregated", "price", "request_times", "sequences", "simulation", "tiers")
"""The modules of `flagcore_serving.model` that run for each simulated request."""
VARIABLE = "FLAGCORE_COMPILE"
PROGRAM = """
import sys
from mypyc.build import mypycify
from setuptools import setup
flags = ["--ignore-missing-imports", "--follow-imports=skip"]  # types of others make nothing faster
modules = mypycify([*flags, *sys.argv.pop().split()], opt_level="3", group_name="flagcore_serving")
setup(name="compiled", packages=[], ext_modules=modules)
"""


class CompileHook(BuildHookInterface[Any]):
    """Adds the compiled modules to a wheel."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Return what a build needs further, in its environment."""
        return ["mypy>=1.11", "setuptools"] if os.environ.get(VARIABLE) == "1" else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile a copy of the sources, so that nothing is left in the folder of the sources."""
        if os.environ.get(VARIABLE) != "1" or version != "standard":
            return
        self._folder = TemporaryDirectory()
        place, root = Path(self._folder.name), Path(self.root)
        shutil.copytree(root / PACKAGE, place / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
        files = [f"{PACKAGE}/model/{name}.py" for name in MODULES]
        command = [sys.executable, "-c", PROGRAM, "build_ext", "--build-lib", "compiled", " ".join(files)]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{VARIABLE}=1, but {PACKAGE} cannot be compiled:\n{done.stdout}{done.stderr}")
        compiled = place / "compiled"
        build_data["force_include"] |= {str(file): str(file.relative_to(compiled)) for file in compiled.rglob("*.so")}
        build_data |= {"infer_tag": True, "pure_python": False}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the copy."""
        if folder := getattr(self, "_folder", None):
            folder.cleanup()
