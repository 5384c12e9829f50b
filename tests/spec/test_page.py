from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from flagcore.spec import json_schema, parse_spec
from flagcore.spec.validate import describe, keys_of

PAGE = (Path(__file__).parents[2] / "docs" / "spec.md").read_text()
SCHEMA = json_schema()
KEYS = {path: schema for path, schema in keys_of(SCHEMA, SCHEMA) if path[:2] != ("auto_tuner", "baseline")}
SECTIONS = {"The file": (), "model: an inline shape": ("model",)}
MOE = {"num_moe_experts": 64, "moe_router_topk": 8, "num_layers": 32}
MLA = {"multi_latent_attention": True, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64}
BASE: dict[str, Any] = {
    "model": {"hidden_size": 4096, "ffn_hidden_size": 9, "num_attention_heads": 32, "vocab_size": 9, **MOE, **MLA},
    "cluster": {},
    "train": {"engine": "megatron", "seq_length": 4096, "global_batch_size": 512, "precision": "bf16", "settings": {}},
    "auto_tuner": {"space": {}, "control": {}},
}
BASE["model"]["v_head_dim"] = 128


def rows() -> dict[tuple[str | int, ...], list[str]]:
    found: dict[tuple[str | int, ...], list[str]] = {}
    section: tuple[str | int, ...] = ()
    for line in PAGE.splitlines():
        if line.startswith("## "):
            name = line.removeprefix("## ")
            section = SECTIONS.get(name, tuple(name.split(".")))
        elif line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            found[(*section, cells[0].strip("`"))] = cells[1:]
    return found


ROWS = rows()


def test_page_has_a_row_for_every_key_and_no_other() -> None:
    assert set(ROWS) == set(KEYS) | {("auto_tuner", "baseline")}


@pytest.mark.parametrize("path", KEYS, ids=lambda path: ".".join(map(str, path)))
def test_row_tells_rule_default_meaning_and_a_valid_example(path: tuple[str, ...], tmp_path: Path) -> None:
    rule, default, _unit, meaning, example = ROWS[path]
    schema = KEYS[path]
    assert rule == describe(schema, SCHEMA)
    assert meaning == schema["description"]
    value = schema.get("default", "required")
    if isinstance(value, dict):
        value = "absent"
    assert default.strip("`") == (value if isinstance(value, str) else json.dumps(value))
    data: dict[str, Any] = yaml.safe_load(yaml.safe_dump(BASE))
    if path[:-1] == ("cluster", "groups"):
        data["cluster"] = {"groups": {"chip": "C550"}}
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
    parse_spec(data, file="page", base=tmp_path)


def test_example_of_the_page_is_a_valid_spec(tmp_path: Path) -> None:
    text = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert len(text) == 1
    spec = parse_spec(yaml.safe_load(text[0]), file="page", base=tmp_path)
    assert spec.space["tensor_model_parallel_size"] == (1, 2, 4, 8)


def test_schema_describes_every_key_and_refuses_others() -> None:
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert SCHEMA["required"] == ["model", "train"]
    assert all(schema.get("description") for schema in KEYS.values())
    assert all(section["additionalProperties"] is False for section in SCHEMA["$defs"].values())
