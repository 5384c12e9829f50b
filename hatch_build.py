"""Dependencies: a checkout requires wheels that are built from the folders beside it, a release requires versions.

`pip install ".[metax]"` from a clone must work where no index knows `flagcore-metax`; an sdist, and a wheel that
is made from it, must ask for it by name and version. `python -m build` makes a release so: the sdist first, the
wheel out of it. A wheel made straight from a checkout is for that checkout alone.

The parts of a checkout are built here, in the process that builds the core: pip takes seconds to build a folder in an
environment of its own.
"""

import os
import re
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.builders.wheel import WheelBuilder
from hatchling.metadata.plugin.interface import MetadataHookInterface

CORE = (
    "annotated-types>=0.6",
    "click>=8.1",
    "numpy>=1.24",
    "optuna>=4.2",
    "packaging>=23",
    "pluggy>=1.5",
    "psutil>=5.9",
    "pydantic>=2.7,<3",
    "pyyaml>=6.0",
    "rich>=13",
    "scipy>=1.14",
    "stevedore>=5.1",
    "threadpoolctl>=3.5",
    "tomli>=2; python_version < '3.11'",
)
VENDORS = (
    *("nvidia", "amd", "metax", "iluvatar", "cambricon", "ascend", "mthreads", "hygon", "kunlunxin", "enflame"),
    "thead",
)
EXTRAS = ("bridge", "flagscale", "goodput", "kubernetes", "mcp", "ray", "testing", "vllm-schedule")
INSTALLED = {
    "plugins": ("cpu",),
    "engines": ("llamacpp", "megatron", "models", "rl", "serving", "sglang", "training", "vllm"),
    "extras": ("hosts", "importers", "operators", "page", "vendorkit"),
}
"""What comes with the core, by folder. Each is a distribution of its own, as those of VENDORS and EXTRAS are."""
ENGINES = {
    # triton: what newer releases import without declaring it; they need Python 3.12
    "megatron": ["torch>=2.5", "megatron-core>=0.12", "triton; python_version>='3.12' and sys_platform=='linux'"],
    "vllm": ["vllm>=0.11"],
    "sglang": ["sglang>=0.5"],
    "llamacpp": ["xllamacpp>=2026.10"],
    "lmdeploy": ["lmdeploy>=0.18"],
}
"""The packages of the engines themselves, by extra."""
TOOLS = {
    "mlflow": ["mlflow-skinny>=2.14"],
    "tensorboard": ["tensorboard>=2.16"],
    "wandb": ["wandb>=0.19"],
    "webhook": [],
}
"""The tools that the watchers of `extras/watchers` write to, by extra."""
DEV = [
    "babel>=2.14",
    "jsonschema>=4.21",
    "build>=1.2",
    "editables>=0.3",
    "gguf>=0.10",
    "hatchling>=1.25",
    "hydra-core>=1.3",
    "import-linter>=2.7",
    "mcp>=2.3,<3",
    "mypy>=1.11",
    "pandas>=2",
    "pre-commit>=3.5",
    "pytest>=8",
    "pytest-cov>=5",
    "pytest-timeout>=2.3",
    "regex>=2024.5",
    "ruff>=0.6",
    "towncrier>=24.8",
    "types-psutil",
    "types-PyYAML",
]
DOCS = ["mkdocs-material>=9.6,<10"]
KIND = "FLAGCORE_PARTS"
"""The variable with the kind of the parts' wheels: `standard`, or `editable`, which refer to the folders."""


class CustomMetadataHook(MetadataHookInterface):
    """Fills in `dependencies` and `optional-dependencies`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the dependencies to the project's metadata. Called once per build."""
        root = Path(self.root)
        version = _version(root)
        wheels = _build_parts(root, os.environ.get(KIND, "standard"))

        def part(folder: str, name: str) -> str:
            if (root / folder).is_dir():
                return f"flagcore-{name} @ {wheels.get(name, root / folder / name).as_uri()}"
            return f"flagcore-{name}=={version}"

        own = {name: [part("plugins", name)] for name in VENDORS} | {name: [part("extras", name)] for name in EXTRAS}
        own |= {"dynamo": own["kubernetes"], "trainers": [part("engines", "trainers")]}
        own |= {name: [*own[name], part("engines", "servers")] for name in ("nvidia", "ascend")}
        watchers = {name: [part("extras", "watchers"), *needs] for name, needs in TOOLS.items()}
        engines = ENGINES | {"lmdeploy": [part("engines", "lmdeploy"), *ENGINES["lmdeploy"]]}
        parts = {**own, **engines, **watchers}
        everything = list(dict.fromkeys(need for name, needs in parts.items() if name not in ENGINES for need in needs))
        installed = (part(folder, name) for folder, names in INSTALLED.items() for name in names)
        metadata["dependencies"] = [*CORE, *installed]
        dev = [*DEV, *TOOLS["tensorboard"]]
        metadata["optional-dependencies"] = {**parts, "all": everything, "dev": dev, "docs": DOCS}


class SdistHook(BuildHookInterface[Any]):
    """Names versions in place of folders in the metadata of an sdist. Wheels of it take their metadata from there."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Change the metadata before the sdist is written."""
        core, released = self.metadata.core, _version(Path(self.root))
        for needs in (core.dependencies, *core.optional_dependencies.values()):
            needs[:] = [re.sub(r"^(flagcore-[\w-]+) ?@ .*", rf"\1=={released}", need) for need in needs]


def _build_parts(root: Path, kind: str) -> dict[str, Path]:
    """Return the wheels of the parts in a checkout by folder, in `build/parts-KIND`. Older wheels there are removed.

    Empty in a release, and in a checkout that cannot be written: pip builds the folders then.
    """
    place, wheels = root / "build" / f"parts-{kind}", dict[str, Path]()
    files = (file for room in INSTALLED for file in (root / room).glob("*/pyproject.toml"))
    with suppress(OSError):
        for folder in (file.parent for file in files):
            wheels[folder.name] = _build_part(folder, place, kind)
        for wheel in {*place.glob("*.whl")} - {*wheels.values()}:
            wheel.unlink(missing_ok=True)
    return wheels


def _build_part(folder: Path, place: Path, kind: str) -> Path:
    """Return the wheel of a part in `place`, built unless it is there. Raises OSError.

    Its version ends in a hash of the content, because pip does not replace a wheel of the same version.
    """
    place.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=place) as new:
        plain = Path(next(WheelBuilder(str(folder)).build(directory=new, versions=[kind])))
        local = f"+h{sha256(plain.read_bytes()).hexdigest()[:8]}"
        wheel = place / plain.name.replace("-py3-", f"{local}-py3-")
        if not wheel.exists():
            builder = WheelBuilder(str(folder))
            builder.metadata.config["project"]["version"] += local
            Path(next(builder.build(directory=new, versions=[kind]))).replace(wheel)
    return wheel


def _version(root: Path) -> str:
    for line in (root / "flagcore" / "__init__.py").read_text(encoding="utf-8").splitlines():
        if line.startswith("__version__"):
            return line.split('"')[1]
    raise ValueError("flagcore/__init__.py has no __version__")
