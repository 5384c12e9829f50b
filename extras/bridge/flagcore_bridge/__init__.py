"""Imports recipes of Megatron-Bridge as specs, with a note on each key that is dropped or changed.

Megatron-Bridge is github.com/NVIDIA-NeMo/Megatron-Bridge. The format is the output of `ConfigContainer.to_yaml` and the
`run_config.yaml` in its checkpoints, as of commit 067f987d (2026-08-22) and release 0.3.1.
"""

import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from flagcore_importers.dialect import flat, merged
from flagcore_importers.values import load_documents
from flagcore_megatron.importing.arguments import (
    SIZES,
    Flags,
    baseline_of,
    baseline_problem,
    has_experts,
    options,
    shape,
    with_layers,
)
from flagcore_megatron.program.user_command import knows
from flagcore_megatron.space.knobs import SETTINGS
from flagcore_megatron.space.stages import LAYOUT
from flagcore_training.lengths import assumed_lengths

from flagcore.contracts import ImportedSpec, Importer
from flagcore.domain.chip import Chip, normalize_name
from flagcore.domain.spec import ImportNote
from flagcore.domain.work import PACKED
from flagcore.errors import SpecError, UsageError, join_errors
from flagcore.i18n import _
from flagcore.spec.plain_data import Notes, package_yaml, parse_yaml, plain, read_text, spec_error

TABLES: Any = package_yaml(__package__, "tables.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRecipe(ImportedSpec):
    """An imported config of Megatron-Bridge."""

    def translate_error(self, error: SpecError) -> SpecError:
        return join_errors([self._with_own_key(each) for each in error.problems])

    def _with_own_key(self, error: SpecError) -> SpecError:
        for prefix, section in TABLES["of_spec"].items():
            if error.key == prefix or error.key.startswith(f"{prefix}."):
                key = f"{section}.{error.key.rpartition('.')[2]}" if "." in error.key else section
                return spec_error(key, error.problem, value=error.value, fix=error.fix, file=self.file)
        return error


class Bridge:
    """Imports configs of Megatron-Bridge as specs."""

    name, title, has_trees = "bridge", "Megatron-Bridge", False

    def read_tree(
        self, directory: Path, name: str, overrides: Sequence[str] = (), chips: Callable[[], Sequence[Chip]] = tuple
    ) -> ImportedRecipe:
        """Return the imported config of a file, a checkpoint or a recipe.

        `name` is a file or a checkpoint, or else a recipe of the installed package. `overrides` change the config, such
        as `train.global_batch_size=512`. Raises SpecError, UsageError.
        """
        config, file, added = read_recipe(directory / name, name, overrides)
        data, notes = translate(config, file, name, chips, added)
        return ImportedRecipe(data=data, notes=notes, file=file)


IMPORTER: Importer = Bridge()


RUN_CONFIG = "run_config.yaml"
PROGRAM = """
import sys
from megatron.bridge import recipes
getattr(recipes, sys.argv[1])().to_yaml(sys.argv[2])
"""
"""A program that writes the config of a recipe to a file. It runs in its own process, because the package imports
torch."""
TIMEOUT_SECONDS = 600.0
_TARGETS = ("_target_", "_call_", "_args_", "_name_")


def _items(loader: yaml.SafeLoader, node: yaml.MappingNode) -> list[Any]:
    return list(loader.construct_mapping(node))


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads sets as lists."""


_Loader.add_constructor("tag:yaml.org,2002:set", _items)
_NAME = re.compile(r"[A-Za-z_]\w*")


def read_recipe(path: Path, name: str, overrides: Sequence[str]) -> tuple[dict[str, Any], str, list[str]]:
    """Return a config as plain values, its file for messages, and the keys of overrides that the config does not have.

    The config is at `path`, or else that of the recipe `name`. A directory is a checkpoint, or contains the checkpoints
    of iterations. An override is `a.b=c`, or a YAML file of changes. Raises SpecError, UsageError.
    """
    if path.is_dir():
        found = [path / RUN_CONFIG, *sorted(path.glob(f"iter_*/{RUN_CONFIG}"), reverse=True)]
        path = next((each for each in found if each.is_file()), found[0])
    if path.is_file() or path.suffix in (".yaml", ".yml") or not _NAME.fullmatch(name):
        config, file = _read(path, str(path)), str(path)
    else:
        config, file = _config_of_recipe(name), name
    config, added = _sections(config), list[str]()
    for override in overrides:
        if "=" not in override and override.endswith((".yaml", ".yml")):
            config = merged(config, _sections(_read(Path(override), override)))
        elif _override(config, override, file) and not override.startswith(("+", "~")):
            added.append(override.partition("=")[0])
    return config, file, added


def _config_of_recipe(name: str) -> dict[str, Any]:
    """Return the config that the recipe function `name` of the installed package creates. Raises UsageError,
    SpecError.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.yaml")
        command = [sys.executable, "-c", PROGRAM, name, str(file)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise UsageError(_("the recipe {name} did not return within {n} s", name=name, n=TIMEOUT_SECONDS)) from None
        if file.is_file():
            return _read(file, name)
    reason = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
    fix = _("give a file that `ConfigContainer.to_yaml` or a checkpoint has, or install megatron-bridge")
    raise UsageError(
        _("{name} is no file, and no recipe that runs here ({reason}); {fix}", name=name, reason=reason, fix=fix)
    )


def _read(path: Path, file: str) -> dict[str, Any]:
    """Return the mapping in a YAML 1.1 file, as PyYAML writes it, possibly with sets. Raises SpecError."""
    text = read_text(path, file=file, key="file")
    try:
        data = plain(next(load_documents(text, _Loader), None), file=file)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:200]
        raise spec_error("the document", _("cannot be read as YAML: {why}", why=why), file=file) from None
    if not isinstance(data, dict):
        raise spec_error((), _("must be a mapping of keys and values"), value=data, file=file)
    return data


def _sections(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(each) for key, each in config.items() if key not in _TARGETS}


def _plain(value: Any) -> Any:
    """Return a value in which enums, types and functions are replaced by their names."""
    if isinstance(value, Mapping):
        name = value.get("_name_") or (value.get("_target_") if value.get("_call_") is False else None)
        if isinstance(name, str):
            return name.rpartition(".")[2]
        if isinstance(arguments := value.get("_args_"), list):
            return _plain(arguments[-1]) if arguments else None
        return _sections(value)
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _override(config: dict[str, Any], override: str, file: str) -> bool:
    """Change a value like Megatron-Bridge's command line: a.b=c, +a.b=c, ++a.b=c or ~a.b. Return whether it is new.

    Raises SpecError for an invalid override.
    """
    key, equals, text = override.partition("=")
    removes, key = key.startswith("~"), key.lstrip("+~")
    *parents, name = key.split(".")
    if not name or not (equals or removes):
        raise spec_error(override, _("is not an override"), fix=_("use a.b=c, or a YAML file"), file=file)
    section = config
    for parent in parents:
        if not isinstance(section.setdefault(parent, {}), dict):
            section[parent] = {}
        section = section[parent]
    is_new = name not in section
    section.pop(name, None)
    if not removes:
        section[name] = plain(parse_yaml(text, file=file), file=file)
    return is_new


DEVICES_PER_NODE = 8
VIRTUAL, VIRTUAL_LAYERS = "virtual_pipeline_model_parallel_size", SIZES[4]
_READ_APART = {"pipeline_schedule", LAYOUT}
_IN_NAME = re.compile(r"_(\d+)gpu_([a-z]+\d+\w*?)(?=_|$)")
_DEFAULTS = {setting.name: setting.neutral is True for setting in SETTINGS if setting.name not in _READ_APART}
"""The settings that are read as they are, and the value that is their default: on or off."""
_READ = {**TABLES["read"], "model": [*TABLES["read"]["model"], *TABLES["model_keys"]]}
_USED = {f"{section}.{key}" for section, keys in _READ.items() for key in keys}
_USED |= {f"{section}.{key}" for section in TABLES["with_settings"] for key in _DEFAULTS}
"""The keys that a spec needs."""


def translate(
    config: Mapping[str, Any], file: str, name: str, chips: Callable[[], Sequence[Chip]], added: Collection[str] = ()
) -> tuple[dict[str, Any], tuple[ImportNote, ...]]:
    """Return the data of a spec for a config, and notes.

    The recipe's `name` may contain the number and kind of devices. `added` are the keys of overrides that the config
    does not have. Raises SpecError, also for keys in `added` that flagcore does not read.
    """
    notes = Notes(file)
    if mixed := _mixed_precision(config.get("mixed_precision"), notes):
        config = {**config, "mixed_precision": mixed}
    sections = {key: value for key in TABLES["used"] if isinstance(value := config.get(key), Mapping)}
    model, train = sections.get("model", {}), sections.get("train", {})
    if not model.get("num_layers"):
        fix = "give the config of a whole recipe, as ConfigContainer.to_yaml or a checkpoint's run_config.yaml has it"
        raise notes.error("model.num_layers", "is missing: these are overrides only, or not a model of layers", fix=fix)
    flags = Flags(notes, _entries(config, sections), "model.{name}")
    for key in ("global_batch_size", "seq_length"):
        if not flags.has(key):
            notes.report(
                f"train.{key}" if "batch" in key else f"model.{key}", "is missing", fix="add it as an override"
            )
    section = shape(flags, _vocabulary(flags, model, sections.get("tokenizer", {})))
    baseline = baseline_of(flags, section)
    if notes.problems:
        raise join_errors(notes.problems)
    tower = {key: each for key in ("vision_config",) if isinstance(each := model.get(key), Mapping)}
    settings = _settings(sections, section, baseline, notes)
    work = options(flags)
    work["settings"] = {**work.get("settings", {}), **settings}
    sizes = {key: flags.get(key) for key in ("seq_length", "global_batch_size")}
    cluster, devices = _cluster(name, baseline, notes, chips)
    data = {"engine": "megatron", **sizes, **work, **_lengths(sections.get("dataset", {}), notes)}
    tuner: dict[str, Any] = {"baseline": baseline}
    if problem := baseline_problem(baseline, data, section, devices):
        notes.note("model", f"cannot run: {problem}; the rule of thumb is the baseline instead", "auto_tuner")
        tuner = {}
    if model.get("hf_model_id"):
        notes.note("model.hf_model_id", f"{model['hf_model_id']}: its sizes are in the config", "model")
    if steps := train.get("train_iters"):
        notes.note("train.train_iters", f"dropped ({steps}): a trial has few steps; see auto_tuner.control", "train")
    _note_others(config, sections, notes, added)
    if notes.problems:
        raise join_errors(notes.problems)
    return {"model": with_layers(flags, section, tower), "cluster": cluster, "train": data, "auto_tuner": tuner}, tuple(
        notes.notes
    )


def _lengths(dataset: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    """Return `train.lengths` for sequences that are packed before the job."""
    specs = dataset.get("offline_packing_specs") or dataset.get("packed_sequence_specs")  # until June 2026
    packed = specs.get("packed_sequence_size") if isinstance(specs, Mapping) else None
    if type(packed) is not int or packed <= 0:
        return {}
    return {"lengths": assumed_lengths(packed, PACKED, notes, offline=True)}


def _entries(config: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Any]]:
    """Return the config as flags of Megatron-LM with their keys in the config."""
    model, train, ddp = (sections.get(key, {}) for key in ("model", "train", "ddp"))
    values = {f"model.{key}": model.get(key) for key in TABLES["model_keys"]}
    backend = model.get("attention_backend")
    attention = dict(enumerate(TABLES["attention"], start=1))
    values["model.attention_backend"] = attention.get(backend, backend) if isinstance(backend, int) else backend
    groups = model.get("num_query_groups")
    if not model.get("kv_lora_rank") and groups not in (None, 0, model.get("num_attention_heads")):
        values |= {"model.group_query_attention": True, "model.num_query_groups": groups}
    values["model.swiglu"] = bool(model.get("gated_linear_unit"))
    values["model.untie_embeddings_and_output_weights"] = not model.get("share_embeddings_and_output_weights", True)
    parts = (model["num_layers"], model.get(SIZES[1]) or 1, model.get(VIRTUAL))
    numbers = [each for each in parts if type(each) is int and each > 0]
    if len(numbers) == 3 and numbers[2] > 1:
        values[f"model.{VIRTUAL_LAYERS}"] = math.ceil(numbers[0] / (numbers[1] * numbers[2]))
    if model.get("seq_length") is None:
        values["dataset.seq_length"] = sections.get("dataset", {}).get("seq_length")
    values |= {f"train.{key}": train.get(key) for key in ("micro_batch_size", "global_batch_size", "rampup_batch_size")}
    sharded = ddp.get("use_distributed_optimizer", sections.get("optimizer", {}).get("use_distributed_optimizer"))
    values["ddp.use_distributed_optimizer"] = sharded
    values |= _precision(mixed) if (mixed := sections.get("mixed_precision")) else {}
    if peft := config.get("peft"):
        kind = str(peft.get("_target_")).rsplit(".", 1)[-1].lower()
        values |= {"peft.peft_type": kind, "peft.lora_dim": peft.get("dim")}
        values["peft.lora_target_modules"] = peft.get("target_modules")
    return list(values.items())


def _precision(mixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags for the config `mixed_precision`. They take precedence over the ones in `model`."""
    fields = {key: mixed.get(key) for key in ("bf16", "fp16", "fp8", "fp4")}
    fields["fp8_recipe"] = mixed["fp8_recipe"] if mixed.get("fp8") else None
    model = {"model.bf16": None, "model.fp16": None}
    return {**model, **{f"mixed_precision.{key}": value for key, value in fields.items()}}


def _mixed_precision(value: object, notes: Notes) -> dict[str, Any]:
    """Return the config of a mixed precision that is a config or the name of one. Report other names.

    It is copied into the config of the optimizer, too, with its scales of FP8 that 16-bit jobs do not use
    (`MixedPrecisionConfig.setup`).
    """
    if not isinstance(value, str):
        return {"fp8_recipe": "tensorwise", **value} if isinstance(value, Mapping) else {}
    text = value.replace("-", "_")
    base = "fp16" if text.startswith("fp16") else "bf16"
    if (named := TABLES["precisions"].get(text)) is None:
        fix = f"use a known one, such as {', '.join(get_close_matches(text, TABLES['precisions'], n=4, cutoff=0.0))}"
        notes.report("mixed_precision", "is not a mixed precision of Megatron-Bridge", value=value, fix=fix)
    return {base: True, "grad_reduce_in_fp32": base == "bf16", "fp8_recipe": "tensorwise", **(named or {})}


def _vocabulary(flags: Flags, model: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> Any:
    """Return the vocabulary size of the model or, if it is missing, of the tokenizer."""
    size = model.get("vocab_size") or tokenizer.get("vocab_size")
    if size is None:
        flags.source.report("model.vocab_size", "is missing", fix="add it as an override: model.vocab_size=128256")
    return size


def _settings(
    sections: Mapping[str, Mapping[str, Any]], model: Mapping[str, Any], baseline: Mapping[str, Any], notes: Notes
) -> dict[str, Any]:
    """Return the settings of megatron-core that have an effect, with the images and the layout of the pipeline."""
    settings, given = _in_effect(_given(sections), model, baseline), sections["model"]
    if isinstance(given.get("vision_config"), Mapping) and "images_per_sequence" not in settings:
        text = "is left out: set images_per_sequence, image_width and image_height, the images of a mean sequence"
        notes.note("model.vision_config", text, "train.settings")
    if layout := _layout(given.get(LAYOUT)):
        settings[LAYOUT] = layout
        text = "applies to all candidates: only pipelines that it fits are tried; remove it to search for others"
        notes.note(f"model.{LAYOUT}", text, f"train.settings.{LAYOUT}")
    return settings


def _given(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings that differ from their defaults. The last section with a setting counts."""
    found: dict[str, Any] = {}
    for section in TABLES["with_settings"]:
        for key, value in sections.get(section, {}).items():
            if key in _DEFAULTS and value is not None and value != [] and value is not _DEFAULTS[key]:
                found[key] = TABLES["dtypes"].get(str(value), value) if key.endswith("dtype") else value
    found |= _images(sections)
    reduces_fp32 = sections.get("mixed_precision", {}).get(
        "grad_reduce_in_fp32", sections.get("ddp", {}).get("grad_reduce_in_fp32")
    )
    return {**found, "grad_reduce_in_bf16": True} if reduces_fp32 is False else found


def _in_effect(found: dict[str, Any], model: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that do nothing in a job."""
    without = {name for name, need in TABLES["needs"].items()
               if not (value := found.get(need["setting"])) or value != need.get("is", value)}  # fmt: skip
    if not has_experts(model):
        without |= {name for name in found if name.startswith(("moe_", "expert_"))}
    if baseline.get("recompute_granularity") != "selective":
        without.add("recompute_modules")
    if found.get("cuda_graph_impl") in (None, "none"):
        without |= {"cuda_graph_impl", "cuda_graph_scope"}
    return {name: value for name, value in found.items() if name not in without}


def _images(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings for the images of a synthetic dataset (`data/builders/mock_vlm_sft.py`)."""
    size, has_tower = sections.get("dataset", {}).get("image_size"), sections.get("model", {}).get("vision_config")
    if not has_tower or not isinstance(size, list) or len(size) != 2:
        return {}
    sizes = dict(zip(("image_width", "image_height"), size, strict=True))
    return {"images_per_sequence": sections["dataset"].get("num_images", 1), **sizes}


def _layout(value: object) -> str:
    """Return a pipeline layout in Megatron's syntax. A `value` that is a list contains the layers of each stage."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return ""
    stages = [each if isinstance(each, list) else [each] for each in value]
    return "|".join("".join(TABLES["letters"].get(str(layer), str(layer)) for layer in stage) for stage in stages)


def _cluster(
    name: str, baseline: Mapping[str, Any], notes: Notes, chips: Callable[[], Sequence[Chip]]
) -> tuple[dict[str, Any], int]:
    """Return the section `cluster`, and the number of devices in it.

    Both are read from the recipe's name. If it does not state them, the cluster has the fewest devices that can run it.
    """
    match = _IN_NAME.search(name)
    sizes = (baseline.get(key) for key in SIZES[:4])
    # An error is reported later for sizes of other types.
    tensor, stages, context, experts = (size if type(size) is int else 1 for size in sizes)
    if match:
        devices, kind = int(match[1]), normalize_name(match[2])
        like = [chip for chip in chips() if chip.matches_name(match[2]) or normalize_name(chip.name).startswith(kind)]
        like.sort(key=lambda each: (not each.matches_name(match[2]), not each.dense_flops_per_second, len(each.name)))
        chip, per_node = (like[0].name, like[0].devices_per_node) if like else ("auto", DEVICES_PER_NODE)
        notes.note("recipe", f"{name} is for {devices} x {match[2].upper()}", "cluster")
    else:
        devices, chip, per_node = math.lcm(tensor * stages * context, stages * experts), "auto", DEVICES_PER_NODE
        text = f"no key of a config has the chip or the number of devices: {devices} is the fewest; correct it"
        notes.note("cluster", text, "cluster")
    nodes = max(1, math.ceil(devices / per_node))
    per_node = devices if nodes == 1 else per_node
    return {"chip": chip, "nodes": nodes, "devices_per_node": per_node}, nodes * per_node


def _note_others(
    config: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], notes: Notes, added: Collection[str]
) -> None:
    """Add notes about the sections and keys that a spec does not have, except null, false and empty values.

    Report an error for unused keys in `added`, because most of them are misspelt.
    """
    for override in added:
        if ".".join(override.split(".")[:2]) not in {*TABLES["used"], *_USED, "train.rampup_batch_size"}:
            fix = _("correct it, or write +{key}=VALUE", key=override)
            notes.report(override, _("is not in the config, and predictions do not use it"), fix=fix)
    for section, values in sections.items():
        off: tuple[Any, ...] = (None, False, [], {}, "")
        if keys := [key for key, value in values.items() if f"{section}.{key}" not in _USED and value not in off]:
            notes.note(f"{section} ({', '.join(keys)})", "dropped: predictions do not use them")
    others = [key for key, value in config.items() if key not in sections and isinstance(value, Mapping) and value]
    notes.note(", ".join(others), "dropped: they do not describe the job's sizes")
    if unknown := [key for key, _value in flat(config) if not _is_known(key)]:
        notes.note(", ".join(unknown), "unknown to flagcore: not in the predictions")


def _is_known(key: str) -> bool:
    """Return whether a table has the name of a key, or the key is part of another model's configuration."""
    *sections, name = key.split(".")
    listed = {*TABLES["known"].split(), *TABLES["used"], *(key.partition(".")[2] for key in _USED)}
    return any(each.endswith("_config") for each in sections) or name in listed or knows(name)
