"""The commands of frameworks are exported with the chosen values, and start on stand-ins, or are refused."""

import json
from pathlib import Path

import pytest
from flagcore_importers.command import read_command

from flagcore import api
from flagcore.errors import UsageError
from tests.product.api.stand_ins import start_all

FACTORY = {
    "model_name_or_path": "Qwen/Qwen3-4B",
    "stage": "sft",
    "finetuning_type": "lora",
    "cutoff_len": 2048,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "bf16": True,
    "deepspeed": "zero.json",
}
AXOLOTL = {"base_model": "Qwen/Qwen3-4B", "adapter": "qlora", "load_in_4bit": True, "sequence_len": 2048}
AXOLOTL |= {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}
ZERO = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}
TITAN = "[model]\nname = 'llama3'\nflavor = '8B'\n[training]\nlocal_batch_size = 1\nseq_len = 4096\n"
VERL = (
    "python3 -m verl.trainer.main_ppo data.train_batch_size=64 data.max_prompt_length=512 data.max_response_length=512 "
    "actor_rollout_ref.model.path=Qwen/Qwen3-4B actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.name=vllm "
    "actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.use_dynamic_bsz=True "
    "trainer.n_gpus_per_node=8 trainer.nnodes={nodes}"
)
SWIFT = "--model Qwen/Qwen3-4B --tuner_type lora --max_length 2048 --per_device_train_batch_size 1 --dataset a"
RANKS = "torchrun --nproc-per-node 8 --nnodes 2 --master-addr $MASTER_ADDR --master-port $MASTER_PORT --node-rank $RANK"
GPT = "--num-layers 16 --hidden-size 2048 --num-attention-heads 16 --vocab-size 32000 --seq-length 2048 --bf16 "
GPT += "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64 --train-iters 9"
JOBS = {
    "LLaMA-Factory": ("ASCEND_RT_VISIBLE_DEVICES=0,1,2,3 llamafactory-cli train job.yaml", "910B3", 1),
    "ms-swift": (f"NPROC_PER_NODE=8 swift sft {SWIFT} --deepspeed zero2", "H100-SXM", 1),
    "ms-swift on Megatron-LM": (
        f"NPROC_PER_NODE=8 megatron sft {SWIFT.replace('per_device_train', 'micro')} --global_batch_size 64 "
        "--tensor_model_parallel_size 2 --sequence_parallel true",
        "H100-SXM",
        1,
    ),
    "DeepSpeed with ranks of another launcher": (
        f"{RANKS} train.py --deepspeed zero.json --model_name_or_path Qwen/Qwen3-4B --max_seq_length 2048 "
        "--per_device_train_batch_size 2",
        "H100-SXM",
        2,
    ),
    "Megatron-LM with ranks of another launcher": (f"{RANKS} pretrain_gpt.py {GPT}", "H100-SXM", 2),
    "axolotl": ("axolotl train axolotl.yaml", "RTX4090", 1),
    "torchtitan": (
        "srun --nodes 2 torchrun --nnodes=2 --nproc-per-node=8 --rdzv-endpoint head:29500 "
        "-m torchtitan.train --job.config_file t.toml",
        "H100-SXM",
        2,
    ),
    "verl": (VERL.format(nodes=1), "H100-SXM", 1),
    "verl on two nodes": (VERL.format(nodes=2), "MI300X", 2),
}
"""Commands of other programs, with a chip and the number of hosts."""
OF_JOBS = ("", "slurm", "kubernetes", "flagscale", "compose")
"""The targets: the engine of the job, and those of launchers."""


@pytest.mark.costly
@pytest.mark.parametrize("job", [pytest.param(each, marks=[pytest.mark.long] * (each == "verl")) for each in JOBS])
def test_a_command_of_a_framework_starts_with_the_chosen_values(job: str, tmp_path: Path) -> None:
    words, chip, nodes = JOBS[job]
    files = {"job.yaml": FACTORY, "axolotl.yaml": AXOLOTL, "zero.json": ZERO}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "t.toml").write_text(TITAN)
    for name in ("train.py", "pretrain_gpt.py"):
        (tmp_path / name).touch()
    (tmp_path / "run.sh").write_text(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("FLAGCORE_CACHE", "on")  # the targets share a plan
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        data = read_command(None, ["run.sh"], chip=chip).data
        (tmp_path / "spec.yaml").write_text(json.dumps(data))
        engine = next(data[kind]["engine"] for kind in ("train", "rl") if kind in data)
        for target in OF_JOBS:
            out = tmp_path / (target or "engine")
            if target in ("flagscale", "compose"):  # these start other kinds of jobs
                if job in ("axolotl", "verl on two nodes"):
                    with pytest.raises(UsageError, match="--to"):
                        api.export("spec.yaml", target, output=out)
                continue
            options = {"image": "i"} if target == "kubernetes" else {}
            api.export("spec.yaml", target or engine, output=out, options=options)
            start_all(out, tmp_path, nodes)
