"""Where instances run: on several hosts, and as instances that only prefill or only decode."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flagcore_llamacpp.engine import ENGINE as LLAMACPP
from flagcore_serving.engine import ServingEngine
from flagcore_serving.job import Images, Load
from flagcore_serving.launch.server import Instance
from flagcore_serving.space import placement
from flagcore_serving.space.hardware import INSTANCES, PP, PREFILL_DECODE, TP, Hardware
from flagcore_serving.space.placement import placements
from flagcore_serving.space.roles import Role, auto_roles, balanced_roles, fits, parse_roles, places, roles
from flagcore_sglang.engine import ENGINE as SGLANG
from flagcore_vllm.engine import ENGINE as VLLM

from engines.serving.tests.engines.tasks import broken, merged, row, serving, space_of
from flagcore.domain.spec import Task
from tests.checks import refuses
from tests.product.tasks import DENSE, VISION


@pytest.mark.parametrize(
    ("values", "places"),
    [
        ({"instances": 2, TP: 4}, [(range(1), 0), (range(1, 2), 0)]),
        ({"instances": 3, TP: 2}, [(range(1), 0), (range(1), 2), (range(1, 2), 0)]),
        ({"instances": 1, TP: 8}, [(range(2), 0)]),
        ({"instances": 1, TP: 4, PP: 2}, [(range(2), 0)]),
    ],
)
def test_an_instance_is_on_the_first_host_with_room(values: dict[str, Any], places: list[tuple[range, int]]) -> None:
    assert [(each.hosts, each.first) for each in placements(serving("vllm", nodes=2), values)] == places


def test_instances_fit_exactly_if_they_have_places() -> None:
    random, answers = np.random.default_rng(1), list[bool]()
    for _ in range(2000):
        hosts, per_host = int(random.integers(1, 6)), int(random.choice([1, 2, 4, 6, 8]))
        hardware = Hardware.of(serving("vllm"))._replace(hosts=hosts, per_host=per_host, cards=hosts * per_host)
        widths = random.choice([1, 2, 3, 4, 6, 8, 16], size=int(random.integers(1, 4)))
        parts = tuple(Role(int(random.integers(1, 5)), tp=int(width)) for width in widths)
        answers.append(places([each.devices for each in parts for _ in range(each.count)], hardware) is not None)
        assert fits(parts, hardware) == answers[-1], (parts, hardware)
    assert 500 < sum(answers) < 1500


def test_a_million_instances_are_placed_at_once() -> None:
    hardware = Hardware.of(serving("vllm"))._replace(hosts=125_000, per_host=8, cards=1_000_000)
    assert fits((Role(499_999, tp=2), Role(2)), hardware)
    assert not fits((Role(499_999, tp=2), Role(3)), hardware)


def test_cores_of_an_instance_come_from_one_host() -> None:
    task = serving("llamacpp", nodes=2, on_cores=True)
    assert [(each.hosts[0], each.width) for each in placements(task, {"instances": 1})] == [(0, 4)]
    assert [(each.hosts[0], each.width) for each in placements(task, {"instances": 3})] == [(0, 2), (0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("engine", "values", "legal"),
    [
        (VLLM, {"instances": 2, TP: 4}, True),
        (VLLM, {"instances": 1, TP: 8}, True),
        (VLLM, {"instances": 2, TP: 1, PP: 3}, True),
        (VLLM, {"instances": 1, TP: 1, PP: 6}, False),
        (SGLANG, {"instances": 1, TP: 4, PP: 2}, True),
        (LLAMACPP, {"instances": 1, PP: 8}, False),
        (LLAMACPP, {"instances": 2, PP: 4}, True),
    ],
)
def test_an_instance_fits_on_a_host_or_has_whole_hosts(engine: Any, values: dict[str, Any], legal: bool) -> None:
    rules = broken(engine, serving(engine.name, nodes=2), **values)
    assert ("hosts" not in rules) == legal, rules


def test_each_host_of_an_instance_has_its_own_flags() -> None:
    assert VLLM.on_host(2, "0")[:4] == ("--nnodes", "2", "--node-rank", "0")
    assert "--headless" not in VLLM.on_host(2, "0")
    assert VLLM.on_host(2, "1")[-1] == "--headless"
    assert SGLANG.on_host(2, "1") == ("--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "{head}:{head_port}")


def test_cards_come_from_the_spec_or_the_cluster_and_must_exist() -> None:
    assert not Hardware.of(serving("vllm")).on_cores
    assert Hardware.of(serving("vllm", on_cores=True)).on_cores
    assert Hardware.of(serving("vllm", devices=8)).cards == 8
    with refuses("auto_tuner.cards", 9):
        Hardware.of(serving("vllm", devices=8, cards=9))
    assert Hardware.of(serving("vllm", devices=8, cards=6)).cards == 6


ENGINES = pytest.mark.parametrize("engine", [SGLANG, VLLM], ids=lambda e: e.name)
HEADS = replace(DENSE, num_attention_heads=16, num_query_groups=8)
EXPERTS = replace(HEADS, num_moe_experts=16, moe_router_topk=2, moe_ffn_hidden_size=64)
PAIR, WIDER, TRANSFER = "2xtp2+1xtp4", "1xtp4+2xtp2", "kv_transfer"


def cards(engine: ServingEngine, count: int = 8, hosts: int = 1, **arguments: Any) -> Task:
    """A task whose objective is a rate, on `hosts` that share the cards."""
    arguments = {"model": HEADS, "objective": "output_tokens_per_s", **arguments}
    return serving(engine.name, devices=count // hosts, nodes=hosts, **arguments)


def illegal(engine: ServingEngine, task: Task, pair: str, **values: Any) -> list[str]:
    """The rules that a pair of a space breaks."""
    spec = replace(task.spec, space={PREFILL_DECODE: (pair,)})
    return broken(engine, replace(task, spec=spec), **{PREFILL_DECODE: pair, **values})


def server(engine: ServingEngine, task: Task, kind: str, **values: Any) -> Instance:
    """One server of a kind."""
    every = {**engine.defaults(task), PREFILL_DECODE: PAIR, **values}
    place = next(each for each in placement.placements(task, every) if each.kind == kind)
    assert engine.of_kind
    return engine.of_kind(task, every, kind, engine.server(task, place.values, ()))


def config(instance: Instance) -> dict[str, Any]:
    return dict(json.loads(instance.argv[instance.argv.index("--kv-transfer-config") + 1]))


@pytest.mark.parametrize(
    "given",
    [
        *("2xtp2", "2xtp2+0xtp4", "tp2+tp4", "2xtp0+1xtp2", "1xtp1+1xtp1+1xtp1", 4, True, "2x+1x"),
        *("1xenc", "0xenc+1xtp2", "1xencpp2+1xtp2", "enc+1xtp2", "1xtp2+1xenc", "1xenc+1xenc+1xtp2"),
    ],
)
def test_an_invalid_pair_is_reported(given: object) -> None:
    with refuses("auto_tuner.space.prefill_decode"):
        VLLM.axes(cards(VLLM, space={PREFILL_DECODE: (given,)}))


def test_a_pair_has_one_spelling() -> None:
    assert parse_roles("2xTP2pp1 + 1xtp4", "x") == PAIR
    assert parse_roles("1xdp8ep8+1xtp4pp2", "x") == "1xtp1dp8ep8+1xtp4pp2"
    assert parse_roles("2xENC + 1xtp2", "x") == "2xenc+1xtp2"


@ENGINES
def test_kinds_are_opt_in_and_auto_divides_all_cards(engine: ServingEngine) -> None:
    rows = _rows(space_of(engine, cards(engine, space={INSTANCES: "auto", TP: "auto", PREFILL_DECODE: "auto"})))
    words = [each[PREFILL_DECODE] for each in rows if each[PREFILL_DECODE]]
    assert len(words) == len(set(words))
    assert {PAIR, "4xtp1+1xtp4", "1xtp4+2xtp2"} <= set(words)
    pairs = [roles(str(word)) for word in words]
    assert {sum(each.count * each.devices for each in pair) for pair in pairs} == {8}
    assert {(each[INSTANCES], each[TP]) for each in rows if each[PREFILL_DECODE]} == {(1, 1)}
    assert all(not each[PREFILL_DECODE] for each in _rows(space_of(engine, cards(engine, space={TP: "auto"}))))


def _rows(space: Any) -> list[dict[str, Any]]:
    return [space.candidate(number).as_dict() for number in range(len(space))]


def test_auto_has_attention_groups_for_experts_and_few_values_for_many_cards() -> None:
    assert "1xtp4+1xtp1dp4ep4" in auto_roles(cards(SGLANG, model=EXPERTS))
    many = auto_roles(cards(VLLM, 256, hosts=32))
    assert 100 < len(many) < 1000
    assert max(max(each.devices for each in roles(str(word))) for word in many[1:]) == 8


def test_a_latency_needs_no_second_kind_unless_it_is_listed() -> None:
    assert len(space_of(VLLM, cards(VLLM, space={PREFILL_DECODE: "auto"}, objective="ttft_s.p99"))) == 1


@pytest.mark.parametrize(
    ("pair", "rule"),
    [
        (PAIR, ""),
        ("2xtp2+2xtp4", "cards_of_kinds"),
        ("1xtp3+1xtp4", "attention_heads"),
        ("1xtp2ep4+1xtp4", "expert_parallel"),
    ],
)
@ENGINES
def test_each_kind_obeys_the_rules_of_the_engine(engine: ServingEngine, pair: str, rule: str) -> None:
    found = illegal(engine, cards(engine), pair)
    assert any(each.startswith(rule) for each in found) if rule else found == []


@ENGINES
def test_instances_of_both_kinds_fit_on_hosts(engine: ServingEngine) -> None:
    assert illegal(engine, cards(engine, 12, hosts=2), "2xtp4+1xtp4") == ["hosts_of_kinds"]
    task = cards(engine, 8, hosts=2)
    values = {**engine.defaults(task), PREFILL_DECODE: PAIR}
    places = [(each.kind, each.hosts[0], each.first, each.width) for each in placement.placements(task, values)]
    assert places == [("prefill", 1, 0, 2), ("prefill", 1, 2, 2), ("decode", 0, 0, 4)]


def test_copies_of_kv_heads_are_not_read_by_fewer_ranks() -> None:
    for heads, pair, rules in ((4, WIDER, []), (2, PAIR, []), (2, WIDER, ["transfer_of_kinds"])):
        task = cards(VLLM, model=replace(HEADS, num_query_groups=heads))
        assert illegal(VLLM, task, pair) == rules


@pytest.mark.parametrize(
    ("release", "connector", "pair", "rule"),
    [
        ("0.32.0", "NixlConnector", PAIR, ""),
        ("0.32.0", None, PAIR, ""),
        ("0.23.0", "P2pNcclConnector", "1xtp4+1xtp4", ""),
        ("0.24.0", "P2pNcclConnector", "1xtp4+1xtp4", "transfer_release"),
        ("0.23.0", "P2pNcclConnector", PAIR, "transfer_of_kinds"),
        ("0.32.0", "NixlConnector", "1xtp2pp2+1xtp4", "transfer_of_kinds"),
    ],
)
def test_connectors_that_a_release_or_a_layout_lacks_are_illegal(
    release: str, connector: str | None, pair: str, rule: str
) -> None:
    found = illegal(VLLM, cards(VLLM, engine_version=release), pair, **{TRANSFER: connector})
    assert found == ([rule] if rule else [])


TOWER = replace(HEADS, vision=VISION)
ENCODED = "2xenc+1xtp2+1xtp4"


def test_encoders_need_a_tower_and_a_release_that_has_them() -> None:
    with refuses("auto_tuner.space.prefill_decode", ENCODED, match="no vision tower"):
        VLLM.axes(cards(VLLM, space={PREFILL_DECODE: (ENCODED,)}))
    assert illegal(VLLM, cards(VLLM, model=TOWER, engine_version="0.33.0"), ENCODED) == []
    assert illegal(VLLM, cards(VLLM, model=TOWER, engine_version="0.14.0"), ENCODED) == ["encoders_of_kinds"]
    assert illegal(VLLM, cards(VLLM, model=TOWER), "3xenc+1xtp2+1xtp4") == ["cards_of_kinds"]
    assert "embeddings_on_host" in illegal(VLLM, cards(VLLM, model=TOWER, hosts=2), ENCODED)
    own = {"ec-transfer-config": "{}"}
    assert illegal(VLLM, cards(VLLM, model=TOWER, engine_args=own), ENCODED) == ["own_embeddings_config"]
    assert illegal(SGLANG, cards(SGLANG, model=TOWER, engine_version="0.5.6"), "1xenc+2xtp2") == ["encoders_of_kinds"]


@pytest.mark.parametrize(
    ("engine", "kind", "words", "absent"),
    [
        (VLLM, "encode", ["--mm-encoder-only", "ec_producer"], ["--max-num-seqs", "--kv-transfer-config"]),
        (VLLM, "prefill", ["ec_consumer", "kv_producer"], ["--max-num-seqs", "--mm-encoder-only"]),
        (VLLM, "decode", ["kv_consumer", "--max-num-seqs"], ["--ec-transfer-config"]),
        (VLLM, "", ["ec_consumer", "--max-num-seqs"], ["--kv-transfer-config"]),
        (SGLANG, "encode", ["--encoder-only --encoder-transfer-backend"], ["--disaggregation-mode", "--tp-size"]),
        (SGLANG, "prefill", ["--language-only --encoder-urls {encoder_urls}", "--disaggregation-mode prefill"], []),
        (SGLANG, "decode", ["--disaggregation-mode decode"], ["--language-only"]),
        (SGLANG, "", ["--encoder-bootstrap-port {embedding_port}"], ["--disaggregation-mode"]),
    ],
)
def test_each_kind_has_its_flags_for_embeddings(engine: Any, kind: str, words: list[str], absent: list[str]) -> None:
    pair, limit = ENCODED if kind else "2xenc+1xtp2", {"vllm": "max_num_seqs", "sglang": "max_running_requests"}
    found = server(engine, cards(engine, model=TOWER), kind, **{PREFILL_DECODE: pair, limit[engine.name]: 64})
    text = " ".join(found.argv)
    assert all(each in text for each in words), text
    assert not any(each in text for each in absent), text
    urls = found.with_encoders(["http://a", "http://b"]).argv
    assert ("--encoder-urls http://a http://b" in " ".join(urls)) is ("--encoder-urls" in text)


def test_routers_know_encoders_or_leave_them_to_the_others() -> None:
    places = [("prefill", "a", 8001), ("decode", "a", 8017), ("encode", "b", 8033), ("encode", "b", 8049)]
    task, values = cards(VLLM, model=TOWER), {PREFILL_DECODE: ENCODED}
    words = VLLM.router(task, values).instance(places).argv
    lists = {kind: words[words.index(f"--{kind}-servers-urls") + 1] for kind in ("encode", "prefill", "decode")}
    assert lists == {"encode": "http://b:8033,http://b:8049", "prefill": "http://a:8001", "decode": "http://a:8017"}
    both = VLLM.router(task, values).instance([("", "a", 8001), *places[2:]]).argv
    assert both[both.index("--prefill-servers-urls") + 1] == "disable"
    assert both[both.index("--decode-servers-urls") + 1] == "http://a:8001"
    others = SGLANG.router(cards(SGLANG, model=TOWER), values).instance(places).argv
    assert "http://a:8001" in others
    assert not any("//b:" in each for each in others)


def test_auto_divides_cards_also_into_encoders_for_a_load_with_images() -> None:
    images = Load(images=Images(buckets=((1280, 720, 1.0),)))
    words = {str(each) for each in auto_roles(cards(VLLM, model=TOWER, loads=(images,)))}
    assert {"4xenc+1xtp4", "4xenc+2xtp2", "2xenc+3xtp2", "1xenc+1xtp1+3xtp2", "1xenc+7xtp1"} <= words
    assert not any("enc" in str(each) for each in auto_roles(cards(VLLM, model=TOWER)))


def test_sglang_has_no_second_kind_on_cores() -> None:
    assert "transfer_on_cores" in illegal(SGLANG, serving("sglang", on_cores=True), "1xtp1+1xtp1")


@ENGINES
def test_the_pair_replaces_layouts_and_the_transfer_means_nothing_without_it(engine: ServingEngine) -> None:
    codes = merged(engine, cards(engine), **{PREFILL_DECODE: PAIR, INSTANCES: 4, TP: 2, PP: 2})
    assert (codes[INSTANCES], codes[TP], codes[PP]) == (1, 1, 1)
    word = next(knob for knob in engine.knobs if knob.name == TRANSFER).words[0]
    assert merged(engine, cards(engine), **{TRANSFER: word})[TRANSFER] == 0


def test_kinds_have_their_own_layouts_and_limits() -> None:
    space = {PREFILL_DECODE: (None, PAIR), "max_num_seqs": (64,), "max_num_batched_tokens": (512,)}
    assert len(space_of(VLLM, cards(VLLM, space=space))) > 2  # also more instances of one kind
    task = cards(VLLM, space={**space, INSTANCES: (1,)})
    kinds = placement.instance_kinds(task, space_of(VLLM, task).columns())
    found = VLLM.settings(task, kinds.columns)
    order = np.argsort(kinds.role)
    assert kinds.role[order].tolist() == [0, 1, 2]
    assert found.tensor[order].tolist() == [1, 2, 4]
    assert kinds.count[order].tolist() == [1, 2, 1]
    default = VLLM.settings(task, {**row(VLLM, task), "max_num_seqs": np.zeros(1, dtype=np.int64)})
    assert found.max_batched_tokens[order].tolist()[:2] == [512, 512]
    assert found.max_running[order].tolist()[::2] == [64, 64]
    assert found.max_running[order].tolist()[1] == int(default.max_running[0])


def test_vllms_kinds_are_started_with_their_connector() -> None:
    task = cards(VLLM, engine_version="0.23.0")
    nixl = server(VLLM, task, "prefill", max_num_seqs=64, max_num_batched_tokens=512)
    assert config(nixl) == {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
    assert nixl.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "{transfer_port}"
    assert "--max-num-batched-tokens" in nixl.argv
    assert "--max-num-seqs" not in nixl.argv
    assert nixl.argv[nixl.argv.index("--tensor-parallel-size") + 1] == "2"
    pair = {PREFILL_DECODE: "1xtp4+1xtp4", TRANSFER: "P2pNcclConnector"}
    roles = [config(server(VLLM, task, kind, **pair))["kv_role"] for kind in ("prefill", "decode")]
    assert roles == ["kv_producer", "kv_consumer"]
    assert config(server(VLLM, task, "decode", **pair).at_port(8017))["kv_port"] == "18017"


@pytest.mark.parametrize(("release", "other"), [("0.5.9", True), ("0.5.10", False)])
def test_sglangs_kinds_are_started_with_their_mode(release: str, other: bool) -> None:
    task = cards(SGLANG, engine_version=release)
    prefill, decode = (server(SGLANG, task, kind, **{TRANSFER: "nixl"}) for kind in ("prefill", "decode"))
    words = " ".join(prefill.argv)
    assert "--disaggregation-mode prefill --disaggregation-transfer-backend nixl" in words
    assert ("--disaggregation-decode-tp 4" in words) is other
    assert "--tp-size 4" in " ".join(decode.argv)


def test_a_vendors_backend_is_passed_by_engine_args() -> None:
    task = cards(SGLANG, engine_version="0.5.23", engine_args={"disaggregation-transfer-backend": "ascend"})
    words = " ".join(server(SGLANG, task, "decode").argv)
    assert words.count("--disaggregation-transfer-backend ascend") == 1
    assert "mooncake" not in words


@ENGINES
def test_the_router_has_each_instance_of_its_kind(engine: ServingEngine) -> None:
    task, values = cards(engine), {PREFILL_DECODE: PAIR}
    places = [("prefill", "a", 8001), ("prefill", "b", 8017), ("decode", "a", 8033)]
    words = engine.router(task, values).instance(places).at_port(8000).argv
    assert [words[number + 1] for number, word in enumerate(words) if word == "--prefill"] == [
        "http://a:8001",
        "http://b:8017",
    ]
    assert words[words.index("--port") + 1] == "8000"


def test_experts_are_split_over_hosts_with_copies() -> None:
    experts = replace(EXPERTS, num_moe_experts=256)
    task = cards(SGLANG, 96, hosts=12, space={PREFILL_DECODE: "auto"}, model=experts)
    pair = "1xtp1dp32ep32+1xtp1dp64ep64"
    assert {pair, "1xtp1dp16ep16+1xtp1dp80ep80"} <= {*auto_roles(task)}
    assert illegal(SGLANG, task, pair, redundant_experts=32) == ["expert_parallel"]
    assert illegal(SGLANG, task, pair, redundant_experts=64) == []
    assert illegal(SGLANG, task, "1xtp1dp24ep24+1xtp1dp72ep72", redundant_experts=32) == []
    assert illegal(SGLANG, task, "1xtp1dp32+1xtp1dp64", redundant_experts=64) == ["load_balancing"]
    assert illegal(SGLANG, task, "6xtp8+1xtp1dp48ep48", redundant_experts=32) == []
    values = {PREFILL_DECODE: "6xtp8+1xtp1dp48ep48", "redundant_experts": 32}
    copies = [placement.of_kind(values, kind).get("redundant_experts") for kind in ("prefill", "decode")]
    assert copies == [None, 32]  # an instance that does not divide its experts has none
    rules = SGLANG.rules(cards(SGLANG, 96, hosts=12, model=experts, default_space=True))
    assert [rule.name for rule in rules if rule.search_only] == ["recipe_of_kinds"]


WIDE, NARROW = "1xtp1dp16ep16+1xtp1dp16ep16", "2xtp1dp8ep8+1xtp1dp16ep16"


@pytest.mark.parametrize(
    ("engine", "pair", "flag", "given", "words"),
    [
        (SGLANG, WIDE, "--moe-a2a-backend", {}, ["deepep", "deepep"]),
        (SGLANG, NARROW, "--moe-a2a-backend", {}, ["none", "deepep"]),
        (SGLANG, WIDE, "--moe-a2a-backend", {"all2all_backend": ("mooncake",)}, ["mooncake", "mooncake"]),
        (VLLM, WIDE, "--all2all-backend", {}, ["deepep_high_throughput", "deepep_low_latency"]),
        (VLLM, "4xtp1dp4ep4+2xtp1dp8ep8", "--all2all-backend", {}, [None, None]),
    ],
)
def test_experts_on_several_hosts_are_started_with_the_exchange_that_predictions_assume(
    engine: ServingEngine, pair: str, flag: str, given: dict[str, Any], words: list[str | None]
) -> None:
    space = {PREFILL_DECODE: (pair,), **given}
    task = cards(engine, 32, hosts=4, model=EXPERTS, space=space, chip={"vendor": "nvidia"})
    found = space_of(engine, task)
    values = next(each for each in map(found.candidate, range(len(found)))).as_dict()
    commands = [server(engine, task, kind, **values).argv for kind in ("prefill", "decode")]
    assert [argv[argv.index(flag) + 1] if flag in argv else None for argv in commands] == words
    columns = placement.instance_kinds(task, found.columns(np.zeros(1, dtype=np.int64))).columns
    settings = engine.settings(task, columns)
    assert settings.exchanges.tolist() == [word not in (None, "none") for word in words]
    named = [text for text in engine.warnings(task) if flag[2:] in text or "all2all_backend" in text]
    assert bool(named) == (not given and words[0] is not None)


def test_a_spec_without_a_space_divides_hosts_by_the_work_of_prompts_and_answers() -> None:
    experts = replace(EXPERTS, num_moe_experts=256)
    pairs = []
    for output_len in (100, 2000):
        loads = (Load(input_len=2000, output_len=output_len, concurrency=16),)
        task = cards(SGLANG, 96, hosts=12, model=experts, default_space=True, loads=loads)
        pairs.append([roles(str(word)) for word in balanced_roles(task)[1:]])
        assert 2 <= len(pairs[-1]) <= 30
    few, many = (sum(decode.count * decode.devices for _, decode in each) / len(each) for each in pairs)
    assert 2 * few < many
    assert balanced_roles(cards(SGLANG, 8, model=experts, default_space=True)) == (None,)
