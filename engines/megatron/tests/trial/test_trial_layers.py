"""Whose layers trials run: transformer-engine's where it imports. It is not installed here; its choice is tested."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flagcore_megatron import start
from flagcore_megatron.engine import ENGINE
from flagcore_megatron.predict import training
from flagcore_megatron.trial.job import parse_job
from flagcore_training.trial.job import JobError

from engines.megatron.tests.trial import trial_jobs
from flagcore.contracts import Platform
from flagcore.errors import SpecError
from tests.product import tasks

pytestmark = pytest.mark.together("megatron-core, imported")

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


def test_layers_of_transformer_engine_are_used_if_it_can_be_imported(install: Install) -> None:
    install()
    found = start.as_installed(platform("cuda"))
    assert found.task.spec.train.implementation == "transformer_engine"
    assert training(found.task).transformer_engine
    assert start.installation_notes(found) == ()


def test_layers_are_megatrons_own_otherwise_with_a_note(install: Install) -> None:
    assert start.as_installed(platform("cuda")).task.spec.train.implementation is None
    install(imports=False)
    found = start.as_installed(platform("cuda"))
    assert found.task.spec.train.implementation is None
    (note,) = start.installation_notes(found)
    assert "transformer-engine" in note


@pytest.mark.parametrize(
    ("device", "train"), [("cpu", {}), ("cuda", {"implementation": "local"}), ("cuda", {"command": ("run",)})]
)
def test_a_cpu_a_given_implementation_and_a_command_stay(install: Install, device: str, train: Any) -> None:
    install()
    arguments = platform(device, **train)
    assert start.as_installed(arguments) is arguments
    assert start.installation_notes(arguments) == ()


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

    @pytest.mark.costly
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


@pytest.mark.parametrize(
    ("release", "is_needed"), [("0.19.2", True), ("0.18.0", True), ("0.17.1", False), (None, False)]
)
def test_releases_that_import_triton_need_it(release: str | None, is_needed: bool) -> None:
    assert ("triton" in start.modules_of(release)) is is_needed
