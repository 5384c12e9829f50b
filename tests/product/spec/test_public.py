"""Public models are known by the names of their repositories."""

from pathlib import Path

import pytest
import yaml
from flagcore_serving.space.weights import parameters

from flagcore.errors import SpecError
from flagcore.spec.models import find_public, model_from

BILLIONS: dict[str, float] = yaml.safe_load(Path(__file__).with_name("parameters.yaml").read_text())


def test_a_public_model_has_its_published_number_of_parameters() -> None:
    found = {name: parameters(model_from(name, base=Path())) / 1e9 for name in BILLIONS}
    rounded = "baidu/ERNIE-4.5-300B-A47B-PT"
    assert found.pop(rounded) == pytest.approx(BILLIONS[rounded], rel=4e-3)
    assert found == pytest.approx({name: BILLIONS[name] for name in found}, rel=1e-3)


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


@pytest.mark.parametrize("name", ["Qwen/Qwen3-9B", "Qwen3-8B", "/nowhere/Qwen3-8B-FP8"])
def test_a_misspelled_name_and_a_path_that_does_not_exist_get_the_nearest_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        model_from(name, base=tmp_path)
    assert (caught.value.key, caught.value.value) == ("model", name)
    assert "Qwen/Qwen3-8B" in str(caught.value)


def test_a_directory_wins_over_a_public_name(tmp_path: Path) -> None:
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    with pytest.raises(SpecError):
        model_from("Qwen/Qwen3-8B", base=tmp_path)
