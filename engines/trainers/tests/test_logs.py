"""Step times, losses and memory in log lines that real programs printed. Settings of trainers that change the cost of a
step and are not predicted, and which chips trainers run on."""

from pathlib import Path
from typing import Any

import pytest
from flagcore_testing.package import joined_texts
from flagcore_trainers.importing import DEEPSPEED, TORCHTITAN, effects_of_deepspeed, effects_of_torchtitan
from flagcore_trainers.logs import FORMATS, TIMED, Log, Patterns
from flagcore_vendorkit.settings import Settings

from flagcore.domain.chip import Support
from flagcore.errors import NoDevice
from tests.product.tasks import SHAPE, task
from tests.tasks import planned

LOGS = joined_texts(Path(__file__).with_name("logs.txt").read_text())
OWN = "step 1/9 loss 6.25 took 100.00 msstep 1/9 loss 6.25 took 120.00 ms\nstep 2/9 loss nan took 90 ms\npeak 1.5 GiB\n"


@pytest.mark.parametrize(
    ("name", "seconds", "losses", "gib"),
    [
        ("megatron", [86.5452, 87.8716], [2.50422, 2.493043], None),
        ("deepspeed", [16.069, 16.053], [], 15.59),
        ("torchtitan", [4096 / 10050 / 4, 4096 / 10007 / 4], [7.62585, 7.07623], 66.91),
        ("huggingface", [1.5, 1.25], [2.4871, 2.3517, 2.1044], None),
        ("own", [0.1, 0.09], [6.25, None], 1.5),
    ],
)
def test_lines_of_programs_are_read(name: str, seconds: list[float], losses: list[Any], gib: float | None) -> None:
    steps = [FORMATS[each] for each in TIMED] if name in TIMED else [FORMATS.get(name, "")]
    patterns = Patterns(steps=steps)
    if name == "own":
        step = r"step (?P<step>\d+)/.*? loss (?P<loss>\S+) took (?P<ms>[\d.]+) ms"
        patterns = Patterns(steps=[step], memory_gib=r"peak ([\d.]+) GiB")
    log = Log("", task(seq_length=512, devices=4), patterns)
    for line in (OWN if name == "own" else LOGS[name]).splitlines():
        log.add(line)
    assert list(log.times.values()) == pytest.approx(seconds, abs=2e-3)
    assert log.losses == losses
    assert log.peak_bytes == (gib and int(gib * 2**30))


@pytest.mark.parametrize(
    ("stated", "seconds"),
    [("30,0", 0.03), ("0,125", 125e-6), ("1,234.5", 1.2345), ("1,234,567", 1234.567), ("86.5,", 0.0865)],
)
def test_a_comma_is_a_decimal_one_unless_it_separates_thousands(stated: str, seconds: float) -> None:
    log = Log("", task(), Patterns(steps=[r"step (?P<step>\d+) (?P<ms>\S+) ms"]))
    log.add(f"step 1 {stated} ms")
    assert log.times["1"] == pytest.approx(seconds)
    log.add("step 2 1.234,5 ms")
    assert (len(log.times), log.unusable) == (1, ["1.234,5"])


def test_colours_and_utf_16_are_read_and_two_times_are_not_guessed() -> None:
    step = r"step (?P<step>\d+) (?:(?P<ms>[\d.]+) ms)?(?: or )?(?:(?P<s>[\d.]+) s)?"
    log = Log("", task(), Patterns(steps=[step]))
    damaged = "step 4 0.0\x001 s"
    for line in ("step \x1b[32m1\x1b[0m 60 ms", "\0".join("step 2 0.06 s"), damaged, "\0step 3 60 ms or 60 s"):
        log.add(line)
    assert list(log.times.values()) == pytest.approx([0.06, 0.06])
    assert (log.unusable, log.last) == (["60 s and 60 ms"], "step 3 60 ms or 60 s")


def test_lines_of_several_steps_are_divided_by_their_number() -> None:
    log = Log("", task(), Patterns(steps=[r"step (?P<step>\d+)"]))
    for line in ("[at 1.000000] step 10", "[at 5.000000] step 20"):
        log.add(line)
    assert list(log.times.values()) == [pytest.approx(0.4)]


def test_a_pattern_that_takes_too_long_ends_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flagcore_trainers.logs.SEARCH_SECONDS", 0.05)
    (tmp_path / "stdout.log").write_text(",".join(map(str, range(36))) + "\nstep 2\n")
    log = Log(str(tmp_path), task(), Patterns(steps=[r"(?P<step>\d*)*(.*?,){25}P"]))
    assert len(log()) == task().spec.control.train_iters
    assert "takes more than 0.05 s on the line '0,1,2" in log.too_slow


def test_many_slow_lines_end_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flagcore_trainers.logs.SLOW_SECONDS", 0.0)
    monkeypatch.setattr("flagcore_trainers.logs.MAX_SLOW_SECONDS", 0.005)
    (tmp_path / "stdout.log").write_text("step 1 20 ms\n" * 20_000)
    log = Log(str(tmp_path), task(), Patterns(steps=[r"step (?P<step>\d+) (?P<ms>\S+) ms"]))
    log()
    assert "s in total" in log.too_slow


PLAIN = r"step (?P<step>\d+) took (?P<ms>\S+) ms"


@pytest.mark.parametrize(
    ("pattern", "line", "unusable"),
    [
        *(
            (PLAIN, f"step 1 took {each} ms", each)
            for each in ("0", "-3", "nan", "inf", "-inf", "1e999", "1_0", "1.2.3", "0x10", "--", "ms", "9" * 400)
        ),
        (r"step (?P<step>\d+) rate (?P<tokens_per_s>\S+)", "step 1 rate inf", "inf"),
        (r"step (?P<step>\d+) rate (?P<tokens_per_s>\S+)", "step 1 rate 0", "0"),
        (r"step (?P<step>\d+) rate (?P<samples_per_s>\S+)", "step 1 rate -1", "-1"),
        (PLAIN, "\0".join("step 1 took nan ms"), "nan"),
        (PLAIN, "x" * 9000 + " step 1 took 20 ms", None),
        (PLAIN, "step \N{SUPERSCRIPT TWO} took 20 ms", None),
        (PLAIN, "", None),
        (r"(?P<step>a+)$ (?P<ms>x)", "a" * 9000, None),
    ],
)
def test_odd_lines_are_named_or_left_out(tmp_path: Path, pattern: str, line: str, unusable: str | None) -> None:
    (tmp_path / "stdout.log").write_text(f"{line}\n")
    log = Log(str(tmp_path), task(), Patterns(steps=[pattern]))
    assert log(unfinished=True) == ()
    assert log.unusable == ([unusable] if unusable else [])


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
        ({}, "--parallelism.pipeline_parallel_schedule Interleaved1F1B", ["parallelism.pipeline_parallel_schedule"]),
    ],
)
def test_keys_of_torchtitan_are_named(content: dict[str, Any], options: str, expected: list[str]) -> None:
    assert [each.name for each in effects_of_torchtitan(options.split(), content)] == expected


def support(chip: str, engine: str) -> Any:
    train = {"engine": engine, "seq_length": 64, "global_batch_size": 8, "precision": "bf16"}
    if engine != "fsdp2":
        train["command"] = ["torchrun", "train.py"]
    spec = {"model": SHAPE, "cluster": {"chip": chip, "devices_per_node": 4}, "train": train}
    return planned(spec).support


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
