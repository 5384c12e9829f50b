"""The layers of transformers 5 beside which PEFT puts adapters. `peft.yaml` has what differs by family of models.

The experts of a layer are two parameters, and no linear layers. A test compares numbers of weights with PEFT's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flagcore.domain.model import Model, Product
from flagcore.domain.spec import Adapter
from flagcore.spec.plain_data import package_yaml

TABLE: Mapping[str, Any] = package_yaml(__package__, "peft.yaml")
PARAMETERS = ("experts.gate_up_proj", "experts.down_proj")
"""The targets that are parameters of stacked experts: of their inputs and of their outputs."""


@dataclass(frozen=True, slots=True)
class Peft:
    """What PEFT does with the layers of a model.

    `family`: the `model_type` of its config.json. Empty: not known.
    `adapts_experts`: whether experts and routers may have adapters. Then dense networks and shared experts have none.
    """

    family: str
    adapts_experts: bool

    @classmethod
    def of(cls, model: Model) -> Peft:
        """Return what PEFT does with a model. One with experts of an unknown family is taken as those of most."""
        family = model.family
        return cls(family, model.experts > 0 and (not family or family in TABLE["experts"]))

    def refuses(self, targets: Sequence[str] | None) -> bool:
        """Return whether it starts no training with adapters beside the layers `targets`, or all if None."""
        return self.family in TABLE["no_outputs"] and (targets is None or "out_proj" in targets)

    def beside(self, adapter: Adapter, product: Product) -> list[tuple[int, int]]:
        """Return the rank and the outputs of each adapter beside one copy of a product.

        Layers that are no targets by their names have one only among all linear layers. Gate and up projection of
        experts have one adapter of twice the rank, unless it is one beside a parameter (PEFT's `target_parameters`).
        """
        rank, is_all, layers = adapter.rank, adapter.targets == "all-linear", product.layers
        if self.family in TABLE["other_gates"]:
            layers = tuple(replace(each, width=each.width // 2) if each.name == "q_proj" else each for each in layers)
        if product.name == "router":
            has_adapter = self.adapts_experts or self.family in TABLE["routers"]
            return [(rank, product.outputs)] * (is_all and has_adapter)
        found = [each.width for each in layers if is_all or (product.adapts and each.name in adapter.targets)]
        if product.component == "experts":
            is_parameter = PARAMETERS[any(each.name == "down_proj" for each in layers)] in adapter.targets
            has_adapter = is_parameter or (self.adapts_experts and len(found) == len(layers))
            return [(rank if is_parameter else rank * len(layers), product.outputs)] * has_adapter
        if product.component in ("ffn", "shared_experts") and self.adapts_experts:
            found = []
        elif product.component == "mixers" and product.split == "outputs":
            number = TABLE["inputs"].get(self.family, 1)
            found = [(each + part) // number for each in found for part in range(number)]
        elif found and product.name in TABLE["joint"].get(self.family, ()):
            found = [product.outputs]
        if is_all and (product.component, product.name) == ("shared_experts", "up"):
            found += [1] * (self.family in TABLE["shared_gates"])
        return [(rank, width) for width in found]
