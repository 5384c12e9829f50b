from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flagcore.domain.launch import Exit, classify
from flagcore.domain.serving import Load
from flagcore.domain.trial import TrialState
from flagcore.engines.serving.launch.server import PORT
from flagcore.engines.serving.space.hardware import Hardware
from flagcore.engines.serving.space.placement import placements
from flagcore.engines.serving.trial.loads import shares
from flagcore.engines.serving.vllm.profile import WORKLOAD as ENGINE
from flagcore.errors import SpecError
from tests.engines.serving.engines.tasks import LOAD, broken, merged, row, serving, space_of
from tests.served import costs
from tests.small import DENSE, EXPERTS

GIB = 2**30
COMMAND = ("/bin/echo", "serve")
MLA = replace(
    DENSE,
    multi_latent_attention=True,
    num_query_groups=4,
    kv_lora_rank=32,
    qk_head_dim=16,
    qk_pos_emb_head_dim=8,
    v_head_dim=16,
)
METRICS = (
    'vllm:cache_config_info{block_size="64",enable_prefix_caching="False",engine="0",gpu_memory_utilization="0.92",'
    'num_gpu_blocks="16384"} 1.0\nvllm:num_preemptions_total{engine="0",model_name="m"} 3.0\n'
)
LOG = """
(APIServer pid=7) INFO [api_utils.py:286] non-default args: {'model': 'hf', 'max_num_seqs': 16, 'max_model_len': 2048}
(APIServer pid=7) INFO 11-20 19:18:15 [scheduler.py:307] Chunked prefill is enabled with max_num_batched_tokens=512.
(EngineCore pid=9) INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: max_seq_len=2048, \
tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1, enforce_eager=True, kv_cache_dtype=auto, \
enable_prefix_caching=False, enable_chunked_prefill=True, pooler_config=None
"""


def cards(**arguments: Any) -> Any:
    return serving("vllm", **{"weights": "hf", "command": COMMAND, "engine_version": "0.32.0", **arguments})


def cores(**arguments: Any) -> Any:
    return cards(**{"on_cores": True, "devices": 2, **arguments})


def server(task: Any, index: int = 0, **values: Any) -> Any:
    placement = placements(task, {**ENGINE.defaults(task), **values})[index]
    return ENGINE.server(task, placement.values, Hardware.of(task).cores(placement.first, placement.width))


def settings(task: Any, **values: Any) -> Any:
    return ENGINE.settings(task, row(ENGINE, task, **values))


def test_unset_arguments_have_vllms_defaults() -> None:
    assert server(cards()).argv == ("/bin/echo", "serve", "hf", "--host", "127.0.0.1", "--port", PORT)
    assert broken(ENGINE, cards()) == []
    assert broken(ENGINE, cores()) == []


def test_knobs_reach_vllm_in_its_spelling() -> None:
    words = server(
        cards(),
        tensor_model_parallel_size=2,
        block_size=32,
        max_num_seqs=64,
        gpu_memory_utilization="0.9",
        kv_cache_type="fp8",
        enforce_eager=True,
        enable_prefix_caching=False,
        context_len=4096,
    ).argv[7:]
    assert " ".join(words) == (
        "--tensor-parallel-size 2 --block-size 32 --max-num-seqs 64 --max-model-len 4096 --gpu-memory-utilization 0.9 "
        "--kv-cache-dtype fp8 --enforce-eager --no-enable-prefix-caching"
    )


def test_expert_parallelism_is_a_switch_over_all_devices_of_an_instance() -> None:
    task = cards(model=EXPERTS)
    assert broken(ENGINE, task, expert_model_parallel_size=4, tensor_model_parallel_size=2, data_parallel_size=2) == []
    assert "expert_parallel" in broken(ENGINE, task, expert_model_parallel_size=2, tensor_model_parallel_size=1)
    assert "experts_exist" in broken(ENGINE, cards(), expert_model_parallel_size=2, tensor_model_parallel_size=2)
    words = server(task, expert_model_parallel_size=2, tensor_model_parallel_size=2).argv
    assert "--enable-expert-parallel" in words
    assert "--enable-expert-parallel" not in server(task, tensor_model_parallel_size=2).argv


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        ("cards", {"tensor_model_parallel_size": 4, "instances": 2}),
        ("attention_heads", {"tensor_model_parallel_size": 3}),
        ("pipeline_layers", {"pipeline_model_parallel_size": 8}),
        ("block_size", {"block_size": 8}),
        ("tokens_hold_sequences", {"max_num_batched_tokens": 8, "max_num_seqs": 16}),
        ("tokens_hold_sequences", {"max_num_seqs": 100_000}),
        ("whole_prompts", {"enable_chunked_prefill": False, "max_num_batched_tokens": 512, "context_len": 1024}),
        ("eager_has_no_graphs", {"enforce_eager": True, "cudagraph_mode": "FULL"}),
        ("context_length", {"context_len": 191}),
    ],
)
def test_settings_that_vllm_refuses_are_illegal(rule: str, values: dict[str, Any]) -> None:
    assert rule in broken(ENGINE, cards(), **values)


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        ("block_size", {"block_size": 16}),
        ("pipeline_on_cores", {"pipeline_model_parallel_size": 2}),
        ("data_on_cores", {"data_parallel_size": 2}),
        ("threads_on_cores", {"threads": 2, "instances": 2}),
        ("cards", {"tensor_model_parallel_size": 2, "instances": 2}),
    ],
)
def test_settings_that_the_cpu_build_does_not_support_are_illegal_on_cores(rule: str, values: dict[str, Any]) -> None:
    assert rule in broken(ENGINE, cores(), **values)


def test_the_context_rule_counts_prefix_and_the_longest_draw_of_lengths() -> None:
    task = cards(loads=(Load(input_len=100, output_len=10, prefix_len=20, range_spread=0.5),))
    assert "context_length" in broken(ENGINE, task, context_len=184)
    assert "context_length" not in broken(ENGINE, task, context_len=185)


def test_block_sizes_follow_the_attention_backend() -> None:
    flash = cards(engine_args={"attention_backend": "FLASHMLA"})
    assert "block_size" in broken(ENGINE, flash, block_size=32)
    assert "block_size" not in broken(ENGINE, flash, block_size=64)
    assert "block_size" in broken(ENGINE, cores(model=MLA), block_size=32)
    assert "block_size" not in broken(ENGINE, cores(model=MLA), block_size=16)


@pytest.mark.parametrize(
    ("memory", "version", "tokens", "seqs"),
    [
        (40 * GIB, "0.32.0", 2048, 256),
        (80 * GIB, "0.32.0", 2048, 256),  # no fp8 rate is known of this chip: the older generation
        (200 * GIB, "0.32.0", 16384, 1024),
        (200 * GIB, "0.19.0", 2048, 256),
    ],
)
def test_unset_batch_sizes_depend_on_memory_and_version(memory: int, version: str, tokens: int, seqs: int) -> None:
    found = settings(cards(memory=memory, engine_version=version))
    assert (found.max_batched_tokens.item(), found.max_running.item()) == (tokens, seqs)


def test_a_chip_with_fp8_and_70_gib_gets_larger_batches() -> None:
    task = cards(memory=80 * GIB)
    group = task.cluster.groups[0]
    rates = {**group.chip.dense_flops_per_second, "fp8": group.chip.dense_flops_per_second["bf16"]}
    chip = replace(group.chip, dense_flops_per_second=rates)
    task = replace(task, cluster=replace(task.cluster, groups=(replace(group, chip=chip),)))
    found = settings(task)
    assert (found.max_batched_tokens.item(), found.max_running.item()) == (8192, 1024)
    assert merged(ENGINE, task, max_num_batched_tokens=8192, max_num_seqs=1024) == merged(ENGINE, task)


def test_batch_sizes_on_cores_grow_with_the_number_of_ranks() -> None:
    found = settings(cores(), tensor_model_parallel_size=2)
    assert (found.max_batched_tokens.item(), found.max_running.item()) == (4096, 256)
    assert settings(cores()).block_size.item() == 128


def test_the_memory_share_is_larger_since_graphs_are_included() -> None:
    assert settings(cards(engine_version="0.20.2")).memory_fraction.item() == 0.9
    assert settings(cards(engine_version="0.21.0")).memory_fraction.item() == 0.92
    assert settings(cards(), gpu_memory_utilization="0.8").memory_fraction.item() == 0.8
    assert settings(cards(engine_args={"gpu-memory-utilization": 0.85})).memory_fraction.item() == 0.85


def test_shares_of_memory_are_numbers_or_words() -> None:
    assert ENGINE.parse({"gpu_memory_utilization": 0.9}) == {"gpu_memory_utilization": "0.9"}
    task = cards(space={"gpu_memory_utilization": (0.9, "0.95")})
    assert space_of(ENGINE, task).choices["gpu_memory_utilization"] == (None, "0.9", "0.95")
    with pytest.raises(SpecError, match="above 0"):
        ENGINE.parse({"gpu_memory_utilization": 1.5})


def test_an_unparsable_version_is_treated_as_the_newest() -> None:
    assert settings(cards(engine_version="nightly-5b8c30d62b754b57")).memory_fraction.item() == 0.92


def test_a_job_record_needs_no_knobs_beyond_its_settings() -> None:
    columns = {name: row(ENGINE, cards())[name] for name in ("tensor_model_parallel_size", "instances")}
    assert ENGINE.settings(cards(weights=None, command=None), columns).chunked.item() == 1


def test_vllms_default_values_are_merged_with_not_set() -> None:
    task = cores()
    assert merged(ENGINE, task, block_size=128, max_num_batched_tokens=2048, kv_cache_type="auto") == merged(
        ENGINE, task
    )
    assert merged(ENGINE, task, tensor_model_parallel_size=2, max_num_batched_tokens=2048)["max_num_batched_tokens"]
    assert merged(ENGINE, cards(), block_size=128) != merged(ENGINE, cards())


def test_the_cache_of_a_server_on_cores_is_always_bounded() -> None:
    assert server(cores()).environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    own = cores(engine_args={"kv_cache_memory_bytes": GIB})
    assert "VLLM_CPU_KVCACHE_SPACE" not in server(own).environment
    assert settings(own).cache_bytes.item() == GIB / 2
    large = replace(DENSE, num_layers=64, num_query_groups=32, num_attention_heads=32, kv_channels=128)
    large_task = cores(model=large, loads=(Load(input_len=4000, output_len=96, concurrency=4),), memory=64 * GIB)
    assert server(large_task).environment["VLLM_CPU_KVCACHE_SPACE"] == "32"  # 2 x 4 x 4096 tokens of 1 MiB
    assert settings(large_task).cache_bytes.item() == 32 * GIB / 2


def test_ranks_on_cores_are_bound_individually_and_a_single_rank_is_not() -> None:
    usable = sorted(os.sched_getaffinity(0))[:2]
    first, second = map(str, usable)
    bound = "VLLM_CPU_OMP_THREADS_BIND"
    assert bound not in server(cores()).environment
    assert server(cores(), tensor_model_parallel_size=2).environment[bound] == f"{first}|{second}"
    assert server(cores(), instances=2, index=1).environment[bound] == second
    assert server(cores(), threads=2).environment[bound] == f"{first},{second}"


def test_flags_that_flagcore_gives_itself_are_refused_with_a_reason() -> None:
    for flag in ("port", "model", "host", "api_key", "disable-log-stats"):
        with pytest.raises(SpecError) as error:
            ENGINE.axes(cards(engine_args={flag: "x"}))
        assert error.value.key == f"serve.engine_args.{flag.replace('_', '-')}"


def test_values_that_a_build_registers_are_passed_on() -> None:
    arguments = {"attention-backend": "VENDOR_ATTN", "quantization": "vendor_int8"}
    parsed = ENGINE.program.split(cards(engine_args=arguments).spec)
    assert (parsed.fixed, parsed.others) == ({}, arguments)


def test_all_invalid_values_of_engine_args_are_reported() -> None:
    arguments = {"max_num_seqs": -5, "enforce_eager": 7, "block_size": 16}
    with pytest.raises(SpecError) as error:
        ENGINE.axes(cards(engine_args=arguments))
    assert [(each.key, each.value) for each in error.value.problems] == [
        ("serve.engine_args.max_num_seqs", -5),
        ("serve.engine_args.enforce_eager", 7),
    ]


def test_a_removed_flag_is_reported_with_its_replacement() -> None:
    with pytest.raises(SpecError, match="kv-offloading-size") as error:
        ENGINE.axes(cards(engine_args={"swap_space": 4}))
    assert error.value.key == "serve.engine_args.swap-space"
    assert server(cards(engine_version="0.17.1", engine_args={"swap_space": 4})).argv[-2:] == ("--swap-space", "4")


@pytest.fixture
def install(tmp_path: Path) -> Path:
    """A made-up environment with vLLM's program, metadata and source of flags."""
    packages = tmp_path / "lib/python3.11/site-packages"
    for name in ("vllm/engine/arg_utils.py", "vllm/entrypoints/openai/cli_args.py", "../../../bin/vllm"):
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "pyvenv.cfg").touch()
    (packages / "vllm/engine/arg_utils.py").write_text('parser.add_argument("--max-logprobs", "--dtype")')
    (packages / "vllm/entrypoints/openai/cli_args.py").write_text("class FrontendArgs:\n    chat_template: str = ''\n")
    python = tmp_path / "bin/python3"
    python.symlink_to("/bin/true")
    program = tmp_path / "bin/vllm"
    program.write_text(f"#!{python}\n")
    program.chmod(0o755)
    return program


def distribution(program: Path, name: str, version: str) -> None:
    folder = program.parent.parent / f"lib/python3.11/site-packages/{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_the_version_comes_from_the_interpreter_that_would_start_it(install: Path) -> None:
    distribution(install, "vllm", "0.17.1")
    task = cards(engine_version=None, command=(str(install), "serve"))
    assert ENGINE.program.version(task.spec) == "0.17.1"
    assert settings(task).memory_fraction.item() == 0.9
    assert ENGINE.program.version(cards(engine_version=None, command=("/no/such/vllm",)).spec) == ""


def test_another_release_than_the_installed_one_can_be_planned_but_not_run(install: Path, tmp_path: Path) -> None:
    distribution(install, "vllm", "0.17.1")
    (tmp_path / "config.json").write_text("{}")

    def ready(version: str) -> None:
        ENGINE.program.ready(cards(weights=str(tmp_path), engine_version=version, command=(str(install), "serve")).spec)

    ready("0.17.1")
    with pytest.raises(SpecError, match=r"engine_version = '0.32.0' .*0\.17\.1"):
        ready("0.32.0")


def test_a_flag_that_only_an_older_release_has_is_taken_there(install: Path) -> None:
    distribution(install, "vllm", "0.17.1")
    source = install.parent.parent / "lib/python3.11/site-packages/vllm/engine/arg_utils.py"
    source.write_text('parser.add_argument("--swap-space")')
    arguments = cards(engine_version=None, command=(str(install), "serve"), engine_args={"swap_space": 4})
    assert server(arguments).argv[-2:] == ("--swap-space", "4")


def test_a_misspelt_flag_is_found_in_the_source_of_the_installed_version(install: Path) -> None:
    command = (str(install), "serve")
    with pytest.raises(SpecError, match=r"did you mean max-logprobs\?") as error:
        ENGINE.axes(cards(command=command, engine_args={"max_logprob": 5}))
    assert error.value.key == "serve.engine_args.max-logprob"
    task = cards(command=command, engine_args={"chat_template": "x", "no_dtype": True, "max_logprobs": 3})
    assert server(task).argv[-5:] == ("--chat-template", "x", "--no-dtype", "--max-logprobs", "3")


def test_servers_cannot_be_started_without_a_directory_of_weights(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        ENGINE.program.ready(cards(weights=None).spec)
    assert "serve.weights" in refused.value.key
    with pytest.raises(SpecError, match=r"config\.json"):
        ENGINE.program.ready(cards(weights=str(tmp_path)).spec)


def test_an_unreachable_precision_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    def ready(**arguments: Any) -> None:
        ENGINE.program.ready(cards(weights=str(tmp_path), precision="fp8", **arguments).spec)

    with pytest.raises(SpecError) as refused:
        ready()
    assert refused.value.key == "serve.precision"
    ready(engine_args={"quantization": "fp8"})
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    ready()


def test_values_of_log_and_metrics_are_read_back() -> None:
    assert ENGINE.reports.effective(lambda path: METRICS, LOG) == {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "data_parallel_size": 1,
        "context_len": 2048,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "kv_cache_type": "auto",
        "max_num_batched_tokens": 512,
        "max_num_seqs": 16,
        "block_size": 64,
        "gpu_memory_utilization": "0.92",
    }
    assert ENGINE.reports.read_counters(lambda path: METRICS) == {"preemptions": 3.0}


def ended(log: str) -> tuple[TrialState, str]:
    return classify(Exit(code=1, ended_by=None, duration_s=1.0), log, ENGINE.reports.failures)


LAST = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("(EngineCore pid=1) ValueError: No common block size for 16 (CPU_ATTN: [MultipleOf(32)])", TrialState.INVALID),
        (
            "ValueError: max_num_batched_tokens (8) must be greater than or equal to max_num_seqs (16).",
            TrialState.INVALID,
        ),
        ("User-specified max_model_len (99999) is greater than the derived max_model_len (8192)", TrialState.INVALID),
        ("vllm: error: unrecognized arguments: --no-such-flag 3", TrialState.INVALID),
        ("AssertionError: Not enough allowed NUMA nodes to bind threads of 2 local CPUWorkers.", TrialState.INVALID),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", TrialState.OUT_OF_MEMORY),
        ("Available memory on node 0 (14.5/16.84 GiB) is less than requested memory for kv", TrialState.OUT_OF_MEMORY),
        ("ValueError: Free memory on device cuda:0 is less than desired GPU memory utilization", TrialState.FAILED),
        ("RuntimeError: operator torchvision::nms does not exist", TrialState.FAILED),
        ("importlib.metadata.PackageNotFoundError: No package metadata was found for vllm", TrialState.FAILED),
        ("(EngineCore pid=3) KeyError: 'rope'", TrialState.FAILED),
    ],
)
def test_the_line_that_gives_the_reason_is_found_before_the_last_one(line: str, state: TrialState) -> None:
    found, reason = ended(f"INFO start\n{line}\n(APIServer pid=1) {LAST}\n")
    assert found is state
    assert line[:60] in reason


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("RuntimeError: operator torchvision::nms does not exist", "pip uninstall -y torchvision"),
        ("importlib.metadata.PackageNotFoundError: No package metadata was found for vllm", "dist-info"),
    ],
)
def test_a_broken_install_of_the_cpu_build_is_reported_with_its_fix(line: str, fix: str) -> None:
    assert fix in ended(line)[1]


def test_a_failure_on_a_busy_device_is_not_attributed_to_the_candidate() -> None:
    line = "ValueError: Free memory on device cuda:0 (3/80 GiB) on startup is less than desired GPU memory utilization"
    assert re.search("another process", ended(line)[1])


def test_a_knob_that_the_release_does_not_have_is_an_error_and_auto_leaves_it_out() -> None:
    for options, key in (
        ({"space": {"moe_backend": ("triton",)}}, "auto_tuner.space.moe_backend"),
        ({"engine_args": {"moe_backend": "triton"}}, "serve.engine_args.moe_backend"),
        ({"baseline": {"moe_backend": "triton"}}, "auto_tuner.baseline.moe_backend"),
    ):
        with pytest.raises(SpecError) as error:
            ENGINE.axes(cards(engine_version="0.16.0", **options))
        assert (error.value.key, error.value.value) == (key, "triton")
        ENGINE.axes(cards(engine_version="0.17.0", **options))
    axes = ENGINE.axes(cards(engine_version="0.10.0", space={"cudagraph_mode": "auto"}))
    assert next(axis.values for axis in axes if axis.knob == "cudagraph_mode") == (None,)


def test_flags_follow_the_release() -> None:
    values = {"compilation_mode": "3", "attention_backend": "FLASHINFER"}
    newer, older = (server(cards(engine_version=version), **values) for version in ("0.13.0", "0.11.0"))
    assert {"--compilation-config.mode", "--attention-backend"} <= set(newer.argv)
    assert "--compilation-config.level" in older.argv
    assert "--attention-backend" not in older.argv
    assert older.environment["VLLM_ATTENTION_BACKEND"] == "FLASHINFER"
    assert "VLLM_ATTENTION_BACKEND" not in newer.environment


def test_both_flags_of_asynchronous_scheduling_set_the_knob() -> None:
    for name, value in (("async-scheduling", "on"), ("no-async-scheduling", "off")):
        task = cards(engine_args={name: True})
        assert ENGINE.program.parse(task.spec).fixed == {"async_scheduling": value}
        assert f"--{name}" in server(task, async_scheduling=value).argv


def test_synchronous_scheduling_and_old_releases_are_predicted_with_the_host_time() -> None:
    def rate(version: str, value: str | None) -> float:
        task = cards(engine_version=version)
        return float(
            ENGINE.predict(task, row(ENGINE, task, async_scheduling=value), costs()).figures["requests_per_s"][0]
        )

    assert rate("0.32.0", "off") < rate("0.32.0", None) == rate("0.32.0", "on")
    assert rate("0.12.0", None) == rate("0.12.0", "off") < rate("0.12.0", "on")


def test_speculation_is_predicted_only_with_a_known_acceptance() -> None:
    values = {"speculation": "ngram", "speculative_tokens": 3}

    def rate(acceptance: float | None, **values: str | int) -> float:
        task = cards(loads=(replace(LOAD, acceptance=acceptance),))
        return float(ENGINE.predict(task, row(ENGINE, task, **values), costs()).figures["requests_per_s"][0])

    assert rate(None, **values) == rate(0.8) == rate(None)
    assert rate(0.0, **values) < rate(0.8) < rate(0.5, **values) < rate(0.8, **values)
    assert ENGINE.spec_warnings(cards(space={"speculation": (None, "ngram")}).spec)
    assert not ENGINE.spec_warnings(cards().spec)


def test_the_draft_model_is_that_of_candidates_with_speculation() -> None:
    def flags(space: dict[str, Any], **values: str | int) -> list[str]:
        task = cards(engine_args={"speculative-config.model": "draft"}, space=space)
        return [word for word in server(task, **values).argv if word.startswith("--speculative-config")]

    compared = {"speculation": (None, "draft_model")}
    assert flags(compared) == []
    assert len(flags(compared, speculation="draft_model", speculative_tokens=3)) == 3
    assert flags({}) == ["--speculative-config.model"]


def test_weights_that_are_converted_to_fp8_are_predicted_like_weights_in_fp8() -> None:
    wide, narrow = cards(), cards(precision="fp8")
    converted = ENGINE.predict(wide, row(ENGINE, wide, quantization="fp8"), costs())
    stored, plain = (ENGINE.predict(task, row(ENGINE, task), costs()) for task in (narrow, wide))
    assert converted.step_time_s == stored.step_time_s < plain.step_time_s
    assert converted.figures["kv_cache_gib"] == stored.figures["kv_cache_gib"] > plain.figures["kv_cache_gib"]


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        ("speculation_needs_tokens", {"speculation": "ngram"}),
        ("speculation_needs_a_draft", {"speculation": "eagle", "speculative_tokens": 3}),
        ("no_prediction_layers", {"speculation": "mtp", "speculative_tokens": 1}),
        ("asynchronous_drafts", {"speculation": "ngram", "speculative_tokens": 3, "async_scheduling": "on"}),
        ("load_balancing", {"enable_eplb": True}),
    ],
)
def test_combinations_that_the_new_knobs_do_not_allow(rule: str, values: dict[str, Any]) -> None:
    assert broken(ENGINE, cards(), **values) == [rule]


def test_the_path_of_a_draft_model_is_a_key_of_the_speculative_config() -> None:
    task = cards(engine_args={"speculative-config.model": "/draft", "speculative-config.prompt_lookup_max": 4})
    assert broken(ENGINE, task, speculation="eagle", speculative_tokens=3) == []
    argv = server(task, speculation="eagle", speculative_tokens=3).argv
    assert argv[argv.index("--speculative-config.model") + 1] == "/draft"
    assert {"--speculative-config.num_speculative_tokens", "--speculative-config.prompt_lookup_max"} <= set(argv)


def test_shares_of_a_load_are_increases_of_counters() -> None:
    start = {"drafted_tokens": 10.0, "accepted_tokens": 10.0, "prefix_tokens_asked": 5.0, "prefix_tokens_found": 0.0}
    end = {"drafted_tokens": 30.0, "accepted_tokens": 15.0, "prefix_tokens_asked": 5.0, "prefix_tokens_found": 0.0}
    assert shares(ENGINE.reports, start, end) == {"acceptance_rate": 0.25}
    assert shares(ENGINE.reports, start, {**end, "accepted_tokens": 2.0}) == {}  # the server has begun to count anew


def test_settings_of_the_new_knobs_are_read_from_the_log() -> None:
    log = (
        "Asynchronous scheduling is disabled.\n(EngineCore pid=9) INFO [core.py:133] Initializing a V1 LLM engine "
        "(v0.28.0) with config: model='m', speculative_config=SpeculativeConfig(method='ngram', model=None, "
        "num_spec_tokens=3), tokenizer='m', quantization=fp8, quantization_config=None, compilation_config="
        "{'mode': <CompilationMode.VLLM_COMPILE: 3>}\nUsing FLASH_ATTN attention backend out of potential backends: []"
    )
    assert ENGINE.reports.effective(lambda path: "", log) == {
        "async_scheduling": "off",
        "speculation": "ngram",
        "speculative_tokens": 3,
        "quantization": "fp8",
        "compilation_mode": "3",
        "attention_backend": "FLASH_ATTN",
    }
