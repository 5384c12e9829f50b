"""TensorRT-LLM and MindIE: their commands and files are read whole, and written as their documentation has them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from flagcore_serving.space.weights import weight_bytes

from engines.serving.tests.engines.tasks import broken, engine_of, planned, server, settings
from flagcore import api
from flagcore.domain.launch import PORT, Start
from flagcore.errors import NoDevice
from tests.product.tasks import EXPERTS

TP, DP, EP = (f"{kind}_parallel_size" for kind in ("tensor_model", "data", "expert_model"))
MODEL, SCHEDULE = "BackendConfig.ModelDeployConfig.ModelConfig", "BackendConfig.ScheduleConfig"
RECIPE = {  # TensorRT-LLM's examples/configs/curated/deepseek-r1-throughput.yaml, with tiers
    "max_batch_size": 1024,
    "max_num_tokens": 3200,
    "kv_cache_free_gpu_memory_fraction": 0.8,
    "tensor_parallel_size": 8,
    "moe_expert_parallel_size": 8,
    "enable_attention_dp": True,
    "enable_autotuner": False,
    "cuda_graph_config": {"enable_padding": True, "batch_sizes": [1, 2, 384]},
    "kv_cache_config": {"dtype": "fp8", "enable_block_reuse": False, "host_cache_size": 137438953472},
    "stream_interval": 10,
    "speculative_config": {"decoding_type": "MTP", "num_nextn_predict_layers": 1},
}
FILE = {
    "Version": "1.0.0",
    "ServerConfig": {"port": 1025, "httpsEnabled": False, "maxLinkNum": 1000, "tlsPk": "key"},
    "BackendConfig": {
        "backendName": "mindieservice_llm_engine",
        "npuDeviceIds": [[0, 1, 2, 3, 4, 5, 6, 7]],
        "ModelDeployConfig": {
            "maxSeqLen": 20000,
            "ModelConfig": [
                {"modelWeightPath": "Qwen/Qwen3-30B-A3B", "worldSize": 8, "npuMemSize": -1, "dp": 2, "moe_ep": 4}
                | {"trustRemoteCode": False, "plugin_params": '{"plugin_type": "prefix_cache,memory_decoding"}'}
            ],
        },
        "ScheduleConfig": {"cacheBlockSize": 128, "maxBatchSize": 200, "supportSelectBatch": False},
    },
}


def imported(name: str, words: str, tmp_path: Path, **envs: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The spec of a command, and its notes by name."""
    start = Start(words=tuple(words.split()), envs=envs)
    data, notes = engine_of(name).commands.read(start, tmp_path, None)
    return data, {each.key: each.text for each in notes}


def test_a_command_of_tensorrt_llm_is_read_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    options = "--set moe_config.backend=TRTLLM --set enable_chunked_prefill=true --port 8000"
    words = f"trtllm-serve deepseek-ai/DeepSeek-R1 --max_batch_size 64 --extra_llm_api_options recipe.yaml {options}"
    data, notes = imported("trtllm", words, tmp_path)
    assert data["auto_tuner"]["baseline"] == (
        {TP: 1, DP: 8, EP: 8, "max_batch_size": 64, "max_num_tokens": 3200, "free_gpu_memory_fraction": "0.8"}
        | {"kv_cache_type": "fp8", "enable_prefix_caching": False, "host_cache_gib": 128, "moe_backend": "TRTLLM"}
        | {"enable_chunked_prefill": True, "cuda_graph_max_batch_size": 384}
        | {"speculation": "MTP", "speculative_tokens": 1}
    )
    args = data["serve"]["engine_args"]
    assert args == {"cuda-graph-config.enable_padding": True, "enable-autotuner": "false", "stream-interval": 10}
    assert all("not predicted" in notes[f"--{name}"] for name in args)
    assert notes["--kv-cache-config.host_cache_size"] == "is replaced with host_cache_gib"


def test_a_file_of_mindie_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FILE))
    data, notes = imported("mindie", "./bin/mindieservice_daemon", tmp_path, MIES_CONFIG_JSON_PATH="config.json")
    assert data["model"] == "Qwen/Qwen3-30B-A3B"
    assert data["auto_tuner"]["baseline"] == (
        {TP: 4, DP: 2, EP: 4, "max_batch_size": 200, "cache_block_size": 128, "context_len": 20000}
        | {"npu_mem_size": None, "enable_prefix_caching": True}
    )
    assert {name for name, text in notes.items() if "not predicted" in text} == {f"--{MODEL}.plugin_params.plugin_type"}
    assert not [name for name in data["serve"]["engine_args"] if "tls" in name]


@pytest.mark.parametrize(
    ("values", "arguments", "words"),
    [
        ({}, {}, ""),
        (
            {DP: 2, EP: 2, "kv_cache_type": "fp8", "host_cache_gib": 2, "enable_prefix_caching": False},
            {"engine_args": {"stream_interval": 10, "trust_remote_code": True}, "model": EXPERTS},
            "--tp_size 2 --ep_size 2 --set kv_cache_config.dtype=fp8 --set kv_cache_config.host_cache_size=2147483648 "
            "--set kv_cache_config.enable_block_reuse=false --set enable_attention_dp=true --set stream_interval=10 "
            "--trust_remote_code",
        ),
        ({"enforce_eager": True}, {}, "--set cuda_graph_config=null"),
    ],
)
def test_fields_without_an_option_are_set_by_path(
    values: Mapping[str, Any], arguments: dict[str, Any], words: str
) -> None:
    engine = engine_of("trtllm")
    argv = engine.form(server(planned("trtllm", **arguments), **values)).argv
    assert " ".join(argv) == f"/bin/echo hf --host 127.0.0.1 --port {PORT} {words}".strip()


def test_settings_of_mindie_are_a_file_that_a_shell_writes() -> None:
    task = planned("mindie", engine_args={f"{MODEL}.trustRemoteCode": "false"})
    values = {TP: 2, DP: 2, "max_batch_size": 64, "enable_prefix_caching": True, "speculation": "mtp"}
    *shell, text, file, program = engine_of("mindie").form(server(task, **values)).argv
    found = json.loads(text.replace(PORT, "8000"))
    (model,) = found["BackendConfig"]["ModelDeployConfig"]["ModelConfig"]
    assert (shell[0], file, program) == ("sh", f"mindie-{PORT}.json", "/bin/echo")
    assert (model["worldSize"], model["tp"], model["dp"], model["trustRemoteCode"]) == (4, 2, 2, False)
    assert json.loads(model["plugin_params"]) == {"plugin_type": "mtp,prefix_cache"}
    assert found["ServerConfig"]["port"] == 8000
    assert found["BackendConfig"]["ScheduleConfig"]["maxBatchSize"] == 64


@pytest.mark.parametrize("name", ["trtllm", "mindie"])
def test_the_cache_is_a_share_of_the_memory(name: str) -> None:
    """Of TensorRT-LLM, a share of what all else leaves free, so that small devices have room for it."""
    task, total = planned(name, memory=24 * 2**30), 24 * 2**30
    if name == "trtllm":
        assert settings(task).rest_share == pytest.approx(0.9)
    else:
        assert settings(task).cache_bytes == pytest.approx(0.8 * total - weight_bytes(task))
    assert engine_of(name).untested
    assert broken(engine_of(name), planned(name, on_cores=True)) == ["no_cores"]
    assert np.isfinite(settings(task).max_batched_tokens).all()


@pytest.mark.parametrize(
    ("name", "rule", "values"),
    [
        ("trtllm", "attention_dp", {TP: 2, DP: 2}),
        ("trtllm", "expert_parallel", {TP: 4, EP: 3}),
        ("trtllm", "whole_prompts", {"max_num_tokens": 64}),
        ("mindie", "whole_prompts", {"max_prefill_tokens": 64}),
    ],
)
def test_rules(name: str, rule: str, values: dict[str, Any]) -> None:
    assert rule in broken(engine_of(name), planned(name, model=EXPERTS), **values)
    if name == "trtllm" and rule == "whole_prompts":
        assert broken(engine_of(name), planned(name), **values, enable_chunked_prefill=True) == []


@pytest.mark.parametrize(("engine", "chip"), [("mindie", "H200"), ("trtllm", "910B3"), ("trtllm", "MI300X")])
def test_chips_of_other_vendors_are_refused(engine: str, chip: str) -> None:
    with pytest.raises(NoDevice, match=f"{engine} .* {chip}: .* vendor (nvidia|ascend)"):
        api.estimate({"model": "Qwen/Qwen3-8B", "cluster": {"chip": chip}, "serve": {"engine": engine}})
