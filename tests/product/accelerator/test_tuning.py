"""flagcore on a vendor's build of torch: trials, probes and calibrations through the module of the device."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from engines.megatron.tests.trial import trial_jobs
from engines.megatron.tests.trial.trial_jobs import DENSE, EXPERTS, NEEDS_MEGATRON, make_job
from tests.product import tasks
from tests.product.accelerator.machine import MEMORY_BYTES, Machine

pytestmark = [NEEDS_MEGATRON, pytest.mark.long, pytest.mark.slow, pytest.mark.together("training")]

MODEL = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "vocab_size": 4000}
TRAIN = {"engine": "megatron", "seq_length": 128, "global_batch_size": 16, "precision": "fp32"}
SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size")
SPACE = {**tasks.PLAIN_SPACE, **dict.fromkeys(SIZES, 1)}
CONTROL = {"train_iters": 3, "warmup_iters": 1, "max_trials": 2, "repeats": 0}


def write(machine: Machine, name: str, spec: dict[str, Any]) -> None:
    (machine.folder / name).write_text(yaml.safe_dump(spec))


def tune(machine: Machine, name: str, cluster: dict[str, Any], space: dict[str, Any], baseline: dict[str, Any]) -> Any:
    """Tune on the devices 3 and 1, and return the result."""
    auto_tuner = {"baseline": baseline, "space": {**SPACE, **space}, "control": CONTROL}
    write(machine, f"{name}.yaml", {"model": MODEL, "cluster": cluster, "train": TRAIN, "auto_tuner": auto_tuner})
    machine.flag("tune", f"{name}.yaml", "--run-dir", name, SIMU_VISIBLE_DEVICES="3,1")
    return json.loads((machine.folder / name / "result.json").read_text())


def steps(folder: Path) -> list[tuple[float, float]]:
    """Return loss and norm of the gradients of each step."""
    lines = (folder / "steps.jsonl").read_text().splitlines()
    return [(step["loss"], step["grad_norm"]) for step in map(json.loads, lines)]


def test_trials_train_on_the_vendors_devices(built: Machine) -> None:
    result = tune(
        built,
        "trained",
        {"chip": "auto"},
        {"tensor_model_parallel_size": [1, 2], "sequence_parallel": True},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "micro_batch_size": 1},
    )
    assert (result["chip"], result["devices"]) == ("S1", 2)
    assert [trial["measured"]["effective"]["tensor_model_parallel_size"] for trial in result["trials"]] == [2, 1]
    losses = []
    for trial in result["trials"]:
        folder = built.folder / "trained" / "trials" / str(trial["number"])
        launch = json.loads((folder / "launch.json").read_text())
        assert launch["environment"].items() >= {"SIMU_VISIBLE_DEVICES": "3,1", "TORCHDYNAMO_DISABLE": "1"}.items()
        job = json.loads((folder / "job.json").read_text())
        assert job["device"]["type"] == "simu"
        assert (job["device"]["backend"], job["device"]["preload"]) == ("simuccl", ["torch_simu", "simu_patch"])
        ranks = json.loads((folder / "metrics.json").read_text())["ranks"]
        assert all(rank["peak_allocated_bytes"] <= rank["peak_reserved_bytes"] for rank in ranks)
        assert all(rank["peak_reserved_bytes"] + (64 << 20) <= rank["device_used_bytes"] for rank in ranks)
        losses.append(steps(folder))
    for split, whole in zip(*losses, strict=True):  # also norms, whose gradients ranks sum under sequence parallelism
        assert split == pytest.approx(whole, rel=1e-5)


def test_every_layout_has_the_same_losses(built: Machine) -> None:
    """As `test_trial_parity` on CPU. Here Megatron's own functions run, whose device is not replaced."""
    folder, device = built.folder / "layouts", {"type": "simu", "backend": "simuccl"}
    device |= {"preload": ["torch_simu", "simu_patch"], "threads_per_rank": 1}
    pipeline = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}
    sharded = {"data_parallel_size": 2, "use_distributed_optimizer": True, "overlap_grad_reduce": True}
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    layouts = {
        "dense": [
            {},
            pipeline,
            {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True},
            {**sharded, "overlap_param_gather": True, "use_recompute": True, **recompute},
        ],
        "experts": [{}, {"data_parallel_size": 2, "expert_model_parallel_size": 2}],
    }
    jobs = {}
    for kind, model in (("dense", DENSE), ("experts", EXPERTS)):
        for place, layout in enumerate(layouts[kind]):
            name = f"{kind}-{place}"
            jobs[name] = make_job(folder / name, model, train={"global_batch_size": 8}, **layout) | {"device": device}
    folder.mkdir()
    line = json.dumps([str(folder), list(jobs.items())]) + "\n"
    done = built.run(sys.executable, trial_jobs.__file__, stdin=line, TORCHDYNAMO_DISABLE="1")
    assert set(json.loads(done.stdout).values()) == {0}, done.stderr[-4000:]
    for kind in layouts:
        whole, *others = [steps(folder / name) for name in jobs if name.startswith(kind)]
        for other in others:
            for step, expected in zip(other, whole, strict=True):
                assert step == pytest.approx(expected, rel=1e-5)


def test_a_candidate_that_runs_out_of_memory_is_recorded_as_such(built: Machine) -> None:
    built.set_memory(96 << 20)
    try:
        result = tune(
            built,
            "large",
            {"chip": "auto", "memory_per_device": "2GiB"},
            {"micro_batch_size": [1, 8]},
            {"micro_batch_size": 8},
        )
    finally:
        built.set_memory(MEMORY_BYTES)
    large, small = result["trials"]
    assert (large["state"], small["state"]) == ("out_of_memory", "measured")
    assert "Simu out of memory" in large["reason"]
    assert small["measured"]["device_used_gib"] < 96 / 1024


def test_a_probe_measures_a_rank_of_a_larger_job_and_confirms_its_memory(built: Machine) -> None:
    """torch's allocator counts what is predicted: in 16 bits, fused kernels store the same tensors on all devices."""
    control = {"train_iters": 2, "warmup_iters": 1}
    cluster = {"chip": "S1", "nodes": 4, "devices_per_node": 4}
    train = {**TRAIN, "global_batch_size": 64, "precision": "bf16"}
    model = {**MODEL, "hidden_size": 256, "ffn_hidden_size": 704}
    write(built, "probe.yaml", {"model": model, "cluster": cluster, "train": train, "auto_tuner": {"control": control}})
    candidate = "tensor_model_parallel_size=2,pipeline_model_parallel_size=2,data_parallel_size=4,micro_batch_size=4"
    (found,) = json.loads(built.flag("probe", "probe.yaml", "--candidate", candidate, "--json").stdout)
    assert [(rank["rank"], rank["state"]) for rank in found["ranks"]] == [(0, "measured"), (8, "measured")]
    for rank in found["ranks"]:
        measured, predicted = rank["measured"], rank["predicted"]
        assert measured["compute_time_s"] > 0 < measured["optimizer_time_s"]
        assert measured["static_gib"] == pytest.approx(predicted["static_gib"], rel=0.01)
        assert measured["peak_allocated_gib"] == pytest.approx(predicted["peak_allocated_gib"], rel=0.05)
        assert measured["device_used_gib"] == pytest.approx(predicted["device_used_gib"], abs=2 / 1024)


def test_kernels_and_links_are_calibrated(built: Machine) -> None:
    built.flag("calibrate", "--seconds", "20", "--devices", "2", "--no-plugin", "cpu")
    (file,) = (built.folder / "home" / "calibrations").glob("*.json")
    data = json.loads(file.read_text())
    file.unlink()  # the other tests predict without it
    assert (data["chip"], data["devices"], data["driver"]) == ("S1", 2, "1.0")
    kinds = {row.get("kernel") for row in data["rows"]}
    assert kinds >= {"launch", "gemm", "attention", "attention_backward", "host_copy"}
    assert any(row.get("collective") for row in data["rows"])
    assert all(row["us"] > 0 for row in data["rows"])


def test_doctor_imports_the_vendors_modules(built: Machine) -> None:
    rows = json.loads(built.flag("doctor", "--json").stdout)
    (modules,) = [row for row in rows if "torch_simu, simu_patch" in row["for"]]
    assert modules["ok"] is True
