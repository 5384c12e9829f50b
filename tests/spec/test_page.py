from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from flagcore.spec import json_schema, parse_spec
from flagcore.spec.schema import document_of
from flagcore.spec.serve_schema import ServeDocument
from flagcore.spec.validate import describe, keys_of
from tests.small import ENGINES

DOCS = Path(__file__).parents[2] / "docs"
PAGE, SERVE_PAGE = ((DOCS / name).read_text(encoding="utf-8") for name in ("spec.md", "spec-serve.md"))
SCHEMA = document_of("megatron", ENGINES["megatron"].knobs).model_json_schema()
SERVE_SCHEMA = ServeDocument.model_json_schema()
SECTIONS = {"The file": (), "model: an inline shape": ("model",)}
LATENCIES = [("ttft_s",), ("tpot_s",), ("itl_s",), ("e2e_s",)]
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
    "serve": {
        "engine": "vllm",
        "profile": {},
        "slo": {"ttft_s": {}, "tpot_s": {}, "itl_s": {}, "e2e_s": {}},
    },
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


def rows(page: str) -> dict[tuple[str | int, ...], list[str]]:
    found: dict[tuple[str | int, ...], list[str]] = {}
    section: tuple[str | int, ...] = ()
    for line in page.splitlines():
        if line.startswith("## "):
            name = line.removeprefix("## ")
            section = SECTIONS.get(name, tuple(name.split(".")))
        elif line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            for each in LATENCIES if section[-1:] == ("LATENCY",) else [section[-1:]]:
                found[(*section[:-1], *each, cells[0].strip("`"))] = cells[1:]
    return found


ROWS, SERVE_ROWS = rows(PAGE), rows(SERVE_PAGE)


def test_page_has_a_row_for_every_key_and_no_other() -> None:
    assert set(ROWS) == set(KEYS) | {("auto_tuner", "baseline")}
    assert set(SERVE_ROWS) == set(SERVE_KEYS) | {("auto_tuner", "baseline")}


@pytest.mark.parametrize("path", KEYS, ids=lambda path: ".".join(map(str, path)))
def test_row_tells_rule_default_meaning_and_a_valid_example(path: tuple[str, ...], tmp_path: Path) -> None:
    check_row(path, ROWS[path], KEYS[path], SCHEMA, BASE, tmp_path)


@pytest.mark.parametrize("path", SERVE_KEYS, ids=lambda path: ".".join(map(str, path)))
def test_row_of_serving_tells_rule_default_meaning_and_a_valid_example(path: tuple[str, ...], tmp_path: Path) -> None:
    check_row(path, SERVE_ROWS[path], SERVE_KEYS[path], SERVE_SCHEMA, SERVE_BASE, tmp_path)


def check_row(
    path: tuple[str, ...], row: list[str], schema: Any, root: Any, base: dict[str, Any], tmp_path: Path
) -> None:
    rule, default, _unit, meaning, example = row
    assert rule == describe(schema, root)
    assert meaning == schema["description"]
    value = schema.get("default", "required")
    if isinstance(value, dict):
        value = "absent"
    assert default.strip("`") == (value if isinstance(value, str) else json.dumps(value))
    data: dict[str, Any] = yaml.safe_load(yaml.safe_dump(base))
    if path[:-1] == ("cluster", "groups"):
        data["cluster"] = {"groups": {"chip": "C550"}}
    if path[:2] == ("serve", "client"):
        data["serve"]["client"] = {"command": ["x"]}
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = yaml.safe_load(example.strip("`"))
    if path[:-1] == ("cluster", "groups"):
        data["cluster"]["groups"] = [place]
    (tmp_path / "hosts.txt").write_text("a slots=8\n")
    (tmp_path / "Qwen3-8B").mkdir()
    (tmp_path / "Qwen3-8B" / "config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,'
        ' "num_attention_heads": 4, "vocab_size": 100}'
    )
    parse_spec(data, file="page", base=tmp_path, engines=ENGINES)


def test_example_of_the_page_is_a_valid_spec(tmp_path: Path) -> None:
    text = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0]
    spec = parse_spec(yaml.safe_load(text), file="page", base=tmp_path, engines=ENGINES)
    assert spec.space["tensor_model_parallel_size"] == (1, 2, 4, 8)
    (text,) = re.findall(r"```yaml\n(.*?)```", SERVE_PAGE, re.DOTALL)
    serving = parse_spec(yaml.safe_load(text), file="page", base=tmp_path, engines=ENGINES)
    assert [load.concurrency for load in serving.serve.loads] == [16, 64]
    assert serving.limits == {"ttft_s.p99": 1.0, "tpot_s.p99": 0.05}


def test_schema_describes_every_key_and_refuses_others() -> None:
    whole = json_schema(ENGINES)
    assert whole["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert [whole["$defs"][name]["required"] for name in ("Document", "ServeDocument")] == [
        ["model", "train"],
        ["model", "serve"],
    ]
    assert all(schema.get("description") for schema in (KEYS | SERVE_KEYS).values())
    assert all(section["additionalProperties"] is False for section in whole["$defs"].values())
