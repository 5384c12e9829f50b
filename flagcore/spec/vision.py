"""Reads the vision tower of a model from its config.json and preprocessor_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from flagcore.domain.model import Vision
from flagcore.spec.plain_data import spec_error
from flagcore.spec.schema import Size
from flagcore.spec.validate import checked

_QWEN3: Mapping[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "patch_size": 16,
    "deepstack_visual_indexes": [8, 16, 24],
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_vl": {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16, "patch_size": 14},
    "qwen2_5_vl": {
        "depth": 32,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
}
"""Values of model_type whose towers and image sizes `Vision` describes, with the defaults of their configuration
classes in transformers 5.19."""
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280
"""Defaults of transformers 5.19 (`Qwen2VLImageProcessor.size`)."""


class _Tower(BaseModel):
    """The keys of vision_config. For Qwen2-VL, `hidden_size` is that of the language model."""

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


def vision_of(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Vision | None:
    """Return the vision tower of a model, None without a known one. Raises SpecError.

    `preprocessor` is the content of preprocessor_config.json, empty without this file.
    """
    kind, section = config.get("model_type"), config.get("vision_config")
    if not isinstance(kind, str) or kind not in MODELS or not isinstance(section, Mapping):
        return None
    tower = checked(_Tower, {**MODELS[kind], **section}, at=("vision_config",))
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
    """Return a limit of pixels: `key`, or `edge` of the section `size`."""
    size = preprocessor.get("size")
    value = preprocessor.get(key) or (size.get(edge) if isinstance(size, Mapping) else None) or default
    if not isinstance(value, int) or value < 1:
        raise spec_error(("preprocessor_config.json", key), "must be a number of pixels", value=value)
    return value
