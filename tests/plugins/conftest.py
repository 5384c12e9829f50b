import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from textwrap import dedent

import pytest

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Write a distribution as pip would leave it: modules and a dist-info folder, on the import path."""
    written: set[str] = set()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("FLAGCORE_DISABLE_PLUGINS", raising=False)

    def write(
        distribution: str,
        points: Mapping[str, str],
        modules: Mapping[str, str] | None = None,
        *,
        group: str = "flagcore.plugins",
        requires: str = "flagcore>=0.1,<0.2",
    ) -> None:
        for module, source in (modules or {}).items():
            (tmp_path / f"{module}.py").write_text(dedent(source))
            written.add(module)
        info = tmp_path / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        metadata = ["Metadata-Version: 2.1", f"Name: {distribution}", "Version: 1.0"]
        metadata += [f"Requires-Dist: {requires}"] if requires else []
        (info / "METADATA").write_text("\n".join(metadata) + "\n")
        lines = [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")

    yield write
    for name in written:
        sys.modules.pop(name, None)
