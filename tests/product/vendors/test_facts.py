"""What the catalogues of all vendors say of chips: sources, plausible figures, and what stays empty.

Plans with no setting typed: against what was published of the runs, and one spec on several chips.
`flag doctor` on machines with a vendor's management tool and a stack that fits it or does not.

The classes of the environment variables of vendors: what is named, and what is not."""

import functools
import importlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from flagcore_testing import fakes
from flagcore_testing.checks.sources import WAIVED
from flagcore_testing.examples import task_on
from flagcore_testing.toy import ENGINE
from flagcore_vendorkit.engines import all_knobs, read_variables
from flagcore_vendorkit.settings import read_settings

from flagcore import api
from flagcore.domain.chip import Chip, Fact
from flagcore.domain.engine import RefusedValues
from flagcore.domain.spec import Task
from flagcore.plugins import LoadedPlugins, with_overlay
from flagcore.tuner.stages.complete import unmodelled
from tests.product.tasks import VENDORS
from tests.product.vendors.test_simulated_nodes import CAMBRICON, METAX
from tests.product.vendors.test_visible_devices import VENDORS_WITH_TOOLS

PLUGINS = LoadedPlugins.of({name: importlib.import_module(f"flagcore_{name}.hooks").plugin for name in VENDORS})
CHIPS = PLUGINS.chips()
BY_NAME = {chip.name: chip for chip in CHIPS}


def facts(chip: Chip) -> Iterator[Fact]:
    yield from chip.dense_flops_per_second.values()
    others = (chip.memory_bytes, chip.memory_bandwidth_bytes_per_second, chip.host_bytes_per_second)
    link = chip.link.bytes_per_second if chip.link else None
    yield from (fact for fact in (*others, chip.nic_bytes_per_second, link) if fact is not None)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_only_own_measurements_are_marked_as_measured(chip: Chip) -> None:
    if any(fact.source.kind == "measured" for fact in facts(chip)):
        assert chip.name == "H200"


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        *(("BI-V150", 32), ("BI-V150S", 32), ("MR-V100-DUO", 32), ("MLU370-X8", 32)),
        *(("910C", 64), ("310P3", 48), ("MI250", 64), ("MI250X", 64)),
    ],
)
def test_a_card_of_two_devices_is_reported_and_its_figures_are_of_one(name: str, gib: int) -> None:
    assert BY_NAME[name].devices_per_card == 2
    memory = BY_NAME[name].memory_bytes
    assert memory is not None
    assert memory.value <= gib * 2**30


@pytest.mark.parametrize(
    ("name", "precision", "reached"),
    [
        # products that others published: zzc0721/torch-performance-test-data issue 155 (C500), leliyliu/TileStack
        # docs/metax_c550_integration.md 3.3, FlagOpen/FlagPerf computation-* of BI150 (a card, halved), and
        # ywh555hhh/llaisys iluvatar-mrv100-corex-hardware-research.md
        ("C500", "fp16", 226.28e12),
        ("C500", "bf16", 226.69e12),
        ("C500", "tf32", 107.57e12),
        ("C550", "fp16", 275.03e12),
        ("C550", "bf16", 269.34e12),
        ("BI-V150", "bf16", 196.77e12 / 2),
        ("BI-V150", "fp16", 196.47e12 / 2),
        ("MR-V100", "fp16", 96.1e12),
        ("MR-V100", "bf16", 96.1e12),
        # wangzy0327/hblas-bench DCU-bench.md, and public measurements of an MTT S5000 of 2026-07-13
        ("BW1000", "fp16", 456.4e12),
        ("BW1000", "fp32", 58.0e12),
        ("MTT-S5000", "fp8", 899.4e12),
    ],
)
def test_no_peak_is_below_a_measured_rate(name: str, precision: str, reached: float) -> None:
    peak = BY_NAME[name].dense_flops_per_second[precision].value
    assert 0.85 * peak < reached < 1.002 * peak


@pytest.mark.parametrize(
    ("name", "engine", "refused", "works"),
    [
        ("MI250X", "vllm", {"fp8"}, set()),
        ("MI300X", "vllm", {"mxfp8"}, {"fp8"}),
        ("MI355X", "vllm", set(), {"fp8"}),
        ("910B3", "vllm", {"fp8", "mxfp8"}, set()),
        ("MTT-S4000", "megatron", {"fp8"}, set()),
        ("MTT-S5000", "megatron", set(), {"fp8"}),
    ],
)
def test_formats_without_units_are_refused(name: str, engine: str, refused: set[str], works: set[str]) -> None:
    rules = PLUGINS.check_task(task_on(BY_NAME[name], engine)).rules
    values = {value for rule in rules if isinstance(rule, RefusedValues) for value in rule.values}
    assert refused <= values
    assert not works & values


ADDRESS = re.compile(r"\w\.[a-z]{2,4}/|[\w-]+/[\w.-]+ (\S*\w[/.]\w\S*|issues? \d+|pull requests? \d+)|arXiv|on PyPI")


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_each_source_can_be_opened_or_says_that_it_was_not_checked(chip: Chip) -> None:
    for source in {fact.source for fact in facts(chip) if fact.source.kind in ("datasheet", "published")}:
        assert ADDRESS.search(source.detail) or WAIVED.search(source.detail), source.detail


@pytest.mark.parametrize("vendor", VENDORS[:-1])  # the variable is T-Head's
def test_a_variable_that_hides_another_is_noted_where_it_is_set(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_on(next(chip for chip in CHIPS if chip.vendor == vendor))
    assert "GEMS_VENDOR" in PLUGINS.environment(task.cluster.groups[0].chip, "megatron", None, task)
    counts = []
    for value in (None, ""):  # the software asks whether it is set, not for its value
        if value is not None:
            monkeypatch.setenv("PPU_SDK", value)
        counts.append(sum("PPU_SDK" in note for note in PLUGINS.check_task(task, None).notes))
    assert counts == [0, 1]


FEW: dict[str, Any] = {
    "data_parallel_size": [64, 128],
    "micro_batch_size": 1,
    "context_parallel_size": [1, 2],
    "num_layers_per_virtual_pipeline_stage": [None, 1, 2],
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
"""A part of the space in which both searches end within seconds; the best of the whole space lies in it."""


def spec(model: str | dict[str, Any], chip: str, nodes: int, space: dict[str, Any] | None = None, **train: Any) -> Any:
    cluster = {"chip": chip, "nodes": nodes, "devices_per_node": 8}
    return {
        "model": model,
        "cluster": cluster,
        "train": {"engine": "megatron", **train},
        "auto_tuner": {"space": space or {}},
    }


@pytest.mark.parametrize("space", [FEW, pytest.param({}, marks=pytest.mark.long)], ids=["few", "all"])
def test_deepseek_v3_is_planned_within_a_quarter_of_its_report(space: dict[str, Any]) -> None:
    """14.8T tokens in 2.664M hours of H800 (arXiv 2412.19437)."""
    job = spec("deepseek-ai/DeepSeek-V3", "H800", 256, space, seq_length=4096, global_batch_size=15360, precision="fp8")
    best = api.estimate(job, top=1).candidates[0]
    assert best["tokens_per_second_per_device"]["value"] == pytest.approx(14.8e12 / (2.664e6 * 3600), rel=0.25)


@pytest.mark.parametrize("space", [FEW, pytest.param({}, marks=pytest.mark.long)], ids=["few", "all"])
def test_llama_3_405b_is_planned_within_15_percent_of_its_report(space: dict[str, Any]) -> None:
    """41% of the peak on 16,384 H100 at 8,192 tokens (arXiv 2407.21783, table 4)."""
    job = spec(
        "meta-llama/Meta-Llama-3.1-405B",
        "H100-SXM",
        2048,
        space,
        seq_length=8192,
        global_batch_size=2048,
        precision="bf16",
    )
    assert api.estimate(job, top=1).candidates[0]["mfu"] == pytest.approx(0.41, rel=0.15)


SMALL = {"num_layers": 4, "hidden_size": 1024, "ffn_hidden_size": 4096, "num_attention_heads": 8, "vocab_size": 32000}


@pytest.mark.parametrize(
    ("chip", "implementation"),
    [
        ("H100-SXM", "transformer_engine"),
        ("A100-40GB", "transformer_engine"),
        ("V100-32GB", None),
        ("C500", "transformer_engine"),
    ],
)
def test_a_plan_lists_the_assumptions_of_the_vendor(chip: str, implementation: str | None) -> None:
    found = api.estimate(spec(SMALL, chip, 2, seq_length=2048, global_batch_size=64, precision="fp16"), top=1)
    assert found.assumed.get("implementation") == implementation
    assert ("assumed" in found.candidates[0]) is (implementation is not None)


ROOT = Path(__file__).resolve().parents[3]
SPEC = ROOT / "examples" / "portability.yaml"


def exchange(chip: str, tensor: int) -> float:
    few = {"pipeline_model_parallel_size": 1, "context_parallel_size": 1, "micro_batch_size": 1}
    spec = api.changed_spec(SPEC, {f"auto_tuner.space.{name}": value for name, value in few.items()})
    account = api.explain_candidate(spec, f"tp={tensor}, mbs=1, sp", chip=chip)
    assert account.predicted is not None
    return float(account.predicted.time_s["tp_comm_s"])


def test_tensor_parallelism_over_both_islands_of_a_c500_costs_more_than_on_a_full_mesh() -> None:
    assert exchange("C500", 8) > 2.5 * exchange("C500", 4)
    assert exchange("C550", 8) < 2.5 * exchange("C550", 4)


def test_a_c500_may_run_tensor_parallelism_over_both_islands() -> None:
    assert api.explain_candidate(SPEC, "tp=8, mbs=1, sp", chip="C500").state != "removed"


@pytest.mark.parametrize(("chip", "has_memory"), [("C588", True), ("BI-V150S", True), ("MLU580", False)])
def test_with_an_unpublished_rate_the_estimate_suggests_calibration(chip: str, has_memory: bool) -> None:
    found = api.estimate(SPEC, chip=chip, top=1)
    assert found.candidates[0].get("step_time_s", {}).get("value") is None
    assert found.untimed == found.counts.untried
    assert f"peak rate of {chip} in bf16" in found.no_time
    assert "`flag calibrate`" in found.no_time
    assert ("give cluster.memory_per_device" in found.no_time) == (not has_memory)


def test_hosts_of_some_releases_need_a_time_for_each_layer_of_a_server() -> None:
    load = {"input_len": 512, "output_len": 64, "concurrency": 1, "num_prompts": 4}
    job = {"kind": "serve", "model": "Qwen/Qwen3-4B", "cluster": {"chip": "910B3", "devices": 4, "devices_per_node": 4}}
    job["candidate"] = {"tensor_model_parallel_size": 4}
    serve = [{"engine": "vllm", "precision": "bf16", **load, **each} for each in ({"engine_version": "0.11.0"}, {})]
    older, newer = api.estimate_jobs([{**job, "id": "1", "serve": each} for each in serve])
    assert older["tpot_s"]["mean"] > 2.0 * newer["tpot_s"]["mean"]
    # Qwen3-4B has 36 layers, each captured in pieces
    assert older["tpot_s"]["mean"] == pytest.approx(36 * 0.75e-3, rel=0.1)


@dataclass(frozen=True)
class Stack:
    """A vendor's tool, what it prints, and the chip."""

    tool: str
    printed: str
    chip: str


STACKS = {"metax": Stack("mx-smi", METAX, "C500"), "cambricon": Stack("cnmon", CAMBRICON, "MLU370-X8")}
BUILDS = {vendor.name: vendor for vendor in VENDORS_WITH_TOOLS}


@functools.cache
def records(name: str, modules: Path) -> list[dict[str, Any]]:
    """Return what `flag doctor` reports with the modules in a folder in front of the installed ones."""
    stack = STACKS[name]
    # other folders on the path may hold a sitecustomize that changes torch, which fails for a stand-in
    own = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if Path(each).is_relative_to(ROOT)]
    path = os.pathsep.join([str(modules), *own])
    with fakes.machine({stack.tool: fakes.prints(stack.printed)}, PYTHONPATH=path):
        return api.doctor()


def of_stack(found: list[dict[str, Any]], chip: str) -> list[dict[str, Any]]:
    return [each for each in found if each["name"] == chip and not each["ok"]]


@pytest.fixture(scope="module")
def of_nvidia(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a stand-in for NVIDIA's torch."""
    folder = tmp_path_factory.mktemp("nvidia")
    (folder / "torch.py").write_text(BUILDS["nvidia"].torch)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", STACKS)
def test_the_public_wheel_of_vllm_is_not_advised_on_a_vendors_chip(name: str, of_nvidia: Path) -> None:
    found = {each["for"]: each for each in records(name, of_nvidia)}
    for engine in ("vllm", "sglang", "lmdeploy"):
        assert "pip install 'flagcore[" not in found[f"engine {engine} ({engine})"]["fix"]
    words = "`pip install --no-deps`" if name == "cambricon" else "the public wheel"
    assert words in found["engine vllm (vllm)"]["fix"]


@pytest.mark.slow
@pytest.mark.parametrize("name", STACKS)
def test_a_torch_of_another_vendor_is_reported(name: str, of_nvidia: Path) -> None:
    problems = of_stack(records(name, of_nvidia), STACKS[name].chip)
    assert any(each["fix"].startswith("torch ") and each["fix"].endswith("vendor's build") for each in problems)
    assert any("torch_mlu" in each["fix"] for each in problems) == (name == "cambricon")


@pytest.mark.slow
@pytest.mark.parametrize("name", STACKS)
def test_a_stack_that_fits_has_no_problem(name: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(BUILDS[name].torch)
    migration = tmp_path / "torch_mlu/utils/gpu_migration"
    migration.mkdir(parents=True)
    for folder in (migration, migration.parent, migration.parent.parent):
        (folder / "__init__.py").touch()
    assert of_stack(records(name, tmp_path), STACKS[name].chip) == []


OF_TORCH = read_settings("flagcore_vendorkit")


def named(chip: Chip, variables: Mapping[str, str], nodes: int = 2) -> set[str]:
    """Return the variables of a task on a chip that are named as not predicted."""
    task = task_on(chip)
    cluster = replace(task.spec.cluster, nodes=nodes)
    asked = Task(spec=replace(task.spec, envs=variables, cluster=cluster), cluster=task.cluster)
    return {each.name for each in unmodelled(asked, ENGINE, with_overlay(PLUGINS, print), PLUGINS.check_task(asked))}


@pytest.mark.parametrize("vendor", [*VENDORS, "cpu"])
def test_each_variable_in_the_files_of_a_plugin_has_a_class(vendor: str) -> None:
    package = f"flagcore_{vendor}"
    classes, quirks = read_settings(package), files(package).joinpath("quirks.yaml")
    names = {each.name for each in read_variables(package)}
    names |= {
        name for each in all_knobs(package) for effect in each.knob.effects.values() for name in effect.environment
    }
    words = re.findall(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b", quirks.read_text("utf-8"))
    names |= {word for word in words if word.startswith(tuple(classes.prefixes.split())) and "ERROR" not in word}
    assert not OF_TORCH.unclassed(classes.unclassed(sorted(names)))


def test_each_variable_that_nccl_reads_has_a_class() -> None:
    names = Path(__file__).with_name("nccl.txt").read_text("utf-8").split()  # of releases 2.28 to 2.30
    names = read_settings("flagcore_nvidia").unclassed(OF_TORCH.unclassed(names))
    assert read_settings("flagcore_amd").unclassed(names) == []


RECIPES = [
    # DGX: Megatron-LM examples, NeMo, DeepSpeed, torchtune
    ("H100-SXM", "CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_IB_SL=1 NCCL_IB_TIMEOUT=19 NCCL_DEBUG=INFO", ""),
    ("H100-SXM", "CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=8 TOKENIZERS_PARALLELISM=false PYTHONPATH=/w", ""),
    ("H100-SXM", "TORCH_NCCL_AVOID_RECORD_STREAMS=1 NCCL_NVLS_ENABLE=0 NCCL_P2P_DISABLE=0", "NCCL_NVLS_ENABLE"),
    (
        "H100-SXM",
        "NCCL_SOCKET_IFNAME=eth0 NCCL_IB_HCA=mlx5 NCCL_IB_GID_INDEX=3 NCCL_IB_DISABLE=0 NCCL_TIMEOUT=3600",
        "",
    ),
    ("H100-SXM", "NCCL_IB_DISABLE=1 NCCL_MIN_NCHANNELS=32", "NCCL_IB_DISABLE NCCL_MIN_NCHANNELS"),
    ("H200", "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128 HF_HUB_OFFLINE=1", "PYTORCH_CUDA_ALLOC_CONF"),
    ("H200", "CUDA_LAUNCH_BLOCKING=1 CUDA_LAUNCH_BLOCKING_=1", "CUDA_LAUNCH_BLOCKING CUDA_LAUNCH_BLOCKING_"),
    ("H200", "CUDA_VISIBLE_DEVICES=0,1 WANDB_MODE=offline MASTER_ADDR=h1 LD_LIBRARY_PATH=/l TORCH_LOGS=+dynamo", ""),
    ("H200", "TORCHDYNAMO_DISABLE=1 TRITON_CACHE_DIR=/t TORCHINDUCTOR_CACHE_DIR=/t", "TORCHDYNAMO_DISABLE"),
    ("H200", "NVSHMEM_IB_ENABLE_IBGDA=1 NVSHMEM_DEBUG=INFO GLOO_SOCKET_IFNAME=eth0", "NVSHMEM_IB_ENABLE_IBGDA"),
    # MindSpeed and vLLM Ascend
    ("910B3", "CUDA_DEVICE_MAX_CONNECTIONS=1 HCCL_CONNECT_TIMEOUT=1800 HCCL_EXEC_TIMEOUT=5400 TASK_QUEUE_ENABLE=1", ""),
    ("910B3", "TASK_QUEUE_ENABLE=2 CPU_AFFINITY_CONF=1", "TASK_QUEUE_ENABLE CPU_AFFINITY_CONF"),
    (
        "910B3",
        "HCCL_IF_IP=10.0.0.1 HCCL_OP_EXPANSION_MODE=AIV HCCL_BUFFSIZE=200 VLLM_USE_V1=1",
        "HCCL_OP_EXPANSION_MODE",
    ),
    ("910B3", "ASCEND_RT_VISIBLE_DEVICES=0,1 ASCEND_SLOG_PRINT_TO_STDOUT=0 ASCEND_GLOBAL_LOG_LEVEL=3", ""),
    # MetaX, ROCm, and the others
    (
        "C550",
        "MACA_PATH=/opt/maca MCCL_IB_HCA=mlx5 MCCL_SOCKET_IFNAME=eth0 MACA_SMALL_PAGESIZE_ENABLE=1",
        "MACA_SMALL_PAGESIZE_ENABLE",
    ),
    (
        "C550",
        "TRITON_ENABLE_MACA_CHAIN_DOT_OPT=1 MCCL_MAX_NCHANNELS=16",
        "TRITON_ENABLE_MACA_CHAIN_DOT_OPT MCCL_MAX_NCHANNELS",
    ),
    (
        "MI300X",
        "HIP_VISIBLE_DEVICES=0 NCCL_MIN_NCHANNELS=112 HSA_NO_SCRATCH_RECLAIM=1",
        "NCCL_MIN_NCHANNELS HSA_NO_SCRATCH_RECLAIM",
    ),
    (
        "MI300X",
        "HSA_OVERRIDE_GFX_VERSION=9.4.2 NCCL_DEBUG=WARN GPU_PER_NODE=8 TORCH_NCCL_HIGH_PRIORITY=1",
        "TORCH_NCCL_HIGH_PRIORITY",
    ),
    (
        "BI-V150",
        "NCCL_SOCKET_IFNAME=eth0 CUDA_DEVICE_MAX_CONNECTIONS=1 ENABLE_FLASH_ATTENTION_WITH_IXDNN=1",
        "ENABLE_FLASH_ATTENTION_WITH_IXDNN",
    ),
    ("MLU590-M9", "MLU_VISIBLE_DEVICES=0,1 CNCL_IB_GID_INDEX=7 CNCL_MLULINK_DISABLE=1", "CNCL_MLULINK_DISABLE"),
    (
        "BW1000",
        "NCCL_TOPO_MAPPING_FILE=/t NCCL_IB_HCA=mlx5 HIP_VISIBLE_DEVICES=0 NCCL_MAX_NCHANNELS=16",
        "NCCL_MAX_NCHANNELS",
    ),
    (
        "P800",
        "XPU_VISIBLE_DEVICES=0,1 BKCL_TIMEOUT=1800 CUDA_DEVICE_MAX_CONNECTIONS=1 BKCL_ENABLE_XDR=1",
        "BKCL_ENABLE_XDR",
    ),
    (
        "MTT-S5000",
        "MUSA_VISIBLE_DEVICES=0 MUSA_KERNEL_TIMEOUT=3200000 MCCL_CHECK_POINTERS=0 MCCL_PROTOS=2",
        "MCCL_PROTOS",
    ),
]


@pytest.mark.parametrize(("chip", "variables", "expected"), RECIPES)
def test_of_a_recipe_the_variables_that_change_its_cost_are_named(chip: str, variables: str, expected: str) -> None:
    assert named(BY_NAME[chip], dict(each.split("=", 1) for each in variables.split())) == {*expected.split()}


def test_on_one_node_variables_of_the_network_change_nothing() -> None:
    assert not named(BY_NAME["H200"], {"NCCL_IB_DISABLE": "1", "NCCL_NET_GDR_LEVEL": "5"}, nodes=1)
