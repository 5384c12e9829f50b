"""What the configurations of fine-tuning frameworks say of kernels, losses and gradients counts in predictions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flagcore_importers.command import read_command
from flagcore_training import frameworks

from engines.trainers.tests.test_recipes import AUTOMODEL
from flagcore import estimate
from flagcore.api.inputs import open_spec
from flagcore.plugins import find_engine
from tests.tasks import planned


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("preset", ["fsdp2", "zero3"])
def test_trls_loss_has_tiles_of_4096_tokens_and_32768_logits(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """trl 1.16 computes a tile again in backward, and gradients of hidden states and head in fp32 beside it."""
    model, length = "meta-llama/Meta-Llama-3.1-8B", 32768
    words = f"trl sft --model_name_or_path {model} --max_length {length} --accelerate_config {preset}"
    data = read_command(None, [f"{words} --per_device_train_batch_size 1"], chip="H100-SXM").data
    platform = open_spec(data, None, (), plan=True).problem.platform
    engine, task = platform.engine, platform.task
    values = {**{knob.name: knob.neutral for knob in engine.knobs}, **data["auto_tuner"]["baseline"]}
    row = {knob.name: np.array([knob.axis(()).encode(values[knob.name])]) for knob in engine.knobs}
    tiled = engine.predict(task, row, platform.costs)
    monkeypatch.setitem(frameworks.TABLES["TRL"], "tiled_loss", False)
    whole = engine.predict(task, row, platform.costs)
    saved = float(whole.peak_allocated_bytes[0] - tiled.peak_allocated_bytes[0])
    assert 9.0 * 128256 * length < saved < 12.0 * 128256 * length
    assert tiled.step_time_s > whole.step_time_s


@pytest.mark.parametrize(
    ("method", "is_recomputed", "allocated"),
    [
        ("finetuning_type: full", True, 36.57),
        ("finetuning_type: full", False, 43.33),
        ("finetuning_type: full\npure_bf16: true", True, 20.71),
        ("finetuning_type: full\npure_bf16: true", False, 25.62),
        ("finetuning_type: lora\nlora_rank: 16\nlora_target: all", True, 11.72),
        ("finetuning_type: lora\nlora_rank: 16\nlora_target: all", False, 16.73),
    ],
)
def test_one_device_and_ddp_hold_what_transformers_allocates(
    folder: Path, method: str, is_recomputed: bool, allocated: float
) -> None:
    """The peak in GiB of a step of Qwen3 with 6 layers and 4096 tokens: storages of fake tensors, counted with
    transformers 5.24, PEFT 0.21 and torch 2.13, less the keys and values that attention repeats on processors only.

    DDP has all gradients twice.
    """
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 6, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False}
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 40960}
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config | sizes))
    rest = "stage: sft\ncutoff_len: 4096\npacking: true\nbf16: true\nper_device_train_batch_size: 1\n"
    rest += f"gradient_accumulation_steps: 1\ndisable_gradient_checkpointing: {str(not is_recomputed).lower()}\n"
    (folder / "job.yaml").write_text(f"model_name_or_path: model\n{method}\n{rest}")
    peaks = []
    for devices in (1, 2):
        words = ["env", f"NPROC_PER_NODE={devices}", "FORCE_TORCHRUN=1", "llamafactory-cli", "train", "job.yaml"]
        data = read_command(None, words, chip="H200").data
        plan = estimate(data, top=1)
        assert plan.baseline is not None
        peaks.append(plan.baseline["memory"]["peak_allocated_gib"])
    gradients = 2.402e9 * (2 if "pure" in method else 4) / 2**30 if "full" in method else 0.0
    assert peaks[0] == pytest.approx(allocated, rel=0.03)
    assert peaks[1] - peaks[0] == pytest.approx(gradients, rel=0.03, abs=0.2)


def seconds(data: dict[str, Any]) -> tuple[float, float]:
    """The predicted step of a job's own layout in seconds, and that of the exchange of experts."""
    platform = open_spec(data, None, (), plan=True).problem.platform
    engine, task = platform.engine, platform.task
    values = {**{knob.name: knob.neutral for knob in engine.knobs}, **data["auto_tuner"]["baseline"]}
    row = {knob.name: np.array([knob.axis(()).encode(values[knob.name])]) for knob in engine.knobs}
    found = engine.predict(task, row, platform.costs)
    return float(found.step_time_s[0]), float(found.time_s["ep_comm_s"][0])


@pytest.mark.parametrize("chip", ["H100-SXM", "A100-80GB"])
def test_a_command_says_which_kernels_its_layers_have(chip: str) -> None:
    """torch takes cuDNN's attention on some chips, and Liger has one kernel for what are several."""
    words = "swift sft --model Qwen/Qwen3-8B --max_length 8192 --per_device_train_batch_size 1"
    options = ("", "--attn_impl flash_attn", "--use_liger_kernel true")
    plain, flash, fused = (seconds(read_command(None, [f"{words} {each}"], chip=chip).data)[0] for each in options)
    assert fused < plain
    assert (plain < flash) == (chip == "H100-SXM")


def test_recipes_of_automodel_have_the_dispatcher_and_the_states_that_they_state(folder: Path) -> None:
    found = {}
    for name, weights, state in (("deepep", "bf16", "bf16"), ("torch", "float32", None)):
        backend = f"torch_dtype: {weights}, backend: {{dispatcher: {name}, experts: gmm"
        recipe = AUTOMODEL.replace("backend: {experts: gmm", backend)
        lines = [line for line in recipe.splitlines() if not line.startswith("peft")]
        (folder / "own.yaml").write_text("\n".join(lines))
        data: Any = read_command(None, ["automodel", "own.yaml"], chip="H100-SXM").data
        assert data["auto_tuner"]["baseline"].get("state_dtype") == state
        found[name] = seconds(data)[1]
    assert 0.0 < 2.0 * found["deepep"] < found["torch"]


def test_a_framework_gives_some_stages_a_layer_more(folder: Path) -> None:
    lines = AUTOMODEL.replace("30B-A3B, backend: {experts: gmm}", "8B").replace("ep_size: 8", "pp_size: 8").splitlines()
    (folder / "own.yaml").write_text("\n".join(line for line in lines if not line.startswith("peft")))
    data: Any = read_command(None, ["automodel", "own.yaml"], chip="H100-SXM").data
    task = planned(data).task
    engine = find_engine("fsdp2")
    assert "36 layers do not divide over 8 stages: predicted as if they did" in engine.warnings(task)
    assert not {each.name for each in engine.rules(task)} & {"pipeline_layers"}
    assert 0.0 < seconds(data)[0] < float("inf")


@pytest.mark.parametrize(
    ("model", "line", "reported"),
    [
        ("zai-org/GLM-4.5-Air", "quantize_moe_experts: true", 63.4),
        ("mistralai/Magistral-Small-2507", "lora_target_linear: true\nlora_dropout: 0.05", 19.1),
        ("swiss-ai/Apertus-8B-Instruct-2509", "lora_target_linear: true\nlora_dropout: 0.05", 8.7),
    ],
)
def test_qlora_of_axolotl_takes_what_its_examples_report(folder: Path, model: str, line: str, reported: float) -> None:
    """`examples` of axolotl @067b021c, in GiB. A layer's quantized experts are unpacked as a whole: 4.1 GiB of GLM."""
    text = "adapter: qlora\nload_in_4bit: true\nlora_r: 32\nlora_target_modules: [q_proj, k_proj, v_proj, o_proj]\n"
    text += "sequence_len: 2048\nsample_packing: true\ncut_cross_entropy: true\ngradient_checkpointing: true\n"
    (folder / "own.yaml").write_text(f"base_model: {model}\n{text}{line}\nmicro_batch_size: 2\n")
    plan = estimate(read_command(None, ["axolotl train own.yaml"], chip="A100-80GB").data, top=1)
    assert plan.baseline is not None
    assert plan.baseline["memory"]["reserved_gib"] == pytest.approx(reported, rel=0.05)


@pytest.mark.parametrize(("steps", "option", "is_said"), [(2, "", True), (1, "", False), (2, "true", False)])
def test_whole_gradients_of_several_micro_batches_are_said(
    folder: Path, steps: int, option: str, is_said: bool
) -> None:
    """accelerate 1.11 to 1.15 `no_sync`; 1.10 reduces after each micro-batch."""
    text = f"base_model: Qwen/Qwen3-8B\nsequence_len: 4096\nmicro_batch_size: 1\ngradient_accumulation_steps: {steps}\n"
    text += "fsdp_config: {reshard_after_forward: true}\ndp_shard_size: 8\n"
    key = "gradient_accumulation_kwargs"
    text += f"accelerator_config: {{{key}: {{sync_each_batch: {option}}}}}\n" if option else ""
    (folder / "own.yaml").write_text(text)
    data = read_command(None, ["axolotl train own.yaml"], chip="H100-SXM").data
    platform = open_spec(data, None, (), plan=True).problem.platform
    assert any("sync_each_batch" in line for line in platform.engine.warnings(platform.task)) == is_said
