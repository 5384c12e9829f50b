"""A script is read without being run: what it starts is found, and nothing of the user changes."""

import hashlib
import os
import time
from pathlib import Path

import pytest
from flagcore_importers import shell
from flagcore_megatron.program.user_command import user_command

from engines.megatron.tests.command.scripts import LAUNCH, MODEL, read, spec_of
from flagcore.errors import SpecError
from tests.checks import given, program, refuses

EXPECTED = tuple(MODEL.split())
FORMS = {
    "plain": LAUNCH,
    "exec": f"exec {LAUNCH}\necho never",
    "piped to a log": f"set -eo pipefail\n{LAUNCH} 2>&1 | tee $(date +%s).log",
    "a subshell piped to a log": f"(true && {LAUNCH}) 2>&1 | tee log",
    "uv": f"uv run --extra ssm python -m torch.distributed.run --nproc_per_node 4 pretrain_gpt.py {MODEL}",
    "a variable of its own": f"CUDA_VISIBLE_DEVICES=0,1 {LAUNCH}",
    "env": f"env NCCL_DEBUG=INFO OMP_NUM_THREADS=1 {LAUNCH}",
    "a text with a log": f'CMD="{LAUNCH}"\neval "$CMD" > train.log 2>&1',
    "the module": f"python3 -m torch.distributed.run --nproc_per_node=4 pretrain_gpt.py {MODEL}",
    "the old module": f"python -u -m torch.distributed.launch --nproc_per_node 4 pretrain_gpt.py {MODEL}",
    "a program alone": f"srun -n 4 python pretrain_gpt.py {MODEL}",
    "timed": f"time {LAUNCH}",
    "a condition": f"if ! {LAUNCH}; then exit 1; fi",
    "a loop that repeats": f"for attempt in 1 2 3; do {LAUNCH}; done",
    "a here-document": f"ARGS=$(cat <<EOF\n{MODEL}\nEOF\n)\ntorchrun --nproc_per_node 4 pretrain_gpt.py $ARGS",
    "lines in an array": f"mapfile -t A < <(printf '%s\\n' {LAUNCH})\n\"${{A[@]}}\"",
    "a function that ends in exec": f'run() {{ exec torchrun --nproc_per_node 4 "$@"; }}\nrun pretrain_gpt.py {MODEL}',
    "a comment in a command": f"torchrun --nproc_per_node 4 pretrain_gpt.py \\\n  `# model` \\\n  {MODEL}",
    "another script": f"cat > /dev/null <<< x\nbash child.sh {MODEL}",
    "a script by its path": f"./child.sh {MODEL}",
    "another script in the background": f"nohup bash child.sh {MODEL} > /dev/null 2>&1 &\nwait",
    "a file that it sources": f"source ./settings.sh\ntorchrun --nproc_per_node $GPUS pretrain_gpt.py {MODEL}",
    "a port by chance": f"torchrun --nproc_per_node $(shuf -e 4 | sort) pretrain_gpt.py {MODEL}",
    "a port of a program": f"torchrun --nproc_per_node 4 --master_port $(python port.py) pretrain_gpt.py {MODEL}",
    "strict, with a function": f'set -eu\nrun() {{ "$@"; }}\nGO="run {LAUNCH}"\n$GO',
    "strict": f"#!/bin/bash\nset -euxo pipefail\ntrap 'rm -rf tmp' EXIT\nmkdir -p tmp\n{LAUNCH}",
}


@pytest.mark.parametrize("name", FORMS)
def test_launch_is_found_however_a_script_writes_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "settings.sh").write_text("export GPUS=4\n")
    program(tmp_path / "child.sh", 'torchrun --nproc_per_node 4 pretrain_gpt.py "$@"', "/usr/bin/env bash")
    before = sorted(tmp_path.iterdir())
    found = read(FORMS[name], tmp_path)
    assert found.arguments == EXPECTED
    assert Path(found.program[-1]).name == "pretrain_gpt.py"
    assert Path(found.directory) == tmp_path
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "run.sh", tmp_path / "pretrain_gpt.py"])


def test_words_are_expanded_as_in_the_script(tmp_path: Path) -> None:
    text = """\
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
COUNT=$(ls "$ROOT" | grep -c run.sh)
cd sub
export NAME="two words" PART=$1
EXTRA=("--a b" "--split '99,1,0'")
[[ "$DATA" == real ]] && EXTRA+=(--data-path "$DATA")
torchrun --nproc_per_node $((COUNT * 4)) "$(dirname "$ROOT/x")/pretrain_gpt.py" ${EXTRA[@]} --name "$NAME" "${@:2}"
"""
    (tmp_path / "sub").mkdir()
    found = read(text, tmp_path, "p", "--q", "r s", DATA="real")
    assert found.program == (f"{tmp_path}/pretrain_gpt.py",)
    assert [option.words for option in found.options] == [("--nproc_per_node", "4")]
    expected = ("--a", "b", "--split", "'99,1,0'", "--data-path", "real", "--name", "two words", "--q", "r s")
    assert found.arguments == expected
    assert found.environment == {"NAME": "two words", "PART": "p"}
    assert Path(found.directory) == tmp_path / "sub"


WRITES = """\
set -x
mkdir -p made
rm -rf data
echo text > data/file
printf x >> data/file
cp data/file copy
cat > hosts <<EOF
a > b
EOF
sed -i s/a/b/ data/file
find data -type f -delete
python prepare.py --out data
touch $(mktemp made.XXXX)
: > data/file
{ echo a; echo b; } 2> /dev/null
exec 3> opened
exec > >(tee -a whole.log) 2>&1
ls data | xargs rm
"""


def test_no_file_of_the_user_is_written_and_skipped_commands_are_listed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "file").write_text("mine")
    (tmp_path / "run.sh").write_text(WRITES + LAUNCH)
    (tmp_path / "pretrain_gpt.py").touch()
    for folder in (data, tmp_path):
        folder.chmod(0o555)
    before = content(tmp_path)
    found = user_command(spec_of(("bash", "run.sh"), tmp_path))
    after = content(tmp_path)
    for folder in (tmp_path, data):
        folder.chmod(0o755)
    assert before == after
    programs = {words.split()[0] for words in given(found).skipped}
    assert {"mkdir", "rm", "cp", "sed", "find", "python", "touch", "mktemp", "cat", "xargs"} <= programs


def content(folder: Path) -> dict[str, tuple[str, int]]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file): (hashlib.sha1(file.read_bytes()).hexdigest(), file.stat().st_mtime_ns) for file in files}


REFUSED = {
    "nothing": ("echo hello", "starts no"),
    "a program of another kind": ("python prepare.py --out x", "python prepare.py"),
    "two jobs": (f"{LAUNCH}\n{LAUNCH} --lr 2", "starts 2 programs"),
    "an error": ("set -u\ntorchrun $NO_SUCH_VARIABLE", "NO_SUCH_VARIABLE"),
    "a syntax error": (f"if true\n{LAUNCH}", "syntax error"),
    "a block with a log": (f"{{\n{LAUNCH}\n}} > train.log 2>&1", "line 3"),
    "a loop with a log": (f"for i in 1; do\n{LAUNCH}\ndone >> train.log", "line 3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_script_that_cannot_be_read_is_refused_with_the_fix(name: str, tmp_path: Path) -> None:
    text, words = REFUSED[name]
    with refuses("train.command") as refused:
        read(text, tmp_path)
    assert words in refused.value.problem
    assert "torchrun" in refused.value.fix
    assert "\n" not in str(refused.value)
    assert {file.name for file in tmp_path.iterdir()} == {"run.sh", "pretrain_gpt.py"}


def test_missing_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="does not exist"):
        user_command(spec_of(("bash", "missing.sh"), tmp_path))


def test_script_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "TIMEOUT_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(SpecError, match="did not end"):
        read("while true; do i=1; done", tmp_path)
    assert time.monotonic() - began < 5


def test_a_shell_script_that_is_the_program_is_read(tmp_path: Path) -> None:
    program(tmp_path / "go", LAUNCH)
    (tmp_path / "pretrain_gpt.py").touch()
    found = given(user_command(spec_of(("./go",), tmp_path)))
    assert found.arguments == EXPECTED


def test_commands_of_other_programs_are_not_read(tmp_path: Path) -> None:
    for command in (("make", "train"), ("python", "train.py", "{flags}"), ("./binary",), ("torchrun", "--standalone")):
        assert user_command(spec_of(command, tmp_path)) is None


def test_python_that_computes_a_value_runs(tmp_path: Path) -> None:
    found = read(f"N=$(python3 -c 'print(2 * 2)')\ntorchrun --nproc_per_node $N pretrain_gpt.py {MODEL}", tmp_path)
    assert found.options[0].words == ("--nproc_per_node", "4")


@pytest.mark.parametrize(
    "command",
    [
        'python3 -c \'open("written", "w")\'',
        "perl -e 'open(F, \">written\")'",
        "awk 'BEGIN { system(\"touch written\") }'",
        "echo 1 | awk '{ print > \"written\" }'",
        "echo 1 | sed 'w written'",
        "echo 1 | sed -n '1e touch written'",
        "echo 1 | sed -ne 's/1/touch written/e'",
        "sort -uo written run.sh",
        "uniq run.sh written",
        "./date",
        "PATH=.:$PATH; export PATH; date",
    ],
)
def test_a_script_of_another_machine_runs_no_program(command: str, tmp_path: Path) -> None:
    program(tmp_path / "date", "open('written', 'w')", "/usr/bin/python3")
    (tmp_path / "run.sh").write_text(f"N=$({command})\ntouch $N\n")
    records, _ = shell.trace_script(("bash", "run.sh"), str(tmp_path), {}, elsewhere=1)
    assert any(record.words[0] == "touch" for record in records)
    assert not (tmp_path / "written").exists()


MODULES = """\
module() { eval "$($LMOD_CMD bash "$@")"; }
module load cuda
"""


def test_modules_and_environments_are_loaded(tmp_path: Path) -> None:
    for name in ("lmod", "conda"):
        program(tmp_path / name, 'echo "export LOADED=$LOADED:$3"')
    conda = 'conda() { eval "$("$CONDA_EXE" shell.posix "$@")"; }\nconda activate train\n'
    tools = {"LMOD_CMD": str(tmp_path / "lmod"), "CONDA_EXE": str(tmp_path / "conda")}
    found = read(f"{MODULES}{conda}{LAUNCH}", tmp_path, **tools)
    assert found.environment == {"LOADED": ":cuda:train"}
    assert found.skipped == ()


def test_the_reason_why_a_script_ends_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="set DATA first"):
        read(f'[ -n "$DATA" ] || {{ echo "set DATA first"; exit 1; }}\n{LAUNCH}', tmp_path)


def test_variables_of_functions_are_no_part_of_the_environment(tmp_path: Path) -> None:
    assert read(f"f() {{ :; }}\nexport -f f\nexport A=1\nB=2\n{LAUNCH}", tmp_path).environment == {"A": "1"}
    assert "FLAGCORE_TRACE" not in os.environ
