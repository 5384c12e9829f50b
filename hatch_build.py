"""Dependencies: a checkout asks for the folders of plugins and extras beside it, a release for their versions.

`pip install ".[metax]"` from a clone must work where no index knows `flagcore-metax`; an sdist, and a wheel that
is made from it, must ask for it by name and version. `python -m build` makes a release so: the sdist first, the
wheel out of it. A wheel made straight from a checkout is for that checkout alone.
"""

import inspect
from pathlib import Path
from typing import Any

from hatchling.builders.sdist import SdistBuilder
from hatchling.metadata.plugin.interface import MetadataHookInterface

CORE = (
    "aiohttp>=3.10",
    "annotated-types>=0.6",
    "click>=8.1",
    "jinja2>=3.1",
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
VENDORS = ("nvidia", "amd", "metax", "iluvatar", "cambricon", "ascend", "mthreads", "hygon", "kunlunxin")
EXTRAS = ("bridge", "flagscale", "kubernetes", "ray", "testing", "trainers")
"""The folders of `extras`. Each is a distribution of its own, as a plugin is."""
ENGINES = {
    "megatron": ["torch>=2.5", "megatron-core>=0.12"],
    "vllm": ["vllm>=0.11"],
    "sglang": ["sglang>=0.5"],
    "llamacpp": ["xllamacpp>=2026.10"],
    "lmdeploy": ["lmdeploy>=0.18"],
}
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
    "gguf>=0.10",
    "hatchling>=1.25",
    "hydra-core>=1.3",
    "import-linter>=2.1",
    "mypy>=1.11",
    "pandas>=2",
    "pre-commit>=3.5",
    "pytest>=8",
    "pytest-cov>=5",
    "pytest-rerunfailures>=16",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "ruff>=0.6",
    "towncrier>=24.8",
    "types-psutil",
    "types-PyYAML",
]
DOCS = ["mkdocs-material>=9.6,<10"]


class CustomMetadataHook(MetadataHookInterface):
    """Fills in `dependencies` and `optional-dependencies`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the dependencies to the project's metadata. Called once per build."""
        root = Path(self.root)
        version = _version(root)
        folders = (root / "plugins").is_dir() and not _sdist_is_being_built()

        def part(folder: str, name: str) -> str:
            if folders:
                return f"flagcore-{name} @ {(root / folder / name).as_uri()}"
            return f"flagcore-{name}=={version}"

        own = {name: [part("plugins", name)] for name in VENDORS} | {name: [part("extras", name)] for name in EXTRAS}
        own["dynamo"] = own["kubernetes"]
        watchers = {name: [part("extras", "watchers"), *needs] for name, needs in TOOLS.items()}
        adapters = {name: part("extras", name) for name in ("llamacpp", "lmdeploy", "sglang")}
        engines = ENGINES | {name: [adapter, *ENGINES[name]] for name, adapter in adapters.items()}
        parts = {**own, **engines, **watchers}
        everything = list(dict.fromkeys(need for name, needs in parts.items() if name not in ENGINES for need in needs))
        hosts = part("extras", "hosts")
        metadata["dependencies"] = [*CORE, part("plugins", "cpu"), hosts, adapters["llamacpp"], adapters["sglang"]]
        dev = [*DEV, *TOOLS["tensorboard"]]
        metadata["optional-dependencies"] = {**parts, "all": everything, "dev": dev, "docs": DOCS}


def _sdist_is_being_built() -> bool:
    """Whether the builder that wants the metadata is that of the sdist; hatchling does not tell its hooks."""
    return any(isinstance(frame.frame.f_locals.get("self"), SdistBuilder) for frame in inspect.stack(context=0))


def _version(root: Path) -> str:
    for line in (root / "flagcore" / "__init__.py").read_text(encoding="utf-8").splitlines():
        if line.startswith("__version__"):
            return line.split('"')[1]
    raise ValueError("flagcore/__init__.py has no __version__")
