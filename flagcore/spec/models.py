"""Reads models from paths or inline shapes, and checks rules on several sizes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flagcore.domain.model import Model
from flagcore.errors import SpecError, join_errors
from flagcore.i18n import _
from flagcore.spec.plain_data import KeyPath, plain, spec_error

if TYPE_CHECKING:
    from flagcore.spec.schema import Shape

_MLA_SIZES = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_MOE_SIZES = ("moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_first_dense_layers")


def model_from(source: object, *, base: Path, file: str = "") -> Model:
    """Return the model at a path, which may be relative to `base`, or of an inline shape. Raises SpecError."""
    from flagcore.spec.schema import Shape
    from flagcore.spec.validate import checked

    if isinstance(source, (str, os.PathLike)):
        return _model_at(str(source), base, file)
    if isinstance(source, Shape):
        return model_of_shape(source, file=file)
    if not isinstance(source, Mapping):
        problem = "must be the path of a Hugging Face directory or config.json, or an inline shape"
        raise spec_error("model", problem, value=plain({"model": source}, file=file)["model"], file=file)
    return model_of_shape(checked(Shape, plain(source, file=file), file=file, at=("model",)), file=file)


def model_of_shape(shape: Shape, *, file: str = "") -> Model:
    """Return the model of an inline shape with resolved defaults. Raises SpecError with all broken rules."""
    sizes, problems = shape.model_dump(), dict[str, SpecError]()

    def fail(key: str, problem: str, fix: str) -> None:
        problems[key] = spec_error(("model", key), problem, value=sizes[key], fix=fix, file=file)

    if shape.multi_latent_attention:
        for key in _MLA_SIZES:
            if sizes[key] is None:
                problem = "is missing, but multi_latent_attention is true"
                fail(key, problem, "give its size, or remove multi_latent_attention")
    else:
        for key in ("q_lora_rank", *_MLA_SIZES):
            if sizes[key] is not None:
                fail(key, "needs multi_latent_attention: true", "add that, or remove this key")
    if shape.num_moe_experts is None:
        for key in _MOE_SIZES:
            if sizes[key]:
                fail(key, "needs num_moe_experts", "add that, or remove this key")
    elif not shape.moe_router_topk:
        fail("moe_router_topk", "is missing, but num_moe_experts is given", f"use 1 to {shape.num_moe_experts}")
    else:
        sizes["moe_ffn_hidden_size"] = shape.moe_ffn_hidden_size or shape.ffn_hidden_size
    heads = shape.num_attention_heads
    if shape.kv_channels is None:
        if shape.multi_latent_attention:
            sizes["kv_channels"] = shape.qk_head_dim
        else:
            sizes["kv_channels"] = shape.hidden_size // heads
            if shape.hidden_size % heads:
                text = _("must be divisible by {name} = {value}", name="num_attention_heads", value=heads)
                fail("hidden_size", text, _("change it, or give kv_channels"))
    model = Model(
        **sizes
        | {
            "num_query_groups": shape.num_query_groups or heads,
            "moe_router_topk": shape.moe_router_topk or 0,
            "moe_shared_expert_intermediate_size": shape.moe_shared_expert_intermediate_size or None,
            "moe_first_dense_layers": shape.moe_first_dense_layers or 0,
            "mtp_num_layers": shape.mtp_num_layers or 0,
        }
    )
    for key, error in _contradictions(model, ("model",), file, {}).items():
        problems.setdefault(key, error)
    if problems:
        raise join_errors(list(problems.values()))
    return model


def check_model(model: Model, *, at: KeyPath = (), names: Mapping[str, str] | None = None) -> None:
    """Raise SpecError if sizes of `model` contradict each other. `names` maps fields to keys of the file."""
    if found := _contradictions(model, at, "", names or {}):
        raise join_errors(list(found.values()))


def _contradictions(model: Model, at: KeyPath, file: str, names: Mapping[str, str]) -> dict[str, SpecError]:
    """Return an error for each field that contradicts another."""
    names_of_fields, errors = (
        {field: names.get(field, field) for field in Model.__dataclass_fields__},
        dict[str, SpecError](),
    )

    def fail(field: str, problem: str, fix: str) -> None:
        errors[field] = spec_error(
            (*at, names_of_fields[field]), problem, value=getattr(model, field), fix=fix, file=file
        )

    heads, groups, experts = model.num_attention_heads, model.num_query_groups, model.num_moe_experts
    if heads % groups:
        divisors = [str(n) for n in range(1, min(heads, 1024) + 1) if heads % n == 0][-6:]
        problem = _("must divide {name} = {value}", name=names_of_fields["num_attention_heads"], value=heads)
        fail("num_query_groups", problem, _("use {values}", values=", ".join(divisors)))
    elif model.multi_latent_attention and groups != heads:
        problem = f"must equal {names_of_fields['num_attention_heads']} = {heads} with multi-latent attention"
        fail("num_query_groups", problem, f"use {heads}")
    if experts is not None and not 1 <= model.moe_router_topk <= experts:
        problem = f"must be from 1 to {names_of_fields['num_moe_experts']} = {experts}"
        fail("moe_router_topk", problem, f"use {experts} or fewer")
    if experts is not None and model.moe_first_dense_layers >= model.num_layers:
        problem = f"must be below {names_of_fields['num_layers']} = {model.num_layers} in a model with experts"
        fail("moe_first_dense_layers", problem, f"use {model.num_layers - 1} or fewer")
    return errors


def _model_at(source: str, base: Path, file: str) -> Model:
    from flagcore.spec.data_file import read_mapping
    from flagcore.spec.huggingface import model_of_config, vision_of

    plain({"model": source}, file=file)
    fix = _("give a directory with a config.json, that file, a GGUF file, or an inline shape; nothing is downloaded")
    path, problem = base / source, ""
    try:
        if path.is_dir():
            path /= "config.json"
            problem = "" if path.exists() else _("is a directory without a config.json")
        elif not path.exists():
            problem = _("does not exist")
    except OSError as error:
        problem = _("cannot be read ({why})", why=error.strerror)
    if problem:
        raise spec_error("model", problem, value=source, fix=fix, file=file)
    if path.suffix == ".gguf":
        return _model_of_gguf(path, file)
    data = read_mapping(path, file=str(path), key="model")
    model = model_of_config(data, name=_name(path), file=str(path))
    sizes = path.with_name("preprocessor_config.json")
    vision = vision_of(data, read_mapping(sizes, file=str(sizes), key="model") if sizes.is_file() else {})
    return replace(model, vision=vision)


def _model_of_gguf(path: Path, file: str) -> Model:
    from flagcore.spec.gguf import shape
    from flagcore.spec.schema import Shape
    from flagcore.spec.validate import checked

    sizes = {key: value for key, value in shape(str(path)).items() if value is not None}
    return model_of_shape(checked(Shape, {**sizes, "name": _name(path)}, file=str(path), at=("model",)), file=file)


def _name(path: Path) -> str:
    absolute = path.absolute()
    return (absolute.parent.name if path.name == "config.json" else path.stem) or "model"
