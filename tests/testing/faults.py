"""The faults: one edit of the healthy plugin each, the check that is for it, and what that says. A line a fault."""

# fmt: off
from __future__ import annotations

from tests.testing.faulty import (
    CHIP,
    COLLECTIVES,
    CURVE,
    DISCOVER,
    ENVIRONMENT,
    HOOKS,
    KNOBS,
    MATURITY,
    PYPROJECT,
    QUIRKS,
    SMI,
    SOURCES,
    Fault,
)

LOADS = "the_plugin_loads_and_implements_known_hooks"
VISIBLE = "return visible(tuple(row.device for row in listing.rows), VISIBLE)"
MODEL = "PlainMemory.of(group, fragmentation=0.02, context_bytes=CONTEXT_BYTES) if _mine(group.chip) else None"


def everywhere(check: str, hook: str, old: str, new: str) -> Fault:
    """Let a hook answer for any vendor's chip."""
    return Fault(check, HOOKS, old, new, f"{hook} answers for a chip of another vendor", "None unless")


def model(check: str, method: str, body: str, says: str) -> Fault:
    """Let a method of the memory model answer `body`."""
    own = f'type("M", (PlainMemory,), {{"{method}": {body}}}).of(group, fragmentation=0.02, context_bytes=CONTEXT_BYTES)'
    return Fault(check, HOOKS, MODEL, f"{own} if _mine(group.chip) else None", says)


def kernels(check: str, method: str, body: str, says: str) -> Fault:
    """Let a method of the kernel costs answer `body`, where `own` are the shipped ones."""
    old = "return kernel_costs(PACKAGE, chip) if _mine(chip) else None"
    made = f'type("K", (), {{"__getattr__": lambda s, n: getattr(own, n), "{method}": {body}}})()'
    return Fault(check, HOOKS, old, f"own = kernel_costs(PACKAGE, chip)\n    return {made} if _mine(chip) else None", says)


def collectives(check: str, seconds: str, taken: str, says: str) -> Fault:
    """Let collectives take `seconds` of payload p and ranks r, and of the compute what `taken` says."""
    old = "return collective_table(PACKAGE, group.chip) if"
    made = f'{{"seconds": lambda self, kind, p, r, s: {seconds}, "compute_share": lambda self, r, s: {taken}}}'
    return Fault(check, HOOKS, old, f'return type("C", (), {made})() if', says)


def reading(check: str, figures: str, says: str) -> Fault:
    """Let telemetry answer `figures`, where `s` is the tool's own reading."""
    old = "return DeviceReading(TABLE, device.index) if mine else None"
    made = f'type("T", (), {{"sample": lambda self: (lambda s: {figures})(DeviceReading(TABLE, device.index).sample())}})()'
    return Fault(check, HOOKS, old, f"return {made} if mine else None", says)


def support(check: str, key: str, value: str, says: str) -> Fault:
    """Let the support of an engine say `value` for `key`."""
    return Fault(check, HOOKS, "discover.VISIBLE,", f"discover.VISIBLE,\n        {key}={value},", says)


MODULE = (
    Fault(LOADS, HOOKS, "def flagcore_chips(", "def flagcore_chip(", "did you mean", "docs/hooks.md"),
    Fault(LOADS, HOOKS, "HOOKS_API = 1", "HOOKS_API = 99", "written for hooks 99", "docs/hooks.md"),
    Fault(LOADS, HOOKS, "(group: NodeGroup) -> Mem", "(cluster: object) -> Mem", "takes cluster", "docs/hooks.md"),
    Fault("importing_it_loads_no_driver_and_no_framework", HOOKS, "from flagcore_acme", "import torch\nfrom flagcore_acme", "torch", "inside the hook"),
    Fault("importing_it_loads_no_driver_and_no_framework", HOOKS, "from flagcore_acme", "try:\n    import pynvml\nexcept ImportError:\n    pass\nfrom flagcore_acme", "imports pynvml, where there is one", "inside the hook"),
    Fault("importing_it_is_quick_and_quiet_and_changes_nothing", HOOKS, "HOOKS_API = 1", "HOOKS_API = 1\nprint('hello')", "prints 'hello'", "print nothing"),
    Fault("importing_it_is_quick_and_quiet_and_changes_nothing", HOOKS, "HOOKS_API = 1", "HOOKS_API = 1\nimport os\nos.environ['ACME_Z'] = '1'", "ACME_Z", "flagcore_environment"),
    Fault("importing_it_is_quick_and_quiet_and_changes_nothing", HOOKS, "HOOKS_API = 1", "HOOKS_API = 1\nimport time\ntime.sleep(5.5)", "takes 5.", "in the hook"),
    Fault("it_imports_of_flagcore_only_what_plugins_may", HOOKS, "from flagcore_acme import", "import flagcore.loop\nfrom flagcore_acme import", "imports flagcore.loop", "vendorkit"),
    Fault(
        "asking_it_twice_gives_the_same_answer",
        HOOKS,
        "return environment(PACKAGE, chip, engine, engine_version, task)",
        "import time\n    return {**environment(PACKAGE, chip, engine, engine_version, task), 'GEMS_VENDOR': str(time.time_ns())}",
        "flagcore_environment",
        also=("what_trials_are_given_does_not_depend_on_the_users_shell", "no_variable_names_another_vendor"),
    ),
    Fault("asking_it_leaves_the_process_as_it_was", HOOKS, "return load_chips(PACKAGE)", "print('loading')\n    return load_chips(PACKAGE)", "prints 'loading'", "logged"),
    Fault("importing_it_is_quick_and_quiet_and_changes_nothing", HOOKS, "HOOKS_API = 1", "HOOKS_API = 1\nimport logging\nlogging.basicConfig(level=40)", "logging of the program", "change nothing"),
    Fault("importing_it_is_quick_and_quiet_and_changes_nothing", HOOKS, "HOOKS_API = 1", "HOOKS_API = 1\nimport numpy\nnumpy.seterr(all='ignore')", "error handling of numpy", "change nothing"),
    Fault("asking_it_leaves_the_process_as_it_was", HOOKS, "return load_chips(PACKAGE)", "import warnings\n    warnings.simplefilter('ignore')\n    return load_chips(PACKAGE)", "asking flagcore_chips changes the filters of warnings", "put it back"),
    Fault("asking_it_leaves_the_process_as_it_was", HOOKS, "return maturity(PACKAGE)", "import signal\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    return maturity(PACKAGE)", "signal handlers", "put it back"),
    Fault("asking_it_leaves_the_process_as_it_was", HOOKS, "return maturity(PACKAGE)", "import threading, time\n    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n    return maturity(PACKAGE)", "leaves one running", "put it back"),
    Fault("what_its_hooks_are_given_stays_as_it_was", HOOKS, "    mine = any(_mine(group.chip) for group in task.cluster.groups)\n    return r", "    mine = any(_mine(group.chip) for group in task.cluster.groups)\n    launch.environment['ACME'] = '1'\n    return r", "flagcore_prepare_launch changes what it is given as launch", "new object"),
    Fault("asking_it_writes_no_files", HOOKS, "return maturity(PACKAGE)", "from pathlib import Path\n    Path('acme.log').write_text('asked')\n    return maturity(PACKAGE)", "acme.log", "memory"),
    Fault("hooks_answer_within_seconds", HOOKS, "HOOKS_API = 1", "HOOKS_API = 1\nimport os\nimport sys\nif sys.argv[0].endswith('asking.py'):\n    os._exit(3)", "its import does not end", "limit of time"),
    Fault("hooks_answer_within_seconds", HOOKS, "return maturity(PACKAGE)", "import time\n    time.sleep(15.2)\n    return maturity(PACKAGE)", "flagcore_maturity took 15 s", "limit of time"),
    Fault("asking_it_leaves_the_process_as_it_was", HOOKS, "return failure_patterns(", "import os\n    os.environ['ACME_X'] = 'a' + os.environ.get('ACME_X', '')\n    return failure_patterns(", "environment", "flagcore_environment"),
)
CHIPS = (
    Fault("chips_and_devices_are_answered_as_their_hooks_promise", CHIP, "kind: estimated, method", "kind: guessed, method", "a1.yaml: memory_bytes.source.kind", "mend that key"),
    Fault("chips_and_devices_are_answered_as_their_hooks_promise", HOOKS, "return load_chips(PACKAGE)", "return [*load_chips(PACKAGE), 'A2']", "flagcore_chips", "docs/hooks.md"),
    Fault("chips_and_devices_are_answered_as_their_hooks_promise", CHIP, "devices_per_node: 8", "devices_per_node: 8\ndevices_per_node: 16", "the key devices_per_node is there twice", "mend that key"),
    Fault("every_figure_has_a_source_of_a_known_kind", CHIP, "TODO: made up, replace it by a figure with its source", " ", "A1: memory_bytes", "what that kind must say"),
    Fault("what_was_measured_says_when", CHIP, '{kind: estimated, method: "TODO', '{kind: measured, how: "TODO', "memory_bytes.source is measured", "add date"),
    Fault("dates_of_sources_are_written_as_iso_dates", COLLECTIVES, "2026-11-02", "2/11/2026", "collectives.yaml: source.date", "2026-11-02"),
    Fault("names_and_aliases_are_each_of_one_chip", "flagcore_acme/chips/b2.yaml", "", "chip: B2\nvendor: acme\naliases: [ACME A1]\n", "answers to", "one chip", also=("a_chip_file_is_named_like_its_chip",)),
    Fault("no_name_is_that_of_another_plugins_chip", CHIP, "[ACME A1]", "[ACME A1, cpu]", "plugin cpu", "this vendor's"),
    Fault("names_are_words_without_spaces_around", CHIP, "[ACME A1]", "[ACME A1, 'A1  OAM']", "A1  OAM"),
    Fault("an_alias_is_listed_once", CHIP, "[ACME A1]", "[ACME A1, acme a1]", "acme a1", "one of them"),
    Fault("all_chips_are_of_one_vendor_in_small_letters", CHIP, "vendor: acme", "vendor: Acme", "vendor is Acme", "small letters", also=("*",)),
    Fault("a_chip_file_is_named_like_its_chip", "flagcore_acme/chips/b2.yaml", "", "chip: A2\nvendor: acme\n", "b2.yaml: chip is A2", "a2.yaml", also=("its_readme_names_all_chips", "maturity_tells_where_the_facts_of_each_chip_are_from")),
    Fault("figures_are_plausible_in_base_units", CHIP, "value: 2.5e+10", "value: 25.0", "A1: nic_bytes_per_second = 25", "without prefixes"),
    Fault("a_narrower_format_is_not_slower", CHIP, "  fp16:", "  fp64: {value: 8.0e+13, source: *made_up}\n  fp16:", "fp32 = 4e+13 is below fp64", "again"),
    Fault("peaks_are_those_without_sparsity", CHIP, "  fp16:", "  fp8: {value: 1.2e+15, source: *made_up}\n  fp16:", "4.0 times bf16", "half"),
    Fault("peaks_are_those_without_sparsity", CHIP, "  bf16: {value: 3.0e+14, source: *made_up}\n  fp16: {value: 3.0e+14", "  bf16: {value: 6.0e+14, source: *made_up}\n  fp16: {value: 6.0e+14", "375 operations a byte", "half"),
    Fault("peaks_are_those_without_sparsity", CHIP, "  fp16:", "  int8: {value: 3.0e+14, source: *made_up}\n  fp16:", "is what int8 has", "half"),
    Fault("peaks_are_those_without_sparsity", CHIP, "fp32: {value: 4.0e+13", "fp32: {value: 7.0e+12", "43 times fp32", "half"),
    Fault("no_peak_is_from_a_table_of_sparse_ones", CHIP, "fp16: {value: 3.0e+14, source: *made_up}", "fp16: {value: 3.0e+14, source: {kind: datasheet, document: 'A1 brief, structured sparsity'}}", "tells of sparsity", "without sparsity"),
    Fault("large_products_reach_a_fair_share_of_the_peak", CURVE, "gemm_share: 0.75", "gemm_share: 0.25", "% of the peak in bf16", "sparsity"),
    Fault("a_network_card_is_slower_than_the_link", CHIP, "value: 2.5e+10", "value: 2.0e+11", "nic_bytes_per_second = 2e+11", "not bits"),
    Fault("a_network_card_is_slower_than_the_link", CHIP, "devices_per_node: 8", "devices_per_node: 8\nhost_bytes_per_second: {value: 1.6e+10, source: *made_up}", "not below host_bytes_per_second", "not bits"),
    Fault("fp16_and_bf16_have_like_peaks", CHIP, "fp16: {value: 3.0e+14", "fp16: {value: 5.0e+13", "bf16 is 6 times", "matrix units"),
    Fault("fp16_and_bf16_have_like_peaks", CHIP, "bf16: {value: 3.0e+14", "bf16: {value: 6.0e+14", "bf16 is 2 times", "dense", also=("peaks_are_those_without_sparsity",)),
    Fault("a_link_is_not_faster_than_the_memory", CHIP, "value: 2.0e+11", "value: 1.6e+12", "is 1 of memory", "one direction"),
    Fault("peaks_and_memory_are_in_proportion", CHIP, "value: 1.6e+12", "value: 4.0e+10", "operations a byte", "prefix", also=("a_link_is_not_faster_than_the_memory",)),
    Fault("a_link_is_not_faster_than_the_memory", CHIP, "value: 2.0e+11", "value: 2.0e+12", "link.bytes_per_second", "not bits"),
    Fault("the_latency_of_a_link_is_in_seconds", CHIP, "  name: ACMELink", "  name: ACMELink\n  latency_seconds: 5.0", "= 5", "seconds"),
    Fault("islands_fill_the_node_or_the_rack", CHIP, "  name: ACMELink", "  name: ACMELink\n  domain_size: 3", "= 3 does not", "consecutive"),
)
TASK = "any(_mine(group.chip) for group in task.cluster.groups)"
FOREIGN = (
    Fault("it_plans_no_topology_of_a_foreign_chip", HOOKS, "topology_of(group) if _mine(group.chip) and group.chip.link else None", "topology_of(group)", "flagcore_topology answers", "None unless"),
    everywhere("it_has_no_memory_model_of_a_foreign_chip", "flagcore_memory_model", " if _mine(group.chip) else None", ""),
    everywhere("it_prices_no_kernel_of_a_foreign_chip", "flagcore_kernel_costs", "kernel_costs(PACKAGE, chip) if _mine(chip) else None", "kernel_costs(PACKAGE, flagcore_chips()[0])"),
    everywhere("it_prices_no_collective_of_a_foreign_chip", "flagcore_collective_costs", "collective_table(PACKAGE, group.chip) if _mine(group.chip) else None", "collective_table(PACKAGE, flagcore_chips()[0])"),
    everywhere("it_supports_no_engine_on_a_foreign_chip", "flagcore_engine_support", "if not _mine(chip) or engine", "if engine"),
    everywhere("it_brings_no_knob_to_a_foreign_chip", "flagcore_knobs", "knobs(PACKAGE, chip, engine, engine_version) if _mine(chip) else None", "knobs(PACKAGE, chip, engine)"),
    everywhere("it_sets_no_variable_on_a_foreign_chip", "flagcore_environment", "engine_version, task) if _mine(chip) else None", "engine_version, task)"),
    everywhere("it_reads_no_log_of_a_foreign_chip", "flagcore_failure_patterns", "failure_patterns(PACKAGE, engine, engine_version) if _mine(chip) else None", "failure_patterns(PACKAGE, engine, engine_version)"),
    everywhere("it_prunes_nothing_on_a_foreign_chip", "flagcore_pruning_rules", f"[StayInPod()] if {TASK} else None", "[StayInPod()]"),
    everywhere("it_leaves_the_launch_on_a_foreign_chip_alone", "flagcore_prepare_launch", f"mine = {TASK}\n    return r", "mine = True\n    return r"),
    everywhere("it_reads_no_foreign_device", "flagcore_telemetry", "if mine else None", ""),
    Fault("it_says_nothing_of_an_unknown_engine", HOOKS, 'ENGINES = ("megatron",)', 'ENGINES = ("megatron", "no such engine")', "'no such engine' runs on A1", "None"),
)
COSTS = (
    Fault("levels_grow_and_end_at_all_devices", HOOKS, "topology_of(group) if", "type(topology_of(group))(levels=topology_of(group).levels[:0]) if", "flagcore_topology: answered levels", "docs/hooks.md"),
    Fault("an_outer_level_is_not_faster_than_the_innermost_one", CHIP, "value: 2.5e+10", "value: 2.5e+11", "level", "share in bytes", also=("a_network_card_is_slower_than_the_link",)),
    Fault("each_level_has_a_name_of_its_own", HOOKS, "topology_of(group) if", "type(topology_of(group))(levels=tuple(__import__('dataclasses').replace(x, name='one') for x in topology_of(group).levels)) if", "one, one", "name"),
    model("more_allocated_never_means_less_used", "device_used_bytes", "lambda self, reserved: reserved * 0.5", "A1: device_used_bytes"),
    model("the_memory_budget_of_the_user_counts", "capacity_bytes", "lambda self: 2.0**35", "budget"),
    model("a_trial_may_use_no_more_than_the_chip_has", "capacity_bytes", "lambda self: 1e9 if group.memory_bytes else 1e12", "capacity_bytes() is 1e+12"),
    Fault("an_idle_device_shows_a_small_share_of_its_memory", HOOKS, "1.2 * 2**30", "1.2 * 2**34", "device_used_bytes(0)", "give bytes"),
    Fault("an_idle_device_shows_a_small_share_of_its_memory", HOOKS, "1.2 * 2**30", "1.2", "device_used_bytes(0) = 1.2", "give bytes"),
    model("the_workspace_of_matrix_products_is_in_bytes", "workspace_bytes", "lambda self: 6e9", "workspace_bytes() = 6e+09"),
    Fault("kernel_times_are_answered_as_their_hook_promises", HOOKS, "return kernel_costs(PACKAGE, chip)", "return 'fast'", "flagcore_kernel_costs", "docs/hooks.md"),
    kernels("kernel_times_are_positive_and_grow_with_size", "host_copy_seconds", "lambda s, b: 1 / b", "host_copy_seconds"),
    kernels("the_host_needs_microseconds_to_launch_a_kernel", "launch_seconds", "lambda s: 8.0", "launch_seconds() = 8"),
    kernels("kernels_are_little_longer_in_runs_than_alone", "run_slowdown", "lambda s: 12.0", "run_slowdown() = 12"),
    Fault("no_kernel_is_faster_than_the_chips_peaks", CURVE, "gemm_share: 0.75", "gemm_share: 7.5", "a product in", "curve.yaml"),
    Fault("the_costs_that_are_shipped_are_answered", HOOKS, "return collective_table(PACKAGE, group.chip)", "return None", "flagcore_collective_costs does not tell", "collective_table"),
    Fault("shipped_costs_are_those_of_its_chips", "flagcore_acme/costs/b7/serving.yaml", "", "curve: {}\nsource: {kind: estimated, method: none}\n", "costs/b7", "small letters"),
    Fault("measured_kernels_have_a_provenance", "flagcore_acme/costs/a1/kernels.jsonl", "", '{"kernel": "launch", "us": 7}\n', "provenance.yaml is missing", "how", also=("kernel_times_are_answered_as_their_hook_promises",)),
    Fault("collectives_are_answered_as_their_hook_promises", HOOKS, "return collective_table(PACKAGE, group.chip)", "return 'fast'", "flagcore_collective_costs", "docs/hooks.md"),
    collectives("collective_times_grow_with_the_payload", "(2e9 - p) * 1e-9 * (r > 1)", "0.1 * (r > 1)", "a larger all_reduce of two devices"),
    Fault("measured_curves_keep_their_bandwidth", COLLECTIVES, "9.8e-03]", "9.8e-02]", "all_reduce of 4 falls", "last seconds"),
    Fault("no_measured_curve_is_faster_than_the_link", COLLECTIVES, "6.9e-04, 9.8e-03]", "2.9e-04, 2.8e-03]", "a device sends", "whole tensor"),
    collectives("a_collective_of_one_device_is_free", "1e-9 * p", "0.1 * (r > 1)", "a collective of one device takes time"),
    collectives("collectives_leave_kernels_a_share_of_the_compute", "1e-9 * p * (r > 1)", "1.0 * (r > 1)", "compute_share"),
    collectives("no_message_is_faster_than_the_memory_of_the_devices", "1e-15 * p * (r > 1)", "0.1 * (r > 1)", "a message of"),
)
ENGINES = (
    support("engine_support_is_answered_as_its_hook_promises", "preload", "'torch_acme'", "flagcore_engine_support"),
    Fault("an_engine_that_is_known_has_a_device_and_a_backend", HOOKS, '"cuda", "nccl"', '"cuda", None', "megatron on A1", "torch's names"),
    Fault("an_engine_that_is_not_sure_to_run_has_a_reason", HOOKS, 'reason=reason(PACKAGE, chip, engine, engine_version) or f"no run of {engine} has been reported here"', 'reason=""', "without a reason", "tell why"),
    Fault("refused_values_have_a_name_and_a_reason", QUIRKS, "acme_no_block", "no block", "no block", "reason"),
    Fault("refused_values_are_those_of_the_engines_knobs", QUIRKS, "knob: recompute_method", "knob: recompute_methods", "recompute_methods", "docs/spec.md"),
    Fault("what_an_engine_cannot_do_leaves_it_something", QUIRKS, "values: [block]", "values: [block, uniform]", "every value of recompute_method", "IMPOSSIBLE"),
    Fault("what_is_forced_has_a_name_and_a_reason", QUIRKS, "", "forced:\n  - {name: acme_x, engine: megatron, setting: attention, value: true, reason: so it is, source: *made_up}\n", "attention", "setting"),
    Fault("refused_values_are_those_of_the_engines_knobs", QUIRKS, "knob: recompute_method\n", "knob: settings.recompute_method\n", "settings.recompute_method", "docs/spec.md"),
    Fault("what_is_forced_is_a_setting_and_a_value_that_it_can_have", QUIRKS, "", "forced:\n  - {name: acme_x, engine: megatron, setting: settings.overlap_p2p_com, value: true, reason: so it is, source: *made_up}\n", "overlap_p2p_com = True", "train.settings"),
    Fault("what_is_forced_is_a_setting_and_a_value_that_it_can_have", QUIRKS, "", "forced:\n  - {name: acme_x, engine: megatron, setting: settings.overlap_grad_reduce, value: often, reason: so it is, source: *made_up}\n", "overlap_grad_reduce = 'often'", "train.settings"),
    Fault("visible_devices_are_told_by_a_variable", HOOKS, "visible_devices=discover.VISIBLE", 'visible_devices="ACME VISIBLE"', "ACME VISIBLE", "environment variable", also=("only_visible_devices_count_in_their_order",)),
    Fault("knobs_are_answered_as_their_hook_promises", KNOBS, "acme_overlap", "ACME-overlap", "ACME-overlap"),
    Fault("a_knob_says_what_it_is", KNOBS, "says: collectives run on a copy engine", "says: ' '", "acme_overlap", "sentence"),
    Fault("a_knob_is_none_that_the_engine_has_everywhere", KNOBS, "name: acme_overlap", "name: use_recompute", "use_recompute", "another name"),
    Fault("a_knob_with_a_gain_says_how_sure_it_is", KNOBS, "low: 0.9, high: 1.02", "low: 0.97, high: 0.97", "for sure", "interval"),
    Fault("the_effect_of_a_knob_is_estimated_or_has_a_source", KNOBS, "    effect: {kind: estimated, method: a guess}\n", "", "acme_overlap", "estimated"),
    Fault("knobs_are_for_known_engines_and_chips", KNOBS, "    says", "    chips: [Z9]\n    says", "'Z9'", "chips/*.yaml"),
)
ENVIRONMENTS = (
    Fault("variables_have_names_and_texts", HOOKS, "return environment(PACKAGE, chip, engine, engine_version, task) if", "return {'GEMS_VENDOR': 1, 'ACME_QUEUES': '1'} if", "flagcore_environment"),
    Fault("every_variable_has_a_meaning_and_a_source", ENVIRONMENT, "meaning: queues of a device", "meaning: ' '", "ACME_QUEUES", "what the variable does"),
    Fault("a_variable_is_listed_once_for_an_engine", ENVIRONMENT, "", "  - {name: ACME_QUEUES, value: '2', meaning: more, source: *made_up}\n", "ACME_QUEUES has 2 values", "keep one"),
    Fault("no_variable_names_another_vendor", ENVIRONMENT, "value: acme", "value: metax", "GEMS_VENDOR = 'metax'", "discover.py"),
    Fault("variables_of_every_process_are_left_alone", ENVIRONMENT, "name: ACME_QUEUES", "name: PATH", "PATH of megatron", "used"),
    Fault("variables_are_written_in_capital_letters", ENVIRONMENT, "name: ACME_QUEUES", "name: acme_queues", "acme_queues", "stack reads"),
    Fault("variables_are_for_known_engines_and_chips", ENVIRONMENT, "", "  - {name: ACME_X, value: '2', engines: [megatronn], meaning: more, source: *made_up}\n", "'megatronn'", "megatron"),
    Fault("trials_are_given_only_documented_variables", HOOKS, "return environment(PACKAGE, chip, engine, engine_version, task) if", "return {**environment(PACKAGE, chip, engine, engine_version, task), 'ACME_Y': '1'} if", "ACME_Y", "meaning"),
    Fault("trials_are_given_the_variables_that_have_a_value", HOOKS, "return environment(PACKAGE, chip, engine, engine_version, task) if", "return {'GEMS_VENDOR': 'acme'} if", "ACME_QUEUES", "flagcore_environment"),
    Fault("what_trials_are_given_does_not_depend_on_the_users_shell", HOOKS, "return environment(PACKAGE, chip, engine, engine_version, task) if", "import os\n    return {n: os.environ.get(n, v) for n, v in environment(PACKAGE, chip, engine, engine_version, task).items()} if", "the shell has set it", "the core keeps"),
    Fault("several_nodes_keep_what_one_needs", HOOKS, "return environment(PACKAGE, chip, engine, engine_version, task) if", "return {} if task and task.cluster.groups[0].nodes > 1 else environment(PACKAGE, chip, engine, engine_version, task) if", "two", "several nodes"),
)
FAILURES = (
    Fault("patterns_are_answered_as_their_hook_promises", QUIRKS, '"ACME out of memory"  # TODO', '"ACME (out of memory"  # TODO', "does not compile"),
    Fault("each_example_is_matched_first_by_its_own_pattern", QUIRKS, "RuntimeError: ACME out", "RuntimeError: ACME ran out", "failures[0].example", "pattern"),
    Fault("a_healthy_log_matches_no_pattern", QUIRKS, 'pattern: "ACME out of memory"', 'pattern: "memory"', "'memory' matches", "match more"),
    Fault("a_healthy_log_matches_no_pattern", QUIRKS, 'pattern: "ACME out of memory"', 'pattern: "ACME out of memory|(?i:warning)"', "of a good run", "match more"),
    Fault("no_pattern_takes_long_on_a_long_line", QUIRKS, 'pattern: "ACME out of memory"', 'pattern: "ACME out of memory|(a+)+$"', "takes more than", "nest"),
    Fault("no_pattern_takes_long_on_a_long_line", QUIRKS, 'pattern: "ACME out of memory"', 'pattern: "ACME out of memory|(x+x+)+y"', "takes more than", "nest"),
    Fault("failures_name_known_engines", QUIRKS, "    state: out_of_memory", "    engines: [megatron, megatronn]\n    state: out_of_memory", "megatronn", "engines are"),
)
RUNS = (
    reading("a_reading_has_known_names_and_units", "{**s, 'acme_mood': 1.0}", "acme_mood"),
    reading("readings_are_plausible_in_base_units", "{**s, 'power_watts': 61000.0}", "power_watts = 61000"),
    reading("memory_in_use_is_read", "{'power_watts': s['power_watts']}", "memory_used_bytes"),
    Fault("telemetry_is_answered_as_its_hook_promises", HOOKS, "return DeviceReading(TABLE, device.index) if mine", "return 'fine' if mine", "flagcore_telemetry", "docs/hooks.md"),
    Fault("a_device_is_read_however_its_name_is_written", HOOKS, "any(chip.answers_to(device.chip) for chip in flagcore_chips())", "any(device.chip in (chip.name, *chip.aliases) for chip in flagcore_chips())", "'acme A1'", "answers_to"),
    Fault("rules_are_answered_as_their_hook_promises", HOOKS, "return [StayInPod()] if", "return [StayInPod] if", "flagcore_pruning_rules", "docs/hooks.md"),
    Fault("a_rule_has_a_name_and_says_what_it_knows", HOOKS, 'name = "acme_pod"', 'name = "acme pod"', "acme pod", "flag explain"),
    Fault("a_rule_leaves_something_to_try", HOOKS, 'columns["tensor_model_parallel_size"] > 4', 'columns["tensor_model_parallel_size"] > 0', "acme_pod leaves no candidate", "prune only"),
    Fault("a_rule_leaves_something_to_try", HOOKS, 'columns["tensor_model_parallel_size"] > 4', 'columns["tensor_parallel"] > 4', "acme_pod is left out", "columns"),
    Fault("a_rule_judges_each_candidate_by_itself", HOOKS, 'columns["tensor_model_parallel_size"] > 4', "predictions.device_used_bytes > predictions.device_used_bytes.mean()", "acme_pod", "this row alone"),
    Fault("a_prepared_launch_still_runs_the_command", HOOKS, '("env", *launch.argv)', '("env", *launch.argv[1:])', "argv", "wrapper", also=("a_prepared_launch_can_be_stopped",)),
    Fault("a_prepared_launch_keeps_the_variables_it_was_given", HOOKS, '("env", *launch.argv))', '("env", *launch.argv), environment={"A": "b"})', "launch.environment", "replace"),
    Fault("a_prepared_launch_keeps_its_limits", HOOKS, '("env", *launch.argv))', '("env", *launch.argv), timeout_seconds=1e9)', "timeout_seconds", "user's"),
    Fault("a_prepared_launch_can_be_stopped", HOOKS, '("env", *launch.argv)', '("sh", "-c", "exit 0", *launch.argv)', "sleeping trial", "wrapper"),
)
DETECTION = (
    Fault("devices_are_found_quickly_or_not_at_all", DISCOVER, VISIBLE, f"one = Device(index=0, chip='ACME A1')\n    if not listing.rows: return (one, one)\n    {VISIBLE}", "one index", also=("*",)),
    Fault("without_its_tool_no_device_is_found", DISCOVER, VISIBLE, f"if not listing.rows: return (Device(index=0, chip='A0'),)\n    {VISIBLE}", "'A0'"),
    Fault("a_tool_that_crashes_lists_nothing", DISCOVER, VISIBLE, f"from flagcore.vendorkit.smi import run_tool\n    said = run_tool(TOOL)\n    assert not said or said.status in (0, None, -25), said.status\n    {VISIBLE}", "AssertionError", "no device"),
    Fault("a_tool_that_hangs_is_given_up", DISCOVER, VISIBLE, f"import subprocess, shutil\n    if shutil.which(TOOL): subprocess.run([TOOL], capture_output=True)\n    {VISIBLE}", "without a limit", "tool_output", also=("a_tool_that_crashes_lists_nothing", "a_tool_that_floods_or_prints_rubbish_lists_nothing")),
    Fault("a_tool_that_hangs_is_given_up", DISCOVER, "timeout_seconds: float = 10.0", "timeout_seconds: float = 100.0", "waits 100 s", "timeout_seconds"),
    Fault("a_tool_that_floods_or_prints_rubbish_lists_nothing", SMI, "        return Listing()\n", "        if 'ELF' in text: raise ValueError('rubbish')\n        return Listing()\n", "ValueError: rubbish", "skip the line"),
    Fault("a_tool_of_another_vendor_is_not_believed", SMI, "if TITLE not in text:", "text = text.replace('00000000:', '0000:')\n    if 'SMI' not in text:", "Nobody N-100", "title"),
    Fault("only_visible_devices_count_in_their_order", DISCOVER, VISIBLE, "return tuple(row.device for row in listing.rows)", "ACME_VISIBLE_DEVICES=1,0", "visible(found"),
    Fault("an_environment_that_names_another_vendor_hides_its_devices", DISCOVER, 'if named_otherwise("acme", OVERRIDES):', "if False:", "GEMS_VENDOR=somebody_else", "named_otherwise"),
    Fault("each_transcript_is_listed_with_its_source", "tests/smi/acme-smi-2.txt", "", "nothing\n", "no line for acme-smi-2.txt", "where it was printed"),
    Fault("transcripts_are_read_as_they_were_printed", SOURCES, "devices: 2", "devices: 3", "acme-smi-1.txt: flagcore_devices reads 2", "mend the parser"),
    Fault("a_transcript_that_is_cut_adds_no_device", SMI, "    if memory is None:\n        return None\n", "    memory = memory or (0.0, 2.0**34)\n    parts = [*parts, '', '']\n", "cut after", "leave it out"),
    Fault("a_transcript_that_is_garbled_adds_no_device", SMI, "    if TITLE not in text:\n        return Listing()", "    if '\\ufffd' in text and 'ELF' not in text:\n        raise ValueError('bytes')\n    if TITLE not in text:\n        return Listing()", "garbled", "skip the line"),
    Fault("names_in_transcripts_are_of_exactly_one_chip", CHIP, "chip: A1\nvendor: acme\naliases: [ACME A1]", "chip: A2\nvendor: acme\naliases: []", "a name of 0 chips", "aliases", also=("*",)),
)
SHIPPED = (
    Fault("quirks_can_be_read_and_each_has_a_source", QUIRKS, "the first step compiles for a minute, source: *made_up", "the first step compiles, source: {kind: estimated, method: ' '}", "notes[0]", "where it is from"),
    Fault("quirks_are_of_known_engines_and_chips", QUIRKS, "{says: the first", "{chips: [Z9], says: the first", "'Z9'", "chips/*.yaml"),
    Fault("what_quirks_refuse_is_told_by_the_hook", HOOKS, "refused=refused(PACKAGE, chip, engine, engine_version),", "refused=(),", "acme_no_block", "refused(PACKAGE"),
    Fault("how_well_founded_it_is_is_told", HOOKS, "return maturity(PACKAGE)", "return None", "flagcore_maturity says nothing", "maturity.yaml"),
    Fault("maturity_names_known_chips", MATURITY, "chips: [A1]\n    files", "chips: [A1, Z9]\n    files", "'Z9'", "chips/*.yaml"),
    Fault("maturity_tells_where_the_facts_of_each_chip_are_from", MATURITY, "facts of the chips", "facts", "A1 is missing", "list every chip"),
    Fault("maturity_names_the_transcripts_that_are_there", MATURITY, "[acme-smi-1.txt]", "[acme-smi-1.txt, acme-smi-9.txt]", "acme-smi-9.txt", "checked_on_transcripts"),
    Fault("what_was_measured_is_said_to_have_run_on_hardware", "flagcore_acme/costs/a1/provenance.yaml", "", "how: by hand\nsoftware: {driver: '1'}\ndate: 2026-11-02\n", "does not name a1", "claim"),
    Fault("costs_that_are_claimed_are_shipped_and_no_others", MATURITY, "collectives of four devices", "links", "collectives of a1", "agree"),
)
PACKAGING = (
    Fault("its_entry_point_names_the_module_of_hooks", PYPROJECT, 'acme = "flagcore_acme.hooks"', 'acme = "flagcore_acme.hook"', "names flagcore_acme.hooks", "entry-points"),
    Fault("it_names_the_releases_of_flagcore_that_it_goes_with", PYPROJECT, ",<0.2", "", "no upper end", "<0.2"),
    Fault("it_names_the_releases_of_flagcore_that_it_goes_with", PYPROJECT, ">=0.1,<0.2", ">=7,<8", "does not include", "widen"),
    Fault("it_needs_no_framework_and_no_engine", PYPROJECT, "dependencies = [", 'dependencies = ["torch>=2.0", ', "torch>=2.0", "take it out"),
    Fault("its_version_is_one_that_pip_can_order", PYPROJECT, 'version = "0.1.0"', 'version = "first"', "'first'", "0.1.0"),
    Fault("it_says_what_it_is_and_under_which_license", PYPROJECT, 'license = "Apache-2.0"\n', "", "license is missing", "license"),
    Fault("it_tells_type_checkers_that_it_is_typed", "flagcore_acme/py.typed", "", "", "py.typed is missing", "empty file"),
    Fault("its_readme_names_all_chips", "README.md", "", "", "README.md is missing", "write one"),
    Fault("its_wheel_holds_the_data_that_the_package_reads", PYPROJECT, 'packages = ["flagcore_acme"]', 'packages = ["flagcore_acme"]\nexclude = ["*.yaml"]', "leaves out flagcore_acme/", "packages ="),
    Fault("its_own_tests_run_this_kit", "tests/test_conformance.py", "", "", "PluginConformance", "docs/write-a-plugin.md"),
)
FAULTS = (*MODULE, *CHIPS, *FOREIGN, *COSTS, *ENGINES, *ENVIRONMENTS, *FAILURES, *RUNS, *DETECTION, *SHIPPED, *PACKAGING)
