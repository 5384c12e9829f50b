"""Bytes of the activations of the vision tower, for the images of one micro-batch."""

from dataclasses import replace

import numpy as np
from flagcore_models.layers import layers_of

from flagcore_training.layout import Layout, Tower, Training
from flagcore_training.memory.modules import Layer, Module, Sizes
from flagcore_training.memory.parts import modules_of
from flagcore_training.vision import tower_layout, tower_repeats, tower_training


def with_tower(entry: Module, train: Training, tower: Tower, layout: Layout) -> Module:
    """Return the embedding `entry` with the tower before it.

    Layers store their tensors if they are trained, and only their input if they are recomputed. Mergers store their
    input, and what is before and after their activation function. The language model stores their outputs. Selective
    recompute is not included: fused attention stores no scores.
    """
    vision, own, mesh = tower.vision, tower_training(tower, train), tower_layout(tower, layout)
    sizes, count = Sizes.from_layout(own, mesh), np.full_like(layout.tensor, float(vision.num_layers))
    layer = Layer.from_modules(modules_of(own, mesh, sizes, layers_of(own.model)[0]))
    repeated = tower_repeats(tower, layout)
    outputs = vision.mergers * sizes.unit * vision.output_size * sizes.tokens / vision.merge_size**2
    is_merged = not (tower.frozen and tower.frozen_mergers)
    stored = outputs + is_merged * vision.mergers * sizes.whole * (1.0 + 2.0 / mesh.tensor)
    work = layer.stored
    if not tower.frozen:
        stored = stored + count * (repeated * sizes.hidden + (1.0 - repeated) * layer.stored)
        work = layer.above(count) + (repeated > 0) * layer.stored
    return replace(entry, tensors={**entry.tensors, "vision": stored}, work=np.maximum(entry.work, work))
