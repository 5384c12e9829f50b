"""The vision tower of a model in training: layers over the patches of images, on the first stage of a pipeline.

Megatron-Bridge (@067f987d `models/qwen_vl`) builds the tower of Qwen3-VL and later models as a transformer of
megatron-core with the tensor parallelism and the recompute of the language model, in 16 bits and without context and
sequence parallelism (`get_vision_model_config`). That of Qwen2.5-VL, whose layers are gated, is a module of
transformers, whole on each rank.
"""

from dataclasses import replace

import numpy as np
from flagcore_models.parts.tower import VisionTower

from flagcore.domain.model import Mixer, Model
from flagcore.domain.space import FloatArray
from flagcore_training.layout import AnySizes, LayerSizes, Layout, Options, StageLayout, Tower, Training


def tower_layout(tower: Tower, layout: AnySizes) -> AnySizes:
    """Return the layouts of the tower, whose micro-batches consist of images."""
    ones = np.ones_like(layout.tensor)
    return replace(
        layout,
        tensor=ones if tower.vision.gated_linear_unit else layout.tensor,
        context=ones,
        micro_batch=tower.images * layout.micro_batch,
        sequence_parallel=0.0 * ones,
    )


def tower_training(tower: Tower, train: Training) -> Training:
    """Return the inputs to the formulas of the tower's layers. Its attention is not causal."""
    vision, options = tower.vision, train.options
    model = Model(
        name="vision tower",
        num_layers=vision.num_layers,
        hidden_size=vision.hidden_size,
        ffn_hidden_size=vision.ffn_hidden_size,
        num_attention_heads=vision.num_heads,
        num_query_groups=vision.num_heads,
        kv_channels=vision.hidden_size // vision.num_heads,
        vocab_size=1,
        gated_linear_unit=vision.gated_linear_unit,
    )
    kept = Options(
        recompute_modules=options.recompute_modules,
        gradient_fusion=options.gradient_fusion,
        attention_kernel="" if options.attention_kernel in ("fp8", "mxfp8") else options.attention_kernel,
    )
    return replace(
        train,
        model=model,
        sequence=tower.patches,
        precision=train.unquantised,
        core_share=2.0 * tower.pairs,
        tower=None,
        options=kept,
    )


def tower_weights(tower: Tower, layout: LayerSizes) -> tuple[FloatArray, FloatArray]:
    """Return the numbers of trained and of frozen weights on a rank."""
    whole = VisionTower(vision=tower.vision)
    mergers, others = whole.merger_weights, whole.weights - whole.merger_weights
    frozen = others * tower.frozen + mergers * tower.frozen_mergers
    split = tower_layout(tower, layout).tensor
    return (others + mergers - frozen) / split, frozen / split


def tower_repeats(tower: Tower, layout: Layout | StageLayout) -> FloatArray:
    """Return the share of the tower's layers that full recompute repeats."""
    if tower.frozen:
        return np.zeros_like(layout.tensor)
    return np.where(layout.uniform > 0, 1.0, np.minimum(layout.block / tower.vision.num_layers, 1.0))


def tower_flops(tower: Tower) -> float:
    """Return the flops of forward and backward for a sequence, without recompute, as `model_flops` counts them."""
    vision, whole = tower.vision, VisionTower(vision=tower.vision)
    mixers = (each for each in whole.layer.parts if isinstance(each, Mixer))
    scores = vision.num_layers * tower.pairs * sum(each.core_flops(tower.patches) for each in mixers)
    layers = (2.0 if tower.frozen else 6.0) * (whole.weights - whole.merger_weights + scores)
    passes = 1.0 + (not tower.frozen) + (not tower.frozen_mergers)
    mergers = 2.0 * passes * whole.merger_weights / vision.merge_size**2
    return tower.images * tower.patches * (layers + mergers)
