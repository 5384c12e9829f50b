"""Each form gives typed starts, and what cannot be read is a value of its own."""

from pathlib import Path

import pytest
from flagcore_importers.starts import FailedScript, Reader

from flagcore.domain.launch import Start

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
