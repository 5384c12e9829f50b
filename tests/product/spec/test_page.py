"""Depths of multi-token prediction that a job trains."""

import copy
from pathlib import Path
from typing import Any

import pytest

from docs.site import tables
from flagcore import api
from flagcore.api.inputs import read_spec
from flagcore.domain.spec import TrainSpec
from flagcore.errors import SpecError
from flagcore.report.text import assumed_text
from flagcore.spec.convert import json_schema, parse_spec
from flagcore.spec.validate import keys_of
from tests.product.tasks import ENGINES

DOCS = Path(__file__).parents[3] / "docs"
PAGE, SERVE_PAGE = ((DOCS / name).read_text(encoding="utf-8") for name in ("spec.md", "spec-serve.md"))
SCHEMA, SERVE_SCHEMA = (tables.schema(kind) for kind in ("train", "serve"))
EXAMPLES: dict[str, Any] = {
    "train.lengths": {"mean": 64},
    "train.lengths.histogram": {"64": 1.0},
    "train.lengths.file": "lengths.txt",
    "model": "./Qwen3-8B",
    "model.num_query_groups": 32,
    "model.num_moe_experts": 64,
    "model.moe_router_topk": 8,
    "cluster.hostfile": "hosts.txt",
    "cluster.host_envs": {"a": {"NCCL_IB_HCA": "mlx5_1"}},
    "cluster.groups": [{"chip": "cpu", "devices_per_node": 4}, {"chip": "cpu", "nodes": 2, "devices_per_node": 2}],
    "cluster.groups.envs": {"IXCCL_DEBUG": "WARN"},
    "train": {"engine": "megatron", "seq_length": 4096, "global_batch_size": 512, "precision": "bf16"},
    "train.engine": "megatron",
    "envs": {"OMP_NUM_THREADS": 4},
    "serve": {"engine": "vllm"},
    "serve.engine": "vllm",
    "serve.engine_args": {"max_model_len": 4096, "gpu_memory_utilization": 0.9},
    "serve.profile.concurrency": [16, 64],
    "serve.profile.request_rate": "inf",
    "serve.profile.images": {"bucket_config": {"1280x720": 1}},
    "auto_tuner.space": {},
}
"""Values of keys for which the schema alone gives no valid value, or only an empty one."""
LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
"""Keys whose tables are the same: the page has one for all."""
SHARED = ("model", "cluster")
"""Sections that the page of training describes for both."""
MOE = {"num_moe_experts": 64, "moe_router_topk": 8, "num_layers": 32}
MLA = {"multi_latent_attention": True, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64}
BASE: dict[str, Any] = {
    "model": {"hidden_size": 4096, "ffn_hidden_size": 9, "num_attention_heads": 32, "vocab_size": 9, **MOE, **MLA},
    "cluster": {},
    "train": {"engine": "megatron", "seq_length": 4096, "global_batch_size": 512, "precision": "bf16", "settings": {}},
    "auto_tuner": {"space": {}, "control": {}},
}
BASE["model"]["v_head_dim"] = 128


SERVE_BASE: dict[str, Any] = {
    "model": BASE["model"],
    "serve": {"engine": "vllm", "profile": {}, "slo": {"ttft_s": {}, "tpot_s": {}, "itl_s": {}, "e2e_s": {}}},
    "auto_tuner": {"control": {}},
}


def keys(schema: Any, but: tuple[str, ...] = ()) -> dict[tuple[str | int, ...], Any]:
    all_of = keys_of(schema, schema)
    return {
        path: each
        for path, each in all_of
        if path[:2] != ("auto_tuner", "baseline") and not (len(path) > 1 and path[0] in but)
    }


KEYS, SERVE_KEYS = keys(SCHEMA), keys(SERVE_SCHEMA, SHARED)


def sections(page: str) -> list[tuple[str, ...]]:
    """Return the sections of the spec whose keys the site lists on a page."""
    return [tuple(filter(None, name.split("."))) for _, name in tables.MARK.findall(page)]


def test_site_has_a_table_for_every_section_of_the_spec() -> None:
    train, serve = ({path[:-1] for path in keys} for keys in (KEYS, SERVE_KEYS))
    assert sorted(sections(PAGE)) == sorted(train)
    assert sorted(sections(SERVE_PAGE)) == sorted(serve - {("serve", "slo", name) for name in LATENCIES[1:]})


def sample(schema: Any, root: Any) -> Any:
    """Return a value that a schema, a part of `root`, accepts: of several kinds the last one that is not null."""
    if "$ref" in schema:
        return sample(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return sample([each for each in schema["anyOf"] if each.get("type") != "null"][-1], root)
    if listed := schema.get("examples") or schema.get("enum") or [each for each in [schema.get("const")] if each]:
        return listed[0]
    values = {"integer": schema.get("minimum", 1), "number": schema.get("maximum", 1.0), "boolean": True, "string": "x"}
    return [sample(schema["items"], root)] if "items" in schema else values.get(schema.get("type"), {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files that the examples name."""
    (tmp_path / "hosts.txt").write_text("a slots=8\n")
    (tmp_path / "lengths.txt").write_text("64\n")
    (tmp_path / "Qwen3-8B").mkdir()
    (tmp_path / "Qwen3-8B" / "config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,'
        ' "num_attention_heads": 4, "vocab_size": 100}'
    )
    return tmp_path


@pytest.mark.parametrize(
    ("keys", "root", "base"), [(KEYS, SCHEMA, BASE), (SERVE_KEYS, SERVE_SCHEMA, SERVE_BASE)], ids=["train", "serve"]
)
def test_every_key_has_a_valid_value(keys: Any, root: Any, base: dict[str, Any], folder: Path) -> None:
    for path, key in keys.items():
        parse_example(path, EXAMPLES.get(".".join(path), sample(key, root)), base, folder)


def test_auto_is_a_value_of_every_knob(folder: Path) -> None:
    for path in KEYS:
        if path[:-1] == ("auto_tuner", "space"):
            parse_example(path, "auto", BASE, folder)


def parse_example(path: tuple[str, ...], example: object, base: dict[str, Any], folder: Path) -> None:
    data = copy.deepcopy(base)
    if path[:-1] == ("cluster", "groups"):
        data["cluster"] = {"groups": {"chip": "C550"}}
    if path == ("cluster", "host_envs"):
        data["cluster"] = {"hostfile": "hosts.txt"}
    if path[:3] == ("serve", "profile", "images"):
        data["serve"].setdefault("profile", {})["images"] = {"bucket_config": {"8x8": 1}}
    if path[:2] in (("train", "lengths"), ("train", "adapter")) and len(path) > 2:
        others = {"spread": {"mean": 64}, "batching": {"mean": 64}, "balanced": {"mean": 64}, "base": {"kind": "qlora"}}
        data["train"][path[1]] = others.get(path[2], {})
    place = data
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = example
    if path[:-1] == ("cluster", "groups"):
        data["cluster"]["groups"] = [place]
    parse_spec(data, file=".".join(path), base=folder, engines=ENGINES)


def test_schema_describes_every_key_and_refuses_others() -> None:
    whole_schema = json_schema(ENGINES)
    assert whole_schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert [whole_schema["$defs"][name]["required"] for name in ("Document_megatron", "ServeDocument")] == [
        ["model", "train"],
        ["serve"],
    ]
    assert all(schema.get("description") for schema in (KEYS | SERVE_KEYS).values())
    assert all(section["additionalProperties"] is False for section in whole_schema["$defs"].values())
    assert not [name for name in whole_schema["$defs"] if "__" in name]  # of a module, where two sections are alike


LORA = {"adapter": {"kind": "lora"}}
SHAPE = {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 8, "ffn_hidden_size": 4096, "vocab_size": 32000}
NAME = "Qwen/Qwen3.6-27B"


def spec(model: Any = NAME, engine: str = "megatron", **train: Any) -> dict[str, Any]:
    work = {"engine": engine, "seq_length": 4096, "global_batch_size": 64, "precision": "bf16", **train}
    return {"model": model, "cluster": {"chip": "H200", "devices_per_node": 8}, "train": work}


def record(**train: Any) -> dict[str, Any]:
    cluster = {"chip": "H200", "devices": 8, "devices_per_node": 8}
    return {**spec(**train), "id": "a", "kind": "train", "cluster": cluster, "candidate": {}}


@pytest.mark.parametrize(
    ("given", "depths", "untrained"),
    [
        (spec(), 1, 0),
        (spec(**LORA), 0, 1),
        (spec(**LORA, mtp_num_layers=1), 1, None),
        (spec(mtp_num_layers=0), 0, None),
        (spec("Qwen/Qwen3-8B", **LORA), 0, None),
        (spec("Qwen/Qwen3-8B", mtp_num_layers=2), 2, None),
        (spec(engine="deepspeed"), 0, 1),
        (spec(engine="fsdp2"), 0, 1),
        (spec(engine="torchtitan", command=["torchrun", "train.py"]), 0, 1),
        (spec({**SHAPE, "mtp_num_layers": 1}, **LORA), 1, None),
        (spec({**SHAPE, "mtp_num_layers": 1}, mtp_num_layers=1), 1, None),
    ],
)
def test_a_job_trains_the_depths_that_it_names_or_that_its_engine_trains(
    given: dict[str, Any], depths: int, untrained: int | None
) -> None:
    found = read_spec(given)
    assert isinstance(found.work, TrainSpec)
    assert (found.model.mtp_num_layers, found.work.untrained_depths) == (depths, untrained)


def test_adapters_need_no_memory_for_depths_that_are_not_trained() -> None:
    records = (record(**LORA), record(**LORA, mtp_num_layers=0), record(**LORA, mtp_num_layers=1))
    usual, without, trained = (answer["memory"]["peak_allocated_gib"] for answer in api.estimate_jobs(records))
    assert usual == without < trained - 1


def test_two_numbers_of_depths_are_refused() -> None:
    with pytest.raises(SpecError) as caught:
        read_spec(spec({**SHAPE, "mtp_num_layers": 1}, mtp_num_layers=2))
    assert (caught.value.key, caught.value.value) == ("train.mtp_num_layers", 2)
    assert "model.mtp_num_layers = 1" in caught.value.problem


def test_an_estimate_names_the_depths_that_it_assumes() -> None:
    values = {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 1, "micro_batch_size": 1}
    space = {name: [value] for name, value in values.items()}
    found = api.estimate({**spec(**LORA), "auto_tuner": {"space": space, "baseline": values}})
    assert found.assumed["mtp_num_layers"] == 0
    assert "0 trained depths" in assumed_text(found.assumed)
