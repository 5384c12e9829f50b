"""Models for the tests of engines."""

from dataclasses import replace

from flagcore_models.layers import layers_of

from flagcore.domain.model import Mixer, Model


def mixed(model: Model, mixer: Mixer, number: int) -> Model:
    """Return `model` with another mixer in its first `number` layers."""
    own, rest = layers_of(model)[:number], layers_of(model)[number:]
    return replace(model, layers=(*(replace(each, mixer=mixer) for each in own), *rest))
