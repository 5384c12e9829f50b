"""vLLM for real: its CPU build, where it is installed, with weights that it makes up itself. A start takes a minute."""

import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flagcore_importers.command import read_command
from flagcore_models.catalogue import public_model
from flagcore_models.config import model_of_config
from flagcore_models.public import find_public
from flagcore_serving.advice import spec_warnings
from flagcore_serving.job import Load
from flagcore_serving.launch.server import read_job
from flagcore_serving.space.hardware import EP, PP
from flagcore_serving.trial.__main__ import running_servers
from flagcore_serving.trial.failures import log_text
from flagcore_serving.trial.loads import LoadRunner, shares
from flagcore_serving.trial.servers import listeners
from flagcore_vllm import json_flags
from flagcore_vllm.engine import ENGINE as ENGINE

from engines.serving.tests.engines.tasks import (
    GIB,
    LOAD,
    broken,
    figures,
    merged,
    planned,
    server,
    serving,
    settings,
    started,
)
from engines.serving.tests.load.servers import send
from flagcore import api
from flagcore.domain.launch import Start
from flagcore.domain.space import Candidate
from flagcore.errors import SpecError
from flagcore.spec.models import model_from
from tests.checks import program, refuses
from tests.product.tasks import CHIP, DENSE
from tests.product.tasks import platform as small_platform


def cards(**arguments: Any) -> Any:
    return planned("vllm", **arguments)


def cores(**arguments: Any) -> Any:
    return planned("vllm", on_cores=True, **arguments)


@pytest.mark.parametrize(
    ("exchange", "version", "is_refused"),
    [
        (None, "0.32.0", True),
        ("nixl_ep", "0.32.0", False),
        ("allgather_reducescatter", "", True),
        (None, "0.11.0", False),
    ],
)
def test_overlapped_batches_need_an_exchange_that_supports_them(
    exchange: str | None, version: str, is_refused: bool
) -> None:
    found = broken(ENGINE, cards(engine_version=version), two_batch_overlap=True, all2all_backend=exchange)
    assert ("overlapped_exchange" in found) == is_refused


@pytest.mark.parametrize(
    ("args", "name", "is_refused"),
    [
        ({"kv-transfer-config": '{"kv_connector": "LMCacheConnectorV1"}'}, "Qwen/Qwen3-Next-80B-A3B-Instruct", True),
        ({"kv-transfer-config": '{"kv_connector": "OffloadingConnector"}'}, "Qwen/Qwen3-Next-80B-A3B-Instruct", False),
        ({"disable-hybrid-kv-cache-manager": True}, "Qwen/Qwen3-Next-80B-A3B-Instruct", True),
        ({"disable-hybrid-kv-cache-manager": True}, "google/gemma-3-27b-pt", False),
    ],
)
def test_a_model_with_states_needs_the_hybrid_manager(args: dict[str, Any], name: str, is_refused: bool) -> None:
    """0.32: specifications of states and attention cannot be made one, so a start ends with an error."""
    assert ("states_need_hybrid" in broken(ENGINE, cards(model=public_model(name), engine_args=args))) == is_refused


@pytest.mark.parametrize(
    ("chip", "version", "tokens", "seqs", "graph"),
    [
        ("sm_90", "0.33.0", 8192, 1024, 512),
        ("sm_100", "0.17.0", 8192, 1024, 512),
        ("sm_100", "0.19.0", 8192, 1024, 1024),
        ("sm_121", "0.33.0", 2048, 256, 512),
        ("sm_121", "0.32.0", 8192, 1024, 512),
        ("gfx950", "0.33.0", 8192, 1024, 512),
    ],
)
def test_batches_and_graphs_follow_the_chip(chip: str, version: str, tokens: int, seqs: int, graph: int) -> None:
    rates = dict.fromkeys(("bf16", "fp8", "fp4"), CHIP.dense_flops_per_second["bf16"])
    changes = {"dense_flops_per_second": rates, "architecture": chip}
    task = cards(memory=80 * GIB, engine_version=version, chip=changes)
    found = settings(task)
    assert (found.max_batched_tokens.item(), found.max_running.item()) == (tokens, seqs)
    assert found.graph_tokens.item() == graph
    assert merged(ENGINE, task, max_num_batched_tokens=tokens, max_num_seqs=seqs) == merged(ENGINE, task)


@pytest.mark.parametrize(("chip", "block"), [("sm_90", 64), ("gfx942", 16)])
def test_sparse_latent_attention_has_blocks_of_64_tokens(chip: str, block: int) -> None:
    found = find_public("deepseek-ai/DeepSeek-V3.2")
    assert found
    task = cards(model=model_of_config(found[0], name="a", file="config.json"), chip={"architecture": chip})
    assert settings(task).block_size.item() == block
    assert settings(cards()).block_size.item() == 16


# What vLLM 0.32's start-up code (`get_kv_cache_configs`, `get_kv_cache_capacity`) says of a cache of GiB per device.
STARTS = """
Qwen/Qwen3-8B                            tp1  4     32768  8192 on  auto refused
Qwen/Qwen3-30B-A3B                       tp2 10     40960 16384 on  fp8  436896
google/gemma-3-27b-it                    tp1 19    131072 16384 on  auto refused
google/gemma-3-27b-it                    tp1 27    131072 16384 on  auto 138909
openai/gpt-oss-20b                       tp1  3    131072  8192 on  fp8  232789
google/gemma-4-31B-it                    tp2 16    262144  8192 on  auto refused
deepseek-ai/DeepSeek-V3.2                tp8 30    163840  8192 on  auto 411264
deepseek-ai/DeepSeek-V4-Flash            tp2  7.7  121344  8192 on  auto 139877
deepseek-ai/DeepSeek-V4-Flash            tp2  5.44  30000  8192 on  auto refused
Qwen/Qwen3-Next-80B-A3B-Instruct         tp2 40    262144  8192 on  auto 3451383
Qwen/Qwen3.6-35B-A3B                     tp1  5.98 262144  8192 off auto 307915
nvidia/Nemotron-H-8B-Base-8K             tp1  4      8192  8192 on  auto 79399
nvidia/Nemotron-H-8B-Base-8K             tp1  4      8192  8192 off auto 147456
ibm-granite/granite-4.0-h-small          tp1 10    131072  8192 on  auto 589349
moonshotai/Kimi-Linear-48B-A3B-Instruct  tp4 20   1048576  8192 on  auto 2655133
LiquidAI/LFM2-8B-A1B                     tp1  3     32768  8192 on  auto 261378
meta-llama/Llama-4-Scout-17B-16E-Instruct tp1 20 131072 8192 on auto 279613
meta-llama/Llama-4-Scout-17B-16E-Instruct tp1 6 131072 8192 on auto refused
"""


@pytest.mark.parametrize("start", STARTS.strip().splitlines())
def test_the_cache_is_what_vllm_itself_counts(start: str) -> None:
    name, tensor, gib, context, batched, caching, kind, tokens = start.split()
    config = find_public(name)
    assert config is not None
    model = replace(model_of_config(config[0], name=name, file=""), vision=None)
    sizes = {"kv-cache-memory-bytes": int(float(gib) * GIB), "max-num-batched-tokens": int(batched), "max-num-seqs": 64}
    task = cards(model=model, devices=8, memory=400 * GIB, engine_args=sizes)
    values = {"tensor_model_parallel_size": int(tensor[2:]), "context_len": int(context)}
    values |= {"enable_prefix_caching": caching == "on", "kv_cache_type": None if kind == "auto" else kind}
    found = settings(task, **values)
    if tokens == "refused":
        assert found.cache_bytes < found.least_cache
    else:
        assert found.cache_bytes >= found.least_cache
        assert int(figures(task, **values)["kv_cache_tokens"]) == int(tokens)
    if "Nemotron-H" in name:  # two states and a checkpoint are counted, and one is kept
        plain, cached = (settings(task, **{**values, "enable_prefix_caching": each}) for each in (False, True))
        assert plain.sequence_bytes == cached.sequence_bytes
        assert cached.admission_bytes > plain.admission_bytes == 0.0
        assert (plain.chunk_tokens.item(), cached.chunk_tokens.item()) == (0, cached.block_size.item())


@pytest.mark.parametrize(
    ("name", "stages", "context", "gib"),  # what vLLM said: vllm-project/vllm issues 34076 and 32105
    [("Qwen/Qwen3-Coder-30B-A3B-Instruct", 2, 262144, 24.0), ("zai-org/GLM-4.7", 8, 202752, 71.16)],
)
def test_a_start_needs_memory_for_the_layers_of_all_stages_in_three_releases(
    name: str, stages: int, context: int, gib: float
) -> None:
    values = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": stages, "context_len": context}
    model = replace(model_from(name, base=Path()), vision=None)
    found = {
        release: settings(cards(model=model, engine_version=release, devices=8), **values)
        for release in ("0.13.0", "0.14.0", "0.16.0", "0.17.0")
    }
    for release in ("0.14.0", "0.16.0"):
        assert found[release].least_cache.item() / GIB == pytest.approx(gib, abs=0.01)
    for release in ("0.13.0", "0.17.0"):
        own = -(-model.num_layers // stages) / model.num_layers
        assert found[release].least_cache.item() / GIB == pytest.approx(gib * own, abs=0.01)
    assert len({each.longest_bytes.item() for each in found.values()}) == 1  # tokens of the cache are those of a rank


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
    first, second = map(str, sorted(os.sched_getaffinity(0))[:2])
    bound = "VLLM_CPU_OMP_THREADS_BIND"
    assert bound not in server(cores()).environment
    assert server(cores(), tensor_model_parallel_size=2).environment[bound] == f"{first}|{second}"
    assert server(cores(), instances=2, index=1).environment[bound] == second
    assert server(cores(), threads=2).environment[bound] == f"{first},{second}"


@pytest.mark.parametrize(
    "args",
    [
        {"cudagraph-capture-sizes": [1, 8, 96]},
        {"max_cudagraph_capture_size": 96},
        {"compilation-config": '{"cudagraph_capture_sizes": [96, 4]}'},
    ],
)
def test_the_largest_graph_is_that_of_the_flags(args: dict[str, Any]) -> None:
    assert settings(cards(engine_args=args)).graph_tokens.item() == 96


def test_short_flags_and_older_words_of_speculation_set_its_knobs() -> None:
    args = {"spec-method": "qwen3_next_mtp", "spec-tokens": 2}
    assert ENGINE.program.split(cards(engine_args=args).spec).fixed == {"speculation": "mtp", "speculative_tokens": 2}


def test_prefill_context_parallelism_is_refused_because_its_devices_are_not_counted() -> None:
    for args in ({"prefill-context-parallel-size": 2}, {"pcp": 2}):
        with refuses("prefill-context-parallel-size"):
            ENGINE.axes(cards(engine_args=args))
    ENGINE.axes(cards(engine_args={"prefill-context-parallel-size": 1}))


def test_weights_on_the_host_free_memory_and_are_read_in_each_pass() -> None:
    large = replace(DENSE, num_layers=64, num_query_groups=32, num_attention_heads=32, kv_channels=128)
    given = {"model": large, "memory": 8 * GIB}
    plain, offloaded = (figures(cards(engine_args=args, **given)) for args in ({}, {"cpu-offload-gb": 0.005}))
    assert offloaded["kv_cache_bytes"] - plain["kv_cache_bytes"] == pytest.approx(0.005 * GIB, rel=0.01)
    read_s = 0.005 * GIB / (0.8 * 32e9)
    assert offloaded["tpot_s.p50"] - plain["tpot_s.p50"] == pytest.approx(read_s, rel=0.2)


def test_an_unknown_link_of_the_host_is_named() -> None:
    assert "32 GB/s are assumed" in str(*ENGINE.unmodelled(cards(engine_args={"cpu-offload-gb": 1})))


def test_a_misspelt_flag_is_found_without_an_installed_release() -> None:
    with refuses("serve.engine_args.tensor-paralel-size"):
        ENGINE.axes(cards(engine_args={"tensor-paralel-size": 2, "a-plugin-flag": 1}))


def test_only_names_of_one_letter_have_one_dash() -> None:
    assert server(cards(engine_args={"foo": 3, "x": 4})).argv[-4:] == ("--foo", "3", "-x", "4")


def test_a_removed_flag_is_reported_with_its_replacement() -> None:
    with refuses("serve.engine_args.swap-space", match="kv-offloading-size"):
        ENGINE.axes(cards(engine_args={"swap_space": 4}))
    for release in ("0.17.1", None):  # an unknown release may have it
        older = cards(engine_version=release, engine_args={"swap_space": 4})
        assert server(older).argv[-2:] == ("--swap-space", "4")
        warned = [
            each
            for each in spec_warnings(older.spec, ENGINE.program)
            if each.startswith("serve.engine_args.swap-space")
        ]
        assert bool(warned) is (release is None)


@pytest.mark.parametrize(
    ("name", "release", "works"),
    [
        ("zai-org/GLM-5.2", "0.29.0", False),
        ("zai-org/GLM-5.2", "0.30.0", True),
        ("zai-org/GLM-4.7-Flash", "0.24.0", True),
        ("Qwen/Qwen3.5-35B-A3B", "0.28.0", False),
        ("Qwen/Qwen3.5-35B-A3B", None, True),
    ],
)
def test_drafts_of_older_releases_have_stages_only_in_some_classes(
    name: str, release: str | None, *, works: bool
) -> None:
    task = cards(engine_version=release, weights=name, model=model_from(name, base=Path()))
    columns = {each.name: np.ones(1, dtype=np.int64) for each in ENGINE.knobs}
    columns |= {PP: np.array([2]), "speculation": np.array([ENGINE.program.code("speculation", "mtp")])}
    rule = next(each for each in ENGINE.rules(task) if each.name == "staged_drafts")
    assert rule.broken(columns).item() is not works


@pytest.mark.parametrize(("release", "works"), [("0.13.0", False), ("0.14.0", True), (None, True)])
def test_a_context_that_fits_is_found_since_a_release(release: str | None, *, works: bool) -> None:
    rule = next(each for each in ENGINE.rules(cards(engine_version=release)) if each.name == "fitted_context")
    for length, is_broken in ((-1, not works), (4096, False)):
        assert rule.broken({"context_len": np.array([length])}).item() is is_broken


def test_experts_of_deepseek_v4_are_as_many_on_each_rank() -> None:
    for name, works in (("deepseek-ai/DeepSeek-V4-Flash", False), ("Qwen/Qwen3-30B-A3B", True)):
        task = cards(weights=name, model=model_from(name, base=Path()))
        rules = [each for each in ENGINE.rules(task) if each.name.endswith("even_experts")]
        columns = {each.name: np.zeros(1, dtype=np.int64) for each in ENGINE.knobs} | {EP: np.array([3])}
        assert any(each.broken(columns).item() for each in rules) is not works


def test_a_format_that_became_a_package_is_named_from_that_release_on() -> None:
    for release, is_moved in (("0.27.1", False), ("0.28.0", True), (None, True)):
        task = cards(engine_version=release, engine_args={"quantization": "bitsandbytes"})
        assert any("vllm-bnb-plugin" in each for each in spec_warnings(task.spec, ENGINE.program)) is is_moved
        start = Start(words=("vllm", "serve", "m", "-q", "bitsandbytes"), version=release or "")
        _data, notes = ENGINE.commands.read(start, Path(), None)
        assert any("vllm-bnb-plugin" in each.text for each in notes) is is_moved


def test_the_preset_is_a_level_of_compilation_before_0_12() -> None:
    older = cards(engine_version="0.11.0", engine_args={"O": 3})
    assert ENGINE.program.split(older.spec).fixed == {"compilation_mode": "3"}
    assert server(older).argv[-2:] == ("--compilation-config.level", "3")


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
    return program(tmp_path / "bin/vllm", "", str(python))


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
    source = install.parent.parent / "lib/python3.11/site-packages/vllm/engine/arg_utils.py"
    source.write_text('parser.add_argument("--swap-space")')  # which only older releases have
    older = cards(engine_version=None, command=(str(install), "serve"), engine_args={"swap_space": 4})
    assert server(older).argv[-2:] == ("--swap-space", "4")


def test_an_import_is_checked_with_the_installed_flags(install: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(install.parent))
    distribution(install, "vllm", "0.19.1")
    source = install.parent.parent / "lib/python3.11/site-packages/vllm/engine/arg_utils.py"
    source.write_text('parser.add_argument("--swap-space", "--vendor-flag")')  # a vendor's build may have both

    def read(words: str) -> tuple[dict[str, Any], set[str]]:
        imported = read_command("vllm", ["vllm", "serve", "Qwen/Qwen3-8B", *words.split()])
        return imported.data["serve"]["engine_args"], {note.key for note in imported.notes}

    args, notes = read("--swap-space 4 --vendor-flag --task generate")
    assert args == {"swap-space": 4, "vendor-flag": True}
    assert "--task" in notes
    assert "--swap-space" not in notes
    assert "--vendor-flag" in notes  # it is kept, and its effect is not known
    with refuses("--no-such-flag"):
        read("--no-such-flag")


def test_sizes_with_a_unit_are_numbers() -> None:
    words = ["--kv-cache-memory-bytes", "8G", "--max-num-batched-tokens", "16k"]
    data = read_command("vllm", ["vllm", "serve", "Qwen/Qwen3-8B", *words]).data
    assert data["serve"]["engine_args"]["kv-cache-memory-bytes"] == 8 * 2**30
    assert data["auto_tuner"]["baseline"]["max_num_batched_tokens"] == 16_000


def test_another_release_than_the_installed_one_can_be_planned_but_not_run(install: Path, tmp_path: Path) -> None:
    distribution(install, "vllm", "0.17.1")
    (tmp_path / "config.json").write_text("{}")

    def ready(version: str) -> None:
        ENGINE.program.ready(cards(weights=str(tmp_path), engine_version=version, command=(str(install), "serve")).spec)

    ready("0.17.1")
    with pytest.raises(SpecError, match=r"engine_version = '0.32.0' .*0\.17\.1"):
        ready("0.32.0")


def test_a_misspelt_flag_is_found_in_the_source_of_the_installed_version(install: Path) -> None:
    command = (str(install), "serve")
    with refuses("serve.engine_args.max-logprob", match=r"did you mean max-logprobs\?"):
        ENGINE.axes(cards(command=command, engine_args={"max_logprob": 5}))
    task = cards(command=command, engine_args={"chat_template": "x", "no_dtype": True, "max_logprobs": 3})
    assert server(task).argv[-5:] == ("--chat-template", "x", "--no-dtype", "--max-logprobs", "3")


def test_an_unreachable_precision_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    def ready(**arguments: Any) -> None:
        ENGINE.program.ready(cards(weights=str(tmp_path), precision="fp8", **arguments).spec)

    with refuses("serve.precision"):
        ready()
    ready(engine_args={"quantization": "fp8"})
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    ready()


def test_a_stored_format_needs_weights_in_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    awq = {"quantization": "awq"}
    for options, key in (
        ({"space": {"quantization": ("awq",)}}, "auto_tuner.space.quantization[0]"),
        ({"baseline": awq}, "auto_tuner.baseline.quantization"),
        ({"engine_args": awq}, "serve.engine_args.quantization"),
    ):
        with refuses(key, "awq"):
            ENGINE.check_values(cards(weights=str(tmp_path), **options).spec)
    (tmp_path / "quant_config.json").write_text("{}")
    ENGINE.check_values(cards(weights=str(tmp_path), engine_args=awq).spec)


def test_a_knob_that_the_release_does_not_have_is_an_error_and_auto_leaves_it_out() -> None:
    for options, key in (
        ({"space": {"moe_backend": ("triton",)}}, "auto_tuner.space.moe_backend"),
        ({"engine_args": {"moe_backend": "triton"}}, "serve.engine_args.moe_backend"),
        ({"baseline": {"moe_backend": "triton"}}, "auto_tuner.baseline.moe_backend"),
    ):
        with refuses(key, "triton"):
            ENGINE.axes(cards(engine_version="0.16.0", **options))
        ENGINE.axes(cards(engine_version="0.17.0", **options))
    axes = ENGINE.axes(cards(engine_version="0.10.0", space={"cudagraph_mode": "auto"}))
    assert next(axis.values for axis in axes if axis.knob == "cudagraph_mode") == (None,)


def test_words_that_vllm_reads_in_any_case() -> None:
    args = {
        "compilation-config.mode": "none",
        "compilation-config.cudagraph_mode": "full",
        "attention-backend": "flashmla",
    }
    fixed = ENGINE.program.split(cards(engine_version="0.32.0", engine_args=args).spec).fixed
    assert fixed == {"compilation_mode": "0", "cudagraph_mode": "FULL", "attention_backend": "FLASHMLA"}


def test_flags_follow_the_release() -> None:
    values = {"compilation_mode": "3", "attention_backend": "FLASHINFER"}
    newer, older = (server(cards(engine_version=version), **values) for version in ("0.13.0", "0.11.0"))
    assert {"--compilation-config.mode", "--attention-backend"} <= set(newer.argv)
    assert "--compilation-config.level" in older.argv
    assert "--attention-backend" not in older.argv
    assert older.environment["VLLM_ATTENTION_BACKEND"] == "FLASHINFER"
    assert "VLLM_ATTENTION_BACKEND" not in newer.environment


def test_synchronous_scheduling_and_old_releases_are_predicted_with_the_host_time() -> None:
    def rate(version: str, value: str | None, stages: int = 1) -> float:
        values = {"async_scheduling": value, "pipeline_model_parallel_size": stages}
        return figures(cards(engine_version=version), **values)["requests_per_s"]

    assert rate("0.32.0", "off") < rate("0.32.0", None) == rate("0.32.0", "on")
    assert rate("0.12.0", None) == rate("0.12.0", "off") < rate("0.12.0", "on")
    assert rate("0.12.0", "off", 2) == rate("0.12.0", "on", 2)


@pytest.mark.parametrize(
    ("version", "values", "ahead"),
    [
        ("0.14.0", {}, 1.0),
        ("0.13.0", {}, 0.0),
        ("0.13.0", {"async_scheduling": "on"}, 1.0),
        ("0.32.0", {"async_scheduling": "off"}, 0.0),
        ("0.32.0", {"speculation": "ngram", "speculative_tokens": 3}, 0.0),
        ("0.32.0", {"pipeline_model_parallel_size": 2}, 1.0),
        ("0.28.0", {"pipeline_model_parallel_size": 2}, 0.0),
    ],
)
def test_a_batch_is_planned_ahead_by_default_since_0_14(version: str, values: dict[str, Any], ahead: float) -> None:
    assert settings(cards(engine_version=version), **values).ahead.item() == ahead


def test_nothing_is_planned_ahead_on_cores() -> None:
    assert settings(cores()).ahead.item() == 0.0


def test_each_scheme_of_speculation_has_its_own_cost_and_acceptance() -> None:
    def found(scheme: str | None, *rates: float, **arguments: Any) -> dict[str, float]:
        loads = (replace(LOAD, acceptance=(("", rates),) if rates else ()),)
        values = {"speculation": scheme, "speculative_tokens": 3} if scheme else {}
        return figures(cards(loads=loads, engine_version="0.12.0", **arguments), **values)

    def rate(scheme: str | None, *rates: float, **arguments: Any) -> float:
        return found(scheme, *rates, **arguments)["requests_per_s"]

    draft = {"speculative-config.model": "Qwen/Qwen3-0.6B"}
    without = rate(None)
    assert rate("ngram", 0.0) < rate("ngram") < without < rate("ngram", 0.5) < rate("ngram", 0.8)
    assert rate("ngram_gpu") == without
    assert rate("eagle3") == rate("eagle3", 0.65) > without
    assert rate("draft_model", 0.65, engine_args=draft) < rate("eagle3", 0.65)
    assert rate("eagle3", 0.8, 0.5, 0.1) == pytest.approx(rate("eagle3", 0.5, 0.5, 0.4), rel=0.02)  # 1.4 accepted
    heads = found("eagle3")["kv_cache_bytes"], found("draft_model", engine_args=draft)["kv_cache_bytes"]
    assert found(None)["kv_cache_bytes"] == found("ngram")["kv_cache_bytes"] > heads[0] > heads[1]
    assert [*spec_warnings(cards(space={"speculation": (None, "ngram")}).spec, ENGINE.program)]
    assert not [*spec_warnings(cards(weights=None).spec, ENGINE.program)]
    of_build = spec_warnings(cards(weights=None, engine_version="atom 0.1").spec, ENGINE.program)
    assert not any("is not a release" in each for each in of_build)
    for arguments, words in (({}, "is not tried"), (draft, "acceptance of 0.65")):
        task = cards(space={"speculation": (None, "eagle3")}, engine_args=arguments)
        assert words in " ".join(spec_warnings(task.spec, ENGINE.program))


def test_the_draft_model_is_that_of_candidates_with_speculation() -> None:
    def flags(space: dict[str, Any], **values: str | int) -> list[str]:
        task = cards(engine_args={"speculative-config.model": "draft"}, space=space)
        return [word for word in server(task, **values).argv if word.startswith("--speculative-config")]

    compared = {"speculation": (None, "draft_model")}
    assert flags(compared) == []
    assert flags(compared, speculation="draft_model", speculative_tokens=3) == [
        f"--speculative-config.{key}" for key in ("method", "num_speculative_tokens", "model")
    ]
    assert flags({}) == ["--speculative-config.model"]


def test_weights_that_are_converted_to_fp8_are_predicted_like_weights_in_fp8() -> None:
    converted, stored = figures(cards(), quantization="fp8"), figures(cards(precision="fp8"))
    assert converted == stored
    assert stored["requests_per_s"] > figures(cards())["requests_per_s"]
    assert stored["kv_cache_bytes"] > figures(cards())["kv_cache_bytes"]


def test_shares_of_a_load_are_increases_of_counters() -> None:
    start = {"drafted_tokens": 10.0, "accepted_tokens": 10.0, "prefix_tokens_asked": 5.0, "prefix_tokens_found": 0.0}
    end = {"drafted_tokens": 30.0, "accepted_tokens": 15.0, "prefix_tokens_asked": 5.0, "prefix_tokens_found": 0.0}
    assert shares(ENGINE.reports, start, end) == {"acceptance_rate": 0.25}
    assert shares(ENGINE.reports, start, {**end, "accepted_tokens": 2.0}) == {}  # the server has begun to count anew


def test_from_0_15_each_attention_rank_accepts_requests() -> None:
    load = {"input_len": 16, "output_len": 4, "concurrency": 1000, "num_prompts": 1000}
    job = {
        "kind": "serve",
        "model": "Qwen/Qwen3-30B-A3B",
        "cluster": {"chip": "H100-SXM", "devices": 8, "devices_per_node": 8},
    }
    job["candidate"] = {"data_parallel_size": 8, "expert_model_parallel_size": 8}
    serve = [{"engine": "vllm", "engine_version": each, "precision": "bf16", **load} for each in ("0.14.0", "0.15.0")]
    older, newer = api.estimate_jobs([{**job, "id": each["engine_version"], "serve": each} for each in serve])
    assert older["ttft_s"]["mean"] - newer["ttft_s"]["mean"] == pytest.approx(1000 * 2e-3 * 7 / 8)


@pytest.mark.parametrize(
    ("flag", "value", "key"),
    [
        ("kv-transfer-config", '{"kv_connector": "OffloadingConnector", "kv_role": "both"}', ".kv_role"),
        ("kv_transfer_config.kv_role", "both", ".kv_role"),
        ("speculative-config", "ngram", ""),
        ("speculative_config", [], ""),
        ("block_size", 0, ""),
        ("speculative-config", '{"method": "ngrm", "num_speculative_tokens": 3}', ".method"),
        ("compilation-config", '{"cudagraph_moed": "FULL"}', ".cudagraph_moed"),
        ("compilation-config", '{"cudagraph_capture_sizes": [1, "a"]}', ".cudagraph_capture_sizes"),
    ],
)
def test_flags_that_vllm_rejects_are_rejected(flag: str, value: object, key: str) -> None:
    with refuses(f"serve.engine_args.{flag.partition('.')[0]}{key}"):
        figures(cards(engine_args={flag: value}))


def test_json_flags_that_vllm_accepts_pass() -> None:
    accepted = {
        "kv-transfer-config": '{"kv_connector": "P2pNcclConnector", "kv_role": "kv_both", "kv_buffer_size": 8e9}',
        "speculative-config": '{"method": "qwen3_next_mtp", "num_speculative_tokens": 2, "own_key": 1}',
        "compilation-config": '{"cudagraph_capture_sizes": [1, 2, 4], "max_cudagraph_capture_size": 4}',
    }
    for flag, text in accepted.items():
        json_flags.check({f"{flag}.{key}": value for key, value in json.loads(text).items()})


HERE = Path(__file__).parents[3]
PROGRAM = HERE / ".venv-vllm/bin/vllm"
ARGS = {"load_format": "dummy", "enforce_eager": True, "max_model_len": 512}
PATIENCE = 400.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    if not PROGRAM.exists():
        pytest.skip("make setup-vllm installs vLLM's CPU build, which is not here")
    folder = tmp_path_factory.mktemp("hf")
    subprocess.run([sys.executable, str(HERE / "examples/tiny_hf.py"), str(folder)], check=True, timeout=60)
    return str(folder)


def task(model: str, **arguments: Any) -> Any:
    loads = (Load(input_len=256, output_len=16, num_prompts=32, concurrency=8),)
    arguments |= {"weights": model, "command": (str(PROGRAM), "serve"), "engine_args": ARGS, "loads": loads}
    return serving("vllm", on_cores=True, devices=2, **arguments)


@pytest.mark.long
def test_a_candidate_is_served_unchanged(model: str, tmp_path: Path) -> None:
    requested = {
        "tensor_model_parallel_size": 2,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "block_size": 64,
        "enable_prefix_caching": False,
    }
    with started(ENGINE, task(model), requested, tmp_path, PATIENCE) as server:
        reported = ENGINE.reports.effective(server.fetch, log_text(server.log))
        assert {knob: reported[knob] for knob in requested} == requested
        assert (reported["context_len"], reported["enforce_eager"]) == (512, True)
        load = Load(input_len=3, output_len=9, num_prompts=1, concurrency=1)
        assert send(server.url, load=load, model=model).problems == ()
        assert ENGINE.reports.read_counters(server.fetch)["output_tokens"] == 9


def tokens_of(url: str, model: str, prompt: list[int], count: int = 16) -> list[int]:
    """The tokens of the most likely answer to a prompt."""
    body = {"model": model, "prompt": prompt, "max_tokens": count, "temperature": 0, "return_token_ids": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return list(json.load(answer)["choices"][0]["token_ids"])


@pytest.mark.long
@pytest.mark.timeout(3 * PATIENCE)
def test_a_pair_answers_as_one_server_does(model: str, tmp_path: Path) -> None:
    """One instance prefills, another one decodes, and the caches move through a folder; each has one core."""
    draw = random.Random(7)
    prompts = [[draw.randrange(8000) for _ in range(length)] for length in (5, 140, 300, 400)]
    with started(ENGINE, task(model), {}, tmp_path, PATIENCE) as server:
        expected = [tokens_of(server.url, model, prompt) for prompt in prompts]
    pair = small_platform(task(model, space={"prefill_decode": ("1xtp1+1xtp1",)}))
    candidate = Candidate.of({**ENGINE.defaults(pair.task), "prefill_decode": "1xtp1+1xtp1"})
    ENGINE.launch(pair, candidate, str(tmp_path))
    job, deadline = read_job(tmp_path), time.monotonic() + PATIENCE
    with running_servers(job, ENGINE.reports, tmp_path, deadline) as servers:
        for prompt, tokens in zip(prompts, expected, strict=True):
            tokens_of(servers[0].url, model, prompt, count=1)
            assert tokens_of(servers[1].url, model, prompt) == tokens
        assert "Inject KV cache of 384 tokens" in log_text(servers[1].log), "of the last prompt, three blocks"
        (point,) = LoadRunner(job, ENGINE.reports, servers, tmp_path, deadline).points()
        ports = [int(str(each.url).rpartition(":")[2]) for each in servers]
    assert point["repeats"][0]["completed"] == 32
    assert point["repeats"][0]["figures"]["output_tokens_per_s"] > 0
    assert all(listeners(port) == [] for port in ports)
    assert not (tmp_path / "shared").exists()


def test_the_profile_samples_tokens_but_on_ascend() -> None:
    task = planned("vllm", engine_version="0.26.0")
    (group,) = task.cluster.groups
    on = replace(task.cluster, groups=(replace(group, chip=replace(group.chip, vendor="ascend")),))
    found = [settings(each).logit_bytes[0] for each in (task, replace(task, cluster=on))]
    assert found == [12.0, 0.0]
