"""What FlagScale's own tuner and runner would start: run by a Python that has FlagScale, with its folder on PYTHONPATH.

Reads a JSON list of cases from stdin: `directory`, `name`, `overrides`, and optionally `exp_dir` and how many
`candidates` of FlagScale's own grid to take, spread over all of them. Writes a list per case: of hosts without
`candidates`, else of candidates, with their `values` and what the generated scripts start: `trial` for the tuner's
task, `real` for the job with that candidate. Nothing is started.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

from flagscale.runner.auto_tuner.generate import Generator
from flagscale.runner.auto_tuner.search.searcher import Searcher
from flagscale.runner.runner_train import SSHTrainRunner
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf


def composed(case: dict[str, object], *overrides: str) -> DictConfig:
    """Compose a tree."""
    with initialize_config_dir(str(Path(str(case["directory"])).resolve()), version_base=None):
        config = compose(str(case["name"]), overrides=[*case["overrides"], *overrides])
    OmegaConf.set_struct(config, False)
    return config


def config_of(case: dict[str, object]) -> DictConfig:
    """Compose a tree and set what the tuner's constructor sets."""
    config = composed(case, f"++experiment.exp_dir={case['exp_dir']}")
    tuner, runner = config.experiment.get("auto_tuner") or {}, config.experiment.runner
    config.experiment.auto_tuner = tuner
    tuner = config.experiment.auto_tuner
    tuner.nproc_per_node, tuner.nnodes = runner.get("nproc_per_node", 8), runner.get("nnodes", 1)
    tuner.cards, tuner.platform = tuner.nproc_per_node * tuner.nnodes, {}
    tuner.pop("memory_model", None)
    for section in ("logging", "checkpoint"):  # the tuner needs them
        if config.train.system.get(section) is None:
            config.train.system[section] = {}
    return config


def started(config: DictConfig) -> list[dict[str, object]]:
    """Generate the scripts of a job; return the folder, PYTHONPATH, variables and words of each host."""
    SSHTrainRunner(config).run(dryrun=True)
    return [read(script) for script in sorted(Path(config.train.system.logging.scripts_dir).glob("host_*_run.sh"))]


def read(script: Path) -> dict[str, object]:
    """Read and remove the script of a host."""
    by_start = {
        start: line[len(start) :]
        for line in script.read_text(encoding="utf-8").splitlines()
        for start in ("cd ", "export PYTHONPATH=", 'cmd="')
        if line.startswith(start)
    }
    words = shlex.split(by_start['cmd="'].removesuffix('"'))
    count = next(place for place, word in enumerate(words) if "=" not in word)
    script.unlink()
    return {
        "host": script.name.split("_")[2],
        "directory": by_start["cd "],
        "path": by_start["export PYTHONPATH="],
        "envs": dict(word.split("=", 1) for word in words[:count]),
        "words": words[count:],
    }


def answer(case: dict[str, object], config: DictConfig, values: dict[str, object]) -> dict[str, object]:
    """Return what is started for one candidate."""
    real = config_of(case)
    (trial,) = started(Generator(config).gen({**values, "idx": 1}))
    (best,) = started(Generator(real).gen_best_task(values, real))
    return {"values": values, "trial": trial, "real": best}


def main() -> None:
    """Answer all cases."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # FlagScale prints
    answers = []
    for case in json.load(sys.stdin):
        if "candidates" not in case:
            answers.append(started(composed(case)))
            continue
        config = config_of(case)
        found = [each for each in Searcher(config).strategies if each["decoder_first_pipeline_num_layers"] is None]
        count = min(len(found), int(case["candidates"]))
        taken = [found[place * len(found) // count] for place in range(count)]
        answers.append([answer(case, config, values) for values in taken])
    json.dump(answers, out)
    out.close()


main()
