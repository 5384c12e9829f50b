"""The modules of a layer, by its mixer and its network, and the vision tower for the images of one micro-batch."""

from dataclasses import replace

import numpy as np
from flagcore_models.mixers.attention import Attention
from flagcore_models.networks.experts import Experts
from flagcore_models.parts.tower import VisionTower

from flagcore.domain.model import Layer, Mixer, Network, Part
from flagcore_training.layout import Layout, Tower, Training
from flagcore_training.memory.activations import attention, ffn, mixer, mixture
from flagcore_training.memory.modules import Layer as StoredLayer
from flagcore_training.memory.modules import Module, Sizes, frozen
from flagcore_training.vision import tower_layout, tower_repeats, tower_training


def modules_of(train: Training, layout: Layout, sizes: Sizes, layer: Layer) -> list[Module]:
    """Return the modules of a layer."""
    return [module for part in layer.parts for module in part_modules(train, layout, sizes, part)]


def part_modules(train: Training, layout: Layout, sizes: Sizes, part: Part) -> list[Module]:
    """Return the modules of a mixer or a network."""
    if isinstance(part, Attention):
        if "attention" in train.options.wide_modules:
            sizes = replace(sizes, linear=sizes.unit)
        modules = attention(train, layout, sizes, part)
    elif isinstance(part, Mixer):
        modules = mixer(train, layout, sizes, part)
    elif isinstance(part, Experts):
        modules = mixture(train, layout, sizes, part)
    else:
        assert isinstance(part, Network)
        modules = ffn(train, layout, sizes, part)
    return frozen(train, layout, sizes, modules, part)


def with_tower(entry: Module, train: Training, tower: Tower, layout: Layout) -> Module:
    """Return the embedding `entry` with the tower before it.

    Layers store their tensors if they are trained, and only their input if they are recomputed. The language model
    stores the outputs of the mergers. Selective recompute is not included: fused attention stores no scores.
    """
    vision, own, mesh = tower.vision, tower_training(tower, train), tower_layout(tower, layout)
    whole = VisionTower(vision=vision)
    sizes, count = Sizes.from_layout(own, mesh), np.full_like(layout.tensor, float(vision.num_layers))
    layer = StoredLayer.from_modules(modules_of(own, mesh, sizes, whole.layer))
    repeated = tower_repeats(tower, layout)
    outputs = vision.mergers * sizes.unit * vision.output_size * sizes.tokens / vision.merge_size**2
    is_merged = not (tower.frozen and tower.frozen_mergers)
    stored = outputs + is_merged * sizes.unit * sizes.tokens * whole.saved_by_mergers(mesh.tensor)
    work = layer.stored
    if not tower.frozen:
        stored = stored + count * (repeated * sizes.hidden + (1.0 - repeated) * layer.stored)
        work = layer.above(count) + (repeated > 0) * layer.stored
    return replace(entry, tensors={**entry.tensors, "vision": stored}, work=np.maximum(entry.work, work))
