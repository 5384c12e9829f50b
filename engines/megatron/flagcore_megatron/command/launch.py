"""Starts a candidate with a user's own command: as a trial without side effects, or as the real job.

Also with the command of a fine-tuning framework that trains with Megatron-LM, such as ms-swift.

For a spec without a command, it builds the launch of Megatron-LM that `best.sh` runs.
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from flagcore_importers.shell import SHELLS
from flagcore_models.layers import attention_counts, indexer_of, latent_layers, other_mixers, without_repeats
from flagcore_models.mixers.attention import Attention
from flagcore_training import real_job
from flagcore_training.commands import STARTERS, Option, UserCommand, environment, expand_command
from flagcore_training.frameworks import RECOMPUTE, Reading, reading
from flagcore_training.frameworks import SIZES as PARALLEL_SIZES

from flagcore.contracts import Platform
from flagcore.domain.knob import in_versions
from flagcore.domain.launch import Launch
from flagcore.domain.model import Model
from flagcore.domain.secrets import is_secret, redact_arguments, redact_data
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import SLOTS, Spec, Task
from flagcore.errors import LaunchError
from flagcore_megatron.command.beside_sizes import REFERENCE, arguments_beside_sizes, flag_of
from flagcore_megatron.command.changes import (
    RENDEZVOUS_OPTIONS,
    Change,
    ChangedCommand,
    limit_to_trial,
    replaced_arguments,
    set_arguments,
    set_launch_options,
)
from flagcore_megatron.mixed import hetero
from flagcore_megatron.mixed.hetero import NOT_PASSED, PROGRAM, Mixed
from flagcore_megatron.program.arguments import Argument
from flagcore_megatron.program.user_command import argument_table, readable_command, release_of, user_command
from flagcore_megatron.space.flags import flags
from flagcore_megatron.space.knobs import BY_NAME, SPACE_KNOBS
from flagcore_megatron.space.meshes import PP, SIZES, SP
from flagcore_megatron.space.options import is_hybrid
from flagcore_megatron.space.rules import DIST_OPT
from flagcore_megatron.space.split import LAYERS_PER_VIRTUAL
from flagcore_megatron.space.stages import LAYOUT, VIRTUAL_STAGES

ARGUMENTS_FILE = "arguments.json"
"""A file in a trial's folder that contains its command and the differences from the user's command."""
OF_HOST = re.compile("((PET_)?(NODE_RANK|MASTER_ADDR|MASTER_PORT|NNODES)|SLURM_.*|.*_(IFNAME|HCA))$")
"""Variables that have other values on each host, unless the spec sets them."""


def own_launch(
    platform: Platform, values: Mapping[str, KnobValue], folder: str, mixed: Mixed | None = None, *, for_real: bool
) -> Launch:
    """Return the launch of the user's own command with a candidate's knob `values`.

    `mixed`: the candidate as a mixed job.

    With `for_real`, the launch is the real job instead of a trial. If the command does not start Megatron-LM, the
    candidate's flags replace the word `{flags}` or are appended. Raises SpecError for a script that cannot be read,
    LaunchError if `arguments.json` cannot be written.
    """
    spec, train, knob_variables = platform.task.spec, platform.task.spec.train, environment(values)
    variables = {**platform.environment, **knob_variables}
    command = user_command(spec, variables)
    if command is None:
        assert train.command is not None
        flag_words = flags(values, spec, None if for_real else spec.control.train_iters)
        argv = expand_command(train.command, values, flag_words, folder)
        return Launch(argv=argv, folder=folder, environment=knob_variables, directory=train.directory)
    if not for_real:
        changed = trial_command(platform.task, command, values, folder, mixed)
        launch = _launch(changed.command, values, folder, {**variables, **spec.envs})
        launch = replace(launch, hosts=_hosts_of(platform.task, mixed))
        _write_record(launch, changed.changes, folder)
        return launch
    words, dests = _arguments(spec, command, values, mixed)
    table = argument_table(spec, command)
    replaced = replaced_arguments(command, table, dests)
    starts_all = spec.on_each_host and bool(STARTERS.search(" ".join(command.prefix)))
    can_rerun = command.skipped is not None and not starts_all  # otherwise each host would start all hosts
    if can_rerun and (script := rerun(spec, command, replaced, words, variables)):
        argv = expand_command(script, values, (), folder)
        return Launch(argv=argv, folder=folder, environment=knob_variables, directory=train.directory, own_script=True)
    real = set_arguments(command, table, dests, words).command
    if spec.cluster.nodes == 1:
        real = replace(real, options=tuple(each for each in real.options if each.name not in _empty(real)))
    if spec.on_each_host and spec.cluster.nodes > 1:
        real = _of_each_host(real, spec, platform.task.cluster.groups[0].devices_per_node)
    return _launch(real, values, folder, {**variables, **spec.envs})


HOST_OPTIONS = ("nnodes", "node-rank", "master-addr", "master-port")


def _empty(command: UserCommand) -> list[str]:
    """Return the options of a host that lack a value: variables have it, which nothing sets for a job on one host."""
    return [each.name for each in command.options if each.name in HOST_OPTIONS and not each.value]


def _of_each_host(command: UserCommand, spec: Spec, devices: int) -> UserCommand:
    """Return a command for all hosts as that of each host, with the rank and the addresses of the host.

    torchrun starts the ranks of a host that srun or mpirun would start, one for each of its `devices`.
    """
    own = {name: value for name, value in command.environment.items() if name in spec.envs or not OF_HOST.match(name)}
    prefix, command = command.prefix, replace(command, environment=own)
    if STARTERS.search(" ".join(prefix)):
        prefix = ()
        if not command.launcher:
            program = command.program[-2 if "-m" in command.program[:-1] else -1 :]
            ranks = Option(name="nproc-per-node", words=(f"--nproc-per-node={devices}",))
            command = replace(command, launcher=("torchrun",), options=(ranks,), program=program)
    words = [Option(name=name, words=(f"--{name}={{{name.replace('-', '_')}}}",)) for name in HOST_OPTIONS]
    kept = [option for option in command.options if option.name not in (*HOST_OPTIONS, *RENDEZVOUS_OPTIONS)]
    return replace(command, prefix=prefix, options=(*words, *kept) if command.launcher else command.options)


def trial_command(
    task: Task, command: UserCommand, values: Mapping[str, KnobValue], folder: str, mixed: Mixed | None = None
) -> ChangedCommand:
    """Return the user's command, changed to a trial in `folder` with the knob `values` and without side effects."""
    table, (words, dests) = argument_table(task.spec, command), _arguments(task.spec, command, values, mixed)
    with_knobs = set_arguments(command, table, dests, words)
    groups, run = task.cluster.groups, str(Path(folder).parent.parent)
    limited = limit_to_trial(with_knobs.command, table, task.spec.control.train_iters, run)
    nodes = sum(group.nodes for group in groups)
    devices = SLOTS if len(groups) > 1 else groups[0].devices_per_node
    launched = set_launch_options(limited.command, devices, nodes, folder, on_each_host=task.spec.on_each_host)
    return ChangedCommand(command=launched.command, changes=(*with_knobs.changes, *limited.changes, *launched.changes))


def _hosts_of(task: Task, mixed: Mixed | None) -> tuple[str, ...]:
    """Return the hosts of the node groups that a mixed job uses, or no hosts if it uses all groups."""
    groups = task.cluster.groups
    if mixed is None or len(mixed.groups) == len(groups):
        return ()
    of_groups = (number for number, group in enumerate(groups) for _ in range(group.nodes))
    hosts = zip(task.spec.cluster.hosts, of_groups, strict=False)
    return tuple(host for host, group in hosts if group in mixed.groups)


def _arguments(
    spec: Spec, command: UserCommand, values: Mapping[str, KnobValue], mixed: Mixed | None = None
) -> tuple[list[str], set[str]]:
    """Return the arguments of a candidate, and the argparse destinations of the user's arguments to replace."""
    train = replace(spec.train, engine_version=release_of(spec, command))
    knobs = [*SPACE_KNOBS, *(BY_NAME[name] for name in train.settings)]
    own: Sequence[str] = ()
    if mixed is not None:
        settings = {name: value for name, value in train.settings.items() if name not in NOT_PASSED}
        train, values, own = replace(train, settings=settings), _values_of_job(values, mixed), hetero.REPLACED
        knobs = [knob for knob in knobs if knob.name not in NOT_PASSED]
    table, words = argument_table(spec, command), flags(values, replace(spec, work=train), None)
    words += mixed.words if mixed is not None else ()
    if values.get("data_parallel_size") == 1 and not values.get(DIST_OPT):  # the user's flag has no effect, and stays
        knobs = [knob for knob in knobs if knob.name != DIST_OPT]
    names = (f"--{name}" for knob in knobs for flag in knob.flags for name in (flag.name, flag.off) if name)
    specs = [*map(table.find, (*names, *own)), *(argument.spec for argument in table.parse(words)[0])]
    return words, {spec.dest for spec in specs if spec}


def _values_of_job(values: Mapping[str, KnobValue], mixed: Mixed) -> dict[str, KnobValue]:
    """Return the knob values of a mixed job that are passed as arguments. FlagScale has others for each mesh."""
    return {**{name: value for name, value in values.items() if name not in NOT_PASSED}, SIZES["pp"]: mixed.stages}


def _launch(command: UserCommand, values: Mapping[str, KnobValue], folder: str, variables: Mapping[str, str]) -> Launch:
    """Return the launch of a command. Variables that the user's script sets take precedence over `variables`."""
    overrides = {
        name: value
        for name, value in sorted(command.environment.items())
        if name in variables and not is_secret(name, value)
    }
    prefix = ("env", *(f"{name}={value}" for name, value in overrides.items())) if overrides else ()
    argv = expand_command((*prefix, *command.words), values, (), folder)
    other_variables = {name: value for name, value in command.environment.items() if name not in overrides}
    launch_variables = {**environment(values), **other_variables}
    skipped = command.skipped
    return Launch(
        argv=argv, folder=folder, environment=launch_variables, directory=command.directory, leaves_out=skipped
    )


def _write_record(launch: Launch, changes: Sequence[Change], folder: str) -> None:
    record = {
        "argv": list(redact_arguments(launch.argv)),
        "changes": redact_data([asdict(change) for change in changes]),
        "skipped": list(launch.leaves_out or ()),
    }
    file = Path(folder, ARGUMENTS_FILE)
    try:
        text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        file.write_text(text, encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise LaunchError(f"{file} cannot be written: {error.strerror or error}") from None


WRAPPER_PROGRAMS = ("nohup", "setsid", "env", "srun", "mpirun")
"""Programs through which a script may start the training program."""
SHELL_TEMPLATE = files(__package__).joinpath("shadow.bash").read_text("utf-8").rstrip()
"""Shell functions that shadow the programs in a script which may start the training program.

They replace the program's arguments, and are exported to all bash processes of the script."""


def rerun(
    spec: Spec, command: UserCommand, replaced: Iterable[Argument], values: Sequence[str], variables: Mapping[str, str]
) -> tuple[str, ...] | None:
    """Return a command that runs the script of `spec` with `values` in place of the arguments `replaced`.

    `command` is what the script starts. Returns None if the script, when it is traced again, starts something else.
    """
    words = spec.train.command or ()
    script = words[1:] if Path(words[0]).name in SHELLS else words
    is_one = spec.cluster.nodes == 1 or not spec.on_each_host
    options = _empty(command) if is_one else (*HOST_OPTIONS, *RENDEZVOUS_OPTIONS)  # torchrun then has PET_ variables
    argv = ("bash", "-c", _shell_functions(command, options, replaced, values), "best", "bash", *script)
    trace = readable_command(replace(spec, work=replace(spec.train, command=argv)), variables)
    if trace is None or trace.program != command.program or trace.arguments[-len(values) :] != tuple(values):
        return None
    count = len(command.arguments) - sum(map(_word_count, replaced)) + len(values)
    return argv if len(trace.arguments) == count else None


def _shell_functions(
    command: UserCommand, options: Iterable[str], replaced: Iterable[Argument], values: Sequence[str]
) -> str:
    """Return SHELL_TEMPLATE for a command without some options of its launcher, which may lack their values."""
    names = dict.fromkeys((command.words[0], *WRAPPER_PROGRAMS))
    cases: dict[int, dict[str, None]] = {}
    for flag in (f"--{spelling}" for name in options for spelling in dict.fromkeys((name, name.replace("-", "_")))):
        cases.setdefault(1 if flag == "--standalone" else 2, {})[flag] = None
        cases.setdefault(1, {})[f"{flag}=*"] = None
    for argument in replaced:
        cases.setdefault(_word_count(argument), {})[argument.flag] = None
        if argument.spec.values != 0:
            cases.setdefault(1, {})[f"{argument.flag}=*"] = None
    return SHELL_TEMPLATE.format(
        program=shlex.quote(Path(command.program[-1]).name),
        cases="\n        ".join(f"{' | '.join(flags)}) skip={count} ;;" for count, flags in cases.items()) or "-) ;;",
        values=" ".join(word if word == shlex.quote(word) else f'"{word}"' for word in values),
        functions="\n".join(f'{name}() {{ flagcore_start {name} "$@"; }}' for name in names),
        names=" ".join(names),
    )


def _word_count(argument: Argument) -> int:
    return argument.end - argument.position


def reference_launch(task: Task, values: Mapping[str, KnobValue], folder: str, mixed: Mixed | None = None) -> Launch:
    """Return the launch of `pretrain_gpt.py` with the arguments of the model, the precision and the candidate.

    For a mixed job, FlagScale's program is started instead, for a hybrid model that for hybrids. Raises LaunchError for
    a model with layers that Megatron-LM does not have.
    """
    spec, group = task.spec, task.cluster.groups[0]
    train, nodes = spec.train, sum(each.nodes for each in task.cluster.groups)
    addresses = ["--master-addr={master_addr}", "--master-port={master_port}"]
    rendezvous = ["--standalone"] if nodes == 1 else [f"--nnodes={nodes}", "--node-rank={node_rank}", *addresses]
    program = "pretrain_gpt.py" if mixed is None else PROGRAM
    modules: list[str] = []
    if is_hybrid(spec.model):
        rows = (each for each in REFERENCE["hybrids"] if in_versions(each["versions"], train.engine_version))
        program, modules = next((each["program"], ["--spec", *each["spec"].split()]) for each in rows)
    argv = ["torchrun", *rendezvous, f"--nproc-per-node={group.devices_per_node}", program]
    own, lacks = arguments_beside_sizes(spec.model, train.engine_version)
    argv += [*model_arguments(spec.model), *own, *modules]
    argv += ["--max-position-embeddings", str(train.seq_length), *REFERENCE["precisions"][train.precision]]
    argv += ["--transformer-impl", train.implementation] if train.implementation else []
    argv += flags(values if mixed is None else _values_of_job(values, mixed), spec, None)
    argv += mixed.words if mixed is not None else ()
    missing = "; ".join(filter(None, (REFERENCE["missing"], lacks)))
    return Launch(argv=tuple(argv), folder=folder, missing=missing, sample=tuple(REFERENCE["sample"]))


def model_arguments(model: Model) -> list[str]:
    """Return Megatron-LM's arguments for a model: a decoder with RMSNorm, rotary embeddings and no biases."""
    is_latent, has_experts, dense = latent_layers(model) > 0, model.experts, model.moe_first_dense_layers
    names = [*REFERENCE["sizes"], *(REFERENCE["latent_sizes"] if is_latent else ())]
    names += REFERENCE["expert_sizes"] if has_experts else []
    switches = [name for name in REFERENCE["switches"] if getattr(model, name)]
    sizes = {name: getattr(model, name) for name in names}
    if has_experts and dense:
        sizes["moe_layer_freq"] = f"([0]*{dense}+[1]*{model.num_layers - dense})"
    if model.num_query_groups != model.num_attention_heads and not is_latent:
        sizes["num_query_groups"] = model.num_query_groups
        switches.append("group_query_attention")
    if model.moe_router_topk == 1:  # the softmax of one chosen expert has no gradient (`transformer_config.py`)
        switches.append("moe_router_pre_softmax")
    words = [word for name, size in sizes.items() if size for word in (flag_of(name), str(size))]
    return [*words, *_arguments_of_layers(model), *REFERENCE["fixed"], *map(flag_of, switches)]


def _arguments_of_layers(model: Model) -> list[str]:
    """Return the arguments of all layers but attention over all tokens, without a hybrid pattern."""
    sizes: dict[str, object] = {}
    if without_repeats(model) is not model:
        raise LaunchError("Megatron-LM has no arguments for layers that run several times: start them with a command")
    for mixer in other_mixers(model):
        if mixer.label not in REFERENCE["mixers"]:
            raise LaunchError(f"Megatron-LM has no arguments for layers with {mixer.label}: start them with a command")
        sizes |= {name: getattr(mixer, field) for field, name in REFERENCE["mixers"][mixer.label].items()}
    if indexer := indexer_of(model):
        sizes |= {name: getattr(indexer, field) for field, name in REFERENCE["indexer"].items()}
        sizes["experimental_attention_variant"] = "dsa"
    if other_mixers(model) and not is_hybrid(model):
        sizes["experimental_attention_variant"] = "gated_delta_net"
        sizes["linear_attention_freq"] = [int(not isinstance(each.mixer, Attention)) for each in model.layers]
    if window := max((each.window or 0 for each in attention_counts(model) if not each.pieces), default=0):
        windows = [int(isinstance(each.mixer, Attention) and each.mixer.window is not None) for each in model.layers]
        sizes |= {"window_size": f"{window - 1},0", "window_attn_skip_freq": windows}
    return [word for name, size in sizes.items() for word in (flag_of(name), str(size).replace(" ", ""))]


MBS, DP, USES = "micro_batch_size", "data_parallel_size", "use_recompute"


def framework_launch(spec: Spec, values: Mapping[str, KnobValue], folder: str) -> Launch:
    """Return the launch of the framework's own command with a candidate's knob `values`, of which None is unset.

    Raises LaunchError if the framework has no key for a value.
    """
    read, micro_batch_size = reading(spec), int(values[MBS] or 1)
    replicas = micro_batch_size * int(values[DP] or 1)
    return real_job.launch(
        spec,
        folder,
        given=_given(spec, values),
        own=_own(read),
        micro_batch_size=micro_batch_size,
        microbatches=spec.train.global_batch_size // replicas,
    )


def _given(spec: Spec, values: Mapping[str, KnobValue]) -> dict[str, Any]:
    """Return the framework's settings of a candidate by name: frameworks count virtual stages, not their layers."""
    found: dict[str, Any] = {name: values.get(name) or 1 for name in PARALLEL_SIZES}
    has_effect = values[DP] != 1 or values.get(DIST_OPT)  # otherwise the user's own stays
    found |= {name: bool(values.get(name)) for name in (SP, *[DIST_OPT] * bool(has_effect))}
    found |= {name: values.get(name) if values.get(USES) else None for name in RECOMPUTE}
    layers = int(values.get(LAYERS_PER_VIRTUAL) or 0) * int(values.get(PP) or 1)
    return found | {VIRTUAL_STAGES: spec.model.num_layers // layers if layers else None, LAYOUT: values.get(LAYOUT)}


def _own(read: Reading) -> dict[str, Any]:
    """Return the settings of the command by name."""
    found: dict[str, Any] = {name: read.size(name) for name in PARALLEL_SIZES}
    found |= {name: read.is_on(name) for name in (DIST_OPT, SP)}
    return found | {name: read.value(name) for name in (*RECOMPUTE, VIRTUAL_STAGES, LAYOUT)}
