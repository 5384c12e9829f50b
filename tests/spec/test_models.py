"""Models of a spec: inline shapes. Files and public names have their tests with the catalogue that reads them."""

from collections.abc import Callable
from pathlib import Path

from flagcore.errors import SpecError
from flagcore.spec.models import model_from
from tests.tasks import SHAPE

ErrorOf = Callable[..., SpecError]


def test_inline_shape_resolves_its_defaults() -> None:
    model = model_from(SHAPE | {"num_moe_experts": 4, "moe_router_topk": 2, "q_lora_rank": None}, base=Path())
    assert (model.num_query_groups, model.kv_channels, model.moe_ffn_hidden_size) == (4, 16, 128)


def test_all_rules_that_an_inline_shape_breaks_are_reported_once(error_of: ErrorOf) -> None:
    shape = SHAPE | {"hidden_size": 65}
    wrong = {"num_query_groups": 3, "moe_router_topk": 2, "kv_lora_rank": 3, "v_head_dim": 8}
    error = error_of(model_from, shape | wrong, base=Path())
    keys = {f"model.{key}": value for key, value in (shape | wrong).items() if key in {*wrong, "hidden_size"}}
    assert {each.key: each.value for each in error.problems} == keys
    assert len(error.problems) == len(keys)
    without_topk = error_of(model_from, shape | {"hidden_size": 64, "num_moe_experts": 4}, base=Path())
    assert [each.key for each in without_topk.problems] == ["model.moe_router_topk"]
