"""The classes of the environment variables of vendors: what is named, and what is not."""

import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from flagcore_testing.examples import task_on
from flagcore_testing.toy import ENGINE
from flagcore_vendorkit.engines import all_knobs, read_variables
from flagcore_vendorkit.settings import read_settings

from flagcore.domain.chip import Chip
from flagcore.domain.spec import Task
from flagcore.plugins import with_overlay
from flagcore.tuner.stages.complete import unmodelled
from tests.product.vendors.test_facts import BY_NAME, PLUGINS, VENDORS

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
