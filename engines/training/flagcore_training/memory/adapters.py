"""Activations of layers with frozen weights and adapters.

Autograd stores the input of a linear layer only for the gradient of its weight, so a frozen layer without an adapter
stores none, and one with an adapter stores it for the first matrix (transformer-engine 2.9 to 2.20 `module/linear.py`,
`backward_needs_input`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from flagcore.domain.model import Part
from flagcore_training.adapters import beside_of, has_adapter
from flagcore_training.layout import Layout, Training
from flagcore_training.memory.modules import Module, Sizes

DORA_STORED, PEFT_STORED, DORA_COPIES = 1.0, 2.0, 3.0
"""Outputs that DoRA stores for the gradient of its magnitude (Megatron-Bridge @067f987d `peft/dora_layers.py`), those
that PEFT and NeMo AutoModel store (PEFT @0a6cd5a4 `tuners/lora/dora.py`: of the layer and of the adapter), and copies
of a matrix while it computes its norm."""
INPUTS: Mapping[str, Sequence[str]] = {
    "qkv_linear": ("q_proj", "k_proj", "v_proj"),
    "mixer_linear": ("in_proj",),
    "mlp_input": ("gate_proj", "up_proj"),
    "mlp_act": ("down_proj",),
    "shared_act": ("down_proj",),
    "expert_fc1": ("gate_proj", "up_proj"),
    "moe_act": ("down_proj",),
}
"""The targets that need a stored input of linear layers, by its name (`memory`). The router also needs its input, and
the attention core its output."""


def frozen(train: Training, layout: Layout, sizes: Sizes, modules: Sequence[Module], part: Part) -> list[Module]:
    """Return the modules of a part of a layer, of which adapters and not weights are trained.

    An adapter of a joint projection stores its input as gathered over the tensor-parallel ranks, the output of its
    first matrix, and with DoRA the outputs. Workspaces have the matrix that is converted, or whose norm is computed.
    """
    adapter = train.options.adapter
    if adapter is None:
        return list(modules)
    products = part.products(train.model.hidden_size)
    gathers = sizes.tokens / sizes.rows if train.options.joint_adapters else 1.0
    result = []
    for each in modules:
        tensors, work, tokens, split = dict(each.tensors), each.work, sizes.tokens, layout.tensor
        if each.component == "experts":
            width = next(product.inputs for product in products if product.component == each.component)
            tokens, split = tensors["expert_fc1"] / (sizes.linear * width), layout.expert_tensor
        for name in tensors.keys() & INPUTS.keys() if each.component != "router" else ():
            is_whole = name in ("qkv_linear", "mixer_linear", "mlp_input")
            tensors[name] = tensors[name] * has_adapter(adapter, *INPUTS[name]) * (gathers if is_whole else 1.0)
        for product in products:
            if product.component != each.component or not product.adapts:
                continue
            found = beside_of(train, product)
            outputs = sum(width for _rank, width in found) / split * (adapter.kind == "dora")
            stored = sum(rank for rank, _width in found) + DORA_STORED * outputs
            tensors["adapters"] = tensors.get("adapters", 0.0) + sizes.unit * tokens * stored
            copies = 1.0 * bool(adapter.base) + DORA_COPIES * (adapter.kind == "dora")
            work = np.maximum(work, each.work + copies * sizes.unit * product.inputs * product.outputs / split)
        result.append(replace(each, tensors=tensors, work=work))
    return result
