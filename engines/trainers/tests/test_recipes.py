"""Configurations of fine-tuning frameworks come in as specs of the engine that they run on."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from flagcore_importers.command import commands_of, read_command
from flagcore_importers.reader import convert
from flagcore_trainers.importing import STEPS
from flagcore_training import frameworks

from flagcore import estimate
from flagcore.api.inputs import open_spec
from flagcore.domain.space import Candidate
from flagcore.errors import LaunchError, SpecError, UsageError
from flagcore.plugins import find_engine
from tests.tasks import planned

FACTORY = """model_name_or_path: Qwen/Qwen3-4B
stage: sft
finetuning_type: lora
lora_rank: 16
lora_target: q_proj,v_proj
cutoff_len: 4096
neat_packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
bf16: true
quantization_bit: 4
enable_liger_kernel: true
"""
AXOLOTL = """base_model: Qwen/Qwen3-8B
sequence_len: 8_192
pad_to_sequence_len: true
micro_batch_size: 2
gradient_accumulation_steps: 3
dp_shard_size: 4
dp_replicate_size: 2
tensor_parallel_size: 2
fsdp_version: 2
fsdp_config: {reshard_after_forward: false, activation_checkpointing: true, offload_params: true}
optimizer: galore_adamw
"""
AUTOMODEL = """recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 64, local_batch_size: 2}
model: {pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B, backend: {experts: gmm}}
peft: {_target_: nemo_automodel.components._peft.lora.PeftConfig, dim: 16, target_modules: '*_proj'}
distributed: {strategy: fsdp2, ep_size: 8, activation_checkpointing: true}
dataset: {_target_: nemo_automodel.components.datasets.llm.mock_iterable_dataset.MockIterableDataset, seq_len: 4096}
benchmark: {num_nodes: 2}
ci: {nproc_per_node: 8}
"""
SWIFT = """NNODES=2 NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B --packing true --max_length 8192 \
  --tensor_model_parallel_size 2 --expert_model_parallel_size 8 --pipeline_model_parallel_size 2 --lr 1e-5 \
  --sequence_parallel true --recompute_granularity full --moe_shared_expert_overlap true --moe_z_loss_coeff 1e-3
"""
DEEPSPEED = '{"zero_optimization": {"stage": 2, "overlap_comm": true, "reduce_bucket_size": "auto"}}'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(DEEPSPEED)
    return tmp_path


CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "lora of LLaMA-Factory": (
        "own.yaml",
        FACTORY,
        {"nodes": 1, "devices_per_node": 1},
        {
            "engine": "fsdp2",
            "seq_length": 4096,
            "global_batch_size": 8,
            "precision": "bf16",
            "lengths": {"mean": 2048.0, "batching": "packed"},
            "adapter": {"kind": "qlora", "rank": 16, "targets": ["q_proj", "v_proj"], "base": "nf4"},
        },
        {"activation_checkpointing": "full", "micro_batch_size": 2},
        "command",
    ),
    "version 1 of LLaMA-Factory": (
        "own.yaml",
        "model: Qwen/Qwen3-4B\nmodel_class: llm\ncutoff_len: 512\nmicro_batch_size: 2\ncp_size: 2\n"
        "dist_config: {name: fsdp2}\nkernel_config: {name: own}\nenable_activation_checkpointing: false\n",
        {"nodes": 1, "devices_per_node": 2},
        {"engine": "fsdp2", "seq_length": 512, "global_batch_size": 2},
        {"context_parallel_size": 2, "activation_checkpointing": "none", "micro_batch_size": 2},
        "kernel_config.name",
    ),
    "FSDP2 of axolotl": (
        "run.sh",
        "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 axolotl train axolotl.yaml --dp-replicate-size 1\n",
        {"nodes": 1, "devices_per_node": 8},
        {
            "engine": "fsdp2",
            "seq_length": 8192,
            "global_batch_size": 24,
            "lengths": {"mean": 4096.0, "batching": "seq_length"},
        },
        {
            "data_parallel_replicate_size": 1,
            "data_parallel_shard_size": 4,
            "tensor_model_parallel_size": 2,
            "activation_checkpointing": "full",
            "reshard_after_forward": False,
            "cpu_offload": True,
            "reduce_dtype": "bf16",
            "state_dtype": "bf16",
        },
        "train.lengths.mean",
    ),
    "a benchmark of NeMo AutoModel": (
        "own.yaml",
        AUTOMODEL,
        {"nodes": 2, "devices_per_node": 8},
        {"engine": "fsdp2", "seq_length": 4096, "global_batch_size": 64, "adapter": {"kind": "lora", "rank": 16}},
        {"data_parallel_shard_size": 16, "expert_model_parallel_size": 8, "micro_batch_size": 2},
        "model.backend.experts",
    ),
    "a pipeline of NeMo AutoModel": (
        "own.yaml",
        AUTOMODEL.replace("30B-A3B, backend: {experts: gmm}", "8B")
        .replace("local_batch_size: 2", "local_batch_size: 4")
        .replace(
            "ep_size: 8", "tp_size: 2, pp_size: 2, pipeline: {pp_schedule: interleaved1f1b, pp_microbatch_size: 1}"
        ),
        {"nodes": 2, "devices_per_node": 8},
        {"engine": "fsdp2", "seq_length": 4096, "global_batch_size": 64, "adapter": {"kind": "lora", "rank": 16}},
        {"pipeline_model_parallel_size": 2, "pipeline_schedule": "interleaved", "micro_batch_size": 1},
        "step_scheduler.local_batch_size",
    ),
    "Megatron-LM of ms-swift": (
        "run.sh",
        SWIFT,
        {"nodes": 2, "devices_per_node": 8},
        {
            "engine": "megatron",
            "global_batch_size": 16,
            "settings": {
                "moe_shared_expert_overlap": True,
                "moe_token_dispatcher_type": "alltoall",
                "expert_tensor_parallel_size": 1,  # ms-swift 4.6 megatron_args.py
            },
            "lengths": {"mean": 4096.0, "batching": "packed"},
        },
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "expert_model_parallel_size": 8,
            "sequence_parallel": True,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
        },
        "moe_z_loss_coeff",
    ),
    "YAML of ms-swift": (
        "own.yaml",
        "ENV: {NPROC_PER_NODE: 4}\nmodel: Qwen/Qwen3-30B-A3B\ntuner_type: lora\nlora_rank: 4\nmax_length: 1024\n"
        "expert_model_parallel_size: 4\nmtp_num_layers: 1\n",
        {"nodes": 1, "devices_per_node": 4},
        {
            "engine": "megatron",
            "seq_length": 1024,
            "global_batch_size": 16,
            "adapter": {"kind": "lora", "rank": 4, "dropout": True},
            "mtp_num_layers": 1,
        },
        {"expert_model_parallel_size": 4, "use_recompute": True, "recompute_granularity": "selective"},
        "train.lengths.mean",
    ),
    "a preset of DeepSpeed in ms-swift": (
        "run.sh",
        "NPROC_PER_NODE=4 swift sft --model Qwen/Qwen3-4B --train_type full --max_length 99 --deepspeed zero3_offload",
        {"nodes": 1, "devices_per_node": 4},
        {"engine": "deepspeed", "global_batch_size": 16, "lengths": {"mean": 49.5, "batching": "longest"}},
        {"zero_stage": 3, "offload_optimizer": "cpu", "activation_checkpointing": "full"},
        "deepspeed",
    ),
    "TRL with a configuration of its own": (
        "run.sh",
        "trl sft --model_name_or_path own/Qwen3-4B-tuned --accelerate_config zero2 --packing --use_peft --lora_r 4 "
        "--lora_target_modules 'model.layers.[\\d]+.(self_attn|mlp).(q|in)_proj' "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 3",
        {"nodes": 1, "devices_per_node": 8},
        {
            "engine": "deepspeed",
            "seq_length": 1024,
            "global_batch_size": 48,
            "lengths": {"mean": 512.0, "batching": "packed"},
            "adapter": {"kind": "lora", "rank": 4, "targets": ["q_proj", "in_proj"], "dropout": True},
        },
        {"zero_stage": 2, "activation_checkpointing": "full", "micro_batch_size": 2},
        "adapter",
    ),
    "replicas of ms-swift": (
        "run.sh",
        "torchrun --nproc_per_node 2 swift/cli/sft.py --model Qwen/Qwen3-4B --use_dora true --sequence_parallel_size 2",
        {"nodes": 1, "devices_per_node": 2},
        {"engine": "deepspeed", "global_batch_size": 8, "adapter": {"kind": "dora", "rank": 8, "dropout": True}},
        {"zero_stage": 0, "context_parallel_size": 2},
        "ddp",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_configuration_says_model_layout_and_lengths(name: str, folder: Path) -> None:
    file, text, cluster, train, baseline, noted = CASES[name]
    (folder / "axolotl.yaml").write_text(AXOLOTL)
    (folder / file).write_text(text)
    imported = read_command(None, [file], chip="H100-SXM")
    data = imported.data
    assert data["cluster"] == {"chip": "H100-SXM", **cluster}
    assert {key: data["train"].get(key) for key in train} == train
    assert ("lengths" in data["train"]) == ("Mock" not in text)
    assert ("adapter" in data["train"]) == ("adapter" in train)
    assert data["auto_tuner"]["baseline"] | baseline == data["auto_tuner"]["baseline"]
    keys = {key for note in imported.notes for key in note.key.split(", ")}
    assert keys >= {noted, "command"}
    assert not keys & {"lr", "bf16", "expert_model_parallel_size", "recompute_granularity", "pad_to_sequence_len"}
    found = open_spec(data, None, (), plan=True).problem.baseline.as_dict()
    assert found | {each: found[each] for each in baseline} == found | baseline


@pytest.mark.parametrize(
    ("further", "is_cast"),
    [
        ("", True),
        ("quantize_moe_experts: true\n", False),
        ("fsdp_version: 2\n", True),
        ("fsdp_config: {auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n", False),
        ("deepspeed: deepspeed_configs/zero3.json\n", False),
        ("deepspeed: deepspeed_configs/zero2.json\n", True),
    ],
)
def test_axolotl_casts_experts_beside_quantized_layers(further: str, is_cast: bool, folder: Path) -> None:
    text = "base_model: Qwen/Qwen3-30B-A3B\nadapter: qlora\nload_in_4bit: true\nlora_target_modules: [q_proj]\n"
    (folder / "axolotl.yaml").write_text(text + further)
    (folder / "job.sh").write_text("CUDA_VISIBLE_DEVICES=0,1 axolotl train axolotl.yaml\n")
    found = read_command(None, ["job.sh"], chip="H100-SXM").data["train"]["adapter"]
    assert found.get("fp32_experts", False) == is_cast


def test_a_job_on_one_device_is_planned_for_more(folder: Path) -> None:
    (folder / "own.yaml").write_text(FACTORY)
    data = read_command(None, ["own.yaml"], chip="A100-80GB").data
    data["cluster"]["devices_per_node"] = 4
    plan = estimate(data, top=1)
    assert plan.devices == 4
    assert plan.baseline["candidate"]["data_parallel_shard_size"] == 4


@pytest.mark.parametrize(
    ("options", "stage"),
    [
        ("--use_deepspeed --deepspeed_config_file ds.json", 2),
        ("--use_deepspeed --zero_stage 3", 3),
        ("--use_deepspeed", 2),
    ],
)
def test_options_of_accelerate_for_deepspeed_give_its_stage(folder: Path, options: str, stage: int) -> None:
    program = "trl/scripts/sft.py --model_name_or_path Qwen/Qwen3-4B --per_device_train_batch_size 2"
    words = [f"accelerate launch --num_processes 4 {options} {program}"]
    imported = read_command(None, words, chip="H100-SXM")
    assert imported.data["auto_tuner"]["baseline"]["zero_stage"] == stage
    assert not any("deepspeed" in note.key for note in imported.notes)


@pytest.mark.parametrize(
    ("left_out", "words"),
    [
        ("enable_liger_kernel quantization_bit", {"Liger", "QLoRA"}),
        ("enable_liger_kernel", {"Liger"}),  # it is QLoRA already
        ("model_name_or_path", {"enable_liger_kernel"}),
        ("", set()),
    ],
)
def test_large_logits_name_the_fused_loss_where_it_is_not_predicted(
    left_out: str, words: set[str], folder: Path
) -> None:
    """LLaMA-Factory knows Liger's kernels of Qwen3, with which a step has few logits at once, and none of OLMo 3."""
    lines = [line for line in FACTORY.splitlines() if line.partition(":")[0] not in left_out.split()]
    lines += ["model_name_or_path: allenai/Olmo-3-7B"] * ("model_name_or_path" in left_out)
    (folder / "run.yaml").write_text("\n".join(lines))
    data = read_command(None, ["llamafactory-cli", "train", "run.yaml"], chip="RTX4090").data
    task = planned(data).task
    found = [each for each in find_engine(data["train"]["engine"]).warnings(task) if "the loss of" in each]
    assert {each for each in ("Liger", "QLoRA", "enable_liger_kernel") if each in " ".join(found)} == words
    assert frameworks.has_tiled_loss(task.spec) == (not left_out)


ACCELERATE = "accelerate launch --num_processes 2 --use_fsdp --fsdp_version 2 -m trl.scripts.sft --model_name_or_path "
ACCELERATE += "Qwen/Qwen3-4B --dataset_name x --output_dir o --max_length 4096 "


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (
            "llamafactory-cli train own.yaml gradient_checkpointing=false --run_name ''",
            {"activation_checkpointing": "full"},
        ),
        ("llamafactory-cli train own.yaml disable_gradient_checkpointing=true", {"activation_checkpointing": "none"}),
        (f"{ACCELERATE} --activation_checkpointing false", {"activation_checkpointing": "none"}),
        (f"{ACCELERATE} --gradient_checkpointing false", {"activation_checkpointing": "none"}),
        (
            ACCELERATE.replace(" -m ", " --fsdp_offload_params true --parallelism_config_cp_size 2 -m "),
            {"cpu_offload": True, "context_parallel_size": 2},
        ),
    ],
)
def test_a_setting_is_read_under_the_name_that_its_program_reads(
    folder: Path, words: str, values: dict[str, Any]
) -> None:
    (folder / "own.yaml").write_text(FACTORY)
    data = read_command(None, [words], chip="H100-SXM").data
    found = open_spec(data, None, (), plan=True).problem.baseline.as_dict()
    assert found | values == found


@pytest.mark.parametrize(
    "key", ["--gradient_checkpointing_kwargs.offload true", "--fsdp_activation_checkpointing_offload true"]
)
def test_only_checkpoints_are_offloaded_where_only_these_are(folder: Path, key: str) -> None:
    def gib(checkpoints: str, further: str) -> float:
        words = ACCELERATE.replace(" -m ", f" {further} -m ") if "fsdp_" in further else f"{ACCELERATE}{further}"
        data = read_command(None, [words], chip="H100-SXM").data
        data["auto_tuner"]["baseline"] |= {"activation_checkpointing": checkpoints, "micro_batch_size": 1}
        return float(estimate(data, top=1).baseline["memory"]["device_used_gib"])

    assert gib("full", key) < gib("full", "") - 0.1
    assert gib("none", key) == gib("none", "")


@pytest.mark.parametrize(
    ("line", "key", "word"),
    [
        ("gradient_checkpointing: offload", "gradient_checkpointing", "transfers"),
        ("qat: {weight_dtype: int4}", "qat.weight_dtype", "fake quantization"),
    ],
)
def test_what_a_job_keeps_beyond_the_prediction_is_noted(folder: Path, line: str, key: str, word: str) -> None:
    (folder / "own.yaml").write_text(f"{AXOLOTL}{line}\n")
    notes = {note.key: note for note in read_command(None, ["own.yaml"], chip="H100-SXM").notes}
    assert word in str(notes[key])


def test_trials_start_a_command_with_a_file_of_deepspeed(folder: Path) -> None:
    (folder / "own.yaml").write_text(FACTORY + "deepspeed: ds.json\n")
    words = ["env NPROC_PER_NODE=4 llamafactory-cli train own.yaml per_device_train_batch_size=1"]
    data = read_command(None, words, chip="H100-SXM").data
    assert data["train"]["global_batch_size"] == 16
    assert data["auto_tuner"]["space"] == {"activation_checkpointing": ["full"]}
    baseline = data["auto_tuner"]["baseline"]
    assert (baseline["zero_stage"], baseline["overlap_comm"], baseline["reduce_bucket_size"]) == (2, True, 2560**2)
    del data["train"]["lengths"]
    platform = planned(data)
    engine = find_engine("deepspeed").with_program(data["train"]["program"])
    values = {knob.name: knob.neutral for knob in engine.knobs} | {"micro_batch_size": 4, "zero_stage": 3}
    (folder / "trial").mkdir()
    argv = engine.launch(platform, Candidate.of(values), "trial").argv
    words_of_trial = {"per_device_train_batch_size=4", "gradient_accumulation_steps=1", "save_strategy=no"}
    assert argv[:3] == ("llamafactory-cli", "train", "own.yaml")
    assert words_of_trial <= {*argv}
    assert "per_device_train_batch_size=1" not in argv
    assert f"deepspeed={folder / 'trial' / 'candidate.json'}" in argv
    assert not engine.spec_warnings(platform.task.spec)


def test_a_command_with_options_alone_keeps_its_launcher_and_gets_options(folder: Path) -> None:
    words = "deepspeed --num_gpus 4 src/train.py --stage sft --model_name_or_path Qwen/Qwen3-4B --deepspeed ds.json"
    words += " --per-device-train-batch-size 2 --cutoff_len 2048 --dataset own --output_dir out"
    train = read_command(None, [words], chip="H100-SXM").data["train"]
    assert train["command"][:4] == ["deepspeed", "--num_gpus", "4", "src/train.py"]
    assert train["command"][-2:] == [
        "--deepspeed={config}",
        "--gradient_accumulation_steps={gradient_accumulation_steps}",
    ]
    assert not {"ds.json", "--per-device-train-batch-size"} & {*train["command"]}
    assert train["program"]["knobs"]["micro_batch_size"]["flag"] == "--per_device_train_batch_size={}"


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("stage: sft", "stage: dpo", "stage"),
        ("finetuning_type: lora", "finetuning_type: oft", "finetuning_type"),
        ("neat_packing: true", "deepspeed: own.json", "deepspeed"),
        ("q_proj,v_proj", "in_proj", "train.adapter.targets"),
        ("Qwen/Qwen3-4B", "own/unknown", "model"),
    ],
)
def test_what_is_not_predicted_is_refused_by_its_key(folder: Path, old: str, new: str, key: str) -> None:
    (folder / "own.yaml").write_text(FACTORY.replace(old, new))
    with pytest.raises(SpecError) as caught:
        read_command(None, ["own.yaml"])
    assert caught.value.key == key


def test_without_their_reader_the_advice_is_to_install_it(folder: Path) -> None:
    (folder / "own.yaml").write_text(AXOLOTL)
    engines = {"megatron": commands_of(find_engine("megatron"))}
    with pytest.raises(UsageError, match=r"flagcore\[trainers\]"):
        convert(engines, ["own.yaml"], "", None, lambda: ["megatron"])


@pytest.mark.parametrize(
    ("text", "words", "values", "argv", "changed"),
    [
        (
            FACTORY,
            "env NPROC_PER_NODE=4 llamafactory-cli train own.yaml per_device_train_batch_size=1",
            {"zero_stage": 2, "activation_checkpointing": "none"},
            ["llamafactory-cli", "train", "{folder}/own.yaml", "per_device_train_batch_size=4"],
            {"disable_gradient_checkpointing": True, "deepspeed": "{folder}/ds_config.json", STEPS: 1},
        ),
        (
            "",
            "env NPROC_PER_NODE=4 swift sft --model Qwen/Qwen3-4B --max_length 2048 --deepspeed zero3",
            {"zero_stage": 3},
            "swift sft --model Qwen/Qwen3-4B --max_length 2048 --deepspeed {folder}/ds_config.json "
            f"--per_device_train_batch_size=4 --{STEPS}=1",
            {},
        ),
        (
            AXOLOTL,
            "env CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 axolotl train own.yaml --dp-replicate-size 1",
            {"data_parallel_shard_size": 8, "tensor_model_parallel_size": 1, "reshard_after_forward": True},
            "axolotl train {folder}/own.yaml --dp-replicate-size 1 -- --num_processes=8",
            {"dp_shard_size": 8, "tensor_parallel_size": 1, "micro_batch_size": 4},
        ),
        (
            "",
            "env NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-4B --max_length 2048 --tensor_model_parallel_size 2 "
            "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1",
            {
                "data_parallel_size": 1,
                "tensor_model_parallel_size": 1,
                "context_parallel_size": 2,
                "pipeline_model_parallel_size": 4,
                "num_layers_per_virtual_pipeline_stage": 3,
                "use_recompute": False,
            },
            "megatron sft --model Qwen/Qwen3-4B --max_length 2048 --tensor_model_parallel_size 1 "
            "--recompute_granularity none --pipeline_model_parallel_size=4 --context_parallel_size=2 "
            "--virtual_pipeline_model_parallel_size=3 --micro_batch_size=4 --global_batch_size=16",
            {},
        ),
        (
            "model_name_or_path: Qwen/Qwen3-4B\nfinetuning_type: full\npure_bf16: true\n",
            "llamafactory-cli train own.yaml",
            {"activation_checkpointing": "none"},
            "env NPROC_PER_NODE=1 llamafactory-cli train {folder}/own.yaml",
            {"disable_gradient_checkpointing": True, "per_device_train_batch_size": 4},
        ),
    ],
)
def test_a_kept_command_is_exported_with_the_values_of_a_candidate(
    folder: Path, text: str, words: str, values: dict[str, Any], argv: Any, changed: dict[str, Any]
) -> None:
    (folder / "own.yaml").write_text(text)
    data = read_command(None, [words], chip="H100-SXM").data
    platform = open_spec(data, None, (), plan=True).problem.platform
    engine = platform.engine
    assert engine.plans.only(platform.task.spec)
    with pytest.raises(SpecError, match=r"train\.(command|engine)"):
        engine.ready(platform.task.spec)
    neutral = {knob.name: knob.neutral for knob in engine.knobs}
    candidate = Candidate.of({**neutral, **data["auto_tuner"]["baseline"], "micro_batch_size": 4, **values})
    argv = argv.split() if isinstance(argv, str) else argv
    launch = engine.launch(platform, candidate, str(folder), for_real=True)
    assert list(launch.argv) == [word.format(folder=folder) for word in argv]
    written = yaml.safe_load((folder / "own.yaml").read_text()) or {}
    expected = {key: each.format(folder=folder) if isinstance(each, str) else each for key, each in changed.items()}
    assert {key: written.get(key) for key in changed} == expected
    if "zero_stage" in values:
        config = json.loads((folder / "ds_config.json").read_text())
        assert config["zero_optimization"]["stage"] == values["zero_stage"]
    elif "fsdp_config" in written:
        assert {*engine.axes(platform.task)[4].values} == {1}  # axolotl has no pipelines
        assert written["fsdp_config"]["reshard_after_forward"] is True
        other = Candidate.of({**candidate.as_dict(), "pipeline_model_parallel_size": 2})
        with pytest.raises(LaunchError, match="pipeline_model_parallel_size"):
            engine.launch(platform, other, str(folder), for_real=True)
