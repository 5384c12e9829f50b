"""flagcore on a vendor's build of torch: trials, probes and calibrations through the module of the device. Choices that
are measured on a vendor's device: the planted optimum of its collective and of its operator library. The devices of a
vendor that no plugin of this repository knows, as its tool lists them."""

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from engines.megatron.tests.trial import trial_jobs
from engines.megatron.tests.trial.trial_jobs import DENSE, EXPERTS, make_job
from extras.operators.tests.planted import BEST
from extras.operators.tests.test_libraries import install
from extras.operators.tests.test_libraries import spec as operators_spec
from tests.product import tasks
from tests.product.accelerator.machine import MEMORY_BYTES, Machine

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


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.together("training")
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


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.together("training")
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


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.together("training")
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


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.together("training")
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


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.together("training")
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


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.together("training")
def test_doctor_imports_the_vendors_modules(built: Machine) -> None:
    rows = json.loads(built.flag("doctor", "--json").stdout)
    (modules,) = [row for row in rows if "torch_simu, simu_patch" in row["for"]]
    assert modules["ok"] is True


WIDE_MODEL = {"num_layers": 2, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4, "vocab_size": 1024}
STEP = r"step (?P<step>\d+) took (?P<ms>[\d.]+) ms"
PROGRAM = """
import time

import torch
import torch.distributed as dist
import torch_simu

dist.init_process_group("simuccl")
torch.simu.set_device(dist.get_rank())
value = torch.zeros(1 << 15, device="simu")
for step in range(1, 7):
    start = time.perf_counter()
    for _ in range(8):
        dist.all_reduce(value)
    if dist.get_rank() == 0:
        print(f"step {step} took {1e3 * (time.perf_counter() - start):.3f} ms", flush=True)
dist.destroy_process_group()
"""


def spec(folder: Path) -> dict[str, Any]:
    """Return a job of two ranks whose program exchanges gradients."""
    tensor = {"flag": "--tp", "values": [2], "meaning": "tensor_model_parallel_size"}
    train = {"engine": "command", "seq_length": 128, "global_batch_size": 4, "precision": "fp32"}
    program = {"knobs": {"tp": tensor}, "log": {"step": STEP}}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "exchange.py"]
    control = {"train_iters": 6, "warmup_iters": 1, "max_trials": 2, "repeats": 0}
    return {
        "model": WIDE_MODEL,
        "cluster": {"chip": "auto", "devices_per_node": 2},
        "train": {**train, "command": command, "directory": str(folder), "program": program},
        "auto_tuner": {"control": control},
        "envs": {"OMP_NUM_THREADS": 1, "SIMUCCL_NETWORK": "slow"},
    }


def compared(machine: Machine, *options: str) -> dict[str, Any]:
    """Run the comparison, and return its rows by setting."""
    limits = ("--collectives", "exchange.yaml", "--seconds", "150", "--json")
    rows = json.loads(machine.flag("calibrate", *limits, *options).stdout)
    return {row["setting"]: row for row in rows}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_planted_optimum_is_found_and_confirmed(built: Machine) -> None:
    (built.folder / "exchange.py").write_text(PROGRAM)
    (built.folder / "exchange.yaml").write_text(yaml.safe_dump(spec(built.folder)))
    rows = compared(built)
    excluded = {name: row["excluded"] for name, row in rows.items() if row["excluded"]}
    assert excluded.keys() == {
        f"SIMUCCL_{name}" for name in ("SUMS=fp8", "PROTO=LL", "TRANSPORT=rdma", "SHM_DISABLE=1")
    }
    assert "wrong" in excluded["SIMUCCL_PROTO=LL"]
    assert "timed out" in excluded["SIMUCCL_SHM_DISABLE=1"]
    best = "SIMUCCL_CHANNELS=4 SIMUCCL_PROTO=LL128"
    assert min((row["time"], name) for name, row in rows.items() if not row["excluded"])[1] == best
    (file,) = (built.folder / "home" / "choices").glob("collectives-*.json")
    choice = json.loads(file.read_text())
    variables = {"SIMUCCL_CHANNELS": "4", "SIMUCCL_PROTO": "LL128"}
    assert choice["environment"] == variables
    assert choice["time"][0] < 0.6

    space = ("--set", "auto_tuner.space.collectives=auto")
    built.flag("tune", "exchange.yaml", "--run-dir", "exchange", *space)
    result = json.loads((built.folder / "exchange" / "result.json").read_text())
    assert [each["candidate"]["collectives"] for each in result["trials"]] == [None, "calibrated"]
    assert result["best"]["candidate"]["collectives"] == "calibrated"
    launch = json.loads((built.folder / "exchange" / "trials" / "1" / "launch.json").read_text())
    assert launch["environment"].items() >= variables.items()
    script = (built.folder / "exchange" / "best.sh").read_text()
    assert all(f"{name}={value}" in script for name, value in variables.items())
    built.flag("tune", "exchange.yaml", "--run-dir", "own", *space, status=2, SIMUCCL_CHANNELS="8")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_planted_optimum_is_found_on_the_device(built: Machine) -> None:
    site = built.folder / "operators"
    install(site)
    variables = {"PYTHONPATH": f"{site}:{built.environment['PYTHONPATH']}"}
    planted = {"PLANTED_KEY": "PrivateUse1", "PLANTED_DEVICE": "simu", "PLANTED_PRELOAD": "torch_simu"}
    job: dict[str, Any] = operators_spec(built.folder, **planted)
    (built.folder / "operators.yaml").write_text(yaml.safe_dump(job))
    limits = ("--library", "planted", "--seconds", "60", "--json")
    rows = json.loads(built.flag("operators", "operators.yaml", *limits, **variables).stdout)
    best = {**BEST, "neg": "avoided"}  # here no vendor says that it is wrong
    assert {row["operator"]: row["chosen"] for row in rows if row["chosen"] != row["default"]} == best
    space = ("--set", "auto_tuner.space.planted_operators=auto")
    built.flag("tune", "operators.yaml", "--run-dir", "planted", *space, **variables)
    result = json.loads((built.folder / "planted" / "result.json").read_text())
    assert (result["chip"], len(result["trials"])) == ("S1", 2)
    assert result["best"]["candidate"]["planted_operators"] == "calibrated"


@pytest.mark.slow
@pytest.mark.together("training")
def test_a_variable_selects_the_devices_and_their_order(simulated: Machine) -> None:
    listed = simulated.flag("devices", "--json", "--no-plugin", "cpu", SIMU_VISIBLE_DEVICES="3,1").stdout
    assert [(each["index"], each["chip"], each["plugin"]) for each in json.loads(listed)] == [
        (3, "S1", "simu"),
        (1, "S1", "simu"),
    ]


@pytest.mark.slow
@pytest.mark.together("training")
@pytest.mark.long
def test_the_plugin_passes_the_kit(simulated: Machine) -> None:
    report = simulated.flag("plugins", "check", "flagcore-simu").stdout
    assert re.match(r"simu 0\.1\.0: \d{2,} passed, 0 failed", report)
