"""What people have comes in whole, or is refused with the cause: nothing of it runs, and no secret is copied."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from extras.importers.tests.test_import_command import TRAINING
from flagcore import api
from flagcore.errors import UsageError
from flagcore.spec.plain_data import commented_yaml

INPUTS = yaml.safe_load(Path(__file__).with_name("found_inputs.yaml").read_text())
SECRETS = ("hf_abc", "sk-abc", "0123456789abcdef", "<secret>", "secrets.env", "hf-token-secret")
FLAGS = TRAINING.replace("--tokenizer-type HuggingFaceTokenizer --tokenizer-model model", "--vocab-size 32000")


@pytest.mark.parametrize("case", INPUTS, ids=lambda case: str(case["name"]))
def test_an_input_comes_in_whole_or_is_refused(
    case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    text = case["text"].replace("[TRAINING]", str(FLAGS.split())).replace("TRAINING", FLAGS)
    is_command = case["name"].endswith(".txt")
    for name, content in {**case.get("files", {}), **({} if is_command else {case["name"]: text})}.items():
        (tmp_path / name).write_text(content)
    before = sorted(os.listdir(tmp_path))
    if "error" in case:
        with pytest.raises(UsageError) as caught:
            api.read_command(None, [text if is_command else case["name"]], chip="H100-SXM")
        assert case["error"] in str(caught.value)
    else:
        imported = api.read_command(None, [text if is_command else case["name"]], chip="H100-SXM")
        data, written = imported.data, commented_yaml(imported)
        work = data.get("train") or data["serve"]
        cluster = data["cluster"]
        assert work["engine"] == case["engine"]
        assert work.get("engine_version") == case.get("version")
        assert data["model"] == case.get("model", data["model"])
        assert cluster.get("nodes", 1) == case.get("nodes", 1)
        assert cluster.get("devices_per_node", 1) == case.get("devices", 1)
        for name, found in (("baseline", data["auto_tuner"]["baseline"]), ("args", work.get("engine_args") or {})):
            assert found == case.get(name, found)
        noted = {note.key for note in imported.notes}
        assert {*case.get("notes", ())} <= noted
        assert not {*case.get("silent", ())} & noted
        if "serve" in data:  # what a note calls passed is passed
            passed = {note.at for note in imported.notes if note.text.startswith("is passed to the engine")}
            assert passed <= {f"serve.engine_args.{name}" for name in work.get("engine_args") or {}}
        envs = {name: value for name, value in data.get("envs", {}).items() if not name.startswith("SLURM_")}
        assert envs == case.get("envs", envs)
        assert not [secret for secret in SECRETS if secret in written]
    assert sorted(os.listdir(tmp_path)) == before
