"""Settings of trainers that change the cost of a step and are not predicted, and which chips trainers run on."""

from pathlib import Path
from typing import Any

import pytest
from flagcore_trainers.importing import DEEPSPEED, TORCHTITAN, effects_of_deepspeed, effects_of_torchtitan
from flagcore_vendorkit.settings import Settings

from flagcore.api.inputs import open_spec
from flagcore.domain.chip import Support
from flagcore.errors import NoDevice
from tests.product.tasks import SHAPE


@pytest.mark.parametrize(
    ("trainer", "settings"), [("deepspeed", DEEPSPEED), ("huggingface", DEEPSPEED), ("torchtitan", TORCHTITAN)]
)
def test_all_settings_of_the_newest_releases_have_a_class(trainer: str, settings: Settings) -> None:
    names = Path(__file__).with_name("settings") / f"{trainer}.txt"  # as `tools/trainer_settings.py` lists them
    assert settings.unclassed(names.read_text().split()) == []


ZERO_3 = {"stage": 3, "sub_group_size": 1e9, "stage3_max_live_parameters": 1e9, "reduce_bucket_size": "auto"}


@pytest.mark.parametrize(
    ("zero", "options", "expected"),
    [
        (ZERO_3, "--learning_rate 1e-5 --own_option 3 --bf16 true", []),
        ({**ZERO_3, "offload_param": {"device": "cpu", "pin_memory": True}}, "", ["offload_param.device"]),
        ({"stage": 2, "stage3_prefetch_bucket_size": 1e7, "round_robin_gradients": True}, "", []),
        ({**ZERO_3, "stage3_prefetch_bucket_size": 1e7}, "", ["stage3_prefetch_bucket_size"]),
        ({"stage": 2, "reduce_scatter": False}, "", ["reduce_scatter"]),
        ({"stage": 2, "reduce_scatter": True, "no_such_key": 1}, "", ["no_such_key"]),
        ({**ZERO_3, "memory_efficient_linear": False}, "", ["memory_efficient_linear"]),
        ({**ZERO_3, "zero_hpz_partition_size": 1, "zero_quantized_weights": True}, "", ["zero_quantized_weights"]),
        ({"stage": 2}, "--optim adafactor --lora_r 8 --use-lora True", ["--optim", "--lora_r, --use-lora"]),
        ({"stage": 2}, "--optim adamw_torch --torch_compile False", []),
    ],
)
def test_keys_and_options_of_deepspeed_are_named(zero: dict[str, Any], options: str, expected: list[str]) -> None:
    effects = effects_of_deepspeed(options.split(), {"zero_optimization": zero, "wall_clock_breakdown": False})
    assert [each.name.removeprefix("zero_optimization.") for each in effects] == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"compile": {"deepcompile": False, "debug_log": True}}, []),
        ({"compile": {"deepcompile": True, "offload_activation": True, "double_buffer": True}}, 2),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, []),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, 1),
        ({"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "num_workers": 4}}}, []),
        ({"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}}, 1),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "adam_w_mode": True}}}, []),
        ({"optimizer": {"type": "Muon", "params": {"muon_lr": 1e-2, "ns_method": "gram"}}}, ["optimizer.type"]),
        ({"expert_parallel": {"enabled": True, "preset_model": "mixtral", "autoep_size": 1}}, 1),
        ({"compile": {"new_key": 3}}, ["compile.new_key"]),
    ],
)
def test_of_a_section_only_the_keys_that_change_time_or_memory_are_named(
    content: dict[str, Any], expected: list[str] | int
) -> None:
    effects = effects_of_deepspeed([], content)
    assert ([each.name for each in effects] if isinstance(expected, list) else len(effects)) == expected


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        ({"quantize": {"linear": {"float8": {"filter_fqns": ["output"]}}}, "model": {"converters": []}}, "", []),
        ({"model": {"converters": ["float8"]}}, "", ["model.converters"]),
        ({}, "--parallelism.expert_parallel_degree 4 --metrics.log_freq 1", ["parallelism.expert_parallel_degree"]),
        ({}, "--compile.enable --training.mixed_precision_param=bfloat16", []),
        ({"new": {"key": 3}}, "", ["new.key"]),
        ({"compile": {"components": ["model"], "backend": "inductor"}}, "", ["compile.components"]),
        ({}, "--compile.components model loss --debug.no-enable_structured_logging", []),
        ({}, "--compile.components model --checkpoint.no-enable", ["compile.components"]),
        ({}, "--parallelism.no-enable_sequence_parallel", ["parallelism.enable_sequence_parallel"]),
        ({}, "--config llama3_8b_mxfp8 --training.steps 10", ["--config llama3_8b_mxfp8"]),
        (
            {},
            "--parallelism.pipeline_parallel_schedule Interleaved1F1B",
            ["parallelism.pipeline_parallel_schedule"],
        ),
    ],
)
def test_keys_of_torchtitan_are_named(content: dict[str, Any], options: str, expected: list[str]) -> None:
    assert [each.name for each in effects_of_torchtitan(options.split(), content)] == expected


def support(chip: str, engine: str) -> Any:
    train = {"engine": engine, "seq_length": 64, "global_batch_size": 8, "precision": "bf16"}
    if engine != "fsdp2":
        train["command"] = ["torchrun", "train.py"]
    spec = {"model": SHAPE, "cluster": {"chip": chip, "devices_per_node": 4}, "train": train}
    return open_spec(spec, None, (), plan=True).problem.platform.support


@pytest.mark.parametrize(
    ("chip", "backend", "preload"),
    [
        ("Ascend-910B3", "hccl", ("torch_npu",)),
        ("MTT-S5000", "mccl", ("torch_musa",)),
        ("MLU590-M9", "cncl", ("torch_mlu",)),
        ("C550", "nccl", ()),
    ],
)
def test_trials_import_the_builds_of_torch_and_not_those_of_megatron(
    chip: str, backend: str, preload: tuple[str, ...]
) -> None:
    found = support(chip, "fsdp2")
    assert (found.support, found.distributed_backend, found.preload) == (Support.UNKNOWN, backend, preload)


def test_an_engine_without_support_is_refused() -> None:
    with pytest.raises(NoDevice, match="no accelerator for MUSA"):
        support("MTT-S5000", "deepspeed")
