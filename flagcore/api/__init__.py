"""The Python API, which the CLI uses, too. It connects plugins, engine, launcher, strategy, store and loop."""

from flagcore.api.common.runs import Run, load_run
from flagcore.api.explaining.candidate_report import CandidateReport, explain_candidate
from flagcore.api.explaining.compare import Comparison, compare
from flagcore.api.explaining.elimination import Explanation, explain
from flagcore.api.hardware.calibration import calibrate, calibrations, forget, summary
from flagcore.api.hardware.hosts import check_hosts
from flagcore.api.hardware.inspection import chip_table, devices, doctor, plugin_table
from flagcore.api.importing.command import ImportedCommand, read_command
from flagcore.api.importing.history import ImportedTrials, check_tree, import_history, read_tree
from flagcore.api.importing.new_spec import defaults_of, new_spec
from flagcore.api.importing.process import read_process
from flagcore.api.planning.estimate import Estimate, estimate
from flagcore.api.planning.jobs import AT_ONCE, estimate_jobs
from flagcore.api.planning.probe import Probed, probe
from flagcore.api.reporting.report import REPORT, report
from flagcore.api.reporting.run_list import compare_runs, differing_knobs, list_runs, remove_run, show_run
from flagcore.api.tuning.export import Outcome, run_best
from flagcore.api.tuning.manifest import manifest
from flagcore.api.tuning.targets import Exported, export, export_targets
from flagcore.api.tuning.tune import tune
from flagcore.testing.runner import Checked, check_plugins
from flagcore.testing.scaffold import new_plugin

__all__ = [
    "AT_ONCE",
    "REPORT",
    "CandidateReport",
    "Checked",
    "Comparison",
    "Estimate",
    "Explanation",
    "Exported",
    "ImportedCommand",
    "ImportedTrials",
    "Outcome",
    "Probed",
    "Run",
    "calibrate",
    "calibrations",
    "check_hosts",
    "check_plugins",
    "check_tree",
    "chip_table",
    "compare",
    "compare_runs",
    "defaults_of",
    "devices",
    "differing_knobs",
    "doctor",
    "estimate",
    "estimate_jobs",
    "explain",
    "explain_candidate",
    "export",
    "export_targets",
    "forget",
    "import_history",
    "list_runs",
    "load_run",
    "manifest",
    "new_plugin",
    "new_spec",
    "plugin_table",
    "probe",
    "read_command",
    "read_process",
    "read_tree",
    "remove_run",
    "report",
    "run_best",
    "show_run",
    "summary",
    "tune",
]
