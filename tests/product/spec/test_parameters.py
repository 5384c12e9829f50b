"""Public models: the names of their repositories, and their parameters."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from flagcore_models.layers import parameters
from flagcore_models.public import find_public, public_models

from engines.models.tests.test_models import DEEPSEEK_V3, GPT_OSS, MIXTRAL, QWEN3_NEXT, QWEN35_MOE, config
from flagcore.errors import SpecError
from flagcore.spec.convert import parse_spec
from flagcore.spec.models import model_from
from tests.checks import given, refuses
from tests.product.tasks import ENGINES, SHAPE

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
"""Models with sizes that no other test checks: the keys of config.json, and the parameters that the authors
or the weights report, or that the model of transformers 5.19 with this config.json has."""


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


BILLIONS: dict[str, float] = yaml.safe_load(Path(__file__).with_name("parameters.yaml").read_text())


def test_a_public_model_has_its_published_number_of_parameters() -> None:
    found = {name: parameters(model_from(name, base=Path())) / 1e9 for name in BILLIONS}
    rounded = "baidu/ERNIE-4.5-300B-A47B-PT"
    assert found.pop(rounded) == pytest.approx(BILLIONS[rounded], rel=4e-3)
    assert found == pytest.approx({name: BILLIONS[name] for name in found}, rel=1e-3)


NOT_READ = {"max_position_embeddings", "quantization_config", "vision_config", "audio_config", "laurel_rank"}
NOT_READ |= {"indexer_compress_ratio", "hc_count", "ngram_vocab_size_base"}


def test_all_other_keys_of_public_models_are_read() -> None:
    found = {
        name: {key.partition(".")[0] for key, _ in model_from(name, base=Path()).unread} for name in public_models()
    }
    assert {name: keys - NOT_READ for name, keys in found.items() if keys - NOT_READ} == {}


@pytest.mark.parametrize(
    ("name", "shape", "weights"),
    [
        ("qwen/qwen3-8b", "Qwen/Qwen3-8B", None),
        ("Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-8B", "fp8"),
        ("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int8", "Qwen/Qwen2.5-72B", "int8"),
        ("RedHatAI/DeepSeek-R1-0528-quantized.w4a16", "deepseek-ai/DeepSeek-R1", "int4"),
        ("nvidia/DeepSeek-V3.1-NVFP4", "deepseek-ai/DeepSeek-V3.1", "nvfp4"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-ai/DeepSeek-V3", "fp8"),
        ("unsloth/DeepSeek-R1-BF16", "deepseek-ai/DeepSeek-R1", None),
        ("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Meta-Llama-3.1-70B", None),
        ("any/gpt-oss-120b-dequantized", "openai/gpt-oss-120b", None),
        ("any/llama-3-70b-fp16", "meta-llama/Meta-Llama-3-70B", None),
    ],
)
def test_variants_have_the_shape_of_their_model(name: str, shape: str, weights: str | None) -> None:
    (found, stored), (known, _) = given(find_public(name)), given(find_public(shape))
    assert (found | {"quantization_config": None}, stored) == (known | {"quantization_config": None}, weights)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-9B", "Qwen3-8B", "a/b/Qwen3-8B", "./Qwen3-8B/x", ""])
def test_other_names_are_unknown(name: str) -> None:
    assert find_public(name) is None


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8C", "Qwen3-8B", "/nowhere/Qwen3-8B-FP8"])
def test_a_misspelled_name_and_a_path_that_does_not_exist_get_the_nearest_name(name: str, tmp_path: Path) -> None:
    with refuses("model", name, match="Qwen/Qwen3-8B"):
        model_from(name, base=tmp_path)


def test_a_directory_wins_over_a_public_name(tmp_path: Path) -> None:
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    with pytest.raises(SpecError):
        model_from("Qwen/Qwen3-8B", base=tmp_path)
