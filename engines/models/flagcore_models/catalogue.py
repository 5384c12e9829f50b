"""What the core asks of this package (`flagcore.spec.models.Catalogue`), and the vision towers of its models."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from flagcore.domain.model import Model, Vision
from flagcore.domain.units import Size
from flagcore.i18n import _
from flagcore.spec.models import model_from
from flagcore.spec.plain_data import read_mapping, spec_error
from flagcore.spec.validate import checked
from flagcore_models.config import model_of_config
from flagcore_models.formats import config_of, format_of_weights
from flagcore_models.gguf import gguf_shape, with_layers
from flagcore_models.keys import MODELS, context_of, is_mxfp4, section_of
from flagcore_models.public import find_public, public_models, public_name, similar_models

__all__ = ["of_keys", "public_model", "public_name", "read", "similar_models", "table"]


def read(path: Path) -> Model:
    """Return the model in a directory with a config.json, in such a file, or in a GGUF file. Raises SpecError."""
    if os.path.isdir(path):
        folder, path = path, path / "config.json"
        if not os.path.exists(path):
            fix = _("give a directory with a config.json, a GGUF file, the name of a public model, or an inline shape")
            raise spec_error("", _("is a directory without a config.json"), value=str(folder), fix=fix)
    file, absolute = str(path), path.absolute()
    name = (absolute.parent.name if path.name == "config.json" else path.stem) or "model"
    if path.suffix == ".gguf":
        sizes = {key: value for key, value in gguf_shape(file).items() if value is not None}
        return with_layers(model_from({**sizes, "name": name}, base=path.parent, file=file), file)
    data = config_of(path, file=file, key="model")
    model = model_of_config(data, name=name, file=file)
    sizes_file = path.with_name("preprocessor_config.json")
    pixels = read_mapping(sizes_file, file=str(sizes_file), key="model") if sizes_file.is_file() else {}
    return replace(model, vision=vision_of(data, pixels))


def of_keys(keys: Mapping[str, Any], name: str) -> Model:
    """Return the model that the keys of a config.json describe. Raises SpecError."""
    return replace(model_of_config(keys, name=name, file=""), vision=vision_of(keys, {}))


@lru_cache(maxsize=256)
def public_model(name: str) -> Model | None:
    """Return the public model `organization/name` or the one that it is a variant of, or None."""
    if (found := find_public(name)) is None:
        return None
    tower = found[0].get("vision_config")
    vision = vision_of(found[0], tower) if isinstance(tower, Mapping) else None
    return replace(model_of_config(found[0], name=name, file=""), vision=vision)


def table(words: Iterable[str]) -> list[dict[str, Any]]:
    """Return one record per public model whose name contains all words, in any case. `context` may be None."""
    records = list[dict[str, Any]]()
    for name, config in public_models().items():
        if all(word.lower() in name.lower() for word in words):
            model = model_of_config(config, name=name, file="")
            records.append(
                {
                    "model": name,
                    "layers": model.num_layers,
                    "hidden": model.hidden_size,
                    "experts": model.experts or None,
                    "context": context_of(config),
                    "weights": "mxfp4" if is_mxfp4(config) else format_of_weights(config) or "bf16",
                }
            )
    return records


MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280
"""The default range of image sizes in pixels. Source: `Qwen2VLImageProcessor.size` in transformers 5.19."""


class _Tower(BaseModel):
    """The keys of vision_config. For Qwen2-VL, `hidden_size` is the width of the language model.

    Those of families.yaml alone: `gated`, whether the feed-forward network is; `pools`, whether the mean of its patches
    makes a token, without a network.
    """

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    depth: Size
    hidden_size: Size
    embed_dim: Size | None = None
    num_heads: Size
    intermediate_size: Size | None = None
    mlp_ratio: Size = 4
    out_hidden_size: Size | None = None
    patch_size: Size
    spatial_merge_size: Size = 2
    temporal_patch_size: Size = 2
    window_size: Size | None = None
    fullatt_block_indexes: list[int] | None = None
    deepstack_visual_indexes: list[int] | None = None
    gated: bool = False
    pools: bool = False


_SAME = {"num_hidden_layers": "depth", "num_attention_heads": "num_heads", "pooling_kernel_size": "spatial_merge_size"}
"""The fields of `_Tower` that other names of config.json mean."""


class _Multimodal(BaseModel):
    vision_config: _Tower


def vision_of(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Vision | None:
    """Return the vision tower of a model, or None if it has no known one. Raises SpecError.

    `preprocessor`: the content of preprocessor_config.json. Empty if there is no such file.
    """
    if not isinstance(section := config.get("vision_config"), Mapping):
        return None
    kinds = (str(each.get("model_type")).removesuffix("_vision") for each in (config, section))
    if (kind := next((each for each in kinds if each in MODELS), None)) is None:
        return None
    keys = MODELS[kind] | {_SAME.get(key, key): value for key, value in section.items()}
    tower, sizes = checked(_Multimodal, {"vision_config": keys}).vision_config, {**MODELS[kind], **preprocessor}
    hidden = tower.embed_dim or tower.hidden_size
    output = tower.hidden_size if tower.embed_dim else tower.out_hidden_size or tower.hidden_size
    windows = tower.window_size if tower.fullatt_block_indexes is not None else None
    return Vision(
        num_layers=tower.depth,
        full_layers=len(tower.fullatt_block_indexes or ()) if windows else tower.depth,
        hidden_size=hidden,
        num_heads=tower.num_heads,
        ffn_hidden_size=tower.intermediate_size or tower.mlp_ratio * hidden,
        gated_linear_unit=tower.gated,
        output_size=output,
        patch_size=tower.patch_size,
        merge_size=tower.spatial_merge_size,
        min_pixels=_pixels(sizes, "min_pixels", "shortest_edge", MIN_PIXELS),
        max_pixels=_pixels(sizes, "max_pixels", "longest_edge", MAX_PIXELS),
        window_size=windows or 0,
        mergers=0 if tower.pools else 1 + len(tower.deepstack_visual_indexes or ()),
        channels=3 * tower.temporal_patch_size,
    )


def _pixels(preprocessor: Mapping[str, Any], key: str, edge: str, default: int) -> int:
    """Return the smallest or largest number of pixels: the value of `key`, or else of `edge` in the section `size`."""
    value = preprocessor.get(key) or section_of(preprocessor, "size").get(edge) or default
    if not isinstance(value, int) or value < 1:
        raise spec_error(("preprocessor_config.json", key), "must be a number of pixels", value=value)
    return value
