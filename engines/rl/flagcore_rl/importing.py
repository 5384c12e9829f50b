"""Converts commands of the frameworks to specs: the command stays, and its settings are the job and the baseline."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flagcore_importers import dialect
from flagcore_importers.dialect import name_of
from flagcore_models.public import model_of, tuned_from
from flagcore_training.adapters import adapter_section

from flagcore.domain.knob import Knob
from flagcore.domain.launch import Start
from flagcore.domain.spec import ImportNote
from flagcore.errors import join_errors
from flagcore.spec.plain_data import Notes
from flagcore_rl.commands import Dialect, Given, dialect_of
from flagcore_rl.roles import DEVICES, ROLLOUTS, STALENESS
from flagcore_rl.rules import ENDS, RDP, RTP

USUAL = 0.5
"""The mean length of prompts and answers as a share of the longest, which commands do not say."""
ON_HOST, AWARE = "optimizer_cpu_offload", "use_precision_aware_optimizer"
SETTINGS = (
    *(ON_HOST, "optimizer_offload_fraction", AWARE),
    *("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "optimizer"),
    *("expert_tensor_parallel_size", *ENDS),
)
"""Settings of the trainer that commands have."""
FORMATS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}
"""The formats of optimizer states as settings, by their names in torch."""
SHORT_PROMPT = 512
"""The longest prompt where a command only limits the sum of prompt and answer."""


def starts(name: str, words: Sequence[str]) -> bool:
    """Return whether a command starts a framework."""
    return re.search(dialect_of(name).starts, " ".join(words)) is not None


def trainer_of(dialect: Dialect, settings: Mapping[str, Any], words: Sequence[str]) -> str:
    """Return the name of the engine of a command's trainer."""
    if dialect.trainer:
        return dialect.trainer
    keys = dialect.keys_of("")
    names = [name_of(key) for target in ("trainer", "megatron") if target in keys for key in keys[target].names]
    given = [settings[name] for name in names if name in settings]
    of_keys = any(".actor.megatron." in key for key in settings) if not given else given[0] in ("megatron", True)
    configs = [word.partition("=")[2] or after for word, after in itertools.pairwise([*words, ""])
               if word.partition("=")[0] == "--config-name"]  # fmt: skip
    return "megatron" if of_keys or any("megatron" in each for each in configs) else "fsdp2"


class Reading(dialect.Reading):
    """A command that is read: the values of its settings by the names in `commands.yaml`."""

    dialect: Dialect

    def __init__(self, name: str, words: Sequence[str], directory: Path) -> None:
        self.command = Given(dialect_of(name), tuple(words))
        given = dialect.read_given(self.command.dialect, words, directory)
        self.trainer = trainer_of(self.command.dialect, given, words)
        super().__init__(self.command.dialect, given, {}, self.trainer)
        for pattern, own in self.command.dialect.of_command.items():
            if re.search(pattern, " ".join(words)):
                self.defaults = {**self.defaults, **own}

    def baseline(self, knobs: Sequence[Knob]) -> dict[str, Any]:
        """Return the values of knobs."""
        found: dict[str, Any] = {}
        idle = {*SETTINGS, *(("micro_batch_size", "logprob_batch_size") if self.packs else TOKENS)}
        for knob in (each for each in knobs if each.name not in idle):
            value = self.value(knob.name)
            if value is None or (knob.kind == "int" and (type(value) is not int or value < 1)):
                continue
            if self.keys[knob.name].per_rank:
                value *= self.number("context_parallel_size") or 1
            found[knob.name] = f"{value:g}" if knob.kind == "share" else value
        return found | self._instances(found)

    def _instances(self, found: Mapping[str, Any]) -> dict[str, int]:
        """Return the sizes of the rollout's instances that differ from those of the command in `found`."""
        tensor, experts, data = (int(found.get(name) or 1) for name in (RTP, "rollout_expert_parallel_size", RDP))
        if self.dialect.nested and tensor % data == 0 and data > 1:
            return {RTP: tensor // data}
        if experts > tensor * data and not experts % tensor:  # attention of the ranks beyond TP is data-parallel
            return {RDP: experts // tensor}
        return {}

    @property
    def generates_itself(self) -> bool:
        """Whether the trainer generates answers, without a rollout's engine."""
        return "uses_vllm" in self.keys and not self.is_on("uses_vllm")

    @property
    def outside(self) -> Sequence[str]:
        """The addresses of engines that the command does not start."""
        given = self.value("outside") or ()
        return given.split() if isinstance(given, str) else given

    @property
    def packs(self) -> bool:
        """Whether micro-batches are packed up to a number of tokens."""
        return self.dialect.packs and self.is_on("packing")

    def is_idle(self, name: str) -> bool:
        return (".megatron" if self.trainer == "fsdp2" else ".dtensor_cfg.") in name or super().is_idle(name)


TOKENS = ("micro_batch_tokens", "logprob_batch_tokens")


def spec_of(
    name: str, start: Start, directory: Path, model: str | None, knobs: Sequence[Knob]
) -> tuple[dict[str, Any], Sequence[ImportNote]]:
    """Return the data of a spec for a command of a framework, and notes. Raises SpecError."""
    notes, read = Notes(), Reading(name, start.words, directory)
    text = " ".join(start.words)
    section = model_of(model, [read.value("model")], directory, notes)
    cluster, rollout_devices = cluster_of(read, notes)
    for key in (key for key, value in read.dialect.refused.items() if read.given.get(key) == value):
        problem, fix = (
            "generates no answers: it is no reinforcement learning",
            "describe the training in a spec with engine: megatron",
        )
        notes.report(key, problem, value=read.given[key], fix=fix)
    if notes.problems:
        raise join_errors(notes.problems)
    rl = {"engine": name, **_engines(read, notes), **_samples(read, notes)}
    baseline = {**_of_all_ranks(read, cluster["nodes"]), **read.baseline(knobs)}
    if rollout_devices:
        baseline[DEVICES] = rollout_devices
    if read.is_on("asynchronous") or re.search(read.dialect.asynchronous or "$^", text):
        rl["staleness"] = baseline[STALENESS] = read.number("lag") or 1
    for each in read.unread():
        notes.note(each.key, f"is not in the predictions ({str(each.value)[:60]}){each.reason}", "rl.command")
    if own := re.search(read.dialect.variants or "$^", text):
        notes.note("command", f"{own[0]} is predicted as if it were the framework's PPO trainer", "rl.command")
    rl |= {"command": list(start.words), "directory": str(directory)}
    return {"model": section, "cluster": cluster, "rl": rl, "auto_tuner": {"baseline": baseline}}, notes.notes


def _of_all_ranks(read: Reading, nodes: int) -> dict[str, int]:
    """Return the micro-batch sizes that a command gives for all ranks together."""
    ranks = nodes * (read.number("devices_per_node") or 1) // (read.number("context_parallel_size") or 1)
    sizes = {size: read.number(f"whole_{size}") for size in ("micro_batch_size", "logprob_batch_size")}
    return {} if read.packs else {size: max(whole // max(ranks, 1), 1) for size, whole in sizes.items() if whole}


def _engines(read: Reading, notes: Notes) -> dict[str, Any]:
    """Return the trainer and the rollout."""
    kind = read.value("distributed") if "distributed" in read.keys else read.dialect.stands_for
    if kind in ("DEEPSPEED", "DeepSpeed", "MULTI_GPU"):
        notes.note("trainer", f"{kind} is predicted as {read.trainer}", "rl.trainer.engine")
    trainer: dict[str, Any] = {"engine": read.trainer, **_offload(read)}
    if settings := _settings(read, notes):
        trainer["settings"] = settings
    if read.is_on("adapter" if "adapter" in read.keys else "rank"):
        section = adapter_section("lora", read.number("rank"), read.value("targets"), read.value("base"))
        is_wide = "loaded" in read.keys and read.value("loaded") == "float32" and str(kind).lower() != "deepspeed"
        if is_wide and "base" not in section:
            section["base"] = "fp32"
            text = "float32: frozen weights stay in fp32, as they are loaded; bfloat16 halves their memory"
            notes.note("dtype", text, "rl.trainer.adapter.base")
        trainer["adapter"] = section | ({"dropout": True} if read.is_on("dropout") else {})
    return {"trainer": trainer, "rollout": _rollout(read, notes), **_precision(read, "precision")}


def _settings(read: Reading, notes: Notes) -> dict[str, Any]:
    """Return the settings of the trainer. Only Megatron-LM itself demands its optimizer for one on the host."""
    given = {name: read.value(name) for name in SETTINGS if name in read.keys}
    found = {name: value for name, value in given.items() if value not in (None, False, "adam")}
    found = {name: FORMATS.get(str(value).removeprefix("torch."), value) for name, value in found.items()}
    if found.get(ON_HOST) and not found.get(AWARE) and not read.dialect.checks_offload:
        notes.note(ON_HOST, f"is predicted with {AWARE}", "rl.trainer.settings")
        found[AWARE] = True
    return found


def _precision(read: Reading, target: str) -> dict[str, Any]:
    return {"precision": precision} if (precision := read.value(target)) else {}


def _rollout(read: Reading, notes: Notes) -> dict[str, Any]:
    """Return the engine that generates answers."""
    given, uses_own = str(read.value("rollout") or read.dialect.rollout).lower(), read.generates_itself
    engine = given if given in ROLLOUTS else ROLLOUTS[0]
    if engine != given or uses_own:
        text = f"{'transformers' if uses_own else given} is predicted as {engine}"
        notes.note("rollout", text, "rl.rollout.engine")
    sleeps = {"sleeps": False} if "sleeps" in read.keys and not read.is_on("sleeps") else {}
    return {"engine": engine, **_precision(read, "rollout_precision"), **sleeps}


def _offload(read: Reading) -> dict[str, str]:
    """Return what a colocated trainer moves to the host; nothing if the framework has no word for it."""
    if read.generates_itself:
        return {"offload": "none"}
    if not {"offload_params", "offload_states"} & read.keys.keys():
        return {}
    if not read.is_on("offload_states"):
        read.drop("offload_params")
        return {"offload": "none"}
    return {"offload": "all" if read.is_on("offload_params") else "optimizer"}


def _samples(read: Reading, notes: Notes) -> dict[str, Any]:
    """Return the samples of a step, their lengths, and what is computed with them."""
    samples = read.number("samples") or 1
    prompts, mini = _sizes(read, samples, notes)
    found: dict[str, Any] = {"algorithm": _algorithm(read, notes), "prompts": prompts, "samples": samples}
    found |= _mini_batch(mini or prompts * samples // (read.number("mini_steps") or 1), prompts * samples, notes)
    if (epochs := read.number("epochs") or 1) > 1:
        found["epochs"] = epochs
    found |= _lengths(read, notes)
    is_single = "rank_samples" in read.keys and "mini_batch" not in found and epochs == 1
    if is_single or read.is_on("on_policy"):
        found["old_logprobs"] = False
    return found | _reward(read, notes) | {"reference": read.is_on("reference"), "packing": read.packs}


def _algorithm(read: Reading, notes: Notes) -> str:
    """Return the algorithm, or the one as which it is predicted."""
    algorithm = str(read.value("algorithm") or "grpo")
    words = read.keys["algorithm"].words if "algorithm" in read.keys else {}
    given = next(iter(read.found("algorithm").values()), "grpo")
    if given not in ("grpo", *words.values()):
        notes.note("algorithm", f"{given} is predicted as {algorithm}", "rl.algorithm")
    if algorithm == "ppo" and any(key.startswith("critic.") for key in read.given):
        notes.note("critic", "is predicted as a second policy, with its layout and micro-batches", "rl.algorithm")
    return algorithm


def _sizes(read: Reading, samples: int, notes: Notes) -> tuple[int, int]:
    """Return the prompts of a step, and the samples of an optimizer step, or 0. `samples`: those of a prompt."""
    if ranks := read.number("rank_samples"):
        per_pass = ranks * (read.number("processes") or 1)
        mini = per_pass * (read.number("accumulated") or 1)
        total = read.number("generation_samples") or per_pass * (read.number("steps_per_generation") or 0) or mini
        return max(total // samples, 1), mini
    mini = (read.number("mini_prompts") or 0) * samples or read.number("mini_samples") or 0
    if prompts := read.number("prompts"):
        return prompts, mini
    prompts = max(mini // samples, 1)
    notes.note("rl.prompts", f"{prompts}: those of an optimizer step, as the command has no other", "rl.prompts")
    return prompts, mini


def _mini_batch(mini: int, total: int, notes: Notes) -> dict[str, int]:
    """Return the samples of an optimizer step, unless they are the `total` of a step."""
    if mini and mini < total and total % mini == 0:
        return {"mini_batch": mini}
    if mini and mini != total:
        notes.note("rl.mini_batch", f"{mini} does not divide the {total} samples of a step: it is all of them", "rl")
    return {}


def _lengths(read: Reading, notes: Notes) -> dict[str, Any]:
    """Return the lengths of prompts and answers."""
    found: dict[str, Any] = {}
    for part, longest in zip(("prompt_len", "answer_len"), _longest(read), strict=True):
        found[part] = {"mean": max(longest * USUAL, 1), "longest": longest}
        text = f"{found[part]['mean']:g} is half of the longest: write the mean of your log"
        if part == "prompt_len" and not read.number("prompt_longest"):
            text += ", and the longest, which the command does not limit"
        notes.note(f"rl.{part}.mean", text, f"rl.{part}.mean")
    return found


def _reward(read: Reading, notes: Notes) -> dict[str, Any]:
    """Return the model that rewards answers, if it is known."""
    name = str(read.value("reward_model") or "")
    is_on = "uses_reward_model" not in read.keys or read.is_on("uses_reward_model")
    if is_on and name and (known := tuned_from(name)):
        return {"reward": {"model": known}}
    if is_on and name:
        notes.note("rl.reward", f"{name} is not known: its time is not in the predictions", "rl.reward.model")
    elif is_on:
        read.drop("uses_reward_model")
    return {}


def _longest(read: Reading) -> tuple[int, int]:
    """Return the lengths at which prompts and answers are cut."""
    whole = read.number("longest") or 2 * SHORT_PROMPT
    answer = read.number("answer_longest")
    prompt = read.number("prompt_longest") or (min(SHORT_PROMPT, whole // 4) if not answer else SHORT_PROMPT)
    if session := read.number("session_longest"):  # of all turns, each of which is limited as an answer
        answer = max(session - prompt, 1)
    return prompt, answer or max(whole - prompt, 1)


def cluster_of(read: Reading, notes: Notes) -> tuple[dict[str, Any], int]:
    """Return the section `cluster`, and the number of devices that only generate answers, or 0."""
    nodes = read.number("nodes") or 1
    per_node = read.number("devices_per_node") or read.number("processes")
    if per_node is None:
        notes.note("cluster.devices_per_node", "is not in the command; auto is the number on this machine", "cluster")
        return {"chip": "auto", "nodes": nodes, "devices_per_node": "auto"}, 0
    if "processes" in read.keys and not read.found("processes"):
        notes.note("cluster", f"{per_node} process, as the command has no number: add --num_processes N", "cluster")
    is_colocated = "colocated" in read.keys and read.is_on("colocated")
    more = 0 if is_colocated else _more_devices(read, per_node)
    devices = nodes * per_node + more
    apart = 0 if is_colocated else _rollout_devices(read, per_node, more)
    if more and nodes == 1 and devices <= 8:
        per_node = devices
    if devices % per_node:
        notes.note("cluster", f"{devices} devices in one node: the roles do not share nodes evenly", "cluster")
        per_node = devices
    return {"chip": "auto", "nodes": devices // per_node, "devices_per_node": per_node}, apart


def _rollout_devices(read: Reading, per_node: int, more: int) -> int:
    """Return the devices that only generate answers. `more`: those that are none of the trainer's nodes."""
    if "rollout_devices_per_node" not in read.keys:
        return more
    return (read.number("rollout_nodes") or 1) * (read.number("rollout_devices_per_node") or per_node)


def _more_devices(read: Reading, per_node: int) -> int:
    """Return the number of devices of the rollout that are none of the trainer's nodes."""
    instances = (read.number("more_instances") or 0) * (read.number("rollout_tensor_parallel_size") or 1)
    nodes = (read.number("more_nodes") or 0) * (read.number("more_devices_per_node") or per_node)
    own = len(read.outside) * (read.number("rollout_tensor_parallel_size") or 1)
    return own or read.number("more_devices") or instances or nodes
