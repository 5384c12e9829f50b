"""What all engines share: the place, figures at /metrics, programs and their versions, sizes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flagcore.domain.serving import Load
from flagcore.engines.serving.engine import Engine
from flagcore.engines.serving.launch import reports
from flagcore.engines.serving.llamacpp.profile import WORKLOAD as LLAMACPP
from flagcore.engines.serving.sglang.profile import WORKLOAD as SGLANG
from flagcore.engines.serving.space import installed
from flagcore.engines.serving.space.hardware import Hardware, longest_request, max_in_flight
from flagcore.engines.serving.space.weights import cache_bytes_per_token, min_devices, parameters
from flagcore.engines.serving.vllm.profile import WORKLOAD as VLLM
from flagcore.errors import NoDevice
from tests.engines.serving.engines.tasks import serving
from tests.small import DENSE

TEXT = """# TYPE a:total counter
a:total{engine="0",name="x \\"y\\""} 3.0
a:total{engine="1"} 4
a:bad NaN
a:info{size="16",on="True"} 1.0
not a line
"""


def test_figures_of_all_labels_are_read_except_invalid_numbers() -> None:
    assert reports.samples(TEXT) == {"a:total": [3.0, 4.0], "a:info": [1.0]}
    assert reports.labels(TEXT, "a:info") == {"size": "16", "on": "True"}
    assert reports.labels(TEXT, "a:none") == {}


def test_a_server_without_metrics_has_no_counters() -> None:
    def fetch(path: str) -> str:
        raise OSError("HTTP 404")

    assert reports.counters(fetch, {"a:total": "all"}) == {}
    assert reports.counters(lambda path: TEXT, {"a:total": "all", "b": "none"}) == {"all": 7.0}


def test_shares_of_ranks_are_averaged_and_tokens_summed() -> None:
    assert reports.counters(lambda path: TEXT, {"a:total": "cache_usage"}) == {"cache_usage": 3.5}
    assert reports.combine("output_tokens", [3.0, 4.0]) == 7.0


def test_cards_come_from_the_spec_or_the_cluster() -> None:
    assert Hardware.of(serving("vllm", devices=8)).cards == 8
    assert Hardware.of(serving("vllm", devices=8, cards=4)).cards == 4


def test_devices_that_share_memory_are_cores() -> None:
    assert Hardware.of(serving("vllm", on_cores=True)).on_cores
    assert not Hardware.of(serving("vllm")).on_cores


def test_the_longest_request_and_the_most_in_flight_are_over_all_loads() -> None:
    loads = (
        Load(input_len=100, output_len=10, concurrency=4),
        Load(input_len=50, output_len=10, prefix_len=60, range_spread=0.1, request_rate=2.0, num_prompts=7),
    )
    assert longest_request(loads, None) == 126
    assert max_in_flight(loads) == 7


def test_weights_and_cache_are_counted_by_shape() -> None:
    llama = replace(
        DENSE,
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        vocab_size=128256,
    )
    assert parameters(llama) == pytest.approx(8.03e9, rel=0.001)  # Llama 3.1 8B
    assert cache_bytes_per_token(llama, 2.0) == 131072
    assert min_devices(serving("vllm", model=llama, memory=16 * 2**30)) == 2
    assert min_devices(serving("vllm", model=llama, memory=80 * 2**30)) == 1
    assert min_devices(serving("vllm", model=llama, memory=2**30, devices=4)) == 4


def test_the_interpreter_of_a_script_is_read_in_its_first_line(tmp_path: Path) -> None:
    script = tmp_path / "serve"
    script.write_text(f"#!{sys.executable}\nprint()\n")
    assert installed.interpreter(str(script)) == sys.executable
    script.write_text("#!/bin/sh\nexec vllm\n")
    assert installed.interpreter(str(script)) is None
    script.write_bytes(b"\x7fELF\x02\x01")
    assert installed.interpreter(str(script)) is None
    assert installed.interpreter(sys.executable) == sys.executable
    assert installed.package_folders(str(script)) == ()


def test_the_version_of_a_package_comes_from_the_interpreter() -> None:
    assert installed.package_version(sys.executable, "no-such-package", "pytest") == pytest.__version__
    assert installed.package_version(sys.executable, "no-such-package") == ""


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("0.11.2rc1+cpu", (0, 11, 2)), ("v0.5", (0, 5, 0)), ("nightly-5b8c", None), ("", None)],
)
def test_a_release_is_read_from_unusual_versions(version: str, numbers: tuple[int, ...] | None) -> None:
    assert installed.release(version) == numbers


def test_a_missing_program_is_reported_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(NoDevice, match="no-such-engine"):
        installed.find_command(serving("vllm", command=("no-such-engine", "serve")).spec, ("vllm", "serve"))
    (tmp_path / "run").touch(mode=0o755)
    spec = serving("vllm", command=("./run", "x"), directory=str(tmp_path)).spec
    assert installed.find_command(spec, ("vllm",)) == (str(tmp_path / "run"), "x")


LLAMA_LOG = """\
load_tensors:   CPU_Mapped model buffer size =    51.00 MiB
load_tensors:        CUDA0 model buffer size =  2048.00 MiB
load_tensors:        CUDA1 model buffer size =  1024.00 MiB
llama_kv_cache:      CUDA0 KV buffer size =   512.00 MiB
llama_kv_cache:      CUDA0 KV buffer size =   256.00 MiB
llama_kv_cache: size =  512.00 MiB (  1024 cells,   6 layers,  4/4 seqs), K (f16):  256.00 MiB, V (f16):  256.00 MiB
sched_reserve:       CUDA0 compute buffer size =   102.40 MiB
"""
VLLM_LOG = """\
(EngineCore_DP0 pid=2) INFO 10-06 12:00:31 [gpu_model_runner.py:3480] Model loading took 15.27 GiB and 3.9 seconds
(EngineCore_DP0 pid=2) INFO 10-06 12:00:31 [gpu_worker.py:721] Available KV cache memory: 55.23 GiB
(EngineCore_DP0 pid=2) INFO 10-06 12:00:31 [kv_cache_utils.py:1087] GPU KV cache size: 402,176 tokens
(EngineCore_DP0 pid=2) INFO 10-06 12:00:40 [gpu_model_runner.py:3480] Graph capturing finished in 8 secs, took 0.31 GiB
"""
SGLANG_LOG = """\
[2025-11-04 05:27:13 TP0] Load weight end. type=LlamaForCausalLM, avail mem=75.11 GB, mem usage=15.02 GB.
[2025-11-04 05:27:13 TP0] KV Cache is allocated. #tokens: 524288, K size: 17.16 GB, V size: 17.16 GB
[2025-11-04 05:27:32 TP0] Capture cuda graph end. Time elapsed: 8.04 s. mem usage=0.80 GB. avail mem=10.30 GB.
[2025-11-04 05:27:32 TP0] max_total_num_tokens=524288, chunked_prefill_size=8192, max_running_requests=2048
"""


@pytest.mark.parametrize(
    ("engine", "log", "reported"),
    [
        (
            LLAMACPP,
            LLAMA_LOG,
            {"weights_gib": 2.0, "kv_cache_gib": 0.75, "compute_gib": 0.1, "kv_cache_tokens": 4096.0},
        ),
        (
            VLLM,
            VLLM_LOG,
            {"weights_gib": 15.27, "kv_cache_gib": 55.23, "graphs_gib": 0.31, "kv_cache_tokens": 402176.0},
        ),
        (
            SGLANG,
            SGLANG_LOG,
            {"weights_gib": 15.02, "kv_cache_gib": 34.32, "graphs_gib": 0.8, "kv_cache_tokens": 524288.0},
        ),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_memory_lines_of_engine_logs_are_read(engine: Engine, log: str, reported: dict[str, float]) -> None:
    assert engine.reports.memory(log) == pytest.approx(reported)
    assert engine.reports.memory("") == {}
    assert set(reported) <= {"weights_gib", "kv_cache_gib", "graphs_gib", "compute_gib", "kv_cache_tokens"}
