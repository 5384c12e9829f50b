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
from flagcore.engines.serving.launch.server import PORT
from flagcore.engines.serving.sglang.profile import WORKLOAD as ENGINE
from flagcore.engines.serving.space.hardware import Hardware
from flagcore.engines.serving.space.placement import placements
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


@pytest.mark.parametrize(
    ("version", "words"),
    [("0.5.21", "--dp-size 2 --enable-dp-attention"), ("0.5.22", "--attn-dp-size 2"), ("", "--enable-dp-attention")],
)
def test_attention_dp_is_inside_sglangs_tp_size_in_old_and_new_spelling(version: str, words: str) -> None:
    argv = server(cards(engine_version=version), tensor_model_parallel_size=2, data_parallel_size=2).argv
    assert argv[8:10] == ("--tp-size", "4")
    assert " ".join(argv).endswith(words)


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
    reported = ENGINE.reports.effective(lambda path: json.dumps(INFO), LOG)
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

    reported = ENGINE.reports.effective(fetch, "")
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
    found, reason = classify(Exit(code=1, ended_by=None, duration_s=1.0), log, ENGINE.reports.failures)
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


def test_a_server_of_unset_drafted_tokens_lets_sglang_choose_them() -> None:
    task = cards(engine_args={"speculative_algorithm": "EAGLE3", "speculative-draft-model-path": "draft"})
    assert broken(ENGINE, task) == []
    assert settings(task).drafted.item() == 3
    tree = {"speculative-num-steps": 5, "speculative-eagle-topk": 4, "speculative-num-draft-tokens": 8}
    task = cards(engine_args={**task.spec.serve.engine_args, **tree})
    assert settings(task).drafted.item() == 5
    assert server(task).argv[-6:] == tuple(str(word) for name, value in tree.items() for word in (f"--{name}", value))


def test_eagle_drafts_with_the_models_own_layers_if_it_has_them() -> None:
    own_layers = cards(model=replace(DENSE, mtp_num_layers=1))
    assert "speculation_needs_a_draft" not in broken(ENGINE, own_layers, speculation="EAGLE", speculative_tokens=1)
    assert "speculation_needs_a_draft" in broken(ENGINE, cards(), speculation="EAGLE", speculative_tokens=1)


@pytest.mark.parametrize(
    ("arguments", "fixed"),
    [
        ({"tp": 4, "dp": 2}, {"tensor_model_parallel_size": 4, "instances": 2}),
        (
            {"tp": 4, "dp_size": 2, "enable_dp_attention": True},
            {"tensor_model_parallel_size": 2, "data_parallel_size": 2},
        ),
        ({"tp": 4, "dp": 1, "enable-dp-attention": True}, {"tensor_model_parallel_size": 4}),
        ({"tp_size": 4, "enable_ep_moe": True}, {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 4}),
        (
            {"speculative-algorithm": "ngram", "speculative-num-draft-tokens": 8},
            {"speculation": "NGRAM", "speculative_tokens": 8},
        ),
        (
            {"speculative-num-steps": 2, "speculative-eagle-topk": 1, "speculative-num-draft-tokens": 3},
            {"speculative_tokens": 2},
        ),
        ({"mem-fraction": 0.75}, {"mem_fraction_static": "0.75"}),
    ],
)
def test_flags_that_together_have_the_meaning_of_a_knob_set_it(arguments: Any, fixed: Any) -> None:
    found = ENGINE.program.parse(cards(engine_args=arguments).spec)
    assert (found.fixed, found.others) == (fixed, {})


@pytest.mark.parametrize(
    ("version", "values", "is_broken"),
    [
        ("0.5.2", {"speculation": "NGRAM"}, True),
        ("0.5.3", {"speculation": "NGRAM"}, False),
        ("0.5.8", {"kv_cache_type": "fp4_e2m1"}, False),
        ("0.5.21", {"kv_cache_type": "fp4_e2m1"}, True),
        ("0.5.19", {"quantization": "marlin"}, False),
        ("0.5.20", {"quantization": "marlin"}, True),
        ("", {"speculation": "NGRAM"}, False),
    ],
)
def test_values_that_a_release_does_not_have_are_illegal(version: str, values: Any, *, is_broken: bool) -> None:
    assert ("value_release" in broken(ENGINE, cards(engine_version=version), **values)) is is_broken


def test_expert_parallelism_of_early_releases_is_a_switch() -> None:
    values = {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 4}
    early, later = (cards(model=EXPERTS, engine_version=version) for version in ("0.4.9.post6", "0.4.10"))
    assert "--enable-ep-moe" in server(early, **values).argv
    assert "--enable-ep-moe" not in server(later, **values).argv
    half = {**values, "expert_model_parallel_size": 2}
    assert "expert_switch" in broken(ENGINE, early, **half)
    assert "expert_switch" not in broken(ENGINE, later, **half)


def test_the_default_order_of_requests_is_that_of_the_release() -> None:
    early, later = (cards(engine_version=version) for version in ("0.4.3", "0.4.4"))
    assert merged(ENGINE, early, schedule_policy="lpm") == merged(ENGINE, early)
    assert merged(ENGINE, later, schedule_policy="lpm") != merged(ENGINE, later)


def test_the_steps_of_a_tree_of_drafts_are_read_back() -> None:
    info = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 5, "speculative_num_draft_tokens": 8}
    assert ENGINE.reports.effective(lambda path: json.dumps(info), "")["speculative_tokens"] == 5
