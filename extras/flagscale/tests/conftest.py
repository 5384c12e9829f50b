"""The trees, each test in its own folder that has them."""

import json
from pathlib import Path

import pytest

from extras.flagscale.tests.accounting import TREES, write_tree


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The trees in the working directory, and a small model of Hugging Face's beside them."""
    for name, tree in TREES.items():
        write_tree(tree, tmp_path / name)
    (tmp_path / "hosts.txt").write_text("node-a slots=8\nnode-b slots=8\n")
    sizes = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    config = {"model_type": "qwen3", "vocab_size": 1000, "num_key_value_heads": 4, **sizes}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path
