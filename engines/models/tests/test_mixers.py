"""Kinds of layers: weights, and what models of config.json have them."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from flagcore_models import config as model_config
from flagcore_models import keys
from flagcore_models.config import mixer_class, model_of_config
from flagcore_models.layers import attention_counts, network_counts, other_mixers
from flagcore_models.mixers.gated_delta_net import GatedDeltaNet
from flagcore_models.mixers.mamba2 import Mamba2

from flagcore.domain.model import Mixer
from flagcore.errors import SpecError

NEXT = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "vocab_size": 151936,
}


def test_layers_with_states_have_no_cache() -> None:
    model = model_of_config({**NEXT, "linear_num_value_heads": 64}, name="next", file="")
    states = GatedDeltaNet(key_heads=16, value_heads=64, key_dim=128, value_dim=128, kernel=4)
    assert other_mixers(model) == {states: 36}
    assert (sum(attention_counts(model).values()), model.attention_output_gate) == (12, True)


def test_a_missing_size_of_a_mixer_is_named() -> None:
    with pytest.raises(SpecError, match="linear_key_head_dim is missing"):
        model_of_config({**NEXT, "linear_key_head_dim": None}, name="next", file="")


def test_letters_list_layers_that_are_a_mixer_or_a_network() -> None:
    config = {**NEXT, "model_type": "nemotron_h", "num_hidden_layers": 5, "hybrid_override_pattern": "MEM*-"}
    config |= {"mamba_num_heads": 64, "n_routed_experts": 8, "num_experts_per_tok": 2}
    model = model_of_config(config, name="hybrid", file="")
    assert {type(mixer): number for mixer, number in other_mixers(model).items()} == {Mamba2: 2}
    assert [number for _, number in sorted(network_counts(model).items(), key=lambda each: each[0].kind)] == [1, 1]


@pytest.mark.parametrize(
    ("mixer", "hidden", "count"),
    [
        (GatedDeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128), 2048, 33_718_464),
        (Mamba2(num_heads=64, head_dim=64, state_size=128, groups=8), 2688, 38_742_208),
    ],
    ids=["Qwen3NextGatedDeltaNet", "NemotronHMamba2Mixer"],
)
def test_a_mixer_has_the_weights_of_the_module_in_transformers(mixer: Mixer, hidden: int, count: int) -> None:
    assert sum(each.weights for each in mixer.products(hidden)) + mixer.other_weights == count


def test_a_family_may_adjust_the_width_of_its_feed_forward_network() -> None:
    keys = {**NEXT, "model_type": "lfm2", "intermediate_size": 12288, "block_auto_adjust_ff_dim": True}
    assert model_of_config(keys, name="lfm2", file="").ffn_hidden_size == 8192


def test_the_guide_adds_a_kind_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "write-a-layer.md").read_text("utf-8")
    blocks = dict(reversed(re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL)))
    names: dict[str, Any] = {"__name__": __name__}
    exec(blocks["python"], names)
    assert blocks["toml"] == '[project.entry-points."flagcore.mixers"]\necho = "my_package.echo:Echo"\n'
    for table, added in zip(("FAMILIES", "KINDS", "MIXERS"), yaml.safe_load_all(blocks["yaml"]), strict=True):
        monkeypatch.setattr(keys, table, {**getattr(keys, table), **added})
    added_class = {"echo": names["Echo"]}.get
    monkeypatch.setattr(model_config, "mixer_class", lambda name: added_class(name) or mixer_class(name))
    model = model_of_config({**NEXT, "model_type": "echo_model", "layer_types": ["echo"] * 48}, name="echo", file="")
    assert other_mixers(model) == {names["Echo"](num_heads=8, head_dim=64): 48}
