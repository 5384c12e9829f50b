"""Converts commands of the frameworks to specs: the command stays, and its settings are the job and the baseline."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flagcore_models.public import model_of, tuned_from
from flagcore_training.adapters import adapter_section

from flagcore.domain.knob import Knob
from flagcore.domain.launch import Start
from flagcore.domain.spec import ImportNote
from flagcore.errors import join_errors
from flagcore.spec.plain_data import Notes
from flagcore_rl.commands import Dialect, Given, Row, dialect_of
from flagcore_rl.roles import DEVICES, ROLLOUTS, STALENESS
from flagcore_rl.rules import ENDS, RDP, RTP

USUAL = 0.5
"""The mean length of prompts and answers as a share of the longest, which commands do not say."""
SETTINGS = (
    *("optimizer_cpu_offload", "optimizer_offload_fraction", "use_precision_aware_optimizer"),
    *("expert_tensor_parallel_size", *ENDS),
)
"""Settings of the trainer that commands have."""
SHORT_PROMPT = 512
"""The longest prompt where a command only limits the sum of prompt and answer."""


def starts(name: str, words: Sequence[str]) -> bool:
    """Return whether a command starts a framework."""
    return re.search(dialect_of(name).starts, " ".join(words)) is not None


def trainer_of(dialect: Dialect, settings: Mapping[str, Any], words: Sequence[str]) -> str:
    """Return the name of the engine of a command's trainer."""
    if dialect.trainer:
        return dialect.trainer
    rows = dialect.rows("")
    keys = [key for name in ("trainer", "megatron") if name in rows for key in rows[name].keys]
    given = [settings[key] for key in keys if key in settings]
    names = [word.partition("=")[2] or after for word, after in itertools.pairwise([*words, ""])
             if word.partition("=")[0] == "--config-name"]  # fmt: skip
    of_keys = any(".actor.megatron." in key for key in settings) if not given else given[0] in ("megatron", True)
    return "megatron" if of_keys or any("megatron" in each for each in names) else "fsdp2"


class Reading:
    """A command that is read: the values of its settings by the names in `commands.yaml`."""

    def __init__(self, name: str, words: Sequence[str], directory: Path) -> None:
        self.dialect = dialect_of(name)
        self.given = Given(self.dialect, tuple(words), directory)
        self.set = {self.dialect.key(key): value for key, value in self.given.settings().items()}
        self.trainer = trainer_of(self.dialect, self.set, words)
        self.rows = self.dialect.rows(self.trainer)

    def value(self, name: str) -> Any:
        """Return the first value of a setting's keys, in the words of specs; None if neither command nor framework
        has one. Keys of a section with `enabled: false` do not count."""
        row = self.rows.get(name)
        if row is None:
            return None
        for values in (self.set, self.dialect.defaults):
            for key in (each for each in map(self.dialect.key, row.keys) if not each.startswith("critic.")):
                if values.get(key) is not None and self.set.get(f"{key.rpartition('.')[0]}.enabled") is not False:
                    return _in_words(row, values[key])
        return None

    def number(self, name: str, least: int = 1) -> int | None:
        """Return a whole number of at least `least`, or None."""
        value = self.value(name)
        return int(value) if type(value) in (int, float) and value >= least else None

    def is_on(self, name: str) -> bool:
        """Return whether any key of a setting is neither off nor 0, or with ! before it, is."""
        row = self.rows.get(name)
        keys = [(self.dialect.key(key), key.startswith("!")) for key in row.keys] if row else []
        given = [bool(self.set[key]) != negated for key, negated in keys if self.set.get(key) is not None]
        return any(given or [bool(self.dialect.defaults.get(key)) != negated for key, negated in keys])

    def baseline(self, knobs: Sequence[Knob]) -> dict[str, Any]:
        """Return the values of knobs."""
        found: dict[str, Any] = {}
        packs = self.packs
        for knob in knobs:
            value = self.value(knob.name)
            if knob.name in SETTINGS:
                continue
            is_idle = knob.name in (("micro_batch_size", "logprob_batch_size") if packs else TOKENS)
            if value is None or is_idle or (knob.kind == "int" and (type(value) is not int or value < 1)):
                continue
            if self.rows[knob.name].per_rank:
                value *= self.number("context_parallel_size") or 1
            found[knob.name] = f"{value:g}" if knob.kind == "share" else value
        tensor, experts, data = (int(found.get(name) or 1) for name in (RTP, "rollout_expert_parallel_size", RDP))
        if self.dialect.nested and tensor % data == 0 and data > 1:
            found[RTP] = tensor // data
        elif experts > tensor * data and not experts % tensor:  # attention of the ranks beyond TP is data-parallel
            found[RDP] = experts // tensor
        return found

    @property
    def generates_itself(self) -> bool:
        """Whether the trainer generates answers, without a rollout's engine."""
        return "uses_vllm" in self.rows and not self.is_on("uses_vllm")

    @property
    def packs(self) -> bool:
        """Whether micro-batches are packed up to a number of tokens."""
        return self.dialect.packs and self.is_on("packing")

    def unread(self) -> dict[str, Any]:
        """Return the settings that are neither read nor known to be harmless."""
        read = {self.dialect.key(key) for row in self.rows.values() for key in row.keys}
        known = re.compile(self.dialect.harmless)
        off: tuple[Any, ...] = (None, False, [], "none")
        other = ".megatron" if self.trainer == "fsdp2" else ".dtensor_cfg."
        given = {key: value for key, value in self.set.items() if value not in off and other not in key}
        given = {key: value for key, value in given.items() if key not in read and not known.fullmatch(key)}
        return {key: value for key, value in given.items() if not known.fullmatch(f"{key}~{value}")}


TOKENS = ("micro_batch_tokens", "logprob_batch_tokens")


def _in_words(row: Row, value: Any) -> Any:
    if not row.words:
        return value
    first = {own: theirs[0] if isinstance(theirs, list) else theirs for own, theirs in row.words.items()}
    return next((own for own, theirs in first.items() if theirs == value), "grpo" if "rloo" in first else None)


def spec_of(
    name: str, start: Start, directory: Path, model: str | None, knobs: Sequence[Knob]
) -> tuple[dict[str, Any], Sequence[ImportNote]]:
    """Return the data of a spec for a command of a framework, and notes. Raises SpecError."""
    notes, read = Notes(), Reading(name, start.words, directory)
    section = model_of(model, [read.value("model")], directory, notes)
    cluster, rollout_devices = _cluster(read, notes)
    for key, value in read.dialect.refused.items():
        if read.set.get(key) == value:
            fix = "describe the training in a spec with engine: megatron"
            notes.report(key, "generates no answers: it is no reinforcement learning", value=value, fix=fix)
    if notes.problems:
        raise join_errors(notes.problems)
    rl = {"engine": name, **_engines(read, notes), **_samples(read, cluster, notes)}
    baseline = read.baseline(knobs)
    ranks = cluster["nodes"] * (read.number("devices_per_node") or 1) // (read.number("context_parallel_size") or 1)
    for size in ("micro_batch_size", "logprob_batch_size"):
        if (whole := read.number(f"whole_{size}")) and size not in baseline and not read.packs:
            baseline[size] = max(whole // max(ranks, 1), 1)
    if rollout_devices:
        baseline[DEVICES] = rollout_devices
    program = read.dialect.asynchronous
    if read.is_on("asynchronous") or (program and re.search(program, " ".join(start.words))):
        rl["staleness"] = baseline[STALENESS] = read.number("lag") or 1
    for key, value in read.unread().items():
        notes.note(key, f"is not in the predictions ({str(value)[:60]})", "rl.command")
    if own := re.search(read.dialect.variants or "$^", " ".join(start.words)):
        notes.note("command", f"{own[0]} is predicted as if it were the framework's PPO trainer", "rl.command")
    rl |= {"command": list(start.words), "directory": str(directory)}
    return {"model": section, "cluster": cluster, "rl": rl, "auto_tuner": {"baseline": baseline}}, notes.notes


def _engines(read: Reading, notes: Notes) -> dict[str, Any]:
    """Return the trainer and the rollout."""
    given = str(read.value("rollout") or read.dialect.rollout).lower()
    rollout = given if given in ROLLOUTS else ROLLOUTS[0]
    uses_own = read.generates_itself
    if rollout != given or uses_own:
        notes.note("rollout", f"{'transformers' if uses_own else given} is predicted as {rollout}", "rl.rollout.engine")
    kind = read.value("distributed") if "distributed" in read.rows else read.dialect.stands_for
    if kind in ("DEEPSPEED", "DeepSpeed", "MULTI_GPU"):
        notes.note("trainer", f"{kind} is predicted as {read.trainer}", "rl.trainer.engine")
    trainer: dict[str, Any] = {"engine": read.trainer}
    if {"offload_params", "offload_states"} & read.rows.keys():
        trainer["offload"] = "all" if read.is_on("offload_params") else "optimizer"
        trainer["offload"] = trainer["offload"] if read.is_on("offload_states") else "none"
    if uses_own:
        trainer["offload"] = "none"
    if settings := {name: value for name in SETTINGS if (value := read.value(name)) not in (None, False)}:
        trainer["settings"] = settings
    if read.is_on("adapter") if "adapter" in read.rows else read.number("rank"):
        trainer["adapter"] = adapter_section("lora", read.number("rank"), read.value("targets"), read.value("base"))
    found: dict[str, Any] = {"trainer": trainer, "rollout": {"engine": rollout}}
    if precision := read.value("precision"):
        found["precision"] = precision
    if precision := read.value("rollout_precision"):
        found["rollout"]["precision"] = precision
    if "sleeps" in read.rows and not read.is_on("sleeps"):
        found["rollout"]["sleeps"] = False
    return found


def _samples(read: Reading, cluster: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    """Return the samples of a step, their lengths, and what is computed with them."""
    samples = read.number("samples") or 1
    if ranks := read.number("rank_samples"):
        per_pass = ranks * (read.number("processes") or 1)
        mini = per_pass * (read.number("accumulated") or 1)
        total = read.number("generation_samples") or per_pass * (read.number("steps_per_generation") or 0) or mini
        prompts = max(total // samples, 1)
    else:
        mini = (read.number("mini_prompts") or 0) * samples or read.number("mini_samples") or 0
        prompts = read.number("prompts") or 0
        if not prompts:
            prompts = max(mini // samples, 1)
            notes.note(
                "rl.prompts", f"{prompts}: those of an optimizer step, as the command has no other", "rl.prompts"
            )
    found: dict[str, Any] = {"algorithm": read.value("algorithm") or "grpo", "prompts": prompts, "samples": samples}
    row = read.rows.get("algorithm")
    given = (
        next((read.set[key] for key in map(read.dialect.key, row.keys) if key in read.set), "grpo") if row else "grpo"
    )
    if row and given not in ("grpo", *row.words.values()):
        notes.note("algorithm", f"{given} is predicted as {found['algorithm']}", "rl.algorithm")
    if found["algorithm"] == "ppo" and any(key.startswith("critic.") for key in read.set):
        notes.note("critic", "is predicted as a second policy, with its layout and micro-batches", "rl.algorithm")
    total = prompts * samples
    mini = mini or total // (read.number("mini_steps") or 1)
    if mini and mini < total and total % mini == 0:
        found["mini_batch"] = mini
    elif mini and mini != total:
        notes.note("rl.mini_batch", f"{mini} does not divide the {total} samples of a step: it is all of them", "rl")
    if (epochs := read.number("epochs") or 1) > 1:
        found["epochs"] = epochs
    for part, longest in zip(("prompt_len", "answer_len"), _longest(read), strict=True):
        found[part] = {"mean": max(longest * USUAL, 1), "longest": longest}
        text = f"{found[part]['mean']:g} is half of the longest: write the mean of your log"
        if part == "prompt_len" and not read.number("prompt_longest"):
            text += ", and the longest, which the command does not limit"
        notes.note(f"rl.{part}.mean", text, f"rl.{part}.mean")
    is_single = "rank_samples" in read.rows and "mini_batch" not in found and epochs == 1
    if is_single or read.is_on("on_policy"):
        found["old_logprobs"] = False
    name = str(read.value("reward_model") or "")
    if name and ("uses_reward_model" not in read.rows or read.is_on("uses_reward_model")):
        if known := tuned_from(name):
            found["reward"] = {"model": known}
        else:
            notes.note("rl.reward", f"{name} is not known: its time is not in the predictions", "rl.reward.model")
    return found | {"reference": read.is_on("reference"), "packing": read.packs}


def _longest(read: Reading) -> tuple[int, int]:
    """Return the lengths at which prompts and answers are cut."""
    whole = read.number("longest") or 2 * SHORT_PROMPT
    answer = read.number("answer_longest")
    prompt = read.number("prompt_longest") or (min(SHORT_PROMPT, whole // 4) if not answer else SHORT_PROMPT)
    return prompt, answer or max(whole - prompt, 1)


def _cluster(read: Reading, notes: Notes) -> tuple[dict[str, Any], int]:
    """Return the section `cluster`, and the number of devices that only generate answers, or 0."""
    nodes = read.number("nodes") or 1
    per_node = read.number("devices_per_node") or read.number("processes")
    if per_node is None:
        notes.note("cluster.devices_per_node", "is not in the command; auto is the number on this machine", "cluster")
        return {"chip": "auto", "nodes": nodes, "devices_per_node": "auto"}, 0
    if "processes" in read.rows and not {*map(read.dialect.key, read.rows["processes"].keys)} & read.set.keys():
        notes.note("cluster", f"{per_node} process, as the command has no number: add --num_processes N", "cluster")
    more = 0
    if "colocated" not in read.rows or not read.is_on("colocated"):
        more = read.number("more_devices") or 0
        more = more or (read.number("more_instances") or 0) * (read.number("rollout_tensor_parallel_size") or 1)
        more = more or (read.number("more_nodes") or 0) * (read.number("more_devices_per_node") or per_node)
    devices, apart = nodes * per_node + more, more
    if "rollout_devices_per_node" in read.rows and not read.is_on("colocated"):
        apart = (read.number("rollout_nodes") or 1) * (read.number("rollout_devices_per_node") or per_node)
    if more and nodes == 1 and devices <= 8:
        per_node = devices
    if devices % per_node:
        notes.note("cluster", f"{devices} devices in one node: the roles do not share nodes evenly", "cluster")
        per_node = devices
    return {"chip": "auto", "nodes": devices // per_node, "devices_per_node": per_node}, apart
