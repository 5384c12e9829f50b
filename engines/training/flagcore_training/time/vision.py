"""Time of the vision tower for the images of one micro-batch. Its patch embedding is left out."""

from functools import reduce
from operator import add

from flagcore_models.parts.tower import VisionTower

from flagcore.contracts import Costs
from flagcore_training.layout import LayerLayout, Tower, Training
from flagcore_training.time.layer import layer_time
from flagcore_training.time.passes import Block, Seconds, linear
from flagcore_training.vision import tower_layout, tower_training


def tower_block(train: Training, tower: Tower, layout: LayerLayout, costs: Costs) -> Block:
    """Return the time of the tower's layers and mergers. Nothing before frozen layers needs gradients."""
    vision, own, mesh = tower.vision, tower_training(tower, train), tower_layout(tower, layout)
    whole = VisionTower(vision=vision)
    layer = layer_time(own, mesh, costs, whole.layer) * float(vision.num_layers)
    if tower.frozen:
        layer = Block(layer.forward, layer.backward * 0.0, layer.weight * 0.0, layer.repeated * 0.0)
    rows = mesh.tokens(own.sequence) / vision.merge_size**2
    mergers = (
        linear(costs.kernels, rows, each.inner(mesh.tensor), each.outer(mesh.tensor), own.precision)
        * float(each.copies)
        for each in whole.merging
    )
    products = reduce(add, mergers)
    return layer + Block(
        Seconds.from_compute(products.forward),
        Seconds.from_compute(products.input_gradient * (not tower.frozen)),
        products.weight_gradient * (not tower.frozen_mergers),
        Seconds.from_compute(0.0 * products.forward),
    )
