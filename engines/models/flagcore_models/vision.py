"""Reads the vision tower of a multimodal model from a Hugging Face config.json and preprocessor_config.json."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from flagcore.domain.model import Vision
from flagcore.domain.units import Size
from flagcore.spec.plain_data import spec_error
from flagcore.spec.validate import checked
from flagcore_models.keys import MODELS, section_of

MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280
"""The default range of image sizes in pixels. Source: `Qwen2VLImageProcessor.size` in transformers 5.19."""


class _Tower(BaseModel):
    """The keys of vision_config. For Qwen2-VL, `hidden_size` is the width of the language model."""

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
    tower = checked(_Multimodal, {"vision_config": {**MODELS[kind], **section}}).vision_config
    hidden = tower.embed_dim or tower.hidden_size
    output = tower.hidden_size if tower.embed_dim else tower.out_hidden_size or tower.hidden_size
    windows = tower.window_size if tower.fullatt_block_indexes is not None else None
    return Vision(
        num_layers=tower.depth,
        full_layers=len(tower.fullatt_block_indexes or ()) if windows else tower.depth,
        hidden_size=hidden,
        num_heads=tower.num_heads,
        ffn_hidden_size=tower.intermediate_size or tower.mlp_ratio * hidden,
        gated_linear_unit=kind == "qwen2_5_vl",
        output_size=output,
        patch_size=tower.patch_size,
        merge_size=tower.spatial_merge_size,
        min_pixels=_pixels(preprocessor, "min_pixels", "shortest_edge", MIN_PIXELS),
        max_pixels=_pixels(preprocessor, "max_pixels", "longest_edge", MAX_PIXELS),
        window_size=windows or 0,
        mergers=1 + len(tower.deepstack_visual_indexes or ()),
        channels=3 * tower.temporal_patch_size,
    )


def _pixels(preprocessor: Mapping[str, Any], key: str, edge: str, default: int) -> int:
    """Return the smallest or largest number of pixels: the value of `key`, or else of `edge` in the section `size`."""
    value = preprocessor.get(key) or section_of(preprocessor, "size").get(edge) or default
    if not isinstance(value, int) or value < 1:
        raise spec_error(("preprocessor_config.json", key), "must be a number of pixels", value=value)
    return value
