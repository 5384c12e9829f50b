"""The engines of docs/write-an-engine.md work as distributions of their own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flagcore.contracts import Engine
from flagcore.plugins.validation import check_protocol

PAGE = (Path(__file__).parents[2] / "docs" / "write-an-engine.md").read_text("utf-8")
FILES = dict(re.findall(r"\*\*`([^`]+)`\*\*\n\n```\w+\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of the page, and the metadata of an installed distribution."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    info = tmp_path / "acme_train-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-train\nVersion: 1.0\n")
    (target,) = re.findall(r'^acme = "(.*)"$', FILES["pyproject.toml"], re.MULTILINE)
    (info / "entry_points.txt").write_text(f"[flagcore.engines]\nacme = {target}\n")
    return tmp_path


@pytest.mark.slow
def test_the_training_engine_is_tuned(folder: Path) -> None:
    command = [sys.executable, "-c", "from flagcore.cli import main; main()", "tune", "train-acme.yaml", "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {trial["state"] for trial in result["trials"]} == {"measured"}
    assert result["best"]["candidate"] == {"data_parallel_size": 2, "micro_batch_size": 4}
    assert result["gain"] == pytest.approx(1.5, abs=0.1)


def test_the_engines_define_what_has_no_default() -> None:
    for name in ("acme_train.py", "acme_serving.py"):
        module = {"__name__": name.removesuffix(".py")}
        exec(compile(FILES[name], name, "exec"), module)
        assert check_protocol(Engine, module["ENGINE"]) is module["ENGINE"]
