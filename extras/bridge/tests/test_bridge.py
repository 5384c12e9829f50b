"""Specs of Megatron-Bridge's recipes.

`configs` has the output of `ConfigContainer.to_yaml` for recipes of release 0.3.1 (Apache License 2.0), without nulls,
most `false`, empty values, and the sections for checkpoints and the scheduler; that of LoRA lacks most keys of `model`.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from flagcore_models.layers import network_counts, other_mixers

from flagcore import api
from flagcore.errors import FlagError, SpecError, UsageError
from flagcore.spec.models import model_of
from flagcore.spec.validate import Context

CONFIGS = Path(__file__).parent / "configs"
LENGTHS = "vocab_size: 8, seq_length: 8"
SIZES = "num_layers: 2, hidden_size: 8, num_attention_heads: 2"
JOB = f"model: {{{{{SIZES}, {LENGTHS}, {{}}}}}}\ntrain: {{{{global_batch_size: 8}}}}"


def imported(name: str, *overrides: str, directory: Path = CONFIGS) -> Any:
    found = api.read_tree(directory, name, overrides, importer="bridge")
    api.check_imported(found)
    return found


@pytest.mark.parametrize(
    ("name", "model", "baseline", "train"),
    [
        (
            "llama3_8b.yaml",  # huggingface.co/meta-llama/Meta-Llama-3-8B config.json
            {
                "num_layers": 32,
                "hidden_size": 4096,
                "ffn_hidden_size": 14336,
                "num_query_groups": 8,
                "vocab_size": 128256,
            },
            {
                "context_parallel_size": 2,
                "micro_batch_size": 1,
                "use_distributed_optimizer": True,
                "use_recompute": False,
            },
            {"seq_length": 8192, "global_batch_size": 512, "precision": "bf16"},
        ),
        (
            "qwen3_30b_a3b.yaml",  # huggingface.co/Qwen/Qwen3-30B-A3B config.json
            {"num_moe_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768, "kv_channels": 128},
            {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 4, "recompute_granularity": "full"},
            {"seq_length": 4096, "global_batch_size": 32},
        ),
        (
            "deepseek_v3.yaml",  # huggingface.co/deepseek-ai/DeepSeek-V3 config.json
            {"moe_first_dense_layers": 3, "q_lora_rank": 1536, "mtp_num_layers": 1, "vocab_size": 129280},
            {"pipeline_model_parallel_size": 16, "expert_model_parallel_size": 64, "sequence_parallel": True},
            {"global_batch_size": 4096},
        ),
    ],
)
def test_a_recipe_is_the_same_job(
    name: str, model: dict[str, Any], baseline: dict[str, Any], train: dict[str, Any]
) -> None:
    data = imported(name).data
    assert model.items() <= data["model"].items()
    assert baseline.items() <= data["auto_tuner"]["baseline"].items()
    assert train.items() <= data["train"].items()
    assert data["train"]["settings"]["attention_dropout"] == 0.0


def test_settings_are_those_that_have_an_effect() -> None:
    settings = imported("deepseek_v3.yaml").data["train"]["settings"]
    assert settings["pipeline_model_parallel_layout"] == "|".join(["Etttt", *["tttt"] * 14, "tmL"])
    assert settings["exp_avg_dtype"] == "bf16"
    assert settings["grad_reduce_in_bf16"] is True
    assert "moe_token_dispatcher_type" not in imported("llama3_8b.yaml").data["train"]["settings"]


def test_every_key_that_is_left_out_is_noted() -> None:
    found = imported("llama3_8b.yaml")
    config = yaml.safe_load((CONFIGS / "llama3_8b.yaml").read_text())
    noted = set(re.findall(r"\w+", " ".join(note.key for note in found.notes)))
    assert {"rotary_base", "eval_iters", "check_for_nan_in_grad", "logger"} <= noted
    assert "num_attention_heads" in config["model"]
    assert "num_attention_heads" not in noted


def test_adapters_lengths_and_precision() -> None:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapter = {"kind": "lora", "rank": 8, "targets": targets}
    peft = imported("llama3_8b_peft.yaml").data["train"]
    assert (peft["adapter"], peft["lengths"]) == (adapter, {"mean": 400, "batching": "packed"})
    overrides = "+dataset.offline_packing_specs.packed_sequence_size=512", "model.apply_rope_fusion=false"
    packed = imported("llama3_8b.yaml", *overrides).data["train"]
    assert (packed["lengths"]["mean"], packed["settings"]["apply_rope_fusion"]) == (256, False)
    train = imported("llama3_8b.yaml", "mixed_precision=bf16_with_fp8_current_scaling_mixed").data["train"]
    assert train["precision"] == "fp8"
    assert imported("llama3_8b.yaml", "mixed_precision=bf16_with_mxfp8_mixed").data["train"]["precision"] == "mxfp8"


def test_a_precision_aware_optimizer_of_bridge_holds_whole_main_parameters() -> None:
    aware = "optimizer.use_precision_aware_optimizer=true"
    recipes = {"bf16_mixed": "tensorwise", "bf16-with-mxfp8-mixed": "mxfp8"}
    recipes["nanov2_bf16_with_fp8_current_scaling_mixed"] = "blockwise"
    for name, recipe in recipes.items():
        settings = imported("llama3_8b.yaml", aware, f"mixed_precision={name}").data["train"]["settings"]
        assert settings["fp8_recipe"] == recipe
    assert "fp8_recipe" not in imported("llama3_8b.yaml", "mixed_precision=bf16_mixed").data["train"]["settings"]


def test_a_named_mixed_precision_has_its_wide_layers_and_fp8_weights() -> None:
    name = "mixed_precision=nemotron_h_bf16_with_fp8_current_scaling_mixed"
    settings = imported("llama3_8b.yaml", name, "ddp.grad_reduce_in_fp32=false").data["train"]["settings"]
    assert settings["first_last_layers_bf16"] is settings["fp8_param_gather"] is True
    assert settings["num_layers_at_end_in_bf16"] == 2
    assert "grad_reduce_in_bf16" not in settings  # Megatron-Bridge overwrites it by the recipe's


@pytest.mark.parametrize("name", ["bf16_with_nvfp4_mixed", "bf16_with_fp8_current_scaling_mixed"])
def test_the_format_of_a_precision_is_predicted(name: str) -> None:
    notes = {each.key for each in imported("llama3_8b.yaml", f"mixed_precision={name}").notes}
    assert not {key for part in notes for key in part.split(", ")} & {"mixed_precision.fp8", "mixed_precision.fp4"}


def test_an_unknown_mixed_precision_is_an_error() -> None:
    with pytest.raises(SpecError, match=r"fp16_with_mxfp8_mixed") as caught:
        imported("llama3_8b.yaml", "mixed_precision=fp16_with_mxfp4_mixed")
    assert [each.key for each in caught.value.problems] == ["mixed_precision"]


def test_overrides_and_files_of_overrides_change_the_config(tmp_path: Path) -> None:
    (tmp_path / "changes.yaml").write_text("train: {global_batch_size: 64}\nmodel: {seq_length: 4096}\n")
    overrides = (str(tmp_path / "changes.yaml"), "++model.tensor_model_parallel_size=4", "~model.context_parallel_size")
    data = imported("llama3_8b.yaml", *overrides).data
    assert (data["train"]["global_batch_size"], data["train"]["seq_length"]) == (64, 4096)
    assert data["auto_tuner"]["baseline"]["tensor_model_parallel_size"] == 4
    assert "context_parallel_size" not in data["auto_tuner"]["baseline"]


def test_kinds_of_layers_and_the_vision_tower_are_read(tmp_path: Path) -> None:
    changes = {
        "model": {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": 4,
            "vision_config": {"model_type": "qwen3_5_vision", "out_hidden_size": 4096},
            "freeze_vision_model": True,
        },
        "dataset": {"image_size": [640, 480]},
    }
    (tmp_path / "changes.yaml").write_text(yaml.safe_dump(changes))
    found = imported("llama3_8b.yaml", str(tmp_path / "changes.yaml"))
    keys, settings = found.data["model"], found.data["train"]["settings"]
    model = model_of(keys, Context())
    assert sum(network_counts(model).values()) == 32
    assert sum(other_mixers(model).values()) == 24
    assert (model.vision.num_layers, model.vision.output_size) == (27, 4096)
    images = {"images_per_sequence": 1, "image_width": 640, "image_height": 480, "freeze_vision_model": True}
    assert images.items() <= settings.items()
    assert not [note for note in found.notes if "image_size" in note.key]
    text = imported("llama3_8b.yaml", str(tmp_path / "changes.yaml"), "~dataset.image_size")
    assert "freeze_vision_model" not in text.data["train"]["settings"]
    assert "model.vision_config" in [note.key for note in text.notes]


def test_the_name_of_a_recipe_has_the_cluster(tmp_path: Path) -> None:
    name = "deepseek_v3_pretrain_1024gpu_h100_bf16_config.yaml"
    (tmp_path / name).write_text((CONFIGS / "deepseek_v3.yaml").read_text())
    cluster = imported(name, directory=tmp_path).data["cluster"]
    assert cluster == {"chip": "H100-SXM", "nodes": 128, "devices_per_node": 8}


def test_a_checkpoint_has_the_config_of_its_latest_iteration(tmp_path: Path) -> None:
    for step, size in ((100, 16), (200, 32)):
        folder = tmp_path / "checkpoints" / f"iter_{step:07}"
        folder.mkdir(parents=True)
        config = yaml.safe_load((CONFIGS / "llama3_8b.yaml").read_text())
        config["train"]["global_batch_size"] = size
        config["peft"] = {"params_to_save": set()}
        (folder / "run_config.yaml").write_text(yaml.safe_dump(config))
    assert imported("checkpoints", directory=tmp_path).data["train"]["global_batch_size"] == 32


def test_the_name_of_a_recipe_runs_the_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "megatron" / "bridge"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    lines = (
        "import shutil",
        "class C:",
        f"  def to_yaml(self, f): shutil.copy({str(CONFIGS / 'llama3_8b.yaml')!r}, f)",
    )
    (package / "recipes.py").write_text("\n".join([*lines, "llama3_8b_pretrain_config = C"]))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert imported("llama3_8b_pretrain_config", directory=Path()).data["model"]["num_layers"] == 32
    with pytest.raises(UsageError, match="other_config"):
        imported("other_config", directory=Path())


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("train: {global_batch_size: 8}", "model.num_layers"),
        ("model: [1]", "model.num_layers"),
        ("- 1", "the document"),
        ("a: !!python/object:os.system {}", "the document"),
        ("model: {num_layers: x, hidden_size: 8, num_attention_heads: 2, vocab_size: 9}", "model.num_layers"),
        (f"model: {{{SIZES}, seq_length: 8}}\ntrain: {{global_batch_size: 2}}", "model.vocab_size"),
        ("model: {num_layers: {_args_: 3}}", "model.num_layers"),
        ("model: {num_layers: {_call_: false}}", "model.num_layers"),
        ("{_name_: recipe, model: {}}", "model.num_layers"),
        ("{_args_: [1], model: {}}", "model.num_layers"),
        (JOB.format("pipeline_model_parallel_size: x"), "model.pipeline_model_parallel_size"),
        (JOB.format("tensor_model_parallel_size: [2]"), "model.tensor_model_parallel_size"),
    ],
)
def test_a_config_that_is_not_a_whole_recipe_is_an_error(text: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(SpecError) as caught:
        imported("config.yaml", directory=tmp_path)
    assert key in [each.key for each in caught.value.problems]


@pytest.mark.parametrize("override", ["x", "=1", "train.a.=2", "optimizer.main_grads_dtype=&a [*a]"])
def test_an_invalid_override_is_an_error(override: str) -> None:
    with pytest.raises(FlagError):
        imported("llama3_8b.yaml", override)


@pytest.mark.parametrize("key", ["train.globl_batch_size", "trian.global_batch_size"])
def test_an_override_of_a_misspelt_key_is_an_error(key: str) -> None:
    with pytest.raises(SpecError) as caught:
        imported("llama3_8b.yaml", f"{key}=64")
    assert [each.key for each in caught.value.problems] == [key]
    assert imported("llama3_8b.yaml", f"+{key}=64", "ddp.overlap_param_gather=false").data
