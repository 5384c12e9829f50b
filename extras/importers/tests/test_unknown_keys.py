"""A key that no table knows is named by each importer, whatever its value and section."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from flagcore import api
from flagcore.contracts import ImportedSpec
from flagcore.errors import SpecError

VALUES = ("true", "false", "17", "null")


@dataclass(frozen=True, kw_only=True)
class Case:
    """An input: a command, and its files. `{}` stands for more of the command or of the last file.

    `keys`: patterns of a key with a name. `shape`: how a key and a value are written.
    """

    command: str
    keys: tuple[str, ...] = ("{}",)
    shape: str = "{}={}"
    files: Mapping[str, str] = field(default_factory=dict)


YAML = "{}: {}"
CASES = {
    "verl": Case(
        command="python3 -m verl.trainer.main_ppo data.train_batch_size=64 actor_rollout_ref.model.path=Qwen/Qwen3-8B {}",
        keys=(
            "data.{}",
            "actor_rollout_ref.actor.{}",
            "actor_rollout_ref.actor.optim.{}",
            "trainer.{}",
            "+reward_model.{}",
        ),
    ),
    "verl on Megatron": Case(
        command="python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-8B "
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 {}",
        keys=(
            "actor_rollout_ref.actor.megatron.{}",
            "actor_rollout_ref.actor.megatron.override_transformer_config.{}",
            "{}",
        ),
    ),
    "NeMo-RL": Case(
        command="uv run examples/run_grpo.py --config job.yaml",
        files={"job.yaml": "policy.model_name: Qwen/Qwen3-8B\ncluster: {{gpus_per_node: 8}}\n{}\n"},
        keys=("grpo.{}", "policy.{}", "policy.generation.vllm_cfg.{}", "env.{}", "loss_fn.{}", "logger.{}"),
        shape=YAML,
    ),
    "slime": Case(
        command="python3 train.py --hf-checkpoint Qwen/Qwen3-8B --rollout-batch-size 32 --global-batch-size 32 {}",
        keys=("{}", "sglang-{}", "save-{}", "moe-{}", "eval-{}"),
        shape="--{} {}",
    ),
    "OpenRLHF": Case(
        command="python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path Qwen/Qwen3-8B {}",
        keys=("{}", "actor.{}", "ckpt.{}", "logger.{}", "ds.lora.{}"),
        shape="--{} {}",
    ),
    "TRL's GRPO": Case(
        command="accelerate launch --num_processes 4 grpo.py --model_name_or_path Qwen/Qwen3-0.6B --num_generations 4 {}",
        keys=("{}", "lora_{}", "reward_{}"),
        shape="--{} {}",
    ),
    "TRL": Case(
        command="trl sft --model_name_or_path Qwen/Qwen3-4B --accelerate_config zero2 {}",
        keys=("{}", "dataset_{}", "lr_{}"),
        shape="--{} {}",
    ),
    "LLaMA-Factory": Case(
        command="own.yaml",
        files={"own.yaml": "model_name_or_path: Qwen/Qwen3-4B\nstage: sft\nfinetuning_type: lora\n{}\n"},
        keys=("{}", "save_{}", "peft_config.{}", "swanlab_{}"),
        shape=YAML,
    ),
    "ms-swift": Case(
        command="NPROC_PER_NODE=2 swift sft --model Qwen/Qwen3-4B --deepspeed zero2 {}",
        keys=("{}", "lora_{}", "eval_{}"),
        shape="--{} {}",
    ),
    "ms-swift on Megatron": Case(
        command="NPROC_PER_NODE=2 megatron sft --model Qwen/Qwen3-4B {}", keys=("{}", "no_save_{}"), shape="--{} {}"
    ),
    "axolotl": Case(
        command="own.yaml",
        files={
            "own.yaml": "base_model: Qwen/Qwen3-8B\nmicro_batch_size: 1\nsequence_len: 512\ndatasets:\n  - path: a\n{}\n"
        },
        keys=("{}", "fsdp_config.{}", "wandb_{}", "is_{}"),
        shape=YAML,
    ),
    "NeMo AutoModel": Case(
        command="automodel own.yaml",
        files={
            "own.yaml": "model.pretrained_model_name_or_path: Qwen/Qwen3-8B\nrecipe: TrainFinetuneRecipeForNextTokenPrediction\n{}\n"
        },
        keys=("{}", "distributed.{}", "optimizer.{}", "dataset.{}", "model.{}"),
        shape=YAML,
    ),
    "DeepSpeed": Case(
        command="deepspeed --num_gpus 4 train.py --deepspeed ds.json --model_name_or_path Qwen/Qwen3-4B --max_seq_length 512",
        files={"ds.json": '{{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {{"stage": 2}}, {}}}'},
        keys=("{}", "zero_optimization.{}", "activation_checkpointing.{}", "tensorboard.{}"),
        shape='"{}": {}',
    ),
    "a script on DeepSpeed": Case(
        command="deepspeed --num_gpus 4 train.py --deepspeed ds.json --model_name_or_path Qwen/Qwen3-4B --max_seq_length 512 {}",
        files={"ds.json": '{{"train_micro_batch_size_per_gpu": 2}}'},
        shape="--{} {}",
    ),
    "torchtitan": Case(
        command="torchrun --nproc_per_node 8 -m torchtitan.train --job.config_file own.toml",
        files={
            "own.toml": '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 512\nlocal_batch_size = 1\n{}\n'
        },
        keys=("training.{}", "training.loss_{}"),
        shape="{} = {}",
    ),
    "options of torchtitan": Case(
        command="torchrun --nproc_per_node 8 -m torchtitan.train --model.name llama3 --model.flavor 8B --training.seq_len 512 "
        "--training.local_batch_size 1 {}",
        keys=("training.{}", "{}", "metrics.{}"),
        shape="--{} {}",
    ),
    "Megatron-LM": Case(
        command="torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 "
        "--seq-length 512 --micro-batch-size 1 --global-batch-size 8 --vocab-size 32000 {}",
        keys=("{}", "moe-{}"),
        shape="--{} {}",
    ),
    "vLLM": Case(command="vllm serve Qwen/Qwen3-8B {}", keys=("{}", "enable-{}"), shape="--{} {}"),
    "SGLang": Case(command="python -m sglang.launch_server --model-path Qwen/Qwen3-8B {}", shape="--{} {}"),
    "llama.cpp": Case(command="llama-server -m model.gguf {}", shape="--{} {}"),
    "LMDeploy": Case(command="lmdeploy serve api_server Qwen/Qwen3-8B {}", shape="--{} {}"),
    "TensorRT-LLM": Case(command="trtllm-serve Qwen/Qwen3-8B {}", shape="--{} {}"),
    "Megatron-Bridge": Case(
        command="bridge",
        files={
            "own.yaml": "model: {{num_layers: 2, hidden_size: 8, num_attention_heads: 2, vocab_size: 8, seq_length: 8}}\n"
            "train: {{global_batch_size: 8}}\n{}\n"
        },
        keys=("{}", "model.{}", "train.{}", "optimizer.{}", "logger.{}"),
        shape=YAML,
    ),
}


def named(case: Case, key: str, value: str, folder: Path) -> set[str]:
    """The keys that the import of a case names, with another key in it."""
    value = {"null": "None"}.get(value, value) if case.shape in ("{}={}", "--{} {}") else value
    is_toml = case.shape == "{} = {}"
    written = case.shape.format(*((key.rpartition(".")[2], value.replace("null", "0")) if is_toml else (key, value)))
    command = case.command.format(written)
    for name, text in case.files.items():
        content = text.format(written)
        if name.endswith((".yaml", ".json")):
            data = nested(yaml.safe_load(content))
            content = json.dumps(data) if name.endswith(".json") else yaml.safe_dump(data)
        (folder / name).write_text(content)
    (folder / "model.gguf").touch()
    (folder / "train.py").touch()
    try:
        found = (
            api.read_tree(folder, "own.yaml", importer="bridge")
            if command == "bridge"
            else api.read_command(None, [command], chip="H100-SXM")
        )
    except SpecError as error:
        return {each.key.lstrip("-") for each in error.problems}
    return {name.strip(" -") for name in keys_of(found)}


def keys_of(found: ImportedSpec) -> set[str]:
    return {key for note in found.notes for key in note.key.split(",")}


def nested(content: Mapping[str, object]) -> dict[str, object]:
    """The sections of a mapping with dotted keys."""
    result: dict[str, object] = {}
    for key, value in content.items():
        value = nested(value) if isinstance(value, dict) else value
        for part in reversed(key.split(".")):
            value = {part: value}
        merge(result, value)
    return result


def merge(into: dict[str, object], other: object) -> None:
    assert isinstance(other, dict)
    for key, value in other.items():
        present = into.get(key)
        if isinstance(present, dict) and isinstance(value, dict):
            merge(present, value)
        else:
            into[key] = value


@pytest.mark.parametrize("name", CASES)
def test_an_unknown_key_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    case, missing = CASES[name], []
    for number, pattern in enumerate(case.keys):
        key = pattern.format(("turbo_mode", "zorblax", "quux_size", "flurb")[number % 4])
        found = named(case, key, VALUES[number % len(VALUES)], tmp_path)
        spelled = {key.lstrip("+"), key.replace("-", "_"), key.replace("_", "-")}
        if not any(each in spelled for each in found):
            missing.append((key, VALUES[number % len(VALUES)], sorted(found)))
    assert not missing
