"""Images in predictions, rules and knobs of engines: the front end, the vision tower, and its ranks. What must hold of
a prefix cache in tiers, whatever their sizes and links."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from flagcore_llamacpp.engine import ENGINE as LLAMACPP
from flagcore_lmdeploy.engine import ENGINE as LMDEPLOY
from flagcore_models.catalogue import public_model
from flagcore_models.parts.tower import VisionTower
from flagcore_serving.engine import ServingEngine
from flagcore_serving.job import Images, Load
from flagcore_serving.load.images import Image
from flagcore_serving.load.traffic import traffic
from flagcore_serving.model.disaggregated import Disaggregated, Prefill
from flagcore_serving.model.memory import serving_memory
from flagcore_serving.model.price import Lane, Price
from flagcore_serving.model.prompts import prompt_parts
from flagcore_serving.model.simulated_load import HIT_RATE, SimulatedLoad
from flagcore_serving.model.simulation import Simulation
from flagcore_serving.model.tiers import cached_tokens
from flagcore_serving.model.vision import EncoderCosts, ImageWork, encoder_costs, image_work
from flagcore_serving.model.work import PIXEL, Serving
from flagcore_serving.space.hardware import CHAT_TOKENS, longest_request
from flagcore_serving.space.placement import instance_kinds
from flagcore_sglang.engine import ENGINE as SGLANG
from flagcore_vllm.engine import ENGINE as VLLM

from engines.serving.tests.engines import tasks
from engines.serving.tests.engines.tasks import broken, merged, row, serving
from engines.serving.tests.model.test_simulation import LANE, OVER
from flagcore.domain.prediction import Predictions
from flagcore.domain.spec import Task
from flagcore.errors import SpecError
from tests.checks import refuses
from tests.product import serving_inputs
from tests.product.serving_inputs import costs, settings, times
from tests.product.tasks import DENSE, VISION

ENGINES: dict[str, Any] = {"vllm": VLLM, "sglang": SGLANG, "llamacpp": LLAMACPP, "lmdeploy": LMDEPLOY}
TOWER = "mm_encoder_tp_mode"
LARGE = replace(serving_inputs.DENSE, vision=VISION)

WHOLE = VisionTower(vision=VISION)


def images(*sizes: tuple[int, int], count: int = 1) -> Images:
    sizes = sizes or ((1280, 720),)
    return Images(buckets=tuple((*size, 1.0 / len(sizes)) for size in sizes), base_items_per_request=count)


def load(found: Images | None, **changes: Any) -> Load:
    return Load(**{"input_len": 64, "output_len": 16, "num_prompts": 24, "concurrency": 4, "images": found} | changes)


def task(found: Images | None, engine: str = "vllm", **arguments: Any) -> Task:
    version = {"vllm": "0.32.0", "sglang": "0.5.12"}.get(engine)
    loads = arguments.pop("loads", (load(found),))
    return serving(engine, **{"loads": loads, "engine_version": version, "model": LARGE, **arguments})


def predicted(found: Images | None, engine: str = "vllm", *, values: dict[str, Any] | None = None, **more: Any) -> Any:
    job = task(found, engine, **more)
    job = replace(job, cluster=replace(job.cluster, groups=(replace(job.cluster.groups[0], chip=serving_inputs.CHIP),)))
    return ENGINES[engine].predict(job, row(ENGINES[engine], job, **values or {}), serving_inputs.costs())


def ttft(predictions: Predictions) -> float:
    return float(predictions.figures["ttft_s.mean"][0])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_larger_and_more_images_take_longer_to_the_first_token(engine: str) -> None:
    loads = [None, images((280, 280)), images((1280, 720)), images((1280, 720), count=3)]
    times = [ttft(predicted(each, engine)) for each in loads]
    assert times == sorted(times)
    assert times[2] > times[0] + 0.02  # the front end alone takes 25 ns per pixel


def test_with_separate_prefill_images_delay_only_the_first_token() -> None:
    pair = "1xtp1+1xtp1"
    more: dict[str, Any] = {"values": {"prefill_decode": pair}, "space": {"prefill_decode": (pair,)}}
    text, seen = predicted(None, **more), predicted(images((1280, 720), count=4), **more)
    assert ttft(seen) > ttft(text) + 0.1
    assert seen.figures["tpot_s.mean"] == pytest.approx(text.figures["tpot_s.mean"], rel=0.05)


def test_the_tower_takes_memory_even_without_images() -> None:
    text, seen = predicted(None, model=serving_inputs.DENSE), predicted(None)
    assert float(text.figures["kv_cache_bytes"][0] - seen.figures["kv_cache_bytes"][0]) > 2 * WHOLE.weights
    assert WHOLE.weights == pytest.approx(0.676e9, rel=0.01)  # published: 0.67 billion
    off = predicted(None, engine_args={"language_model_only": True})
    assert off.figures["kv_cache_bytes"] == pytest.approx(text.figures["kv_cache_bytes"])


def test_whole_towers_work_on_several_images_at_once() -> None:
    values = {"tensor_model_parallel_size": 4}
    whole = {**values, TOWER: "data"}
    many = images((1280, 720), count=4)
    assert ttft(predicted(many, values=values)) != ttft(predicted(many, values=whole))
    one = images((2240, 2240))
    assert ttft(predicted(one, values=values)) < ttft(predicted(one, values=whole))
    caches = [float(predicted(many, values=each).figures["kv_cache_bytes"][0]) for each in (values, whole)]
    assert caches[1] < caches[0]


def test_the_context_holds_the_largest_images() -> None:
    found = images((280, 280), (1280, 720), count=2)
    assert longest_request(task(found)) == 64 + 16 + 2 * 1198 + CHAT_TOKENS
    assert longest_request(task(found, model=DENSE)) == 80


@pytest.mark.parametrize(
    ("name", "arguments", "word"),
    [
        ("llamacpp", {}, "mmproj"),
        ("llamacpp", {"engine_args": {"mmproj": "x.gguf"}, "model": DENSE}, "qwen2_5_vl"),
        ("vllm", {"model": DENSE}, "qwen2_5_vl"),
        ("sglang", {"model": DENSE}, "qwen2_5_vl"),
        ("lmdeploy", {"model": DENSE}, "qwen2_5_vl"),
        ("vllm", {"engine_args": {"--language-model-only": True}}, "language-model-only"),
    ],
)
def test_servers_that_cannot_take_images_are_refused(name: str, arguments: dict[str, Any], word: str) -> None:
    engine: ServingEngine = ENGINES[name]
    with refuses("serve.profile.images") as raised:
        engine.rules(task(images(), name, **arguments))
    assert word in raised.value.problem
    assert raised.value.fix
    engine.rules(task(None, name, **arguments))
    LLAMACPP.rules(task(images(), "llamacpp", engine_args={"mmproj": "x.gguf"}))


@pytest.mark.parametrize(
    ("engine", "flag", "value"),
    [
        ("vllm", "runner", "pooling"),
        ("vllm", "task", "score"),
        ("sglang", "is-embedding", True),
        ("llamacpp", "embedding", True),
    ],
)
def test_servers_that_generate_no_text_are_refused(engine: str, flag: str, value: object) -> None:
    with refuses(f"serve.engine_args.{flag}"):
        ENGINES[engine].rules(task(None, engine, engine_args={flag: value}))


def test_images_of_a_trace_need_a_tower(tmp_path: Any) -> None:
    trace = tmp_path / "a.jsonl"
    trace.write_text('{"prompt": "a", "max_tokens": 1, "images": ["8x8"]}')
    job = task(None, model=DENSE, loads=(Load(trace=str(trace), num_prompts=None, concurrency=1),))
    with refuses("serve.profile.trace"):
        VLLM.rules(job)


def test_images_stay_with_their_requests_when_conversations_take_turns(tmp_path: Any) -> None:
    trace = tmp_path / "a.jsonl"
    rows = [("a", 50, []), ("a", 90, ["224x224", "224x224"]), ("b", 50, ["1280x720"])]
    keys = ("session_id", "input_length", "images")
    trace.write_text("\n".join(json.dumps({**dict(zip(keys, each, strict=True)), "output_length": 4}) for each in rows))
    drawn = SimulatedLoad.draw(Load(trace=str(trace), num_prompts=None, concurrency=2, turns=9), VISION)
    assert [work.images for work in drawn.images] == [0, 1, 2]
    texts = [tokens - work.tokens - 2 * work.images for tokens, work in zip(drawn.input_len, drawn.images, strict=True)]
    assert texts == [50, 50, 90]


def test_limits_of_images_must_hold_a_request() -> None:
    job = task(images(count=3))
    assert broken(VLLM, job, limit_mm_per_prompt=2) == ["images_of_request"]
    assert broken(VLLM, job, limit_mm_per_prompt=3) == []


def test_a_tower_is_shared_by_several_ranks_only() -> None:
    split = {"tensor_model_parallel_size": 2, TOWER: "data"}
    for name in ("vllm", "sglang"):
        seen, text = task(images(), name), task(None, name, model=DENSE)
        engine = ENGINES[name]
        assert merged(engine, seen, **split)[TOWER] > 0
        assert merged(engine, seen, **{**split, "tensor_model_parallel_size": 1})[TOWER] == 0
        assert merged(engine, seen, **{**split, TOWER: "weights"})[TOWER] == 0
        assert merged(engine, text, **split)[TOWER] == 0
        auto = next(axis for axis in engine.axes(task(images(), name, space={TOWER: "auto"})) if axis.knob == TOWER)
        assert set(auto.values) == {"weights", "data"}


WORK = [ImageWork(patches=100.0, pairs=1e4, images=1, pixels=1_000_000)] * 2
ENCODE_S = 0.5
PRICE = Price(times(), 0, LANE, OVER, lambda images: [ENCODE_S] * len(images))


def test_an_image_waits_for_the_front_end_and_the_tower() -> None:
    lengths, arrivals = [(512, 3), (512, 3)], [0.0, 10.0]
    text, seen = (Simulation(PRICE, lengths, arrivals, 1, images=images).run() for images in ((), WORK))
    added = [after.first - before.first for before, after in zip(text.requests, seen.requests, strict=True)]
    assert added == pytest.approx([ENCODE_S + 1e6 * PIXEL] * 2)


def test_images_are_decoded_one_after_the_other() -> None:
    lengths = [(512, 3)] * 2
    free = Price(times(), 0, LANE, OVER, lambda images: [0.0] * len(images))
    text, seen = (Simulation(free, lengths, [0.0, 0.0], 2, images=images).run() for images in ((), WORK))
    assert seen.requests[1].first == pytest.approx(text.requests[1].first + 2e6 * PIXEL, rel=0.1)


def test_the_instance_that_prefills_has_the_tower() -> None:
    decode = Price(times(), 0, LANE, OVER, lambda images: [9.0] * len(images))
    prefill = Prefill(price=PRICE, per_decode=1.0, transfer=0.0)
    text, seen = (Disaggregated(decode, prefill, [(512, 3)], [0.0], 1, images).run() for images in ((), WORK[:1]))
    assert seen.requests[0].first - text.requests[0].first == pytest.approx(ENCODE_S + 1e6 * PIXEL)


SPREAD: dict[str, Any] = {"num_prompts": 60, "concurrency": 16, "output_len": 128, "range_ratio": 0.5}


def figures_apart(word: str, found: Images | None, **changes: Any) -> dict[str, float]:
    """Predicted figures of instances of PREFILL_DECODE, on hosts with as many CPUs as needed."""
    loads = (load(found, **SPREAD | changes),)
    values = {"prefill_decode": word, "instances": 1}
    found_figures = predicted(found, devices=8, loads=loads, space={"prefill_decode": (word,)}, values=values).figures
    return {name: float(each[0]) for name, each in found_figures.items()}


@pytest.mark.parametrize("language", ["2xtp2", "1xtp2+1xtp2"])
@pytest.mark.parametrize("changes", [{}, {"concurrency": None, "request_rate": 12.0}])
def test_more_encoders_are_never_slower_and_idle_without_images(language: str, changes: dict[str, Any]) -> None:
    rows = [figures_apart(f"{count}xenc+{language}", images(count=2), **changes) for count in (1, 2, 3, 4)]
    for less, more in pairwise(rows):  # other batches of prompts may differ a little
        assert more["requests_per_s"] >= 0.98 * less["requests_per_s"]
        assert more["e2e_s.mean"] <= 1.02 * less["e2e_s.mean"]
    assert rows[-1]["ttft_s.mean"] < rows[0]["ttft_s.mean"]
    assert rows[0]["time.encode_s"] > rows[-1]["time.encode_s"] * 0.999 > 0.0
    idle = figures_apart(f"1xenc+{language}", None, **changes)
    values = {"prefill_decode": language} if "+" in language else {"tensor_model_parallel_size": 2}
    space, count = ({"prefill_decode": (language,)}, 1) if "+" in language else ({}, 2)
    loads, values = (load(None, **SPREAD | changes),), {"instances": count, **values}
    others = predicted(None, devices=8, loads=loads, space=space, values=values).figures
    assert {name: idle[name] for name in ("requests_per_s", "ttft_s.p99", "tpot_s.mean")} == {
        name: pytest.approx(float(others[name][0])) for name in ("requests_per_s", "ttft_s.p99", "tpot_s.mean")
    }
    assert idle["output_tokens_per_s_per_device"] == pytest.approx(4 / 5 * others["output_tokens_per_s_per_device"][0])


def test_an_encoder_holds_the_tower_alone() -> None:
    job = task(images(), devices=4, space={"prefill_decode": ("1xenc+1xtp1",)})
    kinds = instance_kinds(job, row(VLLM, job, prefill_decode="1xenc+1xtp1"))
    found = VLLM.settings(job, kinds.columns).encoding(kinds.role == 3)
    memory = serving_memory(Serving(model=LARGE, precision="bf16", overheads=OVER), found, costs())
    assert memory.weights[1] == pytest.approx(2.0 * WHOLE.weights)
    assert memory.weights[0] > 10 * memory.weights[1]
    assert memory.cache[1] == 0.0 < memory.cache[0]


def test_ranks_with_whole_towers_divide_the_images_of_a_request() -> None:
    encoder = EncoderCosts(*(np.array([each]) for each in (1e-3, 1e-6, 0.05, 4.0)))
    several = [ImageWork(400.0, 4e4, count, 0) for count in (1, 2, 8, 0)]
    assert encoder.seconds(0, several) == pytest.approx([0.44, 0.22, 0.11, 0.0])
    assert encoder.seconds(0, [ImageWork(4.0, 1.0, 1, 0)]) == [0.05]


def test_patches_attend_to_windows_in_most_layers() -> None:
    (work, none) = image_work([(Image(1280, 720), Image(56, 56)), ()], VISION)
    assert work.patches == 4 * 1196 + 16
    assert work.pairs == 4 * (4784**2 + 16**2) + 28 * (4784 * 64 + 16 * 16)
    assert (work.images, work.pixels) == (2, 1280 * 720 + 56 * 56)
    assert (work.tokens, none) == (work.patches / 4, (0.0, 0.0, 0, 0, 0.0))


def test_products_of_a_tower_are_those_of_its_weights() -> None:
    serving = Serving(model=LARGE, precision="bf16", overheads=OVER)
    found, whole = (
        encoder_costs(VISION, serving, settings(tensor=[1, 4], **shares), costs())
        for shares in ({}, {"tower_shares": 1.0})
    )
    peak = costs().kernels.gemm_seconds(*(np.array([4096.0]) for _ in range(3)), "bf16")[0] / (2 * 4096.0**3)
    layers = sum(VISION.num_layers * each.weights for each in WHOLE.layer_products)
    least = 2 * (layers + WHOLE.merger_weights / VISION.merge_size**2) * peak
    assert least < found.patch[0] < 3 * least
    assert found.patch[0] / 4 < found.patch[1] < found.patch[0]
    assert found.ranks.tolist() == [1.0, 1.0]
    assert whole.ranks.tolist() == [1.0, 4.0]


CHAT = Load(input_len=2000, output_len=40, turns=6, num_prompts=96, concurrency=8)
SMALL = {"kv-cache-memory-bytes": 2**30}
"""On each of four devices: room for three conversations of eight."""


def figures(engine: str = "vllm", args: Any = SMALL, load: Load = CHAT, **values: Any) -> dict[str, float]:
    task = tasks.planned(engine, loads=(load,), engine_args=args, engine_version=None, model=serving_inputs.DENSE)
    return tasks.figures(task, **values)


def test_a_tier_without_room_is_no_tier() -> None:
    without, empty, small = (figures(kv_offloading_size=size) for size in (None, 0, 1))
    assert empty == pytest.approx(without, nan_ok=True)
    assert "host_hit_rate" not in without
    assert small["host_hit_rate"] == 0.0, "a copy of what the devices have"
    assert small[HIT_RATE] == small["device_hit_rate"] == without[HIT_RATE]


def test_a_tier_with_an_order_of_its_own_loses_first_what_the_devices_have() -> None:
    """The devices keep x, which each second prompt is; so the host has room for a, b and c."""
    prompts = [[(name, 128), (f"end of {name}", 60)] for name in "xaxbxcxa"]
    devices = cached_tokens(prompts, 256, page=128)
    assert devices.tolist() == [0, 0, 128, 0, 128, 0, 128, 0]
    own, shared = (cached_tokens(prompts, 384, page=128, ahead=each) for each in (devices, None))
    assert (own[-1], shared[-1]) == (128, 0)
    assert (own >= devices).all()


def test_a_connector_may_set_the_room_on_the_host() -> None:
    """And on cores, vLLM offloads only with a class of the user's own, because its own one copies from GPUs."""
    config = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 2**33}}

    def room(config: Any, **values: Any) -> float:
        task = tasks.planned("vllm", engine_args={"kv-transfer-config": json.dumps(config)})
        return float(tasks.settings(task, **values).host_cache.item())

    assert (room(config), room(config, kv_offloading_size=4)) == (2**33, 2**32)
    assert room(config | {"kv_connector": "NixlConnector"}) == 0.0
    for wrong in ([1], {"kv_connector": ["x"]}, {"kv_connector_extra_config": {"cpu_bytes_to_use": -5}}):
        with pytest.raises(SpecError, match="kv-transfer-config"):
            room(wrong)
    for own, rules in (({}, ["offload_on_cores"]), ({"spec_module_path": "mine"}, [])):
        text = json.dumps({"kv_connector_extra_config": own})
        task = tasks.planned("vllm", on_cores=True, engine_args={"kv-transfer-config": text})
        assert tasks.broken(tasks.engine_of("vllm"), task, kv_offloading_size=1) == rules


@pytest.mark.parametrize(
    ("config", "envs", "gib"),
    [
        ({"kv_connector": "LMCacheConnectorV1"}, {}, {"host": 2 * 5.0}),
        (
            {"kv_connector": "LMCacheConnectorV1"},
            {"LMCACHE_LOCAL_CPU": "False", "LMCACHE_LOCAL_DISK": "file:///x", "LMCACHE_MAX_LOCAL_DISK_SIZE": "9"}
            | {"LMCACHE_REMOTE_URL": "lm://x:65432"},
            {"disk": 18.0, "store": np.inf},
        ),
        ({"kv_connector": "SimpleCPUOffloadConnector"}, {}, {"host": 8.0}),
        ({"kv_connector": "DynamoConnector"}, {"DYN_KVBM_CPU_CACHE_GB": "20"}, {"host": 20.0}),
        (
            {"kv_connector": "MultiConnector"}
            | {"kv_connector_extra_config": {"connectors": [{"kv_connector": "MooncakeStoreConnector"}, {}, 1]}},
            {},
            {"store": np.inf},
        ),
        ({"kv_connector": "LMCacheMPConnector"}, {"LMCACHE_MAX_LOCAL_CPU_SIZE": "x"}, {}),  # a variable of others
    ],
)
def test_connectors_have_tiers(config: Any, envs: dict[str, str], gib: dict[str, float]) -> None:
    task = tasks.planned("vllm", engine_args={"kv-transfer-config": json.dumps(config)}, envs=envs)
    found = tasks.settings(task, tensor_model_parallel_size=2)
    assert {tier: getattr(found, f"{tier}_cache").item() / 2**30 for tier in ("host", "disk", "store")} == {
        **dict.fromkeys(("host", "disk", "store"), 0.0),
        **gib,
    }


def test_windows_keep_the_context_with_connectors_that_turn_off_vllms_hybrid_manager() -> None:
    given = {"max-model-len": 65536, "max-num-batched-tokens": 2048}
    configs = (json.dumps({"kv_connector": each}) for each in ("OffloadingConnector", "LMCacheConnectorV1"))
    jobs = [{**given, "kv-transfer-config": each} for each in configs]
    jobs.append({**given, "disable-hybrid-kv-cache-manager": True})
    model = public_model("google/gemma-3-27b-pt")
    freed, kept, off = (tasks.settings(tasks.planned("vllm", model=model, engine_args=each)) for each in jobs)
    assert kept.longest_bytes.item() == off.longest_bytes.item() > 4.0 * freed.longest_bytes.item()


def test_an_endless_host_has_each_prefix_that_repeats_and_more_room_never_has_less() -> None:
    requests = traffic(CHAT)
    repeated = cached_tokens(prompt_parts(requests, 0), np.inf).sum() / requests.input_len.sum()
    found = [figures(kv_offloading_size=size) for size in (2, 8, 16, 1000)]
    rates = [each[HIT_RATE] for each in found]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(repeated, rel=0.01)  # in blocks of 16 tokens
    assert found[-1]["host_hit_rate"] > 0.1
    assert found[-1]["device_hit_rate"] == found[0]["device_hit_rate"]
    assert found[-1]["ttft_s.mean"] < found[0]["ttft_s.mean"]
    assert 0.0 < found[-1]["cache_load_s"] < found[-1]["cache_compute_s"]


@pytest.mark.parametrize("by_layer", [False, True])
def test_a_slower_link_never_helps(by_layer: bool) -> None:
    lane, over = (
        Lane(budget=4096.0, running=8.0, cache_tokens=1e9),
        replace(serving_inputs.OVER, loads_by_layer=by_layer),
    )
    price = Price(times(), 0, lane, over)
    lengths, hits = [(4000, 20)] * 24, [0.0, 3000.0] * 12

    def ttft(token_s: float) -> float:
        run = Simulation(price, lengths, None, 8, hits, loads=[token_s * each for each in hits]).run()
        assert all(each.arrival < each.first <= each.end for each in run.requests)
        return float(np.mean([each.first - each.arrival for each in run.requests]))

    found = [ttft(token_s) for token_s in (0.0, 1e-6, 1e-5, 1e-4, 1e-3)]
    assert all(later > 0.99 * sooner for sooner, later in pairwise(found)), found
    assert found[-1] > 3.0


def test_hicache_is_twice_the_cache_of_the_devices_unless_a_size_is_given() -> None:
    args = {"max-total-tokens": 32_768}
    off, on, sized, stored = (
        figures("sglang", {**args, **more}, **values)
        for more, values in (
            ({}, {}),
            ({"enable-hierarchical-cache": True}, {}),
            ({}, {"hicache_size": 64}),
            ({}, {"hicache_storage_backend": "mooncake"}),
        )
    )
    assert off[HIT_RATE] < on[HIT_RATE] < sized[HIT_RATE]
    assert stored[HIT_RATE] == pytest.approx(sized[HIT_RATE])
    assert stored["host_hit_rate"] == on["host_hit_rate"]
    assert stored["store_hit_rate"] > 0.0


def test_a_tier_that_gets_what_is_evicted_adds_to_the_devices() -> None:
    args = {"max-total-tokens": 16_384, "enable-hierarchical-cache": True}
    through, back = (figures("sglang", {**args, **more}) for more in ({}, {"hicache-write-policy": "write_back"}))
    assert through[HIT_RATE] < back[HIT_RATE]
