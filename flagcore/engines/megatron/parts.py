"""The model's own weights by component, before anything is split: what a paper's table of a model shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from flagcore.domain.prediction import ModelPart
from flagcore.domain.space import FloatArray
from flagcore.domain.spec import Task
from flagcore.engines.megatron.knobs import candidate_columns
from flagcore.engines.megatron.parallel import parameters
from flagcore.engines.megatron.parallel.layout import Layout, Training
from flagcore.engines.megatron.predict import layout_of, training

_EXPERTS = ("experts", "shared_experts", "router")


def model_parts(task: Task) -> tuple[ModelPart, ...]:
    """Return the weights of one layer of each kind and how many such layers there are, padded vocabulary included.

    Norms count with the attention and the FFN before which they stand, half and half; the last one with the head.
    """
    train, model = training(task), task.spec.model
    layout = _whole(task)
    one = np.ones(1)
    dense = model.num_layers if model.num_moe_experts is None else model.moe_first_dense_layers
    edge = parameters.edge_parameters(train, layout, first=one, last=one)
    attention, ffn = _halves(train, layout, moe=False)
    parts = [ModelPart("Embedding", float(edge["embedding"][0]), 1)]
    parts.append(ModelPart("MLA" if model.multi_latent_attention else "Attention", attention, model.num_layers))
    if model.num_moe_experts is not None:
        parts.append(ModelPart("MoE", _halves(train, layout, moe=True)[1], model.num_layers - dense))
    if dense:
        parts.append(ModelPart("MLP", ffn, dense))
    if model.mtp_num_layers:
        extra = _sum(parameters.mtp_parameters(train, layout)) / model.mtp_num_layers
        parts.append(ModelPart("MTP", extra, model.mtp_num_layers))
    parts.append(ModelPart("Output", _sum(edge) - parts[0].params, 1))
    return tuple(parts)


def _whole(task: Task) -> Layout:
    """Return the layout of one device that holds all."""
    spec = replace(task.spec, work=replace(task.spec.train, settings={}))
    return layout_of(replace(task, spec=spec), candidate_columns({}))


def _halves(train: Training, layout: Layout, *, moe: bool) -> tuple[float, float]:
    """Return the weights of a layer's attention and of its FFN or experts."""
    parts = {name: float(value[0]) for name, value in parameters.layer_parameters(train, layout, moe=moe).items()}
    norm = float(train.model.hidden_size)
    ffn = norm + sum(value for name, value in parts.items() if name in (*_EXPERTS, "ffn"))
    return sum(parts.values()) - ffn, ffn


def _sum(parts: Mapping[str, FloatArray]) -> float:
    return float(sum(value[0] for value in parts.values()))
