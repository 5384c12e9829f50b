"""The modules of a layer, by its mixer and its network."""

from dataclasses import replace

from flagcore_models.mixers.attention import Attention
from flagcore_models.networks.experts import Experts

from flagcore.domain.model import Layer, Mixer, Network, Part
from flagcore_training.layout import Layout, Training
from flagcore_training.memory.activations import attention, ffn, mixer, mixture
from flagcore_training.memory.adapters import frozen
from flagcore_training.memory.modules import Module, Sizes


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
