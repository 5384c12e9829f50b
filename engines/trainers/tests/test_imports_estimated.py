"""What an importer of this room writes from an example of its tests, its own estimate accepts."""

from pathlib import Path

import pytest
from flagcore_importers.command import read_command

from engines.trainers.tests.test_recipes import ACCELERATE, AXOLOTL, CASES, DEEPSPEED
from flagcore import estimate

EXAMPLES: dict[str, dict[str, str]] = {
    **{name: {file: text} for name, (file, text, *_rest) in CASES.items()},
    "TRL on FSDP2": {"run.sh": f"{ACCELERATE} --use_peft"},
    "TRL on context parallelism": {"run.sh": ACCELERATE.replace(" -m ", " --parallelism_config_cp_size 2 -m ")},
    "TRL on DeepSpeed of accelerate": {
        "acc.yaml": "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config: {zero_stage: 3}\n",
        "run.sh": "accelerate launch --config_file acc.yaml -m trl.scripts.sft --model_name_or_path Qwen/Qwen3-4B "
        "--dataset_name x --gradient_accumulation_steps 2",
    },
    "a script on DeepSpeed": {
        "train.py": "",
        "run.sh": "deepspeed --num_gpus 8 train.py --deepspeed ds.json --model_name_or_path Qwen/Qwen3-4B "
        "--max_seq_length 2048 --per_device_train_batch_size 1 --gradient_accumulation_steps 2",
    },
    "pretraining of LLaMA-Factory": {
        "own.yaml": "model_name_or_path: Qwen/Qwen3-4B\nstage: pt\nfinetuning_type: full\ndeepspeed: ds.json\n"
        "per_device_train_batch_size: 1\n",
        "run.sh": "FORCE_TORCHRUN=1 NPROC_PER_NODE=8 llamafactory-cli train own.yaml",
    },
    "pretraining of ms-swift": {
        "run.sh": "NPROC_PER_NODE=8 swift pt --model Qwen/Qwen3-4B --tuner_type full --packing true --deepspeed zero3 "
        "--per_device_train_batch_size 1"
    },
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_import_is_not_refused_by_its_own_estimate(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file, text in {"ds.json": DEEPSPEED, "axolotl.yaml": AXOLOTL, **EXAMPLES[name]}.items():
        (tmp_path / file).write_text(text)
    data = read_command(None, [[*EXAMPLES[name]][-1]], chip="H200-SXM").data
    assert estimate(data, top=1).baseline
