from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flagcore.domain.launch import Exit, classify
from flagcore.domain.serving import Load
from flagcore.domain.trial import TrialState
from flagcore.engines.serving.common.hardware import Hardware
from flagcore.engines.serving.common.heterogeneous import placements
from flagcore.engines.serving.settings import PORT
from flagcore.engines.serving.sglang.profile import WORKLOAD as ENGINE
from flagcore.errors import NoDevice, SpecError
from tests.engines.serving.engines.tasks import broken, merged, row, serving
from tests.small import DENSE, EXPERTS

GIB = 2**30
INFO = {
    "tp_size": 4,
    "pp_size": 1,
    "ep_size": 2,
    "attn_dp_size": 2,
    "page_size": 64,
    "chunked_prefill_size": 4096,
    "max_prefill_tokens": 16384,
    "max_running_requests": None,
    "mem_fraction_static": 0.85,
    "kv_cache_dtype": "auto",
    "schedule_policy": "lpm",
    "disable_radix_cache": True,
    "disable_cuda_graph": False,
}
LOG = (
    "[2026-11-20] max_total_num_tokens=65536, chunked_prefill_size=4096, max_running_requests=2048, context_len=8192\n"
)


def cards(**arguments: Any) -> Any:
    return serving("sglang", **{"weights": "hf", "command": ("/bin/echo",), "engine_version": "0.5.23", **arguments})


def cores(**arguments: Any) -> Any:
    return cards(**{"on_cores": True, "devices": 2, **arguments})


def server(task: Any, index: int = 0, **values: Any) -> Any:
    placement = placements(task, {**ENGINE.defaults(task), **values})[index]
    return ENGINE.server(task, placement.values, Hardware.of(task).cores(placement.first, placement.width))


def settings(task: Any, **values: Any) -> Any:
    return ENGINE.settings(task, row(ENGINE, task, **values))


def test_unset_arguments_have_sglangs_defaults() -> None:
    expected = ("/bin/echo", "--model-path", "hf", "--host", "127.0.0.1", "--port", PORT, "--enable-metrics")
    assert server(cards()).argv == expected
    assert broken(ENGINE, cards()) == []


def test_knobs_reach_sglang_in_its_spelling() -> None:
    words = server(
        cards(),
        tensor_model_parallel_size=2,
        page_size=64,
        chunked_prefill_size=-1,
        max_running_requests=8,
        mem_fraction_static="0.8",
        enable_prefix_caching=False,
        enforce_eager=True,
        schedule_policy="lpm",
    ).argv[8:]
    assert " ".join(words) == (
        "--tp-size 2 --page-size 64 --chunked-prefill-size -1 --max-running-requests 8 --mem-fraction-static 0.8 "
        "--disable-radix-cache --disable-cuda-graph --schedule-policy lpm"
    )


def test_attention_dp_is_inside_sglangs_tp_size_in_old_and_new_spelling(tmp_path: Path) -> None:
    words = server(cards(), tensor_model_parallel_size=2, data_parallel_size=2).argv
    assert words[8:] == ("--tp-size", "4", "--dp-size", "2", "--enable-dp-attention")
    packages = tmp_path / "lib/python3.11/site-packages/sglang/srt/arg_groups/fields"
    packages.mkdir(parents=True)
    (tmp_path / "pyvenv.cfg").touch()
    (packages / "parallel.py").write_text("class Parallel:\n    attn_dp_size: int = 1\n    tp_size: int = 1\n")
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python3"
    python.symlink_to("/bin/true")
    task = cards(command=(str(python), "-m", "sglang.launch_server"))
    words = server(task, tensor_model_parallel_size=2, data_parallel_size=2).argv
    assert words[-4:] == ("--tp-size", "4", "--attn-dp-size", "2")


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        ("cards", {"tensor_model_parallel_size": 2, "data_parallel_size": 4}),
        ("attention_heads", {"tensor_model_parallel_size": 3}),
        ("chunk_of_pages", {"page_size": 64, "chunked_prefill_size": 96}),
        ("whole_prompts", {"chunked_prefill_size": -1, "max_prefill_tokens": 128}),
        ("context_length", {"context_len": 100}),
        ("experts_exist", {"expert_model_parallel_size": 2}),
    ],
)
def test_settings_that_sglang_refuses_are_illegal(rule: str, values: dict[str, Any]) -> None:
    assert rule in broken(ENGINE, cards(), **values)


def test_experts_are_split_over_a_divisor_of_the_devices_and_of_the_experts() -> None:
    task = cards(model=replace(EXPERTS, num_moe_experts=6))
    values = {"tensor_model_parallel_size": 2, "data_parallel_size": 2}
    assert broken(ENGINE, task, expert_model_parallel_size=2, **values) == []
    assert "expert_parallel" in broken(ENGINE, task, expert_model_parallel_size=4, **values)
    assert "expert_parallel" in broken(ENGINE, task, expert_model_parallel_size=3, **values)


def test_page_sizes_that_a_backend_would_change_are_illegal() -> None:
    task = cards(engine_args={"attention_backend": "trtllm_mla"})
    assert "page_size" in broken(ENGINE, task, page_size=16)
    assert "page_size" not in broken(ENGINE, task, page_size=32)


def test_the_cache_of_a_server_on_cores_is_always_bounded() -> None:
    words = server(cores()).argv
    assert words[-4:] == ("--device", "cpu", "--max-total-tokens", str(2 * 16 * (128 + 64)))
    assert settings(cores()).cache_bytes.item() == pytest.approx(
        2 * 16 * 192 * DENSE.num_layers * 2 * DENSE.num_query_groups * DENSE.kv_channels * 2 / 2
    )
    own = cores(engine_args={"max_total_tokens": 5000})
    assert server(own).argv.count("--max-total-tokens") == 1
    assert "--max-total-tokens" not in server(cards()).argv


@pytest.mark.parametrize(
    ("gib", "tensor", "chunk", "share"),
    [(16, 1, 2048, 0.772), (24, 1, 4096, 0.72), (80, 1, 8192, 0.836), (80, 4, 8192, 0.825), (192, 1, 16384, 0.866)],
)
def test_chunk_and_memory_share_follow_the_memory(gib: int, tensor: int, chunk: int, share: float) -> None:
    found = settings(cards(memory=gib * GIB), tensor_model_parallel_size=tensor)
    assert found.max_batched_tokens.item() == chunk
    assert found.memory_fraction.item() == pytest.approx(share, abs=0.002)


def test_a_share_that_is_set_counts() -> None:
    assert settings(cards(), mem_fraction_static="0.7").memory_fraction.item() == 0.7
    assert settings(cards(engine_args={"mem_fraction_static": 0.6})).memory_fraction.item() == 0.6


def test_attention_dp_divides_chunks_and_requests_among_its_groups() -> None:
    split = {"tensor_model_parallel_size": 1, "data_parallel_size": 4}
    found = settings(cards(), chunked_prefill_size=8192, max_running_requests=64, **split)
    assert (found.max_batched_tokens.item(), found.max_running.item()) == (2048, 16)


def test_whole_prompts_are_bounded_by_the_prefill_tokens() -> None:
    found = settings(cards(), chunked_prefill_size=-1)
    assert (found.chunked.item(), found.max_batched_tokens.item()) == (0, 16384)


def test_sglangs_default_values_are_merged_with_not_set() -> None:
    own = merged(ENGINE, cards())
    assert merged(ENGINE, cards(), page_size=1, kv_cache_type="auto", schedule_policy="fcfs") == own
    assert merged(ENGINE, cores(), enforce_eager=True) == merged(ENGINE, cores())
    assert merged(ENGINE, cards(), enforce_eager=True) != own


def test_values_of_the_server_are_read_back_under_flagcores_names() -> None:
    reported = ENGINE.effective(lambda path: json.dumps(INFO), LOG)
    assert reported == {
        "tensor_model_parallel_size": 2,
        "data_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 2,
        "page_size": 64,
        "chunked_prefill_size": 8192,
        "max_prefill_tokens": 16384,
        "max_running_requests": 4096,
        "context_len": 8192,
        "mem_fraction_static": "0.85",
        "kv_cache_type": "auto",
        "schedule_policy": "lpm",
        "enable_prefix_caching": False,
        "enforce_eager": False,
    }


def test_older_releases_answer_at_another_path() -> None:
    def fetch(path: str) -> str:
        if path != "/get_server_info":
            raise OSError("404")
        return json.dumps({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True})

    reported = ENGINE.effective(fetch, "")
    assert (reported["tensor_model_parallel_size"], reported["data_parallel_size"]) == (2, 2)


def test_flags_that_flagcore_gives_itself_are_refused() -> None:
    with pytest.raises(SpecError) as error:
        ENGINE.axes(cards(engine_args={"model_path": "x"}))
    assert error.value.key == "serve.engine_args.model-path"


def test_sizes_below_one_are_rejected() -> None:
    for values in ({"chunked_prefill_size": -2}, {"page_size": -1}):
        with pytest.raises(SpecError):
            ENGINE.parse(values)
    assert ENGINE.parse({"chunked_prefill_size": "off"}) == {"chunked_prefill_size": -1}


def test_a_tp_size_with_attention_dp_has_sglangs_meaning() -> None:
    task = cards(engine_args={"tp_size": 4, "attn_dp_size": 2})
    assert ENGINE.defaults(task)["tensor_model_parallel_size"] == 2
    assert server(task).argv[8:10] == ("--tp-size", "4")


def test_sglang_that_is_not_installed_is_reported_before_a_launch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    try:
        import sglang  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except ImportError:
        with pytest.raises(NoDevice, match="SGLang is not installed"):
            ENGINE.program.ready(serving("sglang", weights=str(tmp_path)).spec)
    with pytest.raises(SpecError) as refused:
        ENGINE.program.ready(cards(weights=None).spec)
    assert "serve.weights" in refused.value.key


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", TrialState.OUT_OF_MEMORY),
        ("torch.OutOfMemoryError: CUDA out of memory.", TrialState.OUT_OF_MEMORY),
        ("AssertionError: chunked_prefill_size must be divisible by page_size", TrialState.INVALID),
        ("launch_server.py: error: unrecognized arguments: --nope", TrialState.INVALID),
        ("KeyError: 'qk'", TrialState.FAILED),
    ],
)
def test_log_lines_are_classified(line: str, state: TrialState) -> None:
    log = f"[2026-11-20 19:00:00] start\n{line}\nReceived sigquit from a child process\n"
    found, reason = classify(Exit(code=1, ended_by=None, duration_s=1.0), log, ENGINE.program.failures)
    assert found is state
    assert line in reason


def test_an_open_loop_counts_all_requests() -> None:
    task = cores(loads=(Load(input_len=100, output_len=28, num_prompts=50, request_rate=float("inf")),))
    assert server(task).argv[-1] == str(2 * 50 * 128)


def test_drafted_tokens_are_a_chain_of_steps_except_for_ngrams() -> None:
    def flags(method: str) -> dict[str, str]:
        words = server(cards(), speculation=method, speculative_tokens=3).argv
        return {word: after for word, after in pairwise(words) if word.startswith("--speculative")}

    assert flags("NGRAM") == {"--speculative-algorithm": "NGRAM", "--speculative-num-draft-tokens": "3"}
    assert flags("EAGLE") == {
        "--speculative-algorithm": "EAGLE",
        "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "4",
    }


def test_the_names_of_methods_of_other_engines_are_accepted() -> None:
    assert ENGINE.parse({"speculation": "mtp"}) == {"speculation": "NEXTN"}
    assert "--disable-overlap-schedule" in server(cards(), async_scheduling=False).argv
    assert "--enable-hierarchical-cache" in server(cards(), hicache_size=8).argv
