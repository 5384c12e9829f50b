"""Hosts behind slow links: what is slow is named, and the layout of a real training job follows the links."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from flagcore import api
from tests.hosts.bed import SLURM, Bed, missing
from tests.hosts.conftest import Project, Tune

pytestmark = [pytest.mark.slow, pytest.mark.long]

LINK = {"nic_bytes_per_second": 62.5e6, "nic_latency_seconds": 0.005}
"""1 Gbit/s, shared by the two devices of a host."""
INSIDE = {"nic_bytes_per_second": 5e9, "nic_latency_seconds": 2e-5}
SPEC: dict[str, Any] = {
    "model": {
        "name": "small",
        "num_layers": 6,
        "hidden_size": 384,
        "ffn_hidden_size": 1536,
        "num_attention_heads": 6,
        "num_query_groups": 6,
        "vocab_size": 8192,
    },
    "train": {"engine": "megatron", "seq_length": 128, "global_batch_size": 12, "precision": "fp32"},
    "auto_tuner": {
        "strategy": "predicted",  # goes on to the end of the space
        "space": {
            "tensor_model_parallel_size": [1, 2],
            "micro_batch_size": 1,
            "context_parallel_size": 1,
            "sequence_parallel": False,
            "use_recompute": False,
            "use_distributed_optimizer": False,
            "num_layers_per_virtual_pipeline_stage": None,
        },
        "control": {"train_iters": 3, "warmup_iters": 1, "repeats": 0, "compare_hosts": False},
    },
}


@pytest.fixture
def linked(tmp_path: Path) -> Any:
    """A project on hosts of its own, which are 5 ms apart by links of 1 Gbit/s."""
    if reason := missing(*SLURM):
        pytest.skip(reason)
    (tmp_path / "bed").mkdir()
    bed = Bed(tmp_path / "bed")
    for name in bed.names:
        bed.limit(name, rate="1gbit", delay_ms=2.5)
    yield Project(bed, tmp_path)
    bed.close()


def test_a_slow_link_is_named_before_the_first_trial(linked: Project) -> None:
    linked.bed.set_rate("h2", "100mbit")
    linked.write_spec(trials=1, compare=True)
    tune = Tune(linked)
    tune.finish()
    slow = [line for line in tune.output().splitlines() if line.startswith(("h1: its", "h2: its", "h3: its"))]
    assert [line[:2] for line in slow] == ["h2"]


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("launcher", ["ssh", "slurm"])
def test_the_layout_of_a_training_job_follows_the_links(linked: Project, launcher: str) -> None:
    hosts, before = {"hostfile": "hosts.txt"}, []
    (linked.folder / "hosts.txt").write_text("".join(f"{name} slots=2\n" for name in linked.bed.names))
    if launcher == "slurm":
        linked.bed.start_slurm()
        hosts, before = {"devices_per_node": 2, "nodes": 3}, ["salloc", "--quiet", "--nodes=3", "--exclusive"]  # type: ignore[dict-item]
    spec = {**SPEC, "cluster": {"chip": "cpu", "memory_per_device": "3GiB", **hosts, **LINK}}
    spec["auto_tuner"] = {**spec["auto_tuner"], "launcher": launcher}
    (linked.folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    result = Tune(linked, *before).finish()
    times = {layout(trial["candidate"]): trial["measured"]["step_time_s"]["median"] for trial in result["trials"]}
    (linked.folder / "blind.yaml").write_text(yaml.safe_dump({**spec, "cluster": {**spec["cluster"], **INSIDE}}))
    planned = [api.estimate(linked.folder / name).candidates[0] for name in ("spec.yaml", "blind.yaml")]
    best, seeing, blind = (layout(each["candidate"]) for each in (result["best"], *planned))
    assert best[1] in (3, 6), "pipeline stages span the hosts"
    assert seeing[1] in (3, 6)
    assert times[seeing] < 1.25 * times[best]  # six ranks share the cores of one machine
    assert times[seeing] < 0.9 * times[blind]


def layout(candidate: dict[str, Any]) -> tuple[int, int]:
    return candidate["tensor_model_parallel_size"], candidate["pipeline_model_parallel_size"]
