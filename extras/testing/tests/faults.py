"""The faults: one edit of the healthy plugin each, with the check that must find it and what its message must name."""

# fmt: off
from extras.testing.tests.faulty import (
    CHIP,
    COLLECTIVES,
    CURVE,
    DISCOVER,
    ENGINES_FILE,
    ENVIRONMENT,
    FACTS,
    HOOKS,
    KNOBS,
    MATURITY,
    PYPROJECT,
    QUIRKS,
    RUN,
    RUN_FILE,
    SOURCES,
    Fault,
)

ARGUMENTS = {
    "chips": "name",
    "devices": "environment",
    **dict.fromkeys(("topology", "collective_costs"), "group"),
    "memory_model": "group, engine, kind",
    "kernel_costs": "chip, kind",
    "engine_support": "chip, engine, engine_version, kind",
    "knobs": "chip, engine, engine_version",
    "environment": "chip, engine, engine_version, task, kind",
    "telemetry": "device",
    "check_task": "task, engine_version",
    "health": "chip",
    "measured_chip": "chip",
    "vendor": "environment",
}
"""The arguments of each hook of the healthy plugin."""

ENGINE = "from flagcore.domain.engine import "

OVERRIDE = """

class BrokenPlugin(AcmePlugin):
    @hookimpl
    def flagcore_{name}(self, {arguments}):
        {before}
        own = super().flagcore_{name}({passed})
        {body}


plugin = BrokenPlugin(**vars(plugin))
"""


def hook(check: str, name: str, body: str, names: str, *, before: str = "", arguments: str = "", also: tuple[str, ...] = ()) -> Fault:
    """Override a hook. `body` returns the answer and may use `own`, that of the healthy plugin."""
    passed_arguments = ARGUMENTS[name]
    override = OVERRIDE.format(name=name, arguments=arguments or passed_arguments, passed=passed_arguments, before=before, body=body)
    return Fault(check, HOOKS, "", override, names, also)


def module(check: str, statements: str, names: str, also: tuple[str, ...] = ()) -> Fault:
    """Run statements when the module of hooks is imported."""
    return Fault(check, HOOKS, "from flagcore_acme", f"{statements}\nfrom flagcore_acme", names, also)


def foreign(name: str) -> Fault:
    """Let a hook answer for any vendor's chip as for its own."""
    subject = ARGUMENTS[name].split(", ")[0]
    own_chip = "self.flagcore_chips('')[0]"
    group = f"[replace(task.cluster.groups[0], chip={own_chip})]"
    before_text = {
        "chip": f"chip = {own_chip}",
        "group": f"group = replace(group, chip=replace({own_chip}))",
        "task": f"task = replace(task, cluster=replace(task.cluster, groups=tuple({group})))",
        "device": f"device = replace(device, chip={own_chip}.name)",
    }[subject]
    also = ("topologies_fit_their_chips",) if name == "topology" else ()
    return hook("foreign_chips_get_no_answer", name, "return own", f"flagcore_{name}", before=before_text, also=also)


def memory(check: str, method: str, body: str) -> Fault:
    """Override a method of the memory model."""
    type_expression = f"type('Model', (PlainMemory,), {{'{method}': {body}}})"
    answer = f"return own and {type_expression}.of(group, fragmentation=0.02, context_bytes=CONTEXT_BYTES)"
    return hook(check, "memory_model", answer, method)


def kernels(check: str, method: str, body: str) -> Fault:
    """Override a method of the kernel costs."""
    type_expression = f"type('Costs', (), {{'__getattr__': lambda self, name: getattr(own, name), '{method}': {body}}})()"
    return hook(check, "kernel_costs", f"return own and {type_expression}", method)


def collectives(check: str, seconds: str, taken: str, names: str) -> Fault:
    """Let collectives take `seconds` for payload p and ranks r, and the share `taken` of the compute."""
    type_expression = f"{{'seconds': lambda self, kind, p, r, s: {seconds}, 'compute_share': lambda self, r, s: {taken}}}"
    return hook(check, "collective_costs", f"return own and type('Costs', (), {type_expression})()", names)


def reading(check: str, figures: str, names: str, also: tuple[str, ...] = ()) -> Fault:
    """Let telemetry answer `figures`, an expression of the tool's own `figures`."""
    type_expression = f"type('Reading', (), {{'sample': lambda self: (lambda figures: {figures})(own.sample())}})()"
    return hook(check, "telemetry", f"return own and {type_expression}", names, also=also)


def support(check: str, change: str, names: str, also: tuple[str, ...] = ()) -> Fault:
    """Change a field of the support of an engine."""
    return hook(check, "engine_support", f"return own and replace(own, {change})", names, also=also)


MODULE = (
    Fault("plugin_loads", HOOKS, "", "\n\nplugin.__dict__['flagcore_chip'] = hookimpl(lambda: ())\n", "flagcore_chips"),
    hook("plugin_loads", "memory_model", "return own", "cluster", arguments="group, cluster"),
    module("import_loads_no_framework", "import sys, types\nsys.modules['pymxsml'] = types.ModuleType('pymxsml')", "pymxsml"),
    module("import_loads_no_framework", "try:\n    import pynvml\nexcept ImportError:\n    pass", "pynvml"),
    module("import_has_no_side_effects", "print('hello')", "hello"),
    module("import_has_no_side_effects", "import os, sys, types\nsys.modules['_acme'] = types.ModuleType('_acme')\nos.environ['ACME_Z'] = '1'", "ACME_Z"),
    module("import_has_no_side_effects", "import time\ntime.sleep(2.5)", "takes"),
    module("imports_only_public_modules", "import flagcore.tuner.loop", "flagcore.tuner.loop"),
    hook("answers_are_reproducible", "environment", "return own and {**own, 'GEMS_VENDOR': str(__import__('time').time_ns())}", "flagcore_environment", also=("variables_do_not_depend_on_the_shell", "variables_do_not_select_another_vendor")),
    hook("hooks_have_no_side_effects", "chips", "print('loading')\n        return own", "loading"),
    hook("hooks_have_no_side_effects", "chips", "__import__('warnings').simplefilter('ignore')\n        return own", "flagcore_chips"),
    hook("hooks_have_no_side_effects", "topology", "import signal\n        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n        return own", "flagcore_topology", also=("topology_is_valid",)),
    hook("hooks_have_no_side_effects", "check_task", "import os\n        os.environ['ACME_X'] = 'a' + os.environ.get('ACME_X', '')\n        return own", "ACME_X"),
    hook("hooks_do_not_modify_arguments", "devices", "environment['ACME'] = '1'\n        return own", "flagcore_devices"),
    hook("hooks_write_no_files", "topology", "open('acme.log', 'w').close()\n        return own", "acme.log"),
    module("hooks_return_quickly", "import os\nimport sys\nif sys.argv[0].endswith('hook_runner.py'):\n    os._exit(3)", "import"),
    hook("hooks_return_quickly", "topology", "__import__('time').sleep(3.5)\n        return own", "flagcore_topology"),
)
CHIPS = (
    hook("chips_and_devices_are_valid", "chips", "return [*own, 'A2']", "flagcore_chips", also=("foreign_chips_get_no_answer",)),
    Fault("chips_and_devices_are_valid", CHIP, "kind: estimated, method", "kind: guessed, method", "a1.yaml: memory_bytes.source.kind"),
    Fault("chips_and_devices_are_valid", CHIP, "devices_per_node: 8", "devices_per_node: 8\ndevices_per_node: 16", "the key devices_per_node is repeated"),
    Fault("chips_and_devices_are_valid", CHIP, "TODO: made up, replace it by a figure with its source", " ", "memory_bytes.source.method"),
    Fault("sources_are_dated_and_found", CHIP, "{kind: estimated, method: \"TODO", "{kind: measured, how: \"TODO", "memory_bytes.source is measured"),
    Fault("sources_are_dated_and_found", COLLECTIVES, "2026-11-02", "2/11/2026", "collectives.yaml: source.date"),
    Fault("chips_and_devices_are_valid", "flagcore_acme/chips/b2.yaml", "", "chip: B2\nvendor: acme\naliases: [ACME A1]\n", "is already a name of", also=("chip_files_match_chip_names",)),
    Fault("chip_names_are_own", CHIP, '["ACME A1"]', '["ACME A1", cpu]', "plugin cpu"),
    Fault("chip_names_are_clean", CHIP, '["ACME A1"]', '["ACME A1", "A1  OAM"]', "A1  OAM"),
    Fault("chip_names_are_clean", CHIP, "vendor: acme", "vendor: Acme", "vendor is Acme", also=("*",)),
    Fault("chip_files_match_chip_names", "flagcore_acme/chips/b2.yaml", "", "chip: A2\nvendor: acme\n", "b2.yaml: chip is A2", also=("readme_names_all_chips", "maturity_matches_the_files",)),
    Fault("chip_files_match_chip_names", "flagcore_acme/chips/b.yaml", "", "chip: B2\nvendor: acme\n", "b.yaml: chip is B2", also=("readme_names_all_chips", "maturity_matches_the_files",)),
    Fault("chip_files_match_chip_names", CHIP, "", "---\nchip: B2\nvendor: acme\n", "a1.yaml (B2): chip is B2", also=("readme_names_all_chips", "maturity_matches_the_files",)),
    Fault("figures_are_plausible", CHIP, "value: 2.5e+10", "value: 25.0", "A1: nic_bytes_per_second = 25"),
    Fault("figures_are_plausible", CHIP, "  fp16:", "  fp64: {value: 8.0e+13, source: *made_up}\n  fp16:", "fp32 = 4e+13 is 0.5 times"),
    Fault("figures_are_plausible", CHIP, "  fp16:", "  fp8: {value: 1.2e+15, source: *made_up}\n  fp16:", "fp8"),
    Fault("figures_are_plausible", CHIP, "  bf16: {value: 3.0e+14, source: *made_up}\n  fp16: {value: 3.0e+14", "  bf16: {value: 6.0e+14, source: *made_up}\n  fp16: {value: 6.0e+14", "375"),
    Fault("figures_are_plausible", CHIP, "  fp16:", "  int8: {value: 3.0e+14, source: *made_up}\n  fp16:", "int8"),
    Fault("figures_are_plausible", CHIP, "fp32: {value: 4.0e+13", "fp32: {value: 7.0e+12", "42.9"),
    Fault("notes_and_sources_agree_with_peaks", CHIP, "fp16: {value: 3.0e+14, source: *made_up}", "fp16: {value: 3.0e+14, source: {kind: datasheet, document: 'A1 brief, structured sparsity'}}", "sparsity"),
    Fault("kernel_times_are_plausible", CURVE, "gemm_share: 0.75", "gemm_share: 0.25", "% of the peak in bf16"),
    Fault("figures_are_plausible", CHIP, "value: 2.5e+10", "value: 2.0e+11", "nic_bytes_per_second = 2e+11"),
    Fault("figures_are_plausible", CHIP, "devices_per_node: 8", "devices_per_node: 8\nhost_bytes_per_second: {value: 1.6e+10, source: *made_up}", "times host_bytes_per_second"),
    Fault("figures_are_plausible", CHIP, "fp16: {value: 3.0e+14", "fp16: {value: 5.0e+13", "is 6 times", also=("curves_are_plausible", "figures_are_plausible")),
    Fault("figures_are_plausible", CHIP, "bf16: {value: 3.0e+14", "bf16: {value: 6.0e+14", "is 2 times", also=("figures_are_plausible",)),
    Fault("figures_are_plausible", CHIP, "value: 2.0e+11", "value: 1.6e+12", "is 1 times memory"),
    Fault("figures_are_plausible", CHIP, "value: 1.6e+12", "value: 4.0e+10", "7.5e+03 times"),
    Fault("figures_are_plausible", CHIP, "  name: ACMELink", "  name: ACMELink\n  latency_seconds: 5.0", "= 5", also=("levels_are_plausible",)),
    Fault("link_domains_are_possible", CHIP, "  name: ACMELink", "  name: ACMELink\n  domain_size: 3", "= 3 does not", also=("collectives_of_one_group_agree",)),
)
FOREIGN = (
    *(foreign(name) for name in ("topology", "memory_model", "kernel_costs", "collective_costs", "engine_support", "knobs")),
    *(foreign(name) for name in ("environment", "check_task", "telemetry")),
    hook("unknown_engines_get_no_answer", "engine_support", "return own or super().flagcore_engine_support(chip, engine, engine_version, 'train')", "A1"),
)
COSTS = (
    hook("topology_is_valid", "topology", "return own and type(own)(levels=own.levels[:0])", "flagcore_topology"),
    hook("levels_are_plausible", "topology", "return own and type(own)(levels=tuple(replace(level, name='one') for level in own.levels))", "one, one"),
    memory("memory_models_are_plausible", "device_used_bytes", "lambda self, reserved: reserved * 0.5"),
    memory("memory_models_are_plausible", "capacity_bytes", "lambda self: 2.0**35"),
    memory("memory_models_are_plausible", "capacity_bytes", "lambda self: 1e9 if self.capacity < 2**33 else 1e12"),
    memory("memory_models_are_plausible", "workspace_bytes", "lambda self: 6e9"),
    Fault("memory_models_are_plausible", HOOKS, "1.2 * 2**30", "1.2 * 2**34", "device_used_bytes", also=("constants_have_the_size_that_they_state",)),
    Fault("memory_models_are_plausible", HOOKS, "1.2 * 2**30", "1.2", "device_used_bytes", also=("memory_models_are_plausible", "constants_have_the_size_that_they_state")),
    hook("memory_model_is_valid", "memory_model", "return own and 'large'", "flagcore_memory_model"),
    hook("kernel_costs_are_valid", "kernel_costs", "return own and 'fast'", "flagcore_kernel_costs"),
    kernels("kernel_times_are_plausible", "host_copy_seconds", "lambda self, b: 1 / b"),
    kernels("kernel_times_are_plausible", "launch_seconds", "lambda self: 8.0"),
    kernels("kernel_times_are_plausible", "run_slowdown", "lambda self: 12.0"),
    hook("shipped_costs_are_used", "collective_costs", "return None", "flagcore_collective_costs"),
    hook("collective_costs_are_valid", "collective_costs", "return own and 'fast'", "flagcore_collective_costs"),
    collectives("collective_times_are_plausible", "(2e9 - p) * 1e-9 * (r > 1)", "0.1 * (r > 1)", "all_reduce"),
    collectives("collective_times_are_plausible", "1e-9 * p", "0.1 * (r > 1)", "one device"),
    collectives("collective_times_are_plausible", "1e-9 * p * (r > 1)", "1.0 * (r > 1)", "compute_share"),
    collectives("collective_times_are_plausible", "1e-15 * p * (r > 1)", "0.1 * (r > 1)", "A1"),
    Fault("levels_are_plausible", CHIP, "value: 2.5e+10", "value: 2.5e+11", "level", also=("figures_are_plausible",)),
    Fault("kernel_times_are_plausible", CURVE, "gemm_share: 0.75", "gemm_share: 7.5", "a product in", also=("curves_are_plausible",)),
    Fault("shipped_costs_belong_to_chips", "flagcore_acme/costs/b7/serving.yaml", "", "curve: {}\nsource: {kind: estimated, method: none}\n", "costs/b7"),
    Fault("shipped_costs_belong_to_chips", "flagcore_acme/costs/same_as.yaml", "", "curve.yaml: [{same_as: A1, chips: [B7], source: {kind: estimated, method: none}}]\n", "names b7", also=("maturity_matches_the_files",)),
    Fault("shipped_costs_belong_to_chips", "flagcore_acme/costs/a1/kernels.jsonl", "", "{\"kernel\": \"launch\", \"us\": 7}\n", "provenance.yaml is missing", also=("kernel_costs_are_valid",)),
    Fault("measured_curves_are_plausible", COLLECTIVES, "9.8e-03]", "9.8e-02]", "all_reduce of 4 falls"),
    Fault("measured_curves_are_plausible", COLLECTIVES, "6.9e-04, 9.8e-03]", "2.9e-04, 2.8e-03]", "a device sends"),
)
ENGINES = (
    hook("foreign_chips_get_no_answer", "check_task", f"{ENGINE}TaskAdvice\n        return own or TaskAdvice()", "flagcore_check_task"),
    hook("check_task_is_valid", "check_task", "return own and 'no'", "flagcore_check_task"),
    hook("advice_on_tasks_is_complete", "check_task", "return own and replace(own, impossible='too small')", "too small"),
    hook("advice_on_tasks_is_complete", "check_task", "return own and replace(own, notes=(' ',))", "A1: a note"),
    hook("advice_on_tasks_is_complete", "check_task", f"{ENGINE}PreferredSetting\n        bf16 = PreferredSetting(setting='bf16', value=True, reason='r')\n        return own and replace(own, preferred=(bf16,))", "bf16"),
    support("engine_support_is_valid", "preload='torch_acme'", "flagcore_engine_support"),
    support("engine_support_is_complete", "distributed_backend=None", "A1 lacks"),
    support("engine_support_is_complete", "reason=''", "on A1"),
    Fault("engine_support_is_complete", ENGINES_FILE, "distributed_backend: nccl", "distributed_backend: nccl, stack: {implementation: local, settings: {moe_groupd_gemm: true}, source: {kind: estimated, method: a guess}}", "moe_groupd_gemm"),
    support("engine_support_is_complete", "visible_devices=('ACME VISIBLE',)", "ACME VISIBLE", also=("visible_devices_are_respected",)),
    Fault("rules_of_engines_are_complete_and_known", QUIRKS, "acme_no_block", "no block", "no block"),
    Fault("rules_of_engines_are_complete_and_known", QUIRKS, "knob: recompute_method", "knob: recompute_methods", "recompute_methods"),
    Fault("refused_values_leave_candidates", QUIRKS, "values: [block]", "values: [block, uniform]", "every value of recompute_method"),
    Fault("rules_of_engines_are_complete_and_known", QUIRKS, "", "forced:\n  - {name: acme_x, engine: megatron, setting: attention, value: true, reason: so it is, source: *made_up}\n", "attention"),
    Fault("rules_of_engines_are_complete_and_known", QUIRKS, "knob: recompute_method\n", "knob: settings.recompute_method\n", "settings.recompute_method"),
    Fault("rules_of_engines_are_complete_and_known", QUIRKS, "", "forced:\n  - {name: acme_x, engine: megatron, setting: settings.overlap_p2p_com, value: true, reason: so it is, source: *made_up}\n", "overlap_p2p_com = True"),
    Fault("rules_of_engines_are_complete_and_known", QUIRKS, "", "forced:\n  - {name: acme_x, engine: megatron, setting: settings.overlap_grad_reduce, value: often, reason: so it is, source: *made_up}\n", "overlap_grad_reduce = 'often'"),
    Fault("knobs_are_valid", KNOBS, "acme_overlap", "ACME-overlap", "ACME-overlap"),
    Fault("knobs_are_complete", KNOBS, "says: collectives run on a copy engine", "says: ' '", "acme_overlap"),
    Fault("knobs_are_complete", KNOBS, "name: acme_overlap", "name: use_recompute", "use_recompute"),
    Fault("knobs_are_complete", KNOBS, "low: 0.9, high: 1.02", "low: 0.97, high: 0.97", "acme_overlap"),
    Fault("knobs_are_complete", KNOBS, "    effect: {kind: estimated, method: a guess}\n", "", "acme_overlap"),
    Fault("entries_apply_somewhere", KNOBS, "    says", "    chips: [Z9]\n    says", "'Z9'"),
)
ENVIRONMENTS = (
    hook("environment_is_valid", "environment", "return own and {'GEMS_VENDOR': 1, 'ACME_QUEUES': '1'}", "flagcore_environment"),
    hook("variables_are_documented", "environment", "return own and {**own, 'ACME_Y': '1'}", "ACME_Y"),
    hook("documented_variables_are_set", "environment", "return own and {'GEMS_VENDOR': 'acme'}", "ACME_QUEUES"),
    hook("variables_do_not_depend_on_the_shell", "environment", "import os\n        return own and {name: os.environ.get(name, value) for name, value in own.items()}", "GEMS_VENDOR"),
    Fault("environment_is_valid", ENVIRONMENT, "meaning: queues of a device", "meaning: ''", "variables[1].meaning"),
    Fault("variables_are_listed_once", ENVIRONMENT, "", "  - {name: ACME_QUEUES, value: '2', meaning: more, source: *made_up}\n", "ACME_QUEUES has 2 values"),
    Fault("variables_do_not_select_another_vendor", ENVIRONMENT, "value: acme", "value: metax", "GEMS_VENDOR = 'metax'"),
    Fault("system_variables_are_not_set", ENVIRONMENT, "name: ACME_QUEUES", "name: PATH", "PATH of", also=("variables_are_spelled_correctly",)),
    Fault("environment_is_valid", ENVIRONMENT, "name: ACME_QUEUES", "name: acme_queues", "acme_queues"),
    Fault("entries_apply_somewhere", ENVIRONMENT, "", "  - {name: ACME_X, value: '2', engines: [megatronn], meaning: more, source: *made_up}\n", "'megatronn'"),
)
FAILURES = (
    Fault("check_task_is_valid", QUIRKS, "\"ACME out of memory\"  # TODO", "\"ACME (out of memory\"  # TODO", "does not compile"),
    Fault("failure_examples_match", QUIRKS, "RuntimeError: ACME out", "RuntimeError: ACME ran out", "failures[0].example"),
    Fault("failure_patterns_match_only_their_failures", QUIRKS, "pattern: \"ACME out of memory\"", "pattern: \"memory\"", "'memory' matches", also=("failure_patterns_match_only_their_failures",)),
    Fault("entries_apply_somewhere", QUIRKS, "    state: out_of_memory", "    engines: [megatron, megatronn]\n    state: out_of_memory", "megatronn"),
)
RUNS = (
    reading("telemetry_is_plausible", "{**figures, 'acme_mood': 1.0}", "acme_mood"),
    reading("telemetry_is_plausible", "{**figures, 'power_watts': 61000.0}", "power_watts"),
    reading("telemetry_is_plausible", "{'power_watts': figures['power_watts']}", "memory_used_bytes", also=("telemetry_is_what_the_tool_prints",)),
    hook("telemetry_is_valid", "telemetry", "return own and 'fine'", "flagcore_telemetry"),
    hook("telemetry_accepts_chip_aliases", "telemetry", "return own if device.chip in ('A1', 'ACME A1') else None", "acme A1"),
)
DETECTION = (
    hook("detection_is_quick", "devices", "return own or (Device(index=0, chip='ACME A1'),) * 2", "one index", also=("*",)),
    hook("missing_tool_lists_no_devices", "devices", "return own or (Device(index=0, chip='A0'),)", "A0", also=("visible_devices_are_respected", "vendor_selection_is_respected")),
    hook("broken_tool_lists_no_devices", "devices", "from flagcore_vendorkit.machine import run_tool\n        output = run_tool('acme-smi')\n        assert not output or output.status in (0, None, -25)\n        return own", "AssertionError"),
    hook("hanging_tool_is_stopped", "devices", "import shutil, subprocess\n        if shutil.which('acme-smi'): subprocess.run(['acme-smi'], capture_output=True)\n        return own", "acme-smi", also=("broken_tool_lists_no_devices",)),
    Fault("hanging_tool_is_stopped", DISCOVER, 'listing=list_with(read, "acme-smi")', 'listing=lambda seconds: list_with(read, "acme-smi")(100.0)', "100 s"),
    hook("visible_devices_are_respected", "devices", "return own and tuple(row.device for row in self.detector.rows())", "ACME_VISIBLE_DEVICES"),
    hook("vendor_selection_is_respected", "devices", "return own or tuple(row.device for row in self.detector.rows())", "GEMS_VENDOR", also=("visible_devices_are_respected",)),
    Fault("broken_tool_lists_no_devices", DISCOVER, "        return Listing()\n", "        if 'ELF' in text: raise ValueError('rubbish')\n        return Listing()\n", "ValueError: rubbish"),
    Fault("output_of_other_vendors_is_ignored", DISCOVER, "if TITLE not in text:", "text = text.replace('00000000:', '0000:')\n    if 'SMI' not in text:", "Nobody N-100"),
    Fault("transcripts_have_sources", "tests/smi/acme-smi-2.txt", "", "nothing\n", "acme-smi-2.txt"),
    Fault("transcripts_are_parsed", SOURCES, "devices: 2", "devices: 3", "acme-smi-1.txt"),
    Fault("truncated_transcripts_add_no_devices", DISCOVER, "    if memory is None:\n        return None\n", "    memory = memory or (0.0, 2.0**34)\n    parts = [*parts, '', '']\n", "truncated"),
    Fault("garbled_transcripts_add_no_devices", DISCOVER, "    if TITLE not in text:\n        return Listing()", "    if '\\ufffd' in text and 'ELF' not in text:\n        raise ValueError('bytes')\n    if TITLE not in text:\n        return Listing()", "garbled"),
    Fault("transcript_names_match_one_chip", CHIP, 'chip: "A1"\nvendor: acme\naliases: ["ACME A1"]', "chip: A2\nvendor: acme\naliases: []", "a name of 0 chips", also=("*",)),
)
SHIPPED = (
    hook("quirks_are_used", "check_task", "return own and replace(own, rules=())", "acme_no_block"),
    Fault("maturity_matches_the_files", MATURITY, "", "", "has no maturity.yaml"),
    Fault("engine_support_is_valid", QUIRKS, "the first step compiles for a minute, source: *made_up", "the first step compiles, source: {kind: estimated, method: ' '}", "notes[0]"),
    Fault("entries_apply_somewhere", QUIRKS, "{note: the first", "{chips: [Z9], note: the first", "'Z9'"),
    Fault("maturity_matches_the_files", MATURITY, 'chips: ["A1"]\n    files', "chips: [A1, Z9]\n    files", "'Z9'", also=("maturity_matches_the_transcripts",)),
    Fault("maturity_matches_the_files", MATURITY, "facts of the chips", "facts", "A1 is missing"),
    Fault("maturity_matches_the_transcripts", MATURITY, "[acme-smi-1.txt]", "[acme-smi-1.txt, acme-smi-9.txt]", "acme-smi-9.txt"),
    Fault("maturity_matches_the_files", "flagcore_acme/costs/a1/provenance.yaml", "", "how: by hand\nsoftware: {driver: '1'}\ndate: 2026-11-02\n", "a1"),
    Fault("maturity_matches_the_files", MATURITY, "collectives of four devices", "links", "collectives of a1"),
)
PACKAGING = (
    Fault("metadata_is_complete", PYPROJECT, "flagcore_acme.hooks:plugin", "flagcore_acme.hook:plugin", "flagcore_acme.hooks:plugin"),
    Fault("dependencies_are_limited", PYPROJECT, ",<0.2", "", "flagcore>=0.1"),
    Fault("dependencies_are_limited", PYPROJECT, ">=0.1,<0.2", ">=7,<8", "does not include"),
    Fault("dependencies_are_limited", PYPROJECT, "dependencies = [", "dependencies = [\"torch>=2.0\", ", "torch>=2.0"),
    Fault("metadata_is_complete", PYPROJECT, "version = \"0.1.0\"", "version = \"first\"", "'first'"),
    Fault("metadata_is_complete", PYPROJECT, "license = \"Apache-2.0\"\n", "", "license is missing"),
    Fault("readme_names_all_chips", "README.md", "", "", "README.md is missing"),
    Fault("wheel_contains_data_files", PYPROJECT, "packages = [\"flagcore_acme\"]", "packages = [\"flagcore_acme\"]\nexclude = [\"*.yaml\"]", "leaves out flagcore_acme/"),
)
SHEET = "{kind: published, where: \"acme.example/sheet, %s\"}"
LINK = "    value: 2.0e+11\n    source: {kind: estimated, method: \"TODO: made up, one way\"}"
NIC = "nic_bytes_per_second: {value: 2.5e+10, source: *made_up}"
MEMORY = "value: 68719476736"


def link(value: str, words: str, check: str, names: str) -> Fault:
    """State another rate of the link, with words of its source."""
    return Fault(check, CHIP, LINK, f"    value: {value}\n    source: {SHEET % words}", names)


def adapter(value: str, words: str, also: tuple[str, ...] = ()) -> Fault:
    """State another rate of the adapter, with words of its source."""
    new = f"nic_bytes_per_second: {{value: {value}, source: {SHEET % words}}}"
    return Fault("figures_match_their_sources", CHIP, NIC, new, "A1: nic_bytes_per_second", also=also)


def printing(name: str, method: str) -> Fault:
    """Let a method of a hook's object print to stdout."""
    method_code = f"'{method}': lambda self, *given: (print('{method} is called'), getattr(own, '{method}')(*given))[1]"
    loud_type = f"type('Loud', (), {{'__getattr__': lambda self, part: getattr(own, part), {method_code}}})()"
    return hook("hooks_have_no_side_effects", name, f"return own and {loud_type}", f"{method} is called")


MEASURED = (
    link("4.0e+11", "400 GB/s in both directions", "link_rates_are_one_way_and_of_all_links", "'both directions'"),
    link("2.0e+11", "200 GB/s", "link_rates_are_one_way_and_of_all_links", "does not say"),
    link("2.0e+11", "200 Gb/s one way", "figures_match_their_sources", "200 Gb/s"),
    adapter(
        "4.0e+11",
        "one adapter of 400 Gb/s for each device",
        also=("levels_are_plausible", "figures_are_plausible"),
    ),
    adapter("5.0e+10", "400 Gb/s per node"),
    Fault("memory_is_in_binary_units", CHIP, MEMORY, "value: 64000000000", "64 GB", also=("memory_matches_transcripts",)),
    Fault("memory_matches_transcripts", CHIP, MEMORY, "value: 65536000000", "65536 MiB"),
    Fault("memory_matches_transcripts", CHIP, MEMORY, "value: 899678208", "acme-smi-1.txt", also=("figures_are_plausible", "memory_models_are_plausible", "figures_are_plausible")),
    Fault("figures_are_plausible", CHIP, NIC, f"{NIC}\ntdp_watts: {{value: 350000, source: *made_up}}", "A1: tdp_watts", also=("figures_are_plausible",)),
    printing("memory_model", "reserved_bytes"),
    printing("telemetry", "sample"),
    hook("hooks_return_quickly", "memory_model", "import time\n        return own and type('Slow', (), {'__getattr__': lambda self, name: getattr(own, name), 'capacity_bytes': lambda self: time.sleep(3.5) or own.capacity_bytes()})()", "flagcore_memory_model"),
    Fault("chip_names_are_own", CHIP, '["ACME A1"]', '["ACME A1", ACME cpu]', "plugin cpu"),
    Fault("transcripts_are_parsed", SOURCES, "  lists:", "  left_out: 2\n  lists:", "expected 2"),
    Fault("transcripts_are_parsed", "tests/smi/acme-smi-1.txt", "+---", "| 2    ACME A1                  | 0000:10:00.0         | 0%                    |\n| 40C  61W / 400W               | broken               |                       |\n+---", "expected 0"),
    hook("topologies_fit_their_chips", "topology", "return own and topology_of(replace(group, chip=self.flagcore_chips('')[0]))", "the user stated"),
    reading("telemetry_is_of_its_own_column", "{**figures, 'memory_used_bytes': 65536 * 2**20}", "all of its memory", also=("memory_models_are_plausible",)),
    Fault("transcripts_are_parsed", DISCOVER, "memory_bytes=int(memory[1])", "memory_bytes=int(memory[0])", "120 MiB", also=("telemetry_is_of_its_own_column",)),
    Fault("transcripts_are_parsed", DISCOVER, "memory_bytes=int(memory[1])", "memory_bytes=int(memory[1] / 2**20)", "expected 2 'ACME A1' with 65536 MiB"),
)
SPELLING = (
    Fault("variables_are_spelled_correctly", ENVIRONMENT, "", "  - {name: NCCL_SOCKET_IFNAM, used: eth0, meaning: interface, source: *made_up}\n", "NCCL_SOCKET_IFNAM is not known"),
    Fault("variables_are_spelled_correctly", DISCOVER, 'vendor_variables=("GEMS_VENDOR",)', 'vendor_variables=("GEMS_VENDOR", "GEMS_VENDRO")', "discover.py: GEMS_VENDRO"),
    Fault("variables_hold_for_all_users", ENVIRONMENT, "value: '1'", "value: 'a{interfce}'", "{interfce}"),
    Fault("variables_hold_for_all_users", ENVIRONMENT, "", "  - {name: ACME_SOCKET_IFNAME, value: eth0, meaning: interface, source: *made_up}\n", "'eth0'"),
    Fault("variables_hold_for_all_users", ENVIRONMENT, "", "  - {name: ACME_VISIBLE_DEVICES, value: '0,1', meaning: devices, source: *made_up}\n", "'0,1'"),
    Fault("variables_have_their_meaning", ENVIRONMENT, "", "  - {name: ACC_VISIBLE_DEVICES, used: '0', meaning: devices, source: *made_up}\n", "ACC_VISIBLE_DEVICES"),
    Fault("detector_reads_what_the_files_name", ENVIRONMENT, "name: GEMS_VENDOR", "name: FLAG_VENDOR", "GEMS_VENDOR", also=("*",)),
    Fault("backends_and_modules_are_spelled_correctly", ENGINES_FILE, "distributed_backend: nccl", "distributed_backend: ncll", "'ncll'", also=("sections_preload_the_same_module",)),
    Fault("backends_and_modules_are_spelled_correctly", ENGINES_FILE, "distributed_backend: nccl", "distributed_backend: nccl, preload: [torch-acme]", "'torch-acme'", also=("sections_preload_the_same_module",)),
    Fault("sections_preload_the_same_module", ENGINES_FILE, "distributed_backend: nccl", "distributed_backend: nccl, preload: [torch_acme]", "torch_acme"),
    Fault("detector_agrees_with_the_files", ENGINES_FILE, "device_type: cuda", "device_type: acme", "'acme'"),
    Fault("detector_is_well_formed", DISCOVER, "vendor_variables", 'own_variables=("A",),\n    vendor_variables', "own_variables has 'A'"),
    Fault("detector_is_well_formed", DISCOVER, "0xFFFF", "0xFFFFF", "four hexadecimal"),
    Fault("detector_is_well_formed", DISCOVER, "DETECTOR =", "# lspci: 1abc:0001\nDETECTOR =", "1abc"),
    Fault("resources_are_the_vendors", ENGINES_FILE, "distributed_backend: nccl", "distributed_backend: nccl, kubernetes: {name: metax-tech.com/gpu, source: {kind: estimated, method: a guess}}", "plugin metax"),
    Fault("metadata_is_complete", PYPROJECT, "flagcore-acme", "flagcore-cpu", "plugin cpu", also=("project_is_built_and_named",)),
    Fault("dependencies_are_limited", PYPROJECT, "dependencies = [", "dependencies = [\"torch-acme>=2.0\", ", "torch-acme>=2.0"),
)
PLAUSIBLE = (
    Fault("figures_are_plausible", CHIP, "value: 1.6e+12", "value: 1.28e+13", "operations per byte"),
    Fault("nodes_and_cards_are_counted", CHIP, "devices_per_node: 8", "devices_per_node: 1", "lists 2", also=("collectives_of_one_group_agree",)),
    Fault("pcie_rates_are_one_way", CHIP, NIC, f"{NIC}\nhost_bytes_per_second: {{value: 6.4e+10, source: {SHEET % 'PCIe 4.0 x16'}}}", "carries 3.2e+10"),
    Fault("pcie_rates_are_one_way", CHIP, NIC, f"{NIC}\nhost_bytes_per_second: {{value: 1.28e+11, source: *made_up}}", "above PCIe 5.0", also=("kernel_times_are_plausible",)),
    Fault("figures_match_their_sources", CHIP, LINK, f"    value: 4.0e+11\n    source: {SHEET % '400 GB/s in both directions, halved'}", "400 GB/s, halved: 2e+11"),
    adapter("5.0e+10", "400 Gb/s, shared by its four devices"),
    Fault("figures_match_their_sources", CHIP, "bf16: {value: 3.0e+14, source: *made_up}", f"bf16: {{value: 3.0e+14, source: {SHEET % '150 dense TFLOP/s in bf16'}}}", "2 times as much"),
    hook("health_is_valid", "health", "return 'healthy'", "flagcore_health"),
    Fault("memory_models_are_plausible", HOOKS, "fragmentation=0.02", "fragmentation=2", "reserved_bytes"),
    reading("telemetry_is_plausible", "{**figures, 'memory_used_bytes': 826.0}", "memory_used_bytes"),
    reading("telemetry_is_plausible", "{**figures, 'power_watts': 350.0, 'power_limit_watts': 61.0}", "power_limit_watts"),
    Fault("transcripts_are_parsed", DISCOVER, "Device(index=index", "Device(index=index + 1", "indices", also=("*",)),
    Fault("knobs_are_complete", KNOBS, "{value: 0.97, low: 0.9, high: 1.02}", "{part: tp_comms_s, value: 0.97, low: 0.9, high: 1.02}", "tp_comms_s"),
    Fault("knobs_are_complete", KNOBS, "{value: 0.97, low: 0.9, high: 1.02}", "{value: 97, low: 90, high: 102}", "97"),
)

def peak(new: str, names: str) -> Fault:
    """Add a peak to the chip."""
    return Fault("figures_are_plausible", CHIP, "bf16: {value", f"{new}, source: *made_up}}\n  bf16: {{value", names)


SLIPS = (
    Fault("sources_are_dated_and_found", COLLECTIVES, "2026-11-02", "2062-11-02", "in the future"),
    peak("tf32: {value: 3.0e+14", "tf32"),
    peak("int8: {value: 3.0e+13", "int8"),
    Fault("figures_match_their_sources", CHIP, "bf16: {value: 3.0e+14, source: *made_up}", f"bf16: {{value: 3.0e+14, source: {SHEET % '30 dense TFLOP/s in bf16'}}}", "its source has 30"),
    Fault("nodes_and_cards_are_counted", CHIP, "devices_per_node: 8", "devices_per_node: 64", "64, more than"),
    Fault("pcie_rates_are_one_way", CHIP, NIC, f"{NIC}\nhost_bytes_per_second: {{value: 3.0e+9, source: {SHEET % 'PCIe 4.0 x16'}}}", "carries 3.2e+10", also=("figures_are_plausible", "figures_are_plausible")),
    hook("memory_models_are_given", "memory_model", "return None", "A1"),
    Fault("measured_curves_are_plausible", COLLECTIVES, "[1.2e-05, 3.1e-05, 6.9e-04, 9.8e-03]", "[0.012, 0.031, 0.69, 9.8]", "bytes per second"),
    Fault("measured_curves_are_plausible", COLLECTIVES, "[1024, 1048576, 67108864, 1073741824]", "[1, 2, 64, 1024]", "payload_bytes = 1024"),
    Fault("measured_curves_are_plausible", COLLECTIVES, "curves:", "level: nodes\ncurves:", "'nodes'"),
    Fault("kernel_times_are_plausible", CURVE, "memory_share: 0.85", "memory_share: 0.85\n  elementwise_share: 0.085", "memory_seconds", also=("curves_are_plausible",)),
    reading("telemetry_is_of_its_own_column", "{**figures, 'temperature_celsius': figures['power_watts']}", "temperature_celsius", also=("telemetry_is_what_the_tool_prints",)),
    Fault("failures_have_their_pattern_and_state", QUIRKS, "state: out_of_memory", "state: failed", "failures[0].state"),
    Fault("variables_hold_for_all_users", ENVIRONMENT, "value: '1'", "value: '${interface}'", "${interface}"),
    Fault("detector_is_well_formed", DISCOVER, "0xFFFF", "0x19E", "four hexadecimal"),
    Fault("detector_is_well_formed", DISCOVER, "vendor_variables", 'topology="acme-smi topo -m",\n    vendor_variables', "topology = 'acme-smi topo -m'", also=("topology_command_is_known",)),
    Fault("variables_are_spelled_correctly", ENVIRONMENT, "", "  - {name: ACME_AFFINTY_CONF, used: '1', meaning: cores, source: *made_up}\n", "the word AFFINTY"),
    Fault("detector_is_well_formed", DISCOVER, 'device_file="dev', 'device_file="/dev', "device_file", also=("*",)),
    Fault("detector_is_well_formed", DISCOVER, 'tool="acme-smi"', 'tool="acme-smii"', "acme-smii", also=("detector_agrees_with_the_files",)),
    Fault("chip_names_are_own", "flagcore_acme/chips/a2.yaml", "", "chip: A2\nvendor: acme\nfamily_names: [ACME A1]\n", "family_names", also=("*",)),
    Fault("notes_and_sources_agree_with_peaks", CHIP, 'notes: "TODO:', 'notes: "No BF16. TODO:', "bf16"),
    hook("levels_are_plausible", "topology", "return own and replace(own, levels=tuple(replace(each, efficiency=10.0) for each in own.levels))", "efficiency = 10"),
    Fault("variables_hold_for_all_users", ENVIRONMENT, "value: '1'", "value: '{interface}'", "for one node"),
    Fault("knobs_are_complete", KNOBS, "{value: true, time", "{value: true, flags: [acme-overlap], time", "'acme-overlap'"),
    Fault("metadata_is_complete", PYPROJECT, 'requires-python = ">=3.10"', 'requires-python = ">=3.99"', "3.99"),
    Fault("variables_have_their_meaning", ENVIRONMENT, "value: '1'", "value: '1', unless: use_fdsp", "'use_fdsp'"),
    Fault("engine_support_is_complete", ENGINES_FILE, "distributed_backend: nccl", "distributed_backend: nccl, stack: {implementation: te, source: {kind: estimated, method: a guess}}", "'te'"),
    Fault("advice_on_tasks_is_complete", QUIRKS, "", "preferred:\n  - {engine: vllm, setting: engine_args.block_size, value: 128, reason: fast, source: *made_up}\n", "block_size"),
    Fault("tests_run_the_checks", "tests/test_conformance.py", "class Test", "class My", "PluginConformance"),
    Fault("transcripts_are_parsed", DISCOVER, "if TITLE not in text:", "print('rows')\n    if TITLE not in text:", "'rows'"),
    Fault("commands_ask_for_the_format", SOURCES, "acme-smi-1.txt:", "acme-smi-1.json:", "is json", also=("*",)),
    Fault("torch_of_others_is_not_trusted", DISCOVER, '"+acme" in report.version', "True", "of amd"),
    Fault("published_runs_are_job_records", RUN_FILE, "", RUN % ("A2", "tensor_model_parallel_size", 30), "'A2'"),
    Fault("published_runs_are_job_records", RUN_FILE, "", RUN % ("A1", "tensor_parallel_siz", 30), "tensor_parallel_siz"),
    Fault("published_times_are_plausible", RUN_FILE, "", RUN % ("A1", "tensor_model_parallel_size", 30000), "30000"),
)
BF16 = "bf16: {value: 3.0e+14, source: *made_up}"
KERNELS = "flagcore_acme/costs/a1/kernels.jsonl"
WITHOUT_PROVENANCE = ("kernel_costs_are_valid", "shipped_costs_belong_to_chips")


def variable(check: str, entry: str, names: str) -> Fault:
    """Add a variable."""
    return Fault(check, ENVIRONMENT, "", f"  - {{{entry}, meaning: a limit, source: *made_up}}\n", names)


def quirk(check: str, section: str, entry: str, names: str, also: tuple[str, ...] = ()) -> Fault:
    """Add a section with one entry to the quirks."""
    return Fault(check, QUIRKS, "", f"{section}:\n  - {{{entry}, source: *made_up}}\n", names, also)


OF_FIGURES = (
    Fault("figures_are_plausible", CHIP, NIC, f"{NIC}\ntdp_watts: {{value: 35, source: *made_up}}", "tdp_watts = 35"),
    Fault("links_are_what_they_claim", CHIP, "topology: mesh", "topology: pcie", "'ACMELink'"),
    Fault("figures_are_plausible", CHIP, NIC, f"{NIC}\nnic_latency_seconds: 5.0", "nic_latency_seconds = 5", ("levels_are_plausible",)),
    Fault("chip_names_are_own", CHIP, '["ACME A1"]', '["ACME A1", A1 80G]', "80 GB"),
    Fault("chip_names_are_own", "flagcore_acme/chips/b2.yaml", "", "chip: B2\nvendor: acme\naliases: [A1 OAM]\n", "names A1", ("*",)),
    Fault("architectures_are_alike", CHIP, "devices_per_node: 8", "devices_per_node: 8\narchitecture: A 1", "'A 1'"),
    Fault("figures_match_their_sources", CHIP, BF16, f"bf16: {{value: 3.0e+14, source: {SHEET % '280 dense bf16 TFLOP/s'}}}", "280 dense bf16"),
    Fault("sources_are_dated_and_found", CHIP, BF16, "bf16: {value: 3.0e+14, source: {kind: published, where: a catalogue}}", "'a catalogue'"),
)
OF_SECOND_ENTRIES = (
    Fault("figures_agree_with_their_second_entry", CHIP, "value: 1.6e+12", "value: 1.7e+12", "bandwidth: 1.6 TB/s, which is 1.6e+12"),
    Fault("figures_agree_with_their_second_entry", FACTS, "link: 400 GB/s both ways mesh", "link: 400 GB/s", "write 'one way' or 'both ways'"),
    Fault("figures_agree_with_their_second_entry", FACTS, "300 TFLOP/s dense,", "300 TFLOP/s sparse,", "which is 1.5e+14"),
    Fault("settings_agree_with_their_second_entry", KNOBS, 'ACME_OVERLAP: "1"', 'ACME_OVERLAP: "2"', "ACME_OVERLAP=2"),
    Fault("constants_have_the_size_that_they_state", HOOKS, "CONTEXT_BYTES = 1.2 * 2**30", "CONTEXT_BYTES = 1.2 * 2**20", "CONTEXT_BYTES = 1.2 MiB", ("*",)),
    Fault("knobs_name_what_the_engine_has", KNOBS, "value: 0.97, low: 0.9", "value: 0.7, low: 0.6", "0.7 of the whole step"),
    Fault("collectives_of_one_group_agree", COLLECTIVES, "", "  - {kind: all_gather, ranks: 4, payload_bytes: [67108864], seconds: [6.9e-03]}\n", "all_gather", ("*",)),
    quirk("quirks_agree_with_their_reasons", "preferred", "engine: vllm, setting: engine_args.block-size, value: 16, reason: blocks of 128 tokens", "blocks of 128"),
    Fault("variables_are_listed_once", QUIRKS, "the first step compiles for a minute", "leave ACME_QUEUES unset", "ACME_QUEUES"),
    Fault("telemetry_is_what_a_person_reads", SOURCES, "watts: 60", "watts: 61", "power_watts of flagcore_telemetry is 60"),
)
OF_FILES = (
    Fault("measured_kernels_are_possible", KERNELS, "", '{"kernel": "copy", "bytes": 1073741824, "us": 7}\n', "us = 7", WITHOUT_PROVENANCE),
    Fault("curves_are_plausible", CURVE, "launch_seconds: 1.0e-5", "launch_seconds: 1.0e-5\n  attention_share: 60", "attention_share = 60"),
    Fault("collectives_of_one_group_agree", COLLECTIVES, "ranks: 4", "ranks: 64", "ranks = 64"),
    variable("entries_apply_somewhere", 'name: ACME_LIMIT, value: "1", versions: ">=2,<1"', "'>=2,<1'"),
    quirk("rules_do_not_contradict", "forced", "name: acme_no_block, engine: megatron, setting: settings.tp_comm_overlap, value: false, reason: slow", "acme_no_block"),
    quirk("preferred_flags_are_known", "preferred", "engine: vllm, setting: engine_args.blok-size, value: 128, reason: whole blocks", "blok-size"),
    quirk("preferred_flags_are_known", "preferred", "engine: vllm, setting: engine_args.block-size, value: 128 tokens, reason: whole blocks", "128 tokens"),
    quirk("quirks_agree_with_their_reasons", "warmup", "engine: megatron, count: 1000, reason: compilation", "1000"),
    Fault("knobs_name_what_the_engine_has", KNOBS, "default: false", "default: false\n    needs: [{knob: tensor_paralel_size, at_least: 2}]", "'tensor_paralel_size'"),
    variable("variables_have_their_meaning", 'name: VLLM_LIMIT, used: "1", engines: [megatron]', "VLLM_LIMIT"),
    variable("variables_hold_for_all_users", "name: ACME_FOLDER, value: /home/me/acme", "/home/me/acme"),
    Fault("maturity_matches_the_transcripts", MATURITY, "tool: acme-smi", "tool: acme-top", "acme-top"),
    Fault("published_runs_can_be_found", RUN_FILE, "", RUN.replace("https://example.com", "a page") % ("A1", "tensor_model_parallel_size", 30), "'a page'"),
    Fault("resources_are_the_vendors", ENGINES_FILE, "distributed_backend: nccl", "distributed_backend: nccl, kubernetes: {name: gpu, source: {kind: estimated, method: a guess}}", "'gpu'"),
)
OF_AGREEMENT = (
    Fault("detector_agrees_with_its_runtime", DISCOVER, '"ACME_VISIBLE_DEVICES"', '"HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"', "outer = ''", ("*",)),
    variable("variables_have_their_meaning", 'name: CUDA_DEVICE_MAX_CONNECTIONS, value: "8", engines: [megatron], unless: use_megatron_fsdp', "'8'"),
    Fault("failures_agree_with_other_plugins", QUIRKS, "failures:\n", "failures:\n  - {pattern: HIP out of memory, state: failed, example: HIP out of memory, source: &same {kind: estimated, method: a guess}}\n", "'failed'", ("failures_have_their_pattern_and_state",)),
    Fault("refused_precisions_have_no_peak", QUIRKS, "    knob: recompute_method\n    values: [block]\n    reason: the vendor's Megatron has uniform recompute only", "    knob: precision\n    values: [fp16]\n    reason: it has no units for it", "fp16", ("*",)),
    Fault("nodes_and_cards_are_counted", CHIP, BF16, f"bf16: {{value: 3.0e+14, source: {SHEET % '600 dense TFLOP/s a card, halved'}}}", "devices_per_card"),
    Fault("links_are_what_they_claim", CHIP, "  name: ACMELink", "  name: ACMELink\n  switch_reduces: true", "switch_reduces"),
    Fault("detector_agrees_with_the_files", "README.md", "acme-smi", "acme-gmi", "acme-gmi"),
    Fault("processes_are_read", "tests/smi/acme-smi-1.txt", "", "| Process id  | Name    | MB    |\n| 0 | 4711 | python3 | 54870 |\n", "4711", ("*",)),
)
OF_TESTS = (
    Fault("failures_have_their_pattern_and_state", QUIRKS, 'pattern: "ACME out of memory"', 'pattern: "(A+)+CME out of memory"', "nests"),
    quirk("preferred_flags_are_known", "preferred", "engine: megatron, setting: engine_args.block-size, value: 128, reason: whole blocks", "no engine_args"),
    Fault("knobs_are_complete", KNOBS, "{value: true, time", '{value: true, flags: ["--acme-overlap 4"], time', "'--acme-overlap 4'"),
    Fault("detector_is_well_formed", DISCOVER, "pci_vendor=0xFFFF", 'pci_vendor="0xFFFF"', "'0xFFFF'", ("*",)),
    Fault("uuids_are_read", DISCOVER, "vendor_variables", "uuids=list,\n    vendor_variables", "uuids returns a list"),
    module("import_has_no_side_effects", "import subprocess\nsubprocess.run(['true'])", "it starts true"),
    variable("variables_have_their_meaning", 'name: HCCL_BUFFSIZE, used: "200"', "HCCL_BUFFSIZE"),
    variable("system_variables_are_not_set", 'name: ACME_LAUNCH_BLOCKING, value: "1"', "ACME_LAUNCH_BLOCKING"),
    Fault("lists_have_no_duplicates", KNOBS, 'environment: {ACME_OVERLAP: "1"}}]', 'environment: {ACME_OVERLAP: "1"}}, {value: true}]', "choices has 'True' twice"),
    Fault("measured_kernels_are_possible", KERNELS, "", '{"kernel": "attention", "precision": "bf16", "batch": 1, "heads": 8, "groups": 32, "queries": 64, "keys": 64, "head_dim": 128, "us": 960}\n', "groups", WITHOUT_PROVENANCE),
    Fault("torch_of_others_is_not_trusted", DISCOVER, "vendor_variables", 'torch_attributes=("acm",),\n    vendor_variables', "acm", ("*",)),
    Fault("sources_are_dated_and_found", CHIP, BF16, "bf16: {value: 3.0e+14, source: {kind: estimated, method: a guess, confidance: low}}", "confidance"),
    variable("system_variables_are_not_set", 'name: MASTER_PORT, value: "29500"', "MASTER_PORT"),
    hook("health_is_of_problems", "health", "return ['ok']", "'ok'"),
    Fault("tests_run_the_checks", "tests/test_conformance.py", "def plugin(", "def plugins(", "fixture named plugin"),
    Fault("transcripts_have_sources", SOURCES, "  tool: acme-smi\n", "", "no tool", ("*",)),
    Fault("variables_are_listed_once", ENVIRONMENT, "", "  - {name: ACME_QUEUES, used: '2', meaning: more, source: *made_up}\n", "value and used"),
    Fault("uuids_are_read", "tests/smi/acme-smi-1.txt", "", "UUID: GPU-0a1b-1\n", "acme-smi-1.txt"),
    Fault("curves_are_plausible", CURVE, "TODO: made up, measure", "300 of 480 TFLOP/s (TODO), measure", "300 of 480"),
    hook("vendor_is_not_guessed", "vendor", "return 'acme'", "flagcore_vendor"),
    Fault("files_are_read", "flagcore_acme/quirk.yaml", "", "notes: []\n", "quirk.yaml"),
    Fault("quirks_agree_with_their_reasons", QUIRKS, "    values: [block]", "    above: 0", "above = 0", ("*",)),
    Fault("sources_are_dated_and_found", COLLECTIVES, "2026-11-02", "'2026-20-11'", "'2026-20-11'"),
    Fault("tests_run_the_checks", "tests/test_conformance.py", "from flagcore_acme", "from flagcore_amd", "does not import flagcore_acme"),
    Fault("tests_run_the_checks", "tests/test_conformance.py", "class Test", "@pytest.mark.skip\nclass Test", "mark.skip"),
    Fault("metadata_is_complete", PYPROJECT, "Apache-2.0", "Apache 2", "'Apache 2'"),
    Fault("project_is_built_and_named", PYPROJECT, 'name = "flagcore-acme"', 'name = "flagcore-acm"', "flagcore-acm"),
    reading("telemetry_is_what_the_tool_prints", "{name: value for name, value in figures.items() if name != 'power_watts'}", "power_watts"),
    Fault("truncated_transcripts_add_no_devices", DISCOVER, "    if memory is None:\n        return None\n", "    assert memory is not None\n", "AssertionError", ("*",)),
    Fault("curves_are_plausible", CURVE, "gemm_share: 0.75", "gemm_share: 0.075", "gemm_share = 0.075", ("kernel_times_are_plausible",)),
)
PRODUCT = '{"kernel": "gemm", "precision": "int8", "m": %d, "n": 8192, "k": 8192, "us": 30000}\n'
SECOND = """\
|                       |
| 1    ACME A1          | 0000:0f:00.0         | 0%                    |
| 40C  61W / 400W               | 120MiB / 65536MiB    |                       |"""
OF_DERIVATIONS = (
    Fault("link_rates_are_one_way_and_of_all_links", CHIP, "TODO: made up, one way", "links of 400 GB/s, halved", "one of its links"),
    Fault("measured_kernels_are_possible", KERNELS, "", PRODUCT % 8192 + PRODUCT % 65536, "65536 x 8192 x 8192", WITHOUT_PROVENANCE),
    Fault("curves_are_plausible", CURVE, "gemm_share: 0.75", "gemm_share: 0.75\n  units: 6", "units = 6"),
    Fault("figures_match_their_sources", CHIP, "fp32: {value: 4.0e+13, source: *made_up}", "fp32: {value: 4.0e+13, source: {kind: estimated, method: 16 cores at 1 GHz of 384 multiply-adds}}", "1.229e+13"),
    Fault("figures_match_their_sources", CHIP, "{value: 1.6e+12, source: *made_up}", "{value: 1.6e+12, source: {kind: published, where: 'acme.example/a1: 0.8 TB/s'}}", "2 times as much"),
    Fault("pcie_rates_are_one_way", CHIP, "devices_per_node: 8", "host_bytes_per_second: {value: 3.2e+10, source: {kind: published, where: 'acme.example/a1: PCIe 5.0 x16'}}\ndevices_per_node: 8", "6.4e+10"),
    Fault("variables_have_their_meaning", ENVIRONMENT, "", "  - {name: ACCL_IB_HCA, value: '{interface}', several_nodes: true, meaning: adapters, source: *made_up}\n", "'{adapters}'"),
    Fault("memory_models_are_plausible", "flagcore_acme/hooks.py", "1.2 * 2**30", "1.2 * 2**20", "device_used_bytes(0)", ("constants_have_the_size_that_they_state",)),
    Fault("topology_command_is_known", DISCOVER, "vendor_variables", 'topology=("acme-smi", "topo", "-m"),\n    vendor_variables', "acme-smi topo -m"),
    Fault("devices_are_selected_by_an_own_variable", DISCOVER, "vendor_variables", 'own_variables=("ACMERT_",),\n    vendor_variables', "ACMERT_"),
    Fault("all_chips_are_read", DISCOVER, "(\\d+)\\s+(\\S.*)", "(\\d+)\\s+(ACME A2.*)", "A1", ("*",)),
    Fault("uuids_can_be_selected", DISCOVER, "memory_bytes=int(memory[1])", "memory_bytes=int(memory[1]), uuid=f'GPU-0x{index}'", "GPU-0x0"),
    Fault("failure_patterns_match_only_their_failures", QUIRKS, '"ACME out of memory"', '"ACME out of memory|CUDA error"', "illegal memory access"),
    hook("measured_chip_is_valid", "measured_chip", "return 5", "flagcore_measured_chip"),
    hook("measured_chips_keep_their_names", "measured_chip", "return replace(chip, name='A2')", "'A2'"),
    hook("topologies_fit_their_chips", "topology", "return own if group.devices_per_node > 8 else None", "devices_per_node = 8", also=("*",)),
    Fault("knobs_name_what_the_engine_has", KNOBS, "[{value: true, time", '[{value: 1, time: {value: 0.97, low: 0.9, high: 1.02}, environment: {ACME_OVERLAP: "1"}}, {value: 2, time', "set the same", ("*",)),
    hook("topologies_fit_their_chips", "topology", "return own and replace(own, levels=tuple(replace(each, bytes_per_second=0.1 * each.bytes_per_second) for each in own.levels))", "innermost level", also=("*",)),
    Fault("unusable_devices_are_left_out", "tests/smi/acme-smi-1.txt", SECOND, SECOND.replace("|                       |", "| Good                  |"), "'Bad'", ("*",)),
    Fault("notes_and_sources_agree_with_peaks", CHIP, "TODO: what else a user should know", "It does not support bf16.", "does not support bf16"),
    Fault("detector_is_well_formed", DISCOVER, "dev/acme[0-9]*", "dev/acme*", "acme_manager", ("*",)),
    Fault("knobs_name_what_the_engine_has", KNOBS, "    default: false", "    claim: 8% more throughput\n    needs: [{knob: sequence_parallel, one_of: ['true']}]\n    default: false", "'true'", ("*",)),
    Fault("knobs_name_what_the_engine_has", KNOBS, "says: collectives run on a copy engine\n    default: false\n    effect: {kind: estimated, method: a guess}\n    choices: [{value: true, time: {value: 0.97, low: 0.9", "says: collectives run on a copy engine\n    claim: faster\n    default: false\n    effect: {kind: estimated, method: a guess}\n    choices: [{value: true, time: {value: 1.01, low: 0.9", "claim = 'faster'", ("*",)),
    hook("health_is_of_problems", "health", "return (*(own or ()), 'a file of the driver is missing')", "without devices"),
    Fault("variables_hold_for_all_users", ENVIRONMENT, "value: '1'", "value: '1', condition: shared devices", "shared devices"),
    Fault("quirks_agree_with_their_reasons", QUIRKS, "the vendor's Megatron has uniform recompute only", "the vendor's Megatron uses block everywhere", "'block'"),
)
OF_STATES = (
    Fault("parsers_are_tried_on_transcripts", DISCOVER, "    if memory is None:\n        return None\n", "    if memory is None:\n        return None\n    if index > 7:\n        return f\"device {index} is lost\"\n", "is lost"),
    Fault("readings_are_found_in_transcripts", DISCOVER, "celsius=", "megahertz=search(r\"(\\d+)MHz\", parts[0])[0],\n            celsius=", "megahertz"),
    Fault("figures_agree_with_their_second_entry", CHIP, "topology: mesh", "topology: switch", "link.topology = switch"),
    Fault("matrices_of_links_are_read", SOURCES, "  tool: acme-smi\n", "  tool: acme-smi\n  matrix: 8\n", "expected 8"),
    quirk("entries_apply_somewhere", "forced", "name: acme_old, engine: vllm, versions: '>=0.12', setting: engine_args.max-num-seqs, value: 8, reason: releases 0.11.2 and older need it", "0.11.2"),
    Fault("nodes_and_cards_are_counted", CHIP, "TODO: what else a user should know", "A node has 4 of these devices.", "notes say 4"),
    Fault("links_are_what_they_claim", CHIP, "TODO: what else a user should know", "The driver allows no copies between devices.", "no copies between devices"),
)
FAULTS = (
    *SLIPS, *SPELLING, *PLAUSIBLE, *MEASURED, *MODULE, *CHIPS, *FOREIGN, *COSTS, *ENGINES, *ENVIRONMENTS, *FAILURES, *RUNS, *DETECTION, *SHIPPED, *PACKAGING,
    *OF_STATES, *OF_DERIVATIONS, *OF_FIGURES, *OF_SECOND_ENTRIES, *OF_FILES, *OF_AGREEMENT, *OF_TESTS,
)
