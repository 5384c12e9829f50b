"""Parameters of models whose config.json is read, and forms of a value of Megatron."""

import json
from pathlib import Path
from typing import Any

import pytest
from flagcore_serving.space.weights import parameters

from flagcore.spec.convert import parse_spec
from flagcore.spec.models import model_from
from tests.product.tasks import ENGINES, SHAPE
from tests.spec.test_models import DEEPSEEK_V3, GPT_OSS, MIXTRAL, QWEN3_NEXT, QWEN35_MOE, config

KNOWN = {
    "Gemma-7B": (config("gemma", 28, 3072, 24576, 16, 256000), 8_537_680_896),
    "Mixtral-8x7B": (MIXTRAL, 46_702_792_704),
    "gpt-oss-120b": (GPT_OSS, 116_829_156_672),
    "DeepSeek-V3": (DEEPSEEK_V3, 671_026_419_200),
    "DeepSeek-V3.2": (config("deepseek_v32", 61, 7168, 18432, 128, 129280), 671_877_929_216),
    "GLM-5": (config("glm_moe_dsa", 78, 6144, 12288, 64, 154880), 743_911_199_232),
    "GLM-4.5-Air": (config("glm4_moe", 46, 4096, 10944, 96, 151552, head_dim=128), 106_852_251_264),
    "GLM-4.7-Flash": (config("glm4_moe_lite", 47, 2048, 10240, 20, 154880), 29_943_390_976),
    "MiniMax-M2": (config("minimax_m2", 62, 3072, 1536, 48, 200064), 228_689_748_992),
    "Llama-4-Scout": (config("llama4_text", 48, 5120, 8192, 40, 202048), 107_769_861_120),
    "Qwen3-Next-80B-A3B": (QWEN3_NEXT, 79_674_391_296),
    "Qwen3.5-9B": (config("qwen3_5_text", 32, 4096, 12288, 16, 248320), 8_953_803_264),
    "Qwen3.5-35B-A3B": (QWEN35_MOE, 34_660_610_688),
    "Ministral-3-8B": (config("ministral3", 34, 4096, 14336, 32, 131072), 8_489_553_920),
}
"""Models with sizes that no model of `test_public` checks: the keys of config.json, and the parameters that the authors
or the weights report, or that the model of transformers 5.19 with this config.json has.
"""


@pytest.mark.parametrize(("data", "count"), KNOWN.values(), ids=KNOWN)
def test_known_model_has_its_known_number_of_parameters(data: dict[str, Any], count: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert parameters(model_from(".", base=tmp_path)) == pytest.approx(count, rel=6e-4)


@pytest.mark.parametrize("off", [0, None, [0, None]])
def test_all_forms_of_no_virtual_stages_are_one_value(off: Any) -> None:
    train = {"engine": "megatron", "seq_length": 128, "global_batch_size": 8, "precision": "bf16"}
    space = {"num_layers_per_virtual_pipeline_stage": off}
    data = {"model": SHAPE, "train": train, "auto_tuner": {"space": space}}
    assert parse_spec(data, file="x", base=Path(), engines=ENGINES).space.items() >= {(*space, (None,))}
