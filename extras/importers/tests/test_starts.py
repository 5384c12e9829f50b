"""Each form gives typed starts; what people have comes in whole, or is refused with the cause."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from flagcore_importers.command import read_command
from flagcore_importers.starts import FailedScript, Reader

from extras.importers.tests.test_import_command import TRAINING
from flagcore.domain.launch import Start
from flagcore.errors import UsageError
from flagcore.spec.plain_data import commented_yaml

POD = """
kind: Pod
spec:
  containers:
  - {image: some/server:1.2, args: [--model, m], envFrom: [{configMapRef: {name: sizes}}, {secretRef: {name: keys}}]}
"""
COMPOSE = """
services:
  server: {image: "some/server:${TAG}", command: [vllm, serve, "${MODEL}"], environment: {A: "1"}}
"""
UNIT = "[Service]\nEnvironment=SIZE=2\nExecStart=/opt/vllm serve m -tp $SIZE\n"
BATCH = "#!/bin/bash\n#SBATCH --nodes=2 --gpus-per-node=4\nvllm serve m --rank $SLURM_NODEID\n"


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    monkeypatch.chdir(tmp_path)
    return Reader(images={"vllm/server": ("vllm", "serve")}, directory=str(tmp_path))


def test_an_image_whose_entry_point_is_unknown_is_a_field(reader: Reader) -> None:
    (start,) = reader.programs(("docker", "run", "--gpus", "2", "some/server:1.2", "--model", "m"), None)
    assert start == Start(
        image="some/server:1.2", words=("--model", "m"), devices=2, left_out={"image": "some/server:1.2"}
    )
    (start,) = reader.programs(("docker", "run", "vllm/server:v0.11.0", "m"), None)
    assert start == Start(words=("vllm", "serve", "m"), version="0.11.0")


def test_objects_outside_of_a_manifest_are_absent(reader: Reader) -> None:
    (start,) = reader.programs((), POD)
    assert isinstance(start, Start)
    assert start.absent == ("ConfigMap sizes",)
    assert start.left_out["envFrom"] == "of a secret"


def test_variables_without_a_value_are_a_field(reader: Reader) -> None:
    (start,) = reader.programs((), COMPOSE)
    assert start == Start(words=("vllm", "serve", ""), envs={"A": "1"}, unset=("TAG", "MODEL"))
    (start,) = reader.programs((), "vllm serve $MODEL")
    assert start.unset == ("MODEL",)


def test_units_and_batch_jobs_have_their_variables(reader: Reader) -> None:
    (unit,) = reader.programs((), UNIT)
    assert unit == Start(words=("/opt/vllm", "serve", "m", "-tp", "2"), envs={"SIZE": "2"})
    (job,) = reader.programs((), BATCH)
    assert isinstance(job, Start)
    assert (job.words, job.hosts, job.devices) == (("vllm", "serve", "m", "--rank", "0"), 2, 4)
    assert job.job["SLURM_NNODES"] == "2"


def test_a_script_that_fails_is_no_program(reader: Reader) -> None:
    programs = [*reader.programs((), "vllm serve m\necho no data\nexit 3")]
    assert [type(each) for each in programs] == [Start, FailedScript]
    assert programs[1] == FailedScript(reason="exit code 3: no data", unset=())


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
            read_command(None, [text if is_command else case["name"]], chip="H100-SXM")
        assert case["error"] in str(caught.value)
    else:
        imported = read_command(None, [text if is_command else case["name"]], chip="H100-SXM")
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
