"""A job finds the launcher and the hosts of the allocation that flagcore runs in."""

from pathlib import Path
from typing import Any

import pytest

from flagcore.api.inputs import LoadedSpec, read_spec
from flagcore.domain.spec import Spec
from tests.checks import program, refuses
from tests.product.tasks import SHAPE

TRAIN = {"engine": "megatron", "seq_length": 32, "global_batch_size": 8, "precision": "fp32"}


@pytest.fixture(autouse=True)
def _allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes, as Slurm describes them; its `scontrol` is not needed."""
    program(tmp_path / "scontrol", "echo n1\necho n2")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name, value in (("ID", "7"), ("NUM_NODES", "2"), ("NODELIST", "n[1-2]")):
        monkeypatch.setenv(f"SLURM_JOB_{name}", value)


def spec(cluster: Any, train: Any = TRAIN, **tuner: Any) -> Spec:
    data = {"model": SHAPE, "cluster": cluster, "train": train, "auto_tuner": tuner}
    return read_spec(LoadedSpec("spec", data))


def test_servers_start_on_the_nodes_of_the_allocation(tmp_path: Path) -> None:
    data = {"model": SHAPE, "cluster": {"nodes": 2}, "serve": {"engine": "vllm", "command": ["vllm", "serve"]}}
    found = read_spec(LoadedSpec(tmp_path / "spec", {**data, "auto_tuner": {}}))
    assert (found.launcher, found.cluster.hosts) == ("slurm", ("n1", "n2"))


@pytest.mark.parametrize(
    ("cluster", "train", "tuner", "found"),
    [
        *((cluster, TRAIN, {}, ("slurm", ("n1", "n2"), 2)) for cluster in ("auto", {"nodes": 2})),
        ({}, TRAIN, {}, ("local", (), 1)),
        ("auto", TRAIN, {"launcher": "local"}, ("local", (), 1)),
        ({"nodes": 2}, {**TRAIN, "command": ["srun", "torchrun", "train.py"]}, {}, ("local", (), 2)),
    ],
)
def test_only_several_nodes_are_taken_from_the_allocation(cluster: Any, train: Any, tuner: Any, found: Any) -> None:
    result = spec(cluster, train, **tuner)
    assert (result.launcher, result.cluster.hosts, result.cluster.nodes) == found


def test_spares_and_host_files_need_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    result = spec({"spares": 1}, launcher="slurm")
    assert (result.cluster.hosts, result.cluster.nodes) == (("n1", "n2"), 1)
    command = {**TRAIN, "command": ["mpirun", "--hostfile={hostfile}", "x"]}
    for wrong, key in (((({"spares": 1}), TRAIN), "cluster.spares"), (({}, command), "train.command")):
        with refuses(key):
            spec(*wrong)
    monkeypatch.delenv("SLURM_JOB_ID")
    assert spec("auto").launcher == "local"


def test_min_nodes_needs_hosts_and_a_global_batch_that_fewer_nodes_divide() -> None:
    assert spec({"min_nodes": 1}, launcher="slurm").sizes == (1, 2)
    for train, tuner in ((TRAIN, {}), ({**TRAIN, "global_batch_size": 3}, {"launcher": "slurm"})):
        with refuses("cluster.min_nodes"):
            spec({"min_nodes": 1}, train, **tuner)
