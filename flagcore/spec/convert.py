"""Converts a validated document to `flagcore.domain.spec.Spec`, checks rules on several keys, and reads host files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from flagcore.domain.knob import Knob
from flagcore.domain.objective import CHEAPEST, COST
from flagcore.domain.serving import ServeSpec
from flagcore.domain.spec import AUTO, ClusterSpec, Control, Spec, TrainSpec
from flagcore.errors import SpecError, join_errors
from flagcore.i18n import N_, _
from flagcore.spec.data_file import read_text, spec_as_data
from flagcore.spec.knobs import Engines, candidate_of, knobs_of, serving_values, settings_of, space_of
from flagcore.spec.models import model_from
from flagcore.spec.plain_data import KeyPath, plain, spec_error
from flagcore.spec.schema import (
    MAX_DEVICES,
    MAX_MEMORY,
    MIN_MEMORY,
    BudgetSection,
    ClusterSection,
    ControlSection,
    Document,
    GroupSection,
    TrainSection,
    document_of,
)
from flagcore.spec.serve_schema import ServeDocument, serve_document_of
from flagcore.spec.serving import engines_of, knobs_of_engine, serve_of
from flagcore.spec.validate import convert_all, overlap, parse_bytes, partly_checked

Converters = Mapping[str, tuple[Sequence[KeyPath], Callable[[], object]]]
"""For each field of a spec the keys that must be valid, and the function that returns its value."""

ReadResult = tuple[Document | ServeDocument, Converters, list[SpecError], list[KeyPath]]
"""A document, converters of some fields, its problems, and its invalid keys."""

SPACE, BASELINE, CONTROL = (("auto_tuner", key) for key in ("space", "baseline", "control"))
TRIAL_NODES = (*CONTROL, "trial_nodes")


def read_spec(path: Path, engines: Engines) -> Spec:
    """Read a spec file in YAML, or in JSON if its suffix is `.json`. Raises SpecError.

    Paths in the file are relative to its folder.
    """
    return parse_spec(spec_as_data(path), file=str(path), base=path.parent, engines=engines)


def parse_spec(data: Any, *, file: str, base: Path, engines: Engines, plugin_knobs: Sequence[Knob] = ()) -> Spec:
    """Convert plain data to a spec. Raises SpecError.

    `file` is the name of the file in errors, `base` the folder of relative paths. Space, baseline and settings are
    validated against the knobs of the engine that the spec names. The values of `plugin_knobs` are validated later,
    when the chip is known.
    """
    data = plain(data, file=file)
    if not isinstance(data, dict):
        raise spec_error((), _("must be a mapping with the keys model, cluster and train"), value=data, file=file)
    read = _read_serving if "serve" in data else _read_training
    document, converters, problems, invalid = read(data, file, base, engines, plugin_knobs)
    fewer = getattr(document.auto_tuner.control, "trial_nodes", None) is not None
    all_converters: Converters = {
        "model": ((("model",),), lambda: model_from(_model_source(document, file), base=base, file=file)),
        "cluster": ((("cluster",), TRIAL_NODES), lambda: _cluster(document.cluster, file, base, fewer)),
        **converters,
        "envs": ((("envs",),), lambda: _environment(document.envs, file)),
    }
    valid = {
        name: convert
        for name, (required, convert) in all_converters.items()
        if not any(overlap(key, path) for key in required for path in invalid)
    }
    fields = convert_all(valid, problems)
    tuner = document.auto_tuner
    objective = _objective(document, fields["cluster"], file)
    spec = Spec(**fields, objective=objective, strategy=tuner.strategy, launcher=tuner.launcher)
    for nodes in spec.control.trial_nodes:
        if problem := _trial_nodes_problem(spec, nodes):
            fix = _("give a divisor of cluster.nodes, such as {number}", number=_largest_share(spec.cluster.nodes))
            raise spec_error(TRIAL_NODES, problem, value=nodes, fix=fix, file=file)
    return spec


def _trial_nodes_problem(spec: Spec, nodes: int) -> str:
    """Return why trials cannot run on some of the nodes, empty if they can."""
    total_nodes, hosts = spec.cluster.nodes, len(spec.cluster.hosts)
    if spec.cluster.groups:
        return _("needs equal nodes, but there are cluster.groups")
    if total_nodes % nodes:
        return _("must divide cluster.nodes = {nodes}", nodes=total_nodes)
    if hosts and nodes > hosts - spec.cluster.spares:
        return _("is more than the hosts of cluster.hostfile")
    batch = spec.train.global_batch_size
    if batch * nodes % total_nodes:
        return _(
            "is {share} of the nodes, and global_batch_size = {batch} cannot be divided so",
            share=f"1/{total_nodes // nodes}",
            batch=batch,
        )
    return ""


def _largest_share(nodes: int) -> int:
    """Return the largest divisor of a number below it."""
    return next((nodes // each for each in range(2, nodes + 1) if nodes % each == 0), 1)


def _model_source(document: Document | ServeDocument, file: str) -> object:
    """Return the model of a spec, that of the weights if a server has no other. Raises SpecError without any."""
    weights = document.serve.weights if isinstance(document, ServeDocument) else None
    if document.model is None and weights is None:
        fix = _("give a path such as ./Qwen3-8B or a mapping")
        raise spec_error("model", _("is missing"), fix=fix, file=file)
    return weights if document.model is None else document.model


def _read_training(
    data: dict[str, Any], file: str, base: Path, engines: Engines, plugin_knobs: Sequence[Knob]
) -> ReadResult:
    name = data["train"].get("engine") if isinstance(data.get("train"), dict) else None
    knobs: tuple[Knob, ...] = ()
    document_type, engine_problems = Document, list[SpecError]()
    if isinstance(name, str):
        try:
            knobs = (*knobs_of(name, engines, "train.engine", file), *plugin_knobs)
            document_type = document_of(name, knobs)
        except SpecError as error:
            engine_problems.append(error)
    document, problems, invalid = partly_checked(document_type, data, file=file)
    tuner = document.auto_tuner
    limits = [(*CONTROL, key) for key in ("train_iters", "warmup_iters", "trial_nodes")]
    converters: Converters = {
        "work": ((("train",),), lambda: train_of(document.train, knobs, base)),
        "space": ((SPACE,), lambda: space_of(tuner.space, knobs)),
        "baseline": (
            (BASELINE,),
            lambda: None if tuner.baseline is None else candidate_of(tuner.baseline, knobs, settings=True),
        ),
        "control": (limits, lambda: _control(tuner.control, file)),
    }
    if document_type is Document:
        invalid += [("train", "engine"), SPACE, BASELINE]
    return document, converters, engine_problems + problems, invalid


def _read_serving(
    data: dict[str, Any], file: str, base: Path, engines: Engines, plugin_knobs: Sequence[Knob]
) -> ReadResult:
    if "train" in data:
        raise spec_error("serve", _("cannot be combined with train"), fix=_("remove one of the two"), file=file)
    document, knobs, problems, invalid = _serve_document(data, file, engines, plugin_knobs)
    names = engines_of(data)
    if len(names) > 1:
        problem = _("lists several engines; this command accepts one")
        fix = _("name one of them; `flag tune` accepts several")
        problems.append(spec_error("serve.engine", problem, value=list(names), fix=fix, file=file))
        invalid.append(("serve", "engine"))
    tuner, engine = document.auto_tuner, next(iter(names), "")

    def values(at: KeyPath) -> dict[str, Any]:
        return serving_values(knobs_of_engine(data["auto_tuner"][at[-1]], engine), knobs[engine], at, file)

    def space() -> dict[str, Any]:
        section = values(SPACE) if SPACE[-1] in data.get("auto_tuner", {}) else {}
        return {name: each if isinstance(each, tuple) or each == AUTO else (each,) for name, each in section.items()}

    def work() -> ServeSpec:
        return serve_of(
            document.serve,
            engine,
            base,
            cards=tuner.cards,
            model=document.model,
            default_space=not (data.get("auto_tuner") or {}).get("space"),
            file=file,
        )

    converters: Converters = {
        "work": ((("serve",), ("model",), ("auto_tuner", "cards")), work),
        "space": ((("serve", "engine"), SPACE), space),
        "baseline": ((("serve", "engine"), BASELINE), lambda: None if tuner.baseline is None else values(BASELINE)),
        "control": ((CONTROL,), lambda: budgets(tuner.control, file)),
    }
    return document, converters, problems, invalid


def check_engines(data: Mapping[str, Any], *, file: str, engines: Engines) -> None:
    """Check a spec with several serving engines. Raises SpecError with all invalid keys, if the engines are known."""
    _document, knobs, problems, _invalid = _serve_document(plain(data, file=file), file, engines, ())
    if problems and len(knobs) == len(engines_of(data)):
        raise join_errors(problems)


def _serve_document(
    data: dict[str, Any], file: str, engines: Engines, plugin_knobs: Sequence[Knob]
) -> tuple[ServeDocument, dict[str, tuple[Knob, ...]], list[SpecError], list[KeyPath]]:
    """Return a document, the knobs of each of its engines, its problems, and its invalid keys."""
    knobs: dict[str, tuple[Knob, ...]] = {}
    engine_problems: list[SpecError] = []
    names = engines_of(data)
    for name in names:
        try:
            knobs[name] = (*plugin_knobs, *knobs_of(name, engines, "serve.engine", file, "serve"))
        except SpecError as error:
            engine_problems.append(error)
    document_type = serve_document_of(tuple(knobs.items())) if names and not engine_problems else ServeDocument
    document, problems, invalid = partly_checked(document_type, data, file=file)
    if engine_problems:
        invalid.append(("serve", "engine"))
    return document, knobs, engine_problems + problems, invalid


def train_of(train: TrainSection, knobs: Sequence[Knob], base: Path) -> TrainSpec:
    """Return the training job of a section. The default directory of the user's command is `base`."""
    fields = train.model_dump(exclude={"command", "directory", "settings"})
    fields["settings"] = settings_of(train.settings, knobs)
    if not train.command:
        return TrainSpec(**fields)
    directory = (base / (train.directory or ".")).resolve()
    return TrainSpec(**fields, command=tuple(train.command), directory=str(directory))


def _cluster(cluster: ClusterSection | Literal["auto"], file: str, base: Path, fewer: bool) -> ClusterSpec:
    """Return the cluster of a section. `fewer`: trials run on fewer nodes, so that it may have more than hosts."""
    if not isinstance(cluster, ClusterSection):
        return ClusterSpec()
    if cluster.groups is not None:
        return replace(_groups(cluster, cluster.groups, file), grams_co2_per_kwh=cluster.grams_co2_per_kwh)
    if cluster.hostfile is None:
        return replace(_nodes(cluster, ("cluster",), file), spares=cluster.spares, min_nodes=cluster.min_nodes)
    hosts, slots = read_hosts(base / cluster.hostfile, file=file)
    usable = without_spares(hosts, cluster.spares, file)
    nodes = min(cluster.nodes, usable) if "nodes" in cluster.model_fields_set else usable
    nodes = max(nodes, cluster.nodes) if fewer else nodes
    numbers = {"nodes": nodes} | ({"devices_per_node": slots} if slots else {})
    for key, number in numbers.items():
        value = getattr(cluster, key)
        if key in cluster.model_fields_set and value not in (number, AUTO):
            problem = _("must be {number}, as in {file}", number=number, file=cluster.hostfile)
            raise spec_error(("cluster", key), problem, value=value, fix=_("leave it out"), file=file)
    whole = _nodes(cluster.model_copy(update=numbers), ("cluster",), file)
    return replace(whole, hosts=hosts, spares=cluster.spares, min_nodes=cluster.min_nodes)


def without_spares(hosts: Sequence[str], spares: int, file: str = "") -> int:
    """Return the number of hosts without spares. Raises SpecError if there are too many spares."""
    if spares >= len(hosts):
        problem, fix = _("must be below the number of hosts"), _("use at most {number}", number=max(0, len(hosts) - 1))
        raise spec_error("cluster.spares", problem, value=spares, fix=fix, file=file)
    return len(hosts) - spares


def _groups(cluster: ClusterSection, groups: Sequence[GroupSection], file: str) -> ClusterSpec:
    others = [
        key for key in ClusterSection.model_fields if key in cluster.model_fields_set - {"groups", "grams_co2_per_kwh"}
    ]
    if others:
        problem, fix = "cannot be combined with cluster.groups", "set it for each group, or leave it out"
        raise spec_error(("cluster", others[0]), problem, value=getattr(cluster, others[0]), fix=fix, file=file)
    for place, group in enumerate(groups):
        if group.chip == AUTO:
            problem = "must name a chip: devices of other machines cannot be detected"
            raise spec_error(("cluster", "groups", place, "chip"), problem, value=AUTO, fix="name the chip", file=file)
    specs = tuple(_nodes(group, ("cluster", "groups", place), file) for place, group in enumerate(groups))
    devices = sum(spec.nodes * (spec.devices_per_node or 1) for spec in specs)
    if devices > MAX_DEVICES:
        raise spec_error("cluster.groups", f"must have at most {MAX_DEVICES} devices in all", value=devices, file=file)
    return specs[0] if len(specs) == 1 else ClusterSpec(groups=specs)


def _objective(document: Document | ServeDocument, cluster: ClusterSpec, file: str) -> str:
    """Return the figure that the search optimizes. Raises SpecError for `cost` without prices."""
    name = str(document.auto_tuner.objective)
    if name != COST:
        return name
    if any(group.price_per_device_hour is None for group in cluster.groups or (cluster,)):
        key = "cluster.groups[].price_per_device_hour" if cluster.groups else "cluster.price_per_device_hour"
        fix = _("give {key}, or another objective", key=key)
        raise spec_error("auto_tuner.objective", _("needs the price of all devices"), value=name, fix=fix, file=file)
    return CHEAPEST["serve" if isinstance(document, ServeDocument) else "train"]


def _nodes(group: GroupSection, at: KeyPath, file: str) -> ClusterSpec:
    devices = group.devices_per_node if isinstance(group.devices_per_node, int) else None
    check_devices(group.nodes, devices or 1, at, file)
    return ClusterSpec(
        chip=group.chip,
        nodes=group.nodes,
        devices_per_node=devices,
        memory_bytes_per_device=_bytes(group.memory_per_device, (*at, "memory_per_device"), file),
        nic_bytes_per_second=group.nic_bytes_per_second,
        nic_latency_seconds=group.nic_latency_seconds,
        price_per_device_hour=group.price_per_device_hour,
        grams_co2_per_kwh=getattr(group, "grams_co2_per_kwh", None),
    )


def check_devices(nodes: int, per_node: int, at: KeyPath, file: str = "") -> None:
    """Raise SpecError if `nodes` x `per_node` exceeds MAX_DEVICES."""
    if nodes * per_node > MAX_DEVICES:
        text = N_("times devices_per_node = {count} must be at most {most} devices")
        problem = _(text, count=per_node, most=MAX_DEVICES)
        raise spec_error(
            (*at, "nodes"), problem, value=nodes, fix=_("use {values}", values=MAX_DEVICES // per_node), file=file
        )


def _bytes(amount: int | str | None, key: KeyPath, file: str) -> int | None:
    if not isinstance(amount, str):
        return amount
    size = parse_bytes(amount)
    if not MIN_MEMORY <= size <= MAX_MEMORY:
        problem = "must be from 1MiB to 1024TiB"
        raise spec_error(key, problem, value=amount, fix="write e.g. 4GiB", file=file)
    return size


def _control(control: ControlSection, file: str) -> Control:
    if control.warmup_iters >= control.train_iters:
        key, text = "auto_tuner.control.warmup_iters", N_("must be below {name} = {value}")
        problem = _(text, name="train_iters", value=control.train_iters)
        fix = _("use {number} or fewer", number=control.train_iters - 1)
        raise spec_error(key, problem, value=control.warmup_iters, fix=fix, file=file)
    trial_nodes = control.trial_nodes
    sizes = tuple(trial_nodes) if isinstance(trial_nodes, list) else () if trial_nodes is None else (trial_nodes,)
    if list(sizes) != sorted(set(sizes)):
        problem, fix = _("must ascend"), _("sort it")
        raise spec_error(TRIAL_NODES, problem, value=trial_nodes, fix=fix, file=file)
    return replace(budgets(control, file), trial_nodes=sizes)


def budgets(control: BudgetSection, file: str) -> Control:
    """Convert a section to budgets. Raises SpecError."""
    disk = _bytes(control.disk_limit, (*CONTROL, "disk_limit"), file)
    return Control(**{**control.model_dump(), "disk_limit": disk})


def _environment(envs: dict[str, str | int], file: str) -> dict[str, str]:
    problem, fix = _("is not the name of an environment variable"), _("use letters, digits and underscores")
    if invalid := [name for name in envs if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name)]:
        raise join_errors([spec_error(("envs", name), problem, fix=fix, file=file) for name in invalid])
    return {name: str(value) for name, value in envs.items()}


_HOST = re.compile(r"[A-Za-z0-9_\[][A-Za-z0-9_.:\[\]\-]{0,252}")

UNEQUAL = "differs from the first host in slots or type, but all nodes must be equal"


def read_hosts(path: Path, *, file: str) -> tuple[tuple[str, ...], int | None]:
    """Return the hosts and the number of devices of each (None where no line has `slots`).

    All lines or no line must have `slots` and the label `type`, with the same values, because the nodes of a cluster
    are equal. `file` is the spec that names it. Raises SpecError with the line's number.
    """
    hosts: dict[str, dict[str, str]] = {}
    for number, line in enumerate(read_text(path, file=file, key="cluster.hostfile").splitlines(), start=1):
        host, *pairs = line.partition("#")[0].split() or [""]
        if not host:
            continue
        options = dict(pair.partition("=")[::2] for pair in pairs)
        problem = _problem(host, pairs, options, hosts)
        if problem:
            fix = "write lines such as `node-1 slots=8`"
            raise spec_error(f"line {number}", problem, value=line.strip(), fix=fix, file=str(path))
        hosts[host] = options
    if not hosts:
        raise spec_error("cluster.hostfile", "names no host", fix="write one `host slots=8` per line", file=str(path))
    slots = next(iter(hosts.values())).get("slots")
    return tuple(hosts), int(slots) if slots else None


def _problem(host: str, pairs: list[str], options: dict[str, str], hosts: dict[str, dict[str, str]]) -> str:
    if not _HOST.fullmatch(host):
        return "does not start with the name of a host"
    if host in hosts:
        return "repeats a host"
    if len(options) < len(pairs) or not set(options) <= {"slots", "type"}:
        return "has other text than slots=NUMBER and type=LABEL after the host"
    slots = options.get("slots", "1")
    if not re.fullmatch("[0-9]{1,7}", slots) or not 1 <= int(slots) <= MAX_DEVICES:
        return f"must give slots from 1 to {MAX_DEVICES}"
    if hosts and options != next(iter(hosts.values())):
        return UNEQUAL
    return ""
