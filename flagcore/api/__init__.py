"""The one place where parts meet: plugins, engine, launcher, strategy, store and loop. For Python users and the CLI."""

from flagcore.api.account import Account, explain_candidate
from flagcore.api.calibrating import calibrate, calibrations, forget, summary
from flagcore.api.checking import Checked, check_plugins
from flagcore.api.comparing import Comparison, compare
from flagcore.api.estimating import Estimate, estimate
from flagcore.api.explaining import Explanation, explain
from flagcore.api.history import import_history
from flagcore.api.inspecting import chip_table, devices, doctor, plugin_table
from flagcore.api.jobs import AT_ONCE, estimate_jobs
from flagcore.api.probing import Probed, probe
from flagcore.api.reporting import REPORT, report
from flagcore.api.runs import Run, load_run
from flagcore.api.starting import new_plugin
from flagcore.api.tuning import tune
from flagcore.api.winner import Outcome, run_best
from flagcore.spec.flagscale import Imported, read_tree

__all__ = [
    "AT_ONCE",
    "REPORT",
    "Account",
    "Checked",
    "Comparison",
    "Estimate",
    "Explanation",
    "Imported",
    "Outcome",
    "Probed",
    "Run",
    "calibrate",
    "calibrations",
    "check_plugins",
    "chip_table",
    "compare",
    "devices",
    "doctor",
    "estimate",
    "estimate_jobs",
    "explain",
    "explain_candidate",
    "forget",
    "import_history",
    "load_run",
    "new_plugin",
    "plugin_table",
    "probe",
    "read_tree",
    "report",
    "run_best",
    "summary",
    "tune",
]
