"""Whose layers trials run: transformer-engine's where it imports. It is not installed here; its choice is tested.

Each release of megatron-core trains the same model in every layout, or refuses a job in one line.

Layouts that a release refuses, and those where its own gradient norm is not that of one process, are listed.

A rank of a world that is not there against the same rank of a real world, on the processor."""

import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from flagcore_megatron import start
from flagcore_megatron.engine import ENGINE
from flagcore_megatron.predict import training
from flagcore_megatron.trial.job import parse_job
from flagcore_training.trial.job import JobError

from engines.megatron.tests.trial import trial_jobs
from engines.megatron.tests.trial.test_trial_parity import MODELS, assert_trains_alike, run_layouts
from engines.megatron.tests.trial.trial_jobs import DENSE, EXPERTS
from flagcore.contracts import Platform
from flagcore.errors import SpecError
from tests.product import tasks

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Let transformer-engine be installed, and import or not."""

    def set_installed(*, imports: bool = True) -> None:
        monkeypatch.setattr(start, "installed", lambda module, requirement="": True)
        monkeypatch.setattr(start, "_imports", lambda modules: imports)

    return set_installed


def platform(device_type: str, **train: Any) -> Platform:
    found = tasks.platform(tasks.task(**train))
    return dataclasses.replace(found, support=dataclasses.replace(found.support, device_type=device_type))


@pytest.mark.together("megatron-core, imported")
def test_layers_of_transformer_engine_are_used_if_it_can_be_imported(install: Install) -> None:
    install()
    found = start.as_installed(platform("cuda"))
    assert found.task.spec.train.implementation == "transformer_engine"
    assert training(found.task).transformer_engine
    assert start.installation_notes(found) == ()


@pytest.mark.together("megatron-core, imported")
def test_layers_are_megatrons_own_otherwise_with_a_note(install: Install) -> None:
    assert start.as_installed(platform("cuda")).task.spec.train.implementation is None
    install(imports=False)
    found = start.as_installed(platform("cuda"))
    assert found.task.spec.train.implementation is None
    (note,) = start.installation_notes(found)
    assert "transformer-engine" in note


@pytest.mark.together("megatron-core, imported")
@pytest.mark.parametrize(
    ("device", "train"), [("cpu", {}), ("cuda", {"implementation": "local"}), ("cuda", {"command": ("run",)})]
)
def test_a_cpu_a_given_implementation_and_a_command_stay(install: Install, device: str, train: Any) -> None:
    install()
    arguments = platform(device, **train)
    assert start.as_installed(arguments) is arguments
    assert start.installation_notes(arguments) == ()


@pytest.mark.together("megatron-core, imported")
@pytest.mark.parametrize(
    "train",
    [
        {"precision": "fp8"},
        {"precision": "mxfp8"},
        {"implementation": "transformer_engine"},
        {"settings": {"tp_comm_overlap": True}},
        {"settings": {"cp_comm_type": "p2p"}},
        {"settings": {"moe_grouped_gemm": True}},
        {"settings": {"use_precision_aware_optimizer": True}},
    ],
)
def test_settings_that_need_transformer_engine_run_if_it_is_installed(install: Install, train: Any) -> None:
    spec = tasks.task(**train).spec
    with pytest.raises(SpecError):
        ENGINE.ready(spec)
    install()
    ENGINE.ready(spec)


@pytest.mark.together("megatron-core, imported")
def test_the_job_names_the_layers_and_their_settings(install: Install, tmp_path: Path) -> None:
    install()
    settings = {"tp_comm_overlap": True, "cp_comm_type": "a2a"}
    found = start.as_installed(platform("cuda", settings=settings, precision="fp8"))
    ENGINE.launch(found, tasks.candidate(), str(tmp_path))
    job = parse_job(json.loads((tmp_path / "job.json").read_text()))
    assert job.transformer_engine
    assert (job.train.precision, job.candidate.tp_comm_overlap, job.candidate.cp_comm_type) == ("fp8", True, "a2a")


@pytest.mark.slow
class TestRank:
    """What a rank builds; megatron-core's own functions are replaced by what records their arguments."""

    @pytest.fixture
    def config(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        pytest.importorskip("megatron.core")
        from flagcore_megatron.trial import config

        monkeypatch.setattr(config, "build_config", lambda kind, values: {"kind": kind.__name__, **values})
        monkeypatch.setattr(config.groups, "get_expert_tensor_parallel_world_size", lambda: 1)
        return config

    @staticmethod
    def job(**train: Any) -> Any:
        train["implementation"] = "transformer_engine"
        data = trial_jobs.make_job(Path("out"), trial_jobs.DENSE, train=train)
        return parse_job({**data, "device": {**data["device"], "type": "cuda"}})

    def test_kernels_are_fused_as_megatron_lm_does_by_default(self, config: Any) -> None:
        found = config.transformer_config(self.job(precision="bf16"))
        assert all(found[name] for name in ("apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion"))
        assert not found["gradient_accumulation_fusion"]  # needs APEX
        assert not found.get("fp8")
        local = config.transformer_config(parse_job(trial_jobs.make_job(Path("out"), trial_jobs.DENSE)))
        assert not any(local[name] for name in ("apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion"))

    @pytest.mark.parametrize(("precision", "fp8", "recipe"), [("fp8", "hybrid", "delayed"), ("mxfp8", "e4m3", "mxfp8")])
    def test_8_bit_products_have_a_recipe(self, config: Any, precision: str, fp8: str, recipe: str) -> None:
        found = config.transformer_config(self.job(precision=precision))
        assert (found["fp8"], found["fp8_recipe"], found["bf16"]) == (fp8, recipe, True)

    def test_the_specification_is_transformer_engines(self, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from flagcore_megatron.trial import model

        calls = []
        spec = type("Spec", (), {"layer_specs": [object()], "layer_norm": "TENorm"})()
        monkeypatch.setattr(model, "get_gpt_decoder_block_spec", lambda _, te, **__: calls.append(te) or spec)
        assert model.block_spec(None, None, transformer_engine=True) is spec
        assert (calls, spec.layer_norm) == ([True], "TENorm")

    def test_a_job_that_needs_it_is_rejected_in_one_line_if_it_is_missing(self) -> None:
        pytest.importorskip("megatron.core")
        from flagcore_megatron.trial import config

        narrow = trial_jobs.make_job(Path("out"), trial_jobs.DENSE, train={"precision": "fp8"})
        for job in (self.job(), parse_job(narrow)):
            with pytest.raises(JobError, match="transformer-engine"):
                config.check_layers(job)

    def test_a_setting_that_a_release_lacks_is_refused(self) -> None:
        pytest.importorskip("megatron.core")
        from flagcore_megatron.trial import config as releases

        @dataclasses.dataclass
        class Old:
            one: int = 0

        assert releases.build_config(Old, {"one": 1, "later": False, "latest": None}) == Old(1)
        with pytest.raises(JobError, match="later"):
            releases.build_config(Old, {"later": True})
        assert releases.accepted_arguments(lambda one: one, one=1, later=2) == {"one": 1}


PREDICTS_TWO = "multi-token prediction"
LAYOUTS = {
    *("dense / layout, interleaved", "dense / layout of three stages"),
    *("experts / layout", "multi-token prediction / layout"),
}
MISSING = {"0.12": {"experts / shared experts recomputed", *LAYOUTS}, "0.14": set[str]()}
"""What a release does not have."""
SINCE_0_16 = {"layout, before the loss", "layout, interleaved, before the loss"}
"""The planner forbids these layouts before 0.16, where ranks wait for each other without end."""
DIFFERS = {
    "0.12": {f"{PREDICTS_TWO} / pipeline", f"{PREDICTS_TWO} / tensor, sequence"},
    "0.14": {f"{PREDICTS_TWO} / pipeline", f"{PREDICTS_TWO} / layout"},
}
"""Before 0.16 the norm counts a second embedding twice; 0.12 makes extra predictions inexactly from split sequences."""


@pytest.fixture(scope="module", params=MISSING)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A release, and a folder with its package alone; it needs a package index."""
    folder = tmp_path_factory.mktemp("megatron-core")
    name = f"megatron-core=={request.param}.*"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), name]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"{name} cannot be installed: {done.stderr.strip()[-200:]}")
    return request.param, folder


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_layout_trains_like_one_process(release: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = release
    cases = [
        (model, layout)
        for model, (_, _, layouts, _) in MODELS.items()
        for layout in layouts
        if layout not in SINCE_0_16
    ]
    expected = {(model, layout) for model, _ in cases for layout in ("one process",)} | set(cases)
    steps = run_layouts(tmp_path, expected, folder)
    assert {f"{model} / {layout}" for model, layout in expected} - steps.keys() == MISSING[name]
    for model, layout in cases:
        if f"{model} / {layout}" in steps.keys() - DIFFERS[name]:
            assert_trains_alike(steps, model, layout)


HEADS = {"num_attention_heads": 8, "num_query_groups": 4, "kv_channels": 64}
SHAPE = {"hidden_size": 512, "ffn_hidden_size": 1408, "vocab_size": 4096, **HEADS}
TRAIN = {"seq_length": 64, "global_batch_size": 8, "train_iters": 2, "balanced_routing": True}
SPLIT = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}
SHARDED = {"expert_model_parallel_size": 4, "use_distributed_optimizer": True}
WORLDS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "dense": ({**DENSE, **SHAPE}, {**SPLIT, "data_parallel_size": 1, "micro_batch_size": 2}, (0, 3)),
    "experts": (
        {**EXPERTS, **SHAPE, "num_layers": 2, "num_moe_experts": 8, "moe_ffn_hidden_size": 512},
        {**SHARDED, "data_parallel_size": 8, "micro_batch_size": 1},
        (7,),
    ),
}
CASES = [
    pytest.param(name, rank, marks=() if (name, rank) == ("dense", 3) else pytest.mark.long)
    for name, (_, _, ranks) in WORLDS.items()
    for rank in ranks
]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Metrics of the real worlds of the chosen tests, by name, and of the probes, by name and rank."""
    folder = tmp_path_factory.mktemp("probes")
    mine = [item for item in request.session.items if item.path == request.path and "found" in item.fixturenames]
    params = [item.callspec.params for item in mine if hasattr(item, "callspec")]
    chosen = {(each["name"], each["rank"]) for each in params} | {("dense", 3)}
    jobs = {name: _job(folder, name, None) for name, _ in chosen}
    jobs |= {f"{name} {rank}": _job(folder, name, rank) for name, rank in chosen}
    jobs["long"] = {**_job(folder, "dense", 3), "output": str(folder / "long")}
    jobs["long"]["train"]["global_batch_size"] *= 4
    codes, stderr = trial_jobs.run_jobs(folder, jobs)
    assert set(codes.values()) == {0}, stderr
    return {name: json.loads((folder / name / "metrics.json").read_text()) for name in jobs}


def _job(folder: Path, name: str, rank: int | None) -> Any:
    model, knobs, _ = WORLDS[name]
    job = trial_jobs.make_job(folder / (name if rank is None else f"{name} {rank}"), model, train=TRAIN, **knobs)
    return job if rank is None else {**job, "probe": {"rank": rank}}


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.together("training")
@pytest.mark.parametrize(("name", "rank"), CASES)
def test_a_probed_rank_needs_the_memory_that_it_needs_in_its_world(found: dict[str, Any], name: str, rank: int) -> None:
    real = found[name]["ranks"][rank]["peak_allocated_bytes"]
    balance = 0.2 if name == "experts" else 0.03  # how a real router spreads tokens depends on the processor's rounding
    assert found[f"{name} {rank}"]["peak_allocated_bytes"] == pytest.approx(real, rel=balance)


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.together("training")
@pytest.mark.parametrize(("name", "rank"), CASES)
def test_a_probed_rank_computes_about_as_long_as_in_its_world(found: dict[str, Any], name: str, rank: int) -> None:
    real = statistics.median(step["forward_backward_s"] for step in found[name]["ranks"][rank]["own_steps"][1:])
    probed = statistics.median(step["compute_s"] for step in found[f"{name} {rank}"]["steps"][1:])
    assert 0.4 < probed / real < 2.5  # processor time, which a machine with other work lengthens


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.together("training")
@pytest.mark.parametrize(("name", "rank"), CASES)
def test_rank_holds_its_part_of_the_model(found: dict[str, Any], name: str, rank: int) -> None:
    assert found[f"{name} {rank}"]["parameters"] == found[name]["ranks"][rank]["parameters"]
    assert found[f"{name} {rank}"]["effective"]["data_parallel_size"] == WORLDS[name][1]["data_parallel_size"]


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.together("training")
@pytest.mark.parametrize(("name", "rank"), CASES)
def test_phases_are_measured_separately(found: dict[str, Any], name: str, rank: int) -> None:
    probed = found[f"{name} {rank}"]
    peaks = probed["peak_forward_backward_bytes"], probed["peak_optimizer_bytes"]
    model_bytes = {"dense": 16, "experts": 10}[name] * probed["parameters"]  # FP32; the states of experts are sharded
    assert model_bytes <= probed["static_bytes"] <= 1.08 * model_bytes
    assert probed["static_bytes"] <= min(peaks)
    assert max(peaks) == probed["peak_allocated_bytes"]


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.together("training")
def test_a_probe_runs_only_enough_microbatches_to_predict_the_others(found: dict[str, Any]) -> None:
    short, long = found["dense 3"], found["long"]
    assert (short["num_microbatches"], short["microbatches_run"]) == (4, 4)
    assert (long["num_microbatches"], long["microbatches_run"]) == (16, 4)
    assert long["peak_allocated_bytes"] == pytest.approx(short["peak_allocated_bytes"], rel=0.01)
    for step in long["steps"]:
        assert step["compute_s"] == pytest.approx(4 * step["schedule_s"] + step["once_s"])


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.together("training")
@pytest.mark.parametrize(
    ("stages", "stage", "interleaved", "microbatches", "enough"),
    [(8, 0, False, 64, 9), (8, 7, False, 64, 4), (1, 0, False, 2, 2), (8, 0, True, 64, 16), (4, 0, True, 4, 4)],
)
def test_pipeline_is_filled_up(stages: int, stage: int, interleaved: bool, microbatches: int, enough: int) -> None:
    model, knobs = {**DENSE, "num_layers": 16}, {"pipeline_model_parallel_size": stages, "micro_batch_size": 1}
    if interleaved:
        knobs["num_layers_per_virtual_pipeline_stage"] = 1
    data = trial_jobs.make_job(Path("unused"), model, train={"global_batch_size": microbatches}, **knobs)
    assert parse_job(data).enough_microbatches(stage) == enough
