"""Public models are known by the names of their repositories."""

from pathlib import Path

import pytest

from flagcore.errors import SpecError
from flagcore.spec.huggingface import model_of_config
from flagcore.spec.models import model_from
from flagcore.spec.public import find_public, public_models
from tests.spec.test_models import parameters

BILLIONS = {
    "01-ai/Yi-34B": 34.389,
    "01-ai/Yi-6B": 6.061,
    "allenai/OLMo-2-0325-32B": 32.234,
    "allenai/OLMo-2-1124-13B": 13.716,
    "allenai/OLMo-2-1124-7B": 7.299,
    "baidu/ERNIE-4.5-0.3B-PT": 0.361,
    "baidu/ERNIE-4.5-21B-A3B-PT": 21.826,
    "baidu/ERNIE-4.5-300B-A47B-PT": 300.473,
    "ByteDance-Seed/Seed-OSS-36B-Instruct": 36.151,
    "codellama/CodeLlama-34b-hf": 33.744,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": 70.554,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": 8.03,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1.777,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": 14.77,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": 32.764,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": 7.616,
    "deepseek-ai/DeepSeek-V2": 235.741,
    "deepseek-ai/DeepSeek-V2-Lite": 15.706,
    "deepseek-ai/DeepSeek-V3": 671.026,
    "google/gemma-2-27b": 27.227,
    "google/gemma-2-2b": 2.614,
    "google/gemma-2-9b": 9.242,
    "google/gemma-3-12b-pt": 11.766,
    "google/gemma-3-1b-pt": 1,
    "google/gemma-3-27b-pt": 27.009,
    "google/gemma-3-4b-pt": 3.88,
    "HuggingFaceTB/SmolLM2-1.7B": 1.711,
    "HuggingFaceTB/SmolLM3-3B": 3.075,
    "ibm-granite/granite-3.3-8b-instruct": 8.171,
    "meta-llama/Llama-2-13b-hf": 13.016,
    "meta-llama/Llama-2-70b-hf": 68.977,
    "meta-llama/Llama-2-7b-hf": 6.738,
    "meta-llama/Llama-3.2-1B": 1.236,
    "meta-llama/Llama-3.2-3B": 3.213,
    "meta-llama/Llama-3.3-70B-Instruct": 70.554,
    "meta-llama/Meta-Llama-3-70B": 70.554,
    "meta-llama/Meta-Llama-3-8B": 8.03,
    "meta-llama/Meta-Llama-3.1-405B": 405.853,
    "microsoft/Phi-3-medium-4k-instruct": 13.96,
    "microsoft/Phi-3-mini-4k-instruct": 3.821,
    "microsoft/phi-4": 14.66,
    "microsoft/Phi-4-mini-instruct": 3.836,
    "mistralai/Mistral-7B-v0.1": 7.242,
    "mistralai/Mistral-7B-v0.3": 7.248,
    "mistralai/Mistral-Large-Instruct-2407": 122.61,
    "mistralai/Mistral-Nemo-Base-2407": 12.248,
    "mistralai/Mistral-Small-24B-Base-2501": 23.572,
    "mistralai/Mixtral-8x22B-v0.1": 140.621,
    "mistralai/Mixtral-8x7B-v0.1": 46.703,
    "moonshotai/Kimi-K2-Instruct": 1026.5,
    "moonshotai/Moonlight-16B-A3B": 15.96,
    "openai/gpt-oss-120b": 116.829,
    "openai/gpt-oss-20b": 20.915,
    "Qwen/Qwen1.5-MoE-A2.7B": 14.316,
    "Qwen/Qwen2-57B-A14B": 57.41,
    "Qwen/Qwen2-72B": 72.706,
    "Qwen/Qwen2-7B": 7.616,
    "Qwen/Qwen2.5-0.5B": 0.494,
    "Qwen/Qwen2.5-1.5B": 1.544,
    "Qwen/Qwen2.5-14B": 14.77,
    "Qwen/Qwen2.5-32B": 32.764,
    "Qwen/Qwen2.5-3B": 3.086,
    "Qwen/Qwen2.5-72B": 72.706,
    "Qwen/Qwen2.5-7B": 7.616,
    "Qwen/Qwen3-14B": 14.768,
    "Qwen/Qwen3-235B-A22B": 235.094,
    "Qwen/Qwen3-30B-A3B": 30.532,
    "Qwen/Qwen3-32B": 32.762,
    "Qwen/Qwen3-4B": 4.022,
    "Qwen/Qwen3-8B": 8.191,
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": 30.532,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480.155,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 79.674,
    "Qwen/QwQ-32B": 32.764,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1.1,
    "zai-org/GLM-4-32B-0414": 32.566,
    "zai-org/GLM-4-9B-0414": 9.4,
}
"""Parameters in billions, without layers for multi-token prediction, from memory: a check for slips, not a source."""


def test_every_public_model_is_a_valid_shape() -> None:
    for name in public_models():
        found = find_public(name)
        assert found is not None
        assert model_of_config(found[0], name=name, file="").name == name


def test_a_public_model_has_its_published_number_of_parameters() -> None:
    found = {name: parameters(model_from(name, base=Path())) / 1e9 for name in BILLIONS}
    assert found == pytest.approx(BILLIONS, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "shape", "weights"),
    [
        ("qwen/qwen3-8b", "Qwen/Qwen3-8B", None),
        ("Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-8B", "fp8"),
        ("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-72B", "int4"),
        ("RedHatAI/DeepSeek-R1-0528-quantized.w4a16", "deepseek-ai/DeepSeek-R1", "int4"),
        ("nvidia/DeepSeek-V3.1-NVFP4", "deepseek-ai/DeepSeek-V3.1", "nvfp4"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-ai/DeepSeek-V3", "fp8"),
        ("unsloth/DeepSeek-R1-BF16", "deepseek-ai/DeepSeek-R1", None),
        ("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Meta-Llama-3.1-70B", None),
    ],
)
def test_variants_have_the_shape_of_their_model(name: str, shape: str, weights: str | None) -> None:
    found, known = find_public(name), find_public(shape)
    assert found is not None
    assert known is not None
    assert found == (known[0], weights)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-9B", "Qwen3-8B", "a/b/Qwen3-8B", "./Qwen3-8B/x", ""])
def test_other_names_are_unknown(name: str) -> None:
    assert find_public(name) is None


def test_a_misspelled_name_gets_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        model_from("Qwen/Qwen3-9B", base=tmp_path)
    assert (caught.value.key, caught.value.value) == ("model", "Qwen/Qwen3-9B")
    assert "Qwen/Qwen3-8B" in str(caught.value)


def test_a_directory_wins_over_a_public_name(tmp_path: Path) -> None:
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    with pytest.raises(SpecError):
        model_from("Qwen/Qwen3-8B", base=tmp_path)
