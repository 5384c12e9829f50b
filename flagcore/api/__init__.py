"""The one place where parts meet: plugins, engine, launcher, strategy, store and loop. For Python users and the CLI."""

from flagcore.api.calibrating import calibrate, calibrations, forget, summary
from flagcore.api.estimating import Estimate, Explanation, estimate, explain
from flagcore.api.inspecting import chip_table, devices, doctor, plugin_table
from flagcore.api.jobs import AT_ONCE, estimate_jobs
from flagcore.api.probing import Probed, probe
from flagcore.api.tuning import tune
from flagcore.api.winner import Outcome, run_best
from flagcore.spec.flagscale import Imported, read_tree

__all__ = [
    "AT_ONCE",
    "Estimate",
    "Explanation",
    "Imported",
    "Outcome",
    "Probed",
    "calibrate",
    "calibrations",
    "chip_table",
    "devices",
    "doctor",
    "estimate",
    "estimate_jobs",
    "explain",
    "forget",
    "plugin_table",
    "probe",
    "read_tree",
    "run_best",
    "summary",
    "tune",
]
