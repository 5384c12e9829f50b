"""Low-rank adapters (LoRA, DoRA, QLoRA): the linear layers beside which they are, and their weights.

Beside a layer of `inner` x `outer`, an adapter has a matrix of `inner` x rank and one of rank x `outer` (arXiv
2106.09685). Sources: Megatron-Bridge @067f987d `peft/lora_layers.py`, `peft/dora_layers.py` and `peft/utils.py`; NeMo
AutoModel @36044ad3 `_peft/lora.py`.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import numpy as np
from flagcore_models.layers import attention_counts, layers_of
from flagcore_models.mixers.latent_attention import LatentAttention

from flagcore.domain.model import Layer, Model, Product
from flagcore.domain.space import FloatArray
from flagcore.domain.spec import Adapter, Target, Task
from flagcore.errors import SpecError
from flagcore.i18n import _
from flagcore_training.frameworks import Reading
from flagcore_training.layout import LayerSizes, Training
from flagcore_training.lengths import ASSUMED, noted_lengths
from flagcore_training.peft import PARAMETERS, TABLE, Peft

BASE_BYTES = {"nf4": 0.5 + 1 / 64 + 4 / 64 / 256, "int8": 1.0, "fp32": 4.0}
"""Bytes per frozen weight in another format than the job's, with its scales: 4 bits, an 8-bit scale per 64 weights, and
an fp32 scale per 256 of them (QLoRA, arXiv 2305.14314, section 3). The scales of rows of 8 bits are left out."""


NAMES: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
    **dict.fromkeys(("qkv_proj", "query_key_value", "wqkv"), ("q_proj", "k_proj", "v_proj")),
    **dict.fromkeys(("dense", "wo"), ("o_proj",)),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w1": ("gate_proj",),
    **dict.fromkeys(("w3", "fc1", "c_fc", "dense_h_to_4h"), ("up_proj",)),
    **dict.fromkeys(("w2", "fc2", "c_proj", "dense_4h_to_h"), ("down_proj",)),
    "q_a_proj": ("q_proj",),
    "q_b_proj": ("q_proj",),
    "kv_a_proj_with_mqa": ("k_proj",),
    "kv_b_proj": ("v_proj",),
    **{f"in_proj_{each}": ("in_proj",) for each in ("qkvz", "qkv", "ba", "z", "b", "a")},
}
"""The targets of other names of layers: those of Megatron, and of families of models in transformers."""
SHARED = re.compile(r"shared_experts?\.")
"""What is in the path of a layer of shared experts, whose adapters are no adapters of routed experts."""
TARGETS = tuple(name for name in get_args(Target) if name not in PARAMETERS)
"""The targets that are layers."""
NOTED = re.compile(
    r"(?<!no )\b(?:(q?lora|dora)|peft)\b(?: +r(?:ank)? *=? *(\d+))?(?: on ((?:qkv|proj|fc1|fc2|\+)+)\b)?", re.IGNORECASE
)


def as_noted(task: Task, notes: str) -> tuple[Task, frozenset[str]]:
    """Return the task of a job record with the adapter and the packed samples that its notes mention, and the names of
    the settings that only they have: `ASSUMED` if the lengths of the samples are assumed."""
    train = task.spec.train
    adapter = train.adapter or noted_adapter(task.spec.model.name or "", notes)
    lengths = train.lengths or noted_lengths(train.seq_length, notes)
    work = replace(train, adapter=adapter, lengths=lengths)
    return replace(task, spec=replace(task.spec, work=work)), frozenset({ASSUMED} if lengths != train.lengths else ())


def noted_adapter(name: str, notes: str) -> Adapter | None:
    """Return the adapter that the name of a job's model or its notes mention, or None.

    By default it is that of Megatron-Bridge's LoRA. NVIDIA's benchmarks, which have it in the name, adapt queries, keys
    and values only (Megatron-Bridge scripts/performance/configs/llama/llama3_llm_finetune.py @573cd8b5).
    """
    if not (mentions := [*NOTED.finditer(notes)] or [*NOTED.finditer(name)]):
        return None
    found = max(mentions, key=lambda each: each.lastindex or 0)  # the one that says most
    kind = (found[1] or "lora").lower()
    base, rank = ("nf4" if kind == "qlora" else None), int(found[2] or 0) or Adapter().rank
    names = (f"linear_{each}" for each in (found[3] or "").lower().split("+") if each)
    targets = tuple(target for each in names for target in NAMES[each])
    if found.string is not notes:
        targets = NAMES["linear_qkv"]
    return Adapter(kind=kind, rank=rank, base=base, targets=targets or Adapter().targets)


def layer_names(names: object) -> list[str]:
    """Return the names of layers in a list or in text, which both may have commas."""
    text = " ".join(map(str, names)) if isinstance(names, (list, tuple)) else str(names or "")
    return re.findall(r"[^\s,]+", text)


def adapter_section(kind: str, rank: object, names: object = None, base: str | None = None) -> dict[str, object]:
    """Return `train.adapter` of a spec for the settings of a framework. `names`: of layers, as a list or joined text.

    Paths and wildcards before a name are left out. Names of other layers than flagcore's are those of all. Layers of
    shared experts are left out beside others: they are few, and would stand for those of all routed experts.
    """
    given = layer_names(names)
    given = [name for name in given if not SHARED.search(name)] or given
    last = [name.rsplit(".", 1)[-1].strip("*") for name in given]
    targets = list(dict.fromkeys(each for name in last for each in NAMES.get(name, (name,)) if each in TARGETS))
    kind = "qlora" if base and kind != "dora" else kind if kind in ("dora", "qlora") else "lora"
    rank = {"rank": rank} if rank is not None else {}
    return {"kind": kind, **rank, **({"targets": targets} if targets else {}), **({"base": base} if base else {})}


def add_parameters(model: Model, section: dict[str, Any], read: Reading) -> None:
    """Add the stacked experts' parameters with adapters to `train.adapter` of a spec. Raises SpecError.

    PEFT refuses them with a dropout. Those of routers are left out: they are few.
    """
    last = [name.rsplit(".", 1)[-1] for each in read.values("parameters") for name in layer_names(each)]
    found = [PARAMETERS[name == "down_proj"] for name in last if name in ("gate_up_proj", "up_proj", "down_proj")]
    if found and section.get("dropout"):
        problem = _("has no adapters beside parameters with a dropout: PEFT 0.21 refuses them")
        key = read.keys["parameters"].names[0]
        raise SpecError(key=key, problem=problem, fix=_("set {key} = 0", key="lora_dropout"))
    all_layers = [each for each in linear_layers(model, experts=False) if each in TARGETS]
    is_all = "targets" not in section and (read.is_on("all_linear") or read.value("targets"))
    own = all_layers if is_all else section.get("targets", [])
    section |= {"targets": list(dict.fromkeys([*own, *found]))} if found else {}


def by_own_name(model: Model, names: object) -> tuple[list[str], list[str]]:
    """Return those of `names`, as in `layer_names`, that layers of a model in transformers may have, and the others.

    The others name layers that the model has by another name, beside which PEFT puts no adapter.
    """
    other = {*TABLE["unnamed"].get(model.family, ())}
    for each in attention_counts(model):
        if isinstance(each, LatentAttention):
            other |= {"k_proj", "v_proj", *(["q_proj"] if each.query_rank else [])}
    last = {name: name.rsplit(".", 1)[-1].strip("*") for name in layer_names(names)}
    return [name for name in last if last[name] not in other], [name for name in last if last[name] in other]


def has_adapter(adapter: Adapter | None, *names: str) -> bool:
    """Return whether a linear layer with one of these names has an adapter."""
    return adapter is not None and (adapter.targets == "all-linear" or any(name in adapter.targets for name in names))


def beside(
    adapter: Adapter | None, product: Product, *, joint: bool = False, peft: Peft | None = None
) -> list[tuple[int, int]]:
    """Return the rank and the outputs of each adapter beside one copy of a product.

    With `joint` projections, one adapter has all outputs. `peft`: what PEFT does, for adapters of PEFT.
    """
    if adapter is None:
        return []
    if peft is not None:
        return peft.beside(adapter, product)
    widths = [each.width for each in product.layers if product.adapts and has_adapter(adapter, each.name)]
    return [(adapter.rank, each) for each in ([product.outputs] if widths and joint else widths)]


def beside_of(train: Training, product: Product) -> list[tuple[int, int]]:
    """Return the rank and the outputs of each adapter that a job has beside one copy of a product."""
    options = train.options
    return beside(options.adapter, product, joint=options.joint_adapters, peft=options.peft)


def weights_beside(adapter: Adapter, product: Product, found: list[tuple[int, int]]) -> int:
    """Return the number of weights of the adapters that `beside` found, beside all copies of a product."""
    magnitudes = adapter.kind == "dora"
    return product.copies * sum(rank * (product.inputs + width) + magnitudes * width for rank, width in found)


def base_bytes(adapter: Adapter | None, value_bytes: float, peft: Peft | None, *, experts: bool = False) -> float:
    """Return the bytes of a frozen weight of linear layers, or of experts, which PEFT's programs may leave or cast."""
    if adapter is None or adapter.base is None:
        return value_bytes
    if experts and peft is not None and not adapter.quantized_experts and adapter.base != "fp32":
        return 4.0 if adapter.fp32_experts else value_bytes
    return BASE_BYTES[adapter.base]


def linear_layers(model: Model, *, experts: bool = True) -> list[str]:
    """Return the names of the layers of a model that may have adapters, with or without those of routed experts."""
    products = (
        product
        for layer in dict.fromkeys(layers_of(model))
        for part in layer.parts
        for product in part.products(model.hidden_size)
    )
    chosen = (each for each in products if each.adapts and (experts or each.component != "experts"))
    return [*dict.fromkeys(each.name for product in chosen for each in product.layers)]


def absent_targets(model: Model, adapter: Adapter | None, section: str = "train") -> list[str]:
    """Return the targets that no linear layer of the model has. Raises SpecError if nothing would be trained."""
    if adapter is None or adapter.targets == "all-linear":
        return []
    names = [*linear_layers(model), *PARAMETERS[: 2 * bool(model.experts)]]
    absent = [name for name in adapter.targets if name not in names]
    if len(absent) == len(adapter.targets):
        problem = _("are no layers of the model: nothing would be trained")
        fix = _("use some of {names}", names=", ".join(names))
        raise SpecError(key=f"{section}.adapter.targets", value=absent, problem=problem, fix=fix)
    return absent


def adapter_weights(train: Training, layout: LayerSizes, layer: Layer) -> tuple[FloatArray, FloatArray]:
    """Return the numbers of weights of the adapters of a layer on a rank: of dense layers, and of routed experts.

    Tensor parallelism splits both matrices. Each expert has an adapter of its own (without `share_expert_adapters`).
    """
    adapter, counts = train.options.adapter, {False: np.zeros(()), True: np.zeros(())}
    assert adapter is not None
    for part in layer.parts:
        for product in part.products(train.model.hidden_size):
            found = weights_beside(adapter, product, beside_of(train, product))
            is_routed = product.component == "experts"
            counts[is_routed] = counts[is_routed] + found
    return counts[False] / layout.tensor, counts[True] / (layout.expert * layout.expert_tensor)
