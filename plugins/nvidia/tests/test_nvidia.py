"""Rules, costs and serving of NVIDIA's chips.

The kernel times of the plugin.
"""

from collections.abc import Mapping
from importlib.resources import files
from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flagcore_nvidia import discover, hooks
from flagcore_nvidia.hooks import plugin
from flagcore_testing import PluginConformance
from flagcore_vendorkit.chip_file import read_curve, read_kernels, read_provenance
from flagcore_vendorkit.kernel_table import KernelArrays, KernelSheet, with_measured

from flagcore.api import estimate, estimate_jobs
from flagcore.contracts import AttentionShape, KernelCosts
from flagcore.domain.chip import Chip
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.space import KnobValue
from flagcore.errors import NoDevice, NothingFits
from flagcore.physics.roofline import RUNS_AS, Roofline
from tests.checks import collective_seconds as seconds
from tests.checks import collectives, given, refuses


class TestNvidia(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin


def test_memory_that_the_driver_does_not_report_stays_unknown() -> None:
    (row,) = discover.read("0, NVIDIA GB10, [N/A], 580.95, GPU-cccc3333, 0x2E1210DE, [N/A]\n").rows
    assert row.device.memory_bytes is None


def test_collective_buffers_are_counted_for_more_than_one_device() -> None:
    chip = plugin.flagcore_chips("")[0]
    groups = (NodeGroup(chip=chip, nodes=1, devices_per_node=devices) for devices in (1, 2, 8))
    models = [plugin.flagcore_memory_model(group, "megatron", "train") for group in groups]
    alone, pair, eight = (model.context_bytes for model in models if model is not None)
    assert (pair - alone, eight - alone) == (pytest.approx(342 * 2**20), pytest.approx(392 * 2**20))


@pytest.mark.parametrize(("mebibytes", "bus"), [(4, 135.58), (16, 244.4), (64, 359.49), (256, 402.56), (1024, 461.28)])
def test_an_all_reduce_on_another_h100_node_is_within_10_percent(mebibytes: int, bus: float) -> None:
    # a published report of a DGX H100 (all_reduce_perf), which the table is not made from
    payload = mebibytes * 2**20
    assert seconds(collectives(plugin, "H100-SXM"), "all_reduce", payload, 8) == pytest.approx(
        1.75 * payload / (bus * 1e9), rel=0.1
    )


@pytest.mark.parametrize(
    ("chip", "nodes", "kind", "ranks", "payload", "measured"),
    [
        ("H100-SXM", 2, "all_reduce", 16, 2**34, 2**34 / 250e9),  # NVIDIA/nccl-tests issue 309
        ("H100-SXM", 16, "all_reduce", 128, 512, 67e-6),  # NVIDIA/nccl issue 1469
        ("H100-SXM", 32, "all_reduce", 256, 2**31, 2 * 2**31 / 340e9),  # NVIDIA/nccl issue 1218
        ("H200", 248, "all_reduce", 1984, 2**29, 2 * 2**29 / 350e9),  # NVIDIA/nccl-tests issue 283
        ("B200", 2, "all_reduce", 16, 8, 55e-6),  # dstackai/dstack pull request 3961
    ],
)
def test_collectives_over_several_nodes_are_within_20_percent(
    chip: str, nodes: int, kind: str, ranks: int, payload: float, measured: float
) -> None:
    assert seconds(collectives(plugin, chip, nodes), kind, payload, ranks) == pytest.approx(measured, rel=0.2)


def test_a_rack_of_gb300_is_one_domain_and_two_are_joined_by_the_network() -> None:
    costs = collectives(plugin, "GB300", nodes=32, devices_per_node=4)
    assert seconds(costs, "all_reduce", 2**34, 64) == pytest.approx(36.35e-3, rel=0.01)
    assert seconds(costs, "all_gather", 2**30, 64) < 2.5e-3
    assert seconds(costs, "all_to_all", 2**30, 128) > 2.5 * seconds(costs, "all_to_all", 2**30, 64)
    assert costs.compute_share(np.array([64, 2]), np.array([1, 72])).tolist() == [0.15, 0.02]


def test_a_server_of_a_chip_without_bf16_computes_in_fp16() -> None:
    def plan(chip: str, **args: str) -> Any:
        serve, cluster = {"engine": "vllm", "engine_args": args}, {"chip": chip, "nodes": 1, "devices_per_node": 1}
        serve |= {"engine_version": args.pop("engine_version", None)}
        space = {"max_num_seqs": [1], "max_num_batched_tokens": [2048]}
        model = {"model": "Qwen/Qwen3-0.6B", "cluster": cluster}
        return estimate({**model, "serve": serve, "auto_tuner": {"space": space}}).candidates

    assert plan("V100-16GB", engine_version="0.19.0")
    with pytest.raises(NoDevice, match=r"no kernels for compute capability 7\.0 since 0\.20"):
        plan("V100-16GB")
    assert plan("T4", dtype="half")
    with pytest.raises(NothingFits, match="nvidia_bf16_type"):
        plan("T4", dtype="bfloat16")


@pytest.mark.parametrize(
    ("model", "chip", "rule"),
    [
        ("openai/gpt-oss-20b", "T4", "nvidia_stored_mxfp4"),
        ("Qwen/Qwen3-0.6B-AWQ", "V100-32GB", "nvidia_stored_awq"),
        ("Qwen/Qwen3-0.6B-GPTQ-Int4", "V100-32GB", ""),
        ("Qwen/Qwen3-0.6B-AWQ", "T4", ""),
        ("openai/gpt-oss-20b", "A100-80GB", ""),
    ],
)
def test_weights_are_served_only_in_formats_that_the_chip_has_kernels_for(model: str, chip: str, rule: str) -> None:
    cluster, space = {"chip": chip, "nodes": 1, "devices_per_node": 1}, {"max_num_seqs": [1]}
    serve = {"engine": "vllm", "engine_version": "0.19.0"}
    job = {"model": model, "cluster": cluster, "serve": serve, "auto_tuner": {"space": space}}
    if not rule:
        assert estimate(job).candidates
        return
    with pytest.raises(NothingFits, match=rf"{rule}.*change model, or use another chip"):
        estimate(job)


def test_only_recipes_of_the_newest_chips_have_graphs() -> None:
    def settings(name: str) -> Mapping[str, KnobValue]:
        (chip,) = (each for each in plugin.flagcore_chips("") if each.name == name)
        support = plugin.flagcore_engine_support(chip, "megatron", None, "train")
        assert support
        assert support.stack
        return support.stack.settings

    assert "cuda_graph_impl" in settings("GB300")
    assert "cuda_graph_impl" not in settings("H100-SXM")


def test_chips_with_equal_links_share_times() -> None:
    same = {"B300": "B200", "GB300": "GB200", "H20": "H200", "A100-40GB": "A100-80GB", "L20": "L40S"}
    for chip, other in same.items():
        one, two = (seconds(collectives(plugin, each), "all_gather", 2**26, 4) for each in (chip, other))
        assert one == two


QWEN3_8B = {
    "num_layers": 36,
    "hidden_size": 4096,
    "ffn_hidden_size": 12288,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "kv_channels": 128,
    "vocab_size": 151936,
    "qk_layernorm": True,
}
LOADS = {"burst": (1024, 128, 128, 128), "waves": (512, 256, 64, 192), "alone": (256, 32, 1, 16)}
SETTINGS: dict[str, dict[str, Any]] = {
    "own": {},
    "small": {"max_num_seqs": 64, "max_num_batched_tokens": 512},
    "eager": {"enforce_eager": True},
}
MEASURED = {
    ("own", "burst"): (3508, 2.088),
    ("own", "waves"): (6368, 0.465),
    ("own", "alone"): (163, 0.013),
    ("small", "burst"): (1741, 3.997),
    ("small", "waves"): (4671, 0.263),
    ("small", "alone"): (169, 0.026),
    ("eager", "burst"): (2343, 2.217),
    ("eager", "waves"): (2016, 0.502),
    ("eager", "alone"): (38, 0.052),
}
"""Output tokens per second, and the median time to the first token in seconds."""


def record(setting: str, load: str, engine: str = "vllm", **more: Any) -> dict[str, Any]:
    prompt, output, clients, prompts = LOADS[load]
    sent: dict[str, Any] = {"input_len": prompt, "output_len": output, "concurrency": clients, "num_prompts": prompts}
    return {
        "id": f"{setting} {load}",
        "kind": "serve",
        "model": QWEN3_8B,
        "cluster": {"chip": "NVIDIA H200", "devices": 1, "devices_per_node": 8},
        "serve": {"engine": engine, "engine_version": "0.20.2", "precision": "bf16", **sent, **more},
        "candidate": SETTINGS[setting],
    }


def test_throughput_of_a_server_is_as_measured() -> None:
    answers = list(estimate_jobs([record(*key) for key in MEASURED]))
    off = [
        abs(answer["output_tokens_per_s"] / rate - 1)
        for answer, (rate, _) in zip(answers, MEASURED.values(), strict=True)
    ]
    assert sum(off) / len(off) < 0.08
    assert max(off) < 0.2


@pytest.mark.parametrize("load", ["burst", "waves"])
def test_settings_of_a_server_are_in_the_measured_order(load: str) -> None:
    answers = list(estimate_jobs([record(setting, load) for setting in SETTINGS]))
    rates = [answer["output_tokens_per_s"] for answer in answers]
    measured = [MEASURED[setting, load][0] for setting in SETTINGS]
    assert sorted(range(3), key=rates.__getitem__) == sorted(range(3), key=measured.__getitem__)


def test_queueing_of_a_burst_matches_measurements() -> None:
    for setting in SETTINGS:
        (answer,) = estimate_jobs([record(setting, "burst", concurrency=None, request_rate="inf")])
        rate, first = MEASURED[setting, "burst"]
        assert answer["output_tokens_per_s"] == pytest.approx(rate, rel=0.12)
        assert answer["ttft_s"]["p50"] == pytest.approx(first, rel=0.18)


@pytest.mark.parametrize("chip", ["NVIDIA H200", "NVIDIA B200"])
def test_8_bit_products_are_never_slower_than_16_bit_ones(chip: str) -> None:
    jobs = []
    for (prompt, output), tensor, precision in product([(32, 16), (128, 128), (2048, 256)], (1, 4, 8), ("bf16", "fp8")):
        shape = {"input_len": prompt, "output_len": output, "concurrency": 2, "num_prompts": 8}
        jobs.append(record("own", "alone", **{**shape, "precision": precision}))
        jobs[-1]["cluster"] = {"chip": chip, "devices": tensor, "devices_per_node": 8}
        jobs[-1]["candidate"] = {"tensor_model_parallel_size": tensor}
    means = [each["tpot_s"]["mean"] for each in estimate_jobs(jobs)]
    assert all(narrow <= wide for wide, narrow in zip(means[::2], means[1::2], strict=True)), means


LAUNCH = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4"


@pytest.mark.parametrize(
    ("own", "key"),
    [
        ({}, ""),
        ({"envs": {"NCCL_ALGO": "Ring"}}, "envs.NCCL_ALGO"),
        ({"cluster": {"host_envs": {"a": {"NCCL_ALGO": "Ring"}}}}, "envs.NCCL_ALGO"),
        ({"script": "export NCCL_ALGO=Ring\n"}, "auto_tuner.space.nccl_algo"),
    ],
)
def test_a_variable_of_the_collective_library_is_a_knob_unless_the_user_sets_it(
    own: Mapping[str, Any], key: str, tmp_path: Path
) -> None:
    (tmp_path / "pretrain_gpt.py").touch()
    script = f"{own.get('script', '')}{LAUNCH} --micro-batch-size 1 --global-batch-size 8\n"
    (tmp_path / "run.sh").write_text(script)
    shape = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 256, "num_attention_heads": 4, "vocab_size": 512}
    train = {"engine": "megatron", "seq_length": 64, "global_batch_size": 8, "precision": "bf16"}
    (tmp_path / "hosts").write_text("a slots=8\n")
    hosts = {"hostfile": str(tmp_path / "hosts")} if "cluster" in own else {}
    spec = {
        "model": shape,
        "cluster": {"chip": "H100", "devices_per_node": 8, **hosts, **own.get("cluster", {})},
        "train": {**train, "command": ["bash", "run.sh"], "directory": str(tmp_path)},
        "auto_tuner": {"space": {"nccl_algo": [None, "Tree"], "tensor_model_parallel_size": 2}},
        "envs": own.get("envs", {}),
    }
    if key:
        with refuses(key, "Ring"):
            estimate(spec)
    else:
        assert {each["candidate"]["nccl_algo"] for each in estimate(spec, top=100).candidates} == {None, "Tree"}


COSTS = files("flagcore_nvidia").joinpath("costs").joinpath("h200")
FOLDS = 8
SLOW_RATIO = 1.15
"""Time of attention in fp32 on the H200, measured, over that of the H100, whose share of fp32 products is estimated."""

GRID = np.array(list(product((1.0, 16.0, 256.0, 2048.0, 16384.0), *[(128.0, 1024.0, 4096.0, 16384.0)] * 2))).T
"""Products m, n, k: small, large and thin."""

CORES = AttentionShape(
    batch=np.array([1.0, 4.0, 1.0, 64.0, 1.0]),
    heads=np.array([32.0, 32.0, 8.0, 32.0, 16.0]),
    groups=np.array([8.0, 8.0, 8.0, 8.0, 16.0]),
    queries=np.array([4096.0, 512.0, 32768.0, 1.0, 2048.0]),
    keys=np.array([4096.0, 512.0, 32768.0, 8192.0, 2048.0]),
    head_dim=np.array([128.0, 128.0, 128.0, 128.0, 64.0]),
)


def read(name: str) -> str:
    return COSTS.joinpath(name).read_text("utf-8")


SHEET = read_kernels(read("kernels.jsonl"), "kernels.jsonl", read_provenance(read("provenance.yaml"), "provenance"))


def chip_named(name: str) -> Chip:
    return next(chip for chip in plugin.flagcore_chips("") if chip.name == name)


def costs_of(name: str) -> KernelCosts:
    return given(plugin.flagcore_kernel_costs(chip_named(name), "megatron"))


def modelled(costs: KernelCosts, kind: str, rows: KernelArrays) -> np.ndarray:
    sizes = rows.sizes.T if kind == "gemm" else (rows.attention_shape(),)
    return getattr(costs, f"{kind}_seconds")(*sizes, "bf16")


def errors(costs: KernelCosts, kind: str, rows: KernelArrays) -> np.ndarray:
    return np.abs(np.log(modelled(costs, kind, rows) / rows.seconds))


@pytest.mark.parametrize("kind", ["gemm", "attention", "attention_backward"])
def test_the_h200_table_reproduces_its_measurements_and_bounds(kind: str) -> None:
    rows, costs = SHEET.rows(kind, "bf16"), costs_of("H200")
    assert errors(costs, kind, rows.exact).mean() < 0.015
    bounds = rows.select(rows.bound)
    assert (modelled(costs, kind, bounds) < 1.12 * bounds.seconds).all()


@pytest.mark.parametrize(("kind", "mean"), [("gemm", 0.05), ("attention", 0.02), ("attention_backward", 0.025)])
def test_the_h200_table_is_close_on_unseen_kernels(kind: str, mean: float) -> None:
    roofline = Roofline(chip=chip_named("H200"), curve=read_curve(read("curve.yaml"), "curve.yaml"))
    places = np.array([place for place, kernel in enumerate(SHEET.kernels) if kernel.name == kind and not kernel.bound])
    np.random.default_rng(1).shuffle(places)
    found = []
    for fold in range(FOLDS):
        hidden = set(places[fold::FOLDS].tolist())
        seen = KernelSheet(tuple(kernel for place, kernel in enumerate(SHEET.kernels) if place not in hidden))
        unseen = KernelSheet(tuple(SHEET.kernels[place] for place in sorted(hidden)))
        found.append(errors(with_measured(roofline, seen), kind, unseen.rows(kind, "bf16")))
    assert np.concatenate(found).mean() < mean


def test_the_h100_has_a_slower_memory_than_the_h200() -> None:
    one, large = np.array([1.0]), np.array([8192.0])
    thin = [costs_of(name).gemm_seconds(one, large, large, "bf16")[0] for name in ("H100-SXM", "H200")]
    assert 1.2 < thin[0] / thin[1] < 1.5


@pytest.mark.parametrize("name", ["A100-80GB", "H100-SXM", "B200", "GB200", "B300", "GB300"])
def test_a_large_product_reaches_a_plausible_share_of_the_peak(name: str) -> None:
    large = np.array([8192.0])
    peak = chip_named(name).dense_flops_per_second["bf16"].value
    share = 2 * 8192.0**3 / costs_of(name).gemm_seconds(large, large, large, "bf16") / peak
    assert 0.4 < share[0] < 0.9


@pytest.mark.parametrize(
    ("name", "measured"),
    [
        ("A100-40GB", 19.05e12),  # FlagOpen/FlagPerf computation-FP32
        ("B200", 66.24e12),  # zzc0721/torch-performance-test-data
    ],
)
def test_large_fp32_products_are_as_fast_as_measured(name: str, measured: float) -> None:
    large = np.array([8192.0])
    assert 2 * 8192.0**3 / costs_of(name).gemm_seconds(large, large, large, "fp32")[0] == pytest.approx(measured, 0.05)


def test_a_slower_chip_is_never_predicted_clearly_faster() -> None:
    chips = plugin.flagcore_chips("")
    known = {chip.name: plugin.flagcore_kernel_costs(chip, "megatron") for chip in chips}
    for old, new in permutations(chips, 2):
        for precision in ("fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"):
            if not no_faster(old, new, precision) or (old.name, new.name) == ("GB300", "GB200"):  # measured: 1.2
                continue
            kernels = ["gemm", "memory"]
            is_wide = precision in ("fp32", "tf32")  # of fused attention there is none, and small products are rare
            if known[old.name] and known[new.name] and not is_wide:  # elsewhere the core's shares stand in
                kernels += ["attention", "attention_backward"]
            for kind in kernels:
                costs = [known[chip.name] or Roofline(chip=chip) for chip in (new, old)]
                one, other = (kernels_seconds(each, kind, precision)[-1 if is_wide else 0 :] for each in costs)
                assert (one < SLOW_RATIO * other).all(), (old.name, new.name, precision, kind, (one / other).max())


def no_faster(old: Chip, new: Chip, precision: str) -> bool:
    """Return whether, by its facts, `old` is not faster than `new`."""
    peaks = [chip.dense_flops_per_second.get(RUNS_AS.get(precision, precision)) for chip in (old, new)]
    bandwidths = [chip.memory_bandwidth_bytes_per_second for chip in (old, new)]
    return all(one and other and one.value <= other.value for one, other in (peaks, bandwidths))


def kernels_seconds(costs: KernelCosts, kind: str, precision: str) -> np.ndarray:
    if kind == "memory":
        return costs.memory_seconds(np.array([1e4, 1e6, 1e8, 1e10]))
    return getattr(costs, f"{kind}_seconds")(*(GRID if kind == "gemm" else (CORES,)), precision)
