"""What FlagScale's own runner would start for trees on several kinds of chips: its words on each host, and variables.

Reads a JSON list of cases from stdin, each with `directory`, `name` and `overrides`, and writes a list of hosts per
case. Nothing is started. See `flagscale_runner.py`.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

from flagscale.runner.runner_train import SSHTrainRunner
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf


def hosts_of(case: dict[str, object]) -> list[dict[str, object]]:
    """Return the words and the variables of each host's script, in the order of the host file."""
    with initialize_config_dir(str(Path(str(case["directory"])).resolve()), version_base=None):
        config = compose(str(case["name"]), overrides=case["overrides"])
    OmegaConf.set_struct(config, False)
    SSHTrainRunner(config).run(dryrun=True)
    scripts = sorted(Path(config.train.system.logging.scripts_dir).glob("host_*_run.sh"))
    found = []
    for script in scripts:
        line = next(line for line in script.read_text(encoding="utf-8").splitlines() if line.startswith('cmd="'))
        words = shlex.split(line.removeprefix('cmd="').removesuffix('"'))
        count = next(place for place, word in enumerate(words) if "=" not in word)
        variables = dict(word.split("=", 1) for word in words[:count])
        found.append({"host": script.name.split("_")[2], "envs": variables, "words": words[count:]})
        script.unlink()
    return found


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # FlagScale prints
    answers = [hosts_of(case) for case in json.load(sys.stdin)]
    json.dump(answers, out)
