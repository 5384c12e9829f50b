"""A candidate is started with the arguments, variables and folder that FlagScale's own tuner and runner give it. Trees
are tuned by FlagScale's own training program, on CPU: `cpu_as_cuda` makes torch.cuda mean the CPU.

What is no tree, or none that can be tuned, is refused in one line: the file, the tree's key and the fix."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from flagcore_flagscale import FlagScale
from flagcore_megatron.command.changes import RULES
from flagcore_megatron.engine import ENGINE
from flagcore_megatron.program.arguments import ArgumentTable, release_table

from extras.flagscale.tests.accounting import CPU_TREE, write_tree
from flagcore.cli.main import flag
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.space import Candidate
from flagcore.domain.spec import Task
from flagcore.errors import SpecError
from flagcore.plugins import entry_points
from flagcore.spec.convert import parse_spec
from tests.product import tasks
from tests.product.tasks import ENGINES

HERE = Path(__file__).parent
RECORDED = HERE / "recorded.json"
"""Answers of FlagScale 0.8.0 for `OWN`: `RECORD=1 pytest extras/flagscale/tests/test_same_job.py -m long`, and for
kinds of chips: `FLAGSCALE=FOLDER RECORD=1 pytest extras/flagscale/tests/test_hetero.py`."""
ANSWERS = json.loads(RECORDED.read_text(encoding="utf-8"))
TABLE = release_table("0.15.0+flagscale")
DATA = ("++train.data.data_path=/data/corpus", "++train.data.tokenizer.tokenizer_path=/data/tokenizer")
# What FlagScale's tuner sets is below train.system, and values of train.model hide it.
OWN = {
    "train_dense": (*DATA, "experiment.runner.nnodes=1", "~experiment.envs.node_specific"),
    "train_groups": DATA,
    "train_latent": (),
    "train_newest": (*DATA, "~train.model.recompute_granularity", "++train.system.checkpoint.load=/data/load"),
    "train_next": ("~train.model.recompute",),
}
NO_SPLIT = ("~train.system.decoder_first_pipeline_num_layers",)
"""FlagScale computes it for each candidate."""
EXAMPLES = {
    "aquila/train": ("train=7b",),
    "aquila/train 3b": ("train=3b",),
    "deepseek_v3/train": NO_SPLIT,
    "deepseek_v3/train_auto_tuner": NO_SPLIT,
    "llama2/train": (),
    "llama3/train": ("train=8b",),
    "llama3/train 70b": ("train=70b",),
    "mixtral/train": ("++train.data.tokenizer.vocab_size=32000",),
    "qwen3/train": ("train=32b",),
    "qwen3/train_auto_tuner": (),
    "qwq/train": (),
}
"""Trees of the wheel, each with a space of its own or FlagScale's."""


def case(directory: Path, name: str, overrides: tuple[str, ...], candidates: int) -> dict[str, Any]:
    one = ("++experiment.runner.nnodes=1", "++experiment.runner.nproc_per_node=8", "++experiment.runner.hostfile=null")
    return {
        "directory": str(directory),
        "name": name,
        "overrides": [*overrides, *one],
        "exp_dir": "/tmp/flagcore-tests/exp",
        "candidates": candidates,
    }


def own_cases() -> list[dict[str, Any]]:
    return [case(Path(name), "tune", overrides, 4) for name, overrides in OWN.items()]


def meaning(table: ArgumentTable, words: list[str]) -> dict[str, Any]:
    """Return what arguments mean: those that differ from the parser's defaults, and those that it does not know."""
    values = {dest: value for dest, value in table.effective(words).items() if not _is_default(table, dest, value)}
    return values | {problem.flag: problem.value for problem in table.parse(words)[1]}


def _is_default(table: ArgumentTable, dest: str, value: object) -> bool:
    return any(spec.default == value and spec.values != 0 for spec in table.by_flag.values() if spec.dest == dest)


def arguments(words: list[str] | tuple[str, ...]) -> list[str]:
    place = next(place for place, word in enumerate(words) if word.endswith(".py"))
    return list(words[place + 1 :])


def check(asked: dict[str, Any], answers: list[dict[str, Any]], folder: Path) -> None:
    """Compare all candidates of one tree."""
    overrides = (*asked["overrides"], f"++experiment.exp_dir={asked['exp_dir']}")
    found = FlagScale().read_tree(Path(asked["directory"]), asked["name"], overrides)
    spec = parse_spec(found.data, file="x", base=Path(), engines=tasks.ENGINES)
    group = NodeGroup(chip=tasks.CHIP, nodes=1, devices_per_node=8)
    platform = tasks.platform(Task(spec=spec, cluster=Cluster(groups=(group,))))
    assert answers
    for answer in answers:
        candidate = Candidate.of({key: value for key, value in answer["values"].items() if key in ENGINE_KNOBS})
        for expected, for_real in ((answer["trial"], False), (answer["real"], True)):
            actual = ENGINE.launch(platform, candidate, str(folder), for_real=for_real)
            left, right = (meaning(TABLE, arguments(words)) for words in (actual.argv, expected["words"]))
            if not for_real:
                left, right = as_trial(left, asked), as_trial(right, asked)
            if answer["values"]["data_parallel_size"] == 1:  # flagcore keeps the user's flag, which has no effect
                left.pop("use_distributed_optimizer", None)
            assert left == right
            assert {key: str(value) for key, value in spec.envs.items() if key != "PYTHONPATH"} == expected["envs"]


ENGINE_KNOBS = {knob.name for knob in ENGINE.knobs}


def as_trial(values: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Return arguments without those by which a trial of flagcore's and one of FlagScale's are shortened."""
    short = {"train_iters", "auto_tune", "log_interval"}
    return {
        dest: value for dest, value in values.items() if dest in short or not any(rule.matches(dest) for rule in RULES)
    }


@pytest.mark.spread
@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_a_candidate_has_the_arguments_that_flagscale_recorded(name: str, tmp_path: Path) -> None:
    """`tmp_path` has the trees."""
    own_case = own_cases()[list(OWN).index(name)]
    (run := tmp_path / "run" / "trials" / "0001").mkdir(parents=True)
    check(own_case, ANSWERS[name], run)


def record(answers: dict[str, Any]) -> None:
    RECORDED.write_text(json.dumps({**ANSWERS, **answers}) + "\n", encoding="utf-8")


def run_flagscale(python: str, root: Path, cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return FlagScale's answers, from a process that sees no others: its scripts end processes by name."""
    command = [python, str(HERE / "flagscale_runner.py")]
    if shutil.which("unshare") and subprocess.run(["unshare", "--pid", "--fork", "true"], check=False).returncode == 0:
        command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *command]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "third_party" / "Megatron-LM")])}
    done = subprocess.run(
        command, input=json.dumps(cases), env=environment, capture_output=True, text=True, timeout=540, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[list[dict[str, Any]]] = json.loads(done.stdout)
    return found


ENVIRONMENT = os.environ.get("REAL_MEGATRON", "")


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> Path:
    """FlagScale's folder in the environment, which PYTHONPATH names to the importer."""
    (found,) = Path(ENVIRONMENT, "lib").glob("python3*/site-packages/flag_scale")
    monkeypatch.setenv("PYTHONPATH", str(found))
    return found


@pytest.mark.spread
@pytest.mark.long
@pytest.mark.skipif(not ENVIRONMENT, reason="needs REAL_MEGATRON, a virtual environment with flag-scale 0.8.0")
def test_a_candidate_has_the_arguments_of_flagscales_own_runner(wheel: Path, tmp_path: Path) -> None:
    """Trees of the repository, and FlagScale's own examples, started from its folder."""
    (run := tmp_path / "run" / "trials" / "0001").mkdir(parents=True)
    own = own_cases()
    examples = [
        case(wheel / "examples" / name.split("/")[0] / "conf", name.split("/")[1].split()[0], (*overrides, *DATA), 4)
        for name, overrides in EXAMPLES.items()
    ]
    answers = run_flagscale(f"{ENVIRONMENT}/bin/python", wheel, [*own, *examples])
    if os.environ.get("RECORD"):
        record(without_places(dict(zip(OWN, answers, strict=False)), wheel))
    for request, answer in zip([*own, *examples], answers, strict=True):
        check(request, answer, run)
        found = FlagScale().read_tree(Path(request["directory"]), request["name"], tuple(request["overrides"]))
        path = f"{found.data['envs']['PYTHONPATH']}".removesuffix(f":{wheel}")
        assert (found.data["train"]["directory"], f"{path}:${{PYTHONPATH}}") == (
            answer[0]["trial"]["directory"],
            answer[0]["trial"]["path"],
        )


def without_places(record: dict[str, Any], wheel: Path) -> dict[str, Any]:
    """Return answers without the folders of this machine."""
    found: dict[str, Any] = json.loads(json.dumps(record).replace(str(wheel), "/flagscale"))
    return found


ROOT = Path(__file__).parents[3]
SHIM = ROOT / "engines" / "megatron" / "tests" / "trial" / "cpu_as_cuda"


@pytest.mark.long
@pytest.mark.skipif(not ENVIRONMENT, reason="needs REAL_MEGATRON, a virtual environment with flag-scale 0.8.0")
@pytest.mark.parametrize(("name", "candidates"), [("dense", 4), ("stages", 2)])
def test_a_tree_is_tuned_through_flagscales_own_program(name: str, candidates: int, tmp_path: Path) -> None:
    write_tree(CPU_TREE, tmp_path / "conf")
    code = "from flagcore.cli import main; main()"
    arguments = ("--config-path", "conf", "--config-name", name, "--run-dir", "run", "action=auto_tune")
    environment = {**os.environ, "PATH": f"{ENVIRONMENT}/bin:{os.environ['PATH']}", "PYTHONWARNINGS": "ignore"}
    shim = f"experiment.envs.PYTHONPATH={SHIM}:{':'.join(folders())}"
    done = subprocess.run(
        [sys.executable, "-c", code, "tune", *arguments, f"+{shim}"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: Any = json.loads((tmp_path / "run" / "result.json").read_text())
    measured = [each for each in result["trials"] if each["state"] == "measured"]
    assert len({json.dumps(each["candidate"]) for each in measured}) >= min(candidates, 2)
    assert result["counts"]["failed"] == 0, [each["reason"] for each in result["trials"]]
    assert not (tmp_path / "outputs").exists()  # checkpoints and logs of the job itself
    assert "flagscale/train/train_gpt.py" in (tmp_path / "run" / "best.sh").read_text()


def folders() -> list[str]:
    """Return what FlagScale's runner puts on PYTHONPATH."""
    (wheel,) = Path(ENVIRONMENT, "lib").glob("python3*/site-packages/flag_scale")
    return [str(wheel), str(wheel / "third_party" / "Megatron-LM")]


read_tree = FlagScale().read_tree

BROKEN = {
    "no YAML": ("\nexperiment: [1,\n", r"tune\.yaml: line \d+ is not valid YAML"),
    "tab": ("\nmore:\n\tkey: 1\n", r"tune\.yaml: line \d+ is not valid YAML"),
    "twice": ("\naction: run\n", r"line \d+ is not valid YAML: .*duplicate key action"),
    "tag": ("\nkey: !!python/object/apply:os.system [ls]\n", "not valid YAML.*python/object"),
    "circle": ("\nkey: &a\n  key: *a\n", "contains itself"),
    "two documents": ("\n---\nkey: 1\n", "another document"),
    "no interpolation": ("\nkey: ${a b}\n", "key cannot be composed"),
    "odd key": ("\nkey: {null: 1}\n", "key cannot be composed: .*NoneType"),
    "latin-1": (b"\nkey: \xe9\n", "tune.yaml: the tree is not UTF-8 text"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named_with_its_line_or_key(case: str) -> None:
    added, message = BROKEN[case]
    top = Path("train_dense", "tune.yaml")
    top.write_bytes(top.read_bytes() + (added if isinstance(added, bytes) else added.encode()))
    with pytest.raises(SpecError, match=message) as caught:
        read_tree(Path("train_dense"), "tune")
    assert "\n" not in str(caught.value)
    assert "hydra" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tun", "--config-name = 'tun' is not a file in train_dense; use tune"),
        ("train/small", "give the folder to --config-path"),
        ("", "is not a file in train_dense; use tune"),
    ],
)
def test_a_missing_top_file_gets_the_existing_ones_as_suggestions(name: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        read_tree(Path("train_dense"), name)


@pytest.mark.parametrize(
    ("name", "override", "says"),
    [
        ("train_dense", "action=stop", "action"),
        ("train_dense", "no.such.key=1", r"add it: \+no\.such\.key=1"),
        ("train_dense", "+train.model.num_layers=1", "exists already; change it: train"),
        ("train_dense", "~train.model.nothing", "does not exist"),
        ("train_dense", "train=nothing", "train/nothing.yaml, which does not exist; use "),
        ("train_dense", "train.model.seq_length=1,2", r"auto_tuner\.space"),
        ("train_dense", "train.model.seq_length=choice(1,2)", r"auto_tuner\.space"),
        ("train_dense", "experiment.exp_name='a b", "is invalid"),
        ("serve_vllm", "serve[0].engine=vllm", "as serve.0"),
        ("train_dense", "experiment=5", "must be a mapping"),
        ("train_dense", "~train", "train is missing, but"),
        ("serve_vllm", "serve.0.engine={vllm: 1}", "not an engine"),
        ("train_dense", "~experiment", "experiment is missing"),
        ("train_dense", "experiment.auto_tuner=5", "must be a mapping"),
        ("train_dense", "~train.data.tokenizer.vocab_size", "vocab_size"),
        ("train_dense", "experiment.runner.nnodes=many", "nnodes"),
        ("train_dense", "experiment.task.type=rl", "task.type"),
        ("train_dense", "~experiment.task.entrypoint", "task.entrypoint"),
        ("train_dense", "experiment.task.backend=robotics", "task.backend"),
        ("train_dense", "train.data.tokenizer.vocab_size=xxx", "vocab_size = 'xxx' is a placeholder"),
        ("serve_pairs", "experiment.runner.deploy.prefill_decode_disaggregation=true", "prefill_decode"),
        ("serve_pairs", "+serve.0.engine_args.disaggregation_mode=prefill", "disaggregation_mode"),
        ("serve_vllm", "experiment.auto_tuner.engines=[tgi]", "tgi"),
        ("serve_vllm", "serve=[]", "serve"),
    ],
)
def test_a_tree_that_cannot_be_tuned_is_refused_in_one_line(name: str, override: str, says: str) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        read_tree(Path(name), "tune", (override,))
    assert "\n" not in str(caught.value)


def test_a_spec_together_with_a_tree_is_refused() -> None:
    done = CliRunner().invoke(flag, ["estimate", "spec.yaml", "--config-path", "train_dense", "--config-name", "tune"])
    assert done.exit_code == 2
    assert "spec.yaml" in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("import", "flagscale", "train_dense", "--config-name", "tune"),
        ("import", "flagscale-history", "history.csv", "--spec", "spec.yaml"),
    ],
)
def test_without_the_extra_its_commands_name_it(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_points, "installed", lambda group: {})
    done = CliRunner().invoke(flag, list(arguments))
    assert done.exit_code == 2
    assert 'pip install "flagcore[flagscale]"' in done.output


def test_an_import_that_gives_no_valid_spec_fails() -> None:
    arguments = ["train_dense", "--config-name", "tune", "++train.system.fp16=maybe", "-o", "out.yaml"]
    found = CliRunner().invoke(flag, ["import", "flagscale", *arguments])
    assert isinstance(found.exception, SpecError)
    assert (found.exception.exit_code, found.exception.value) == (2, "maybe")
    assert not Path("out.yaml").exists()


def test_a_json_config_of_an_old_flagscale_is_recognized(tmp_path: Path) -> None:
    (tmp_path / "pretrain_7b.json").write_text('{"experiment": {}}')
    for name in ("pretrain_7b", "pretrain_7b.json"):
        with pytest.raises(SpecError, match="JSON config of FlagScale") as caught:
            read_tree(tmp_path, name)
        assert caught.value.key == "--config-name"


SPACE = "experiment.auto_tuner.space"


@pytest.mark.parametrize(
    ("name", "override", "says"),
    [
        ("train_dense", "train.data.tokenizer.vocab_size=many", "train.data.tokenizer.vocab_size = 'many'"),
        ("train_dense", "train.model.seq_length=0", "train.model.seq_length = 0 must"),
        ("train_dense", "train.model.num_query_groups=5", "train.model.num_query_groups = 5 must divide"),
        (
            "train_dense",
            "train.system.tensor_model_parallel_size=two",
            "train.system.tensor_model_parallel_size = 'two'",
        ),
        ("train_dense", f"{SPACE}.micro_batch_size=[4,a]", f"{SPACE}.micro_batch_size[1] = 'a'"),
        ("train_dense", f"{SPACE}.recompute_method=[blocky]", f"{SPACE}.recompute_method[0] = 'blocky'"),
        (
            "train_dense",
            "experiment.auto_tuner.control.max_time=soon",
            "experiment.auto_tuner.control.max_time = 'soon'",
        ),
        ("train_moe", "train.model.num_experts=-3", "train.model.num_experts = -3"),
        ("train_first", "train.model.multiple_of=x", "train.model.multiple_of = "),
        ("serve_vllm", "serve.0.engine_args.model=/nowhere", "serve[0].engine_args.model = '/nowhere' does not exist"),
        ("train_dense", "+experiment.envs={a-b: 1}", "experiment.envs.a-b is not the name"),
        ("serve_vllm", "serve.0.profile.num_prompts=x", "serve[0].profile.num_prompts = 'x'"),
    ],
)
def test_an_error_of_the_spec_names_the_key_of_the_tree(name: str, override: str, says: str) -> None:
    model = ("++serve.0.engine_args.model=model",) if name.startswith("serve") else ()
    with pytest.raises(SpecError) as caught:
        parsed(name, *model, override)
    assert str(caught.value).startswith(f"{name}/tune.yaml: {says}")


def parsed(name: str, *overrides: str) -> None:
    """Make a spec of a tree. Raises SpecError in the tree's words."""
    found = read_tree(Path(name), "tune", overrides)
    try:
        parse_spec(found.data, file=found.file, base=Path(), engines=ENGINES)
    except SpecError as error:
        raise found.translate_error(error) from None


def test_an_error_without_a_file_gets_the_file_of_the_tree() -> None:
    found = read_tree(Path("serve_vllm"), "tune")
    error = SpecError(key="auto_tuner.space.instances", problem="is invalid", value=3)
    assert str(found.translate_error(error)) == f"serve_vllm/tune.yaml: {SPACE}.vllm.instance = 3 is invalid"
    engine_args = SpecError(key="serve.engine_args.context_len", problem="is invalid")
    assert (
        str(found.translate_error(engine_args)) == "serve_vllm/tune.yaml: serve[0].engine_args.max_model_len is invalid"
    )
    for other in (SpecError(key="model", problem="x", file="other"), SpecError(key="--chip", problem="x")):
        assert found.translate_error(other) is other


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("${oc.env:NO_SUCH_PATH}", "Environment variable 'NO_SUCH_PATH' not found"),
        ("${no.such.key}", "Interpolation key 'no.such.key' not found"),
        ("???", "Missing mandatory value"),
    ],
)
def test_a_key_that_is_needed_but_not_resolved_is_refused_with_the_reason(value: str, why: str) -> None:
    with pytest.raises(SpecError, match=r"serve\[0\].engine_args.model cannot be resolved: " + why):
        read_tree(Path("serve_vllm"), "tune", (f"serve.0.engine_args.model='{value}'",))
