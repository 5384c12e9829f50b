"""What no reader reads is refused as what it is."""

from pathlib import Path

import pytest
from flagcore_importers.command import read_command

from flagcore.errors import SpecError

FILES = {
    "prime-rl": 'max_steps = 20\n\n[model]\nname = "Qwen/Qwen3-30B-A3B"\n\n[model.ac]\n\n[optim]\nlr = 1e-5\n',
    "AReaL": "experiment_name: a\ntrial_name: b\nallocation_mode: sglang:d4p1t1+d4p1t1\ngconfig:\n  n_samples: 4\n",
    "ROLL": "rollout_batch_size: 64\nactor_train:\n  training_args:\n    learning_rate: 1.0e-6\n",
    "srtctl": "name: a\nmodel: {path: b}\nresources:\n  gpu_type: gb200\n  prefill_nodes: 1\n  decode_nodes: 2\n",
    "MindIE": '{"Version": "1.0.0", "ServerConfig": {}, "BackendConfig": {"npuDeviceIds": [[0]]}}',
}
COMMANDS = {
    "ms-swift": "megatron rlhf --rlhf_type grpo --model Qwen/Qwen3-8B --num_generations 8 --max_completion_length 9",
    "ms-swift's": "python swift/cli/rlhf.py --rlhf_type grpo --model Qwen/Qwen3-8B --num_generations 8",
    "AReaL": "python3 -m areal.launcher.local a.py --config a.yaml",
    "ROLL": "python examples/start_rlvr_pipeline.py --config_path a --config_name b",
    "prime-rl": "uv run rl @ configs/a.toml",
    "srtctl": "uv run srtctl apply -f a.yaml",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_tool_is_named(name: str, tmp_path: Path) -> None:
    suffix = {"prime-rl": "toml", "MindIE": "json"}.get(name, "yaml")
    path = tmp_path / f"own.{suffix}"
    path.write_text(FILES[name])
    with pytest.raises(SpecError) as error:
        read_command(None, [str(path)], chip="H100-SXM")
    assert name in error.value.problem


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_of_another_tool_is_named(name: str) -> None:
    with pytest.raises(SpecError) as error:
        read_command(None, [COMMANDS[name]], chip="H100-SXM")
    assert name in error.value.problem
