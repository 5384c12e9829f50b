"""Faults of single figures, names and entries of the data files, and of the package and its tests."""

# fmt: off
from extras.testing.tests.faults import NIC, SHEET, hook, module, reading
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
    SMI,
    SOURCES,
    Fault,
)

BF16 = "bf16: {value: 3.0e+14, source: *made_up}"
KERNELS = "flagcore_acme/costs/a1/kernels.jsonl"
WITHOUT_PROVENANCE = ("kernel_costs_are_valid", "measured_kernels_have_provenance")


def variable(check: str, entry: str, names: str) -> Fault:
    """Add a variable."""
    return Fault(check, ENVIRONMENT, "", f"  - {{{entry}, meaning: a limit, source: *made_up}}\n", names)


def quirk(check: str, section: str, entry: str, names: str, also: tuple[str, ...] = ()) -> Fault:
    """Add a section with one entry to the quirks."""
    return Fault(check, QUIRKS, "", f"{section}:\n  - {{{entry}, source: *made_up}}\n", names, also)


OF_FIGURES = (
    Fault("figures_are_of_their_class", CHIP, NIC, f"{NIC}\ntdp_watts: {{value: 35, source: *made_up}}", "tdp_watts = 35"),
    Fault("links_are_named_as_they_are", CHIP, "topology: mesh", "topology: pcie", "'ACMELink'"),
    Fault("links_are_named_as_they_are", CHIP, NIC, f"{NIC}\nnic_latency_seconds: 5.0", "nic_latency_seconds = 5", ("levels_are_plausible",)),
    Fault("names_agree_with_the_memory", CHIP, '["ACME A1"]', '["ACME A1", A1 80G]', "80 GB"),
    Fault("names_are_of_their_chip", "flagcore_acme/chips/b2.yaml", "", "chip: B2\nvendor: acme\naliases: [A1 OAM]\n", "names A1", ("*",)),
    Fault("architectures_are_alike", CHIP, "devices_per_node: 8", "devices_per_node: 8\narchitecture: A 1", "'A 1'"),
    Fault("figures_are_those_of_their_sources", CHIP, BF16, f"bf16: {{value: 3.0e+14, source: {SHEET % '280 dense bf16 TFLOP/s'}}}", "280 dense bf16"),
    Fault("sources_can_be_found", CHIP, BF16, "bf16: {value: 3.0e+14, source: {kind: published, where: a catalogue}}", "'a catalogue'"),
)
OF_SECOND_ENTRIES = (
    Fault("figures_agree_with_their_second_entry", CHIP, "value: 1.6e+12", "value: 1.7e+12", "bandwidth: 1.6 TB/s, which is 1.6e+12"),
    Fault("figures_agree_with_their_second_entry", FACTS, "link: 400 GB/s both ways mesh", "link: 400 GB/s", "write 'one way' or 'both ways'"),
    Fault("figures_agree_with_their_second_entry", FACTS, "300 TFLOP/s dense,", "300 TFLOP/s sparse,", "which is 1.5e+14"),
    Fault("settings_agree_with_their_second_entry", KNOBS, 'ACME_OVERLAP: "1"', 'ACME_OVERLAP: "2"', "ACME_OVERLAP=2"),
    Fault("constants_have_the_size_that_they_state", HOOKS, "CONTEXT_BYTES = 1.2 * 2**30", "CONTEXT_BYTES = 1.2 * 2**20", "CONTEXT_BYTES = 1.2 MiB", ("*",)),
    Fault("knobs_name_what_the_engine_has", KNOBS, "value: 0.97, low: 0.9", "value: 0.7, low: 0.6", "0.7 of the whole step"),
    Fault("collectives_of_one_group_agree", COLLECTIVES, "", "  - {kind: all_gather, ranks: 4, payload_bytes: [67108864], seconds: [6.9e-03]}\n", "all_gather", ("*",)),
    quirk("preferred_values_are_those_of_their_reasons", "preferred", "engine: vllm, setting: engine_args.block-size, value: 16, reason: blocks of 128 tokens", "blocks of 128"),
    Fault("variables_are_not_those_that_notes_warn_of", QUIRKS, "the first step compiles for a minute", "leave ACME_QUEUES unset", "ACME_QUEUES"),
    Fault("telemetry_is_what_a_person_reads", SOURCES, "watts: 60", "watts: 61", "power_watts of flagcore_telemetry is 60"),
)
OF_FILES = (
    Fault("measured_kernels_are_possible", KERNELS, "", '{"kernel": "copy", "bytes": 1073741824, "us": 7}\n', "us = 7", WITHOUT_PROVENANCE),
    Fault("curves_are_plausible", CURVE, "launch_seconds: 1.0e-5", "launch_seconds: 1.0e-5\n  attention_share: 60", "attention_share = 60"),
    Fault("measured_groups_exist", COLLECTIVES, "ranks: 4", "ranks: 64", "ranks = 64"),
    variable("entries_apply_somewhere", 'name: ACME_LIMIT, value: "1", versions: ">=2,<1"', "'>=2,<1'"),
    quirk("rules_do_not_contradict", "forced", "name: acme_no_block, engine: megatron, setting: settings.tp_comm_overlap, value: false, reason: slow", "acme_no_block"),
    quirk("preferred_flags_are_known", "preferred", "engine: vllm, setting: engine_args.blok-size, value: 128, reason: whole blocks", "blok-size"),
    quirk("preferred_flags_are_known", "preferred", "engine: vllm, setting: engine_args.block-size, value: 128 tokens, reason: whole blocks", "128 tokens"),
    quirk("warmups_are_short", "warmup", "engine: megatron, count: 1000, reason: compilation", "1000"),
    Fault("knobs_name_what_the_engine_has", KNOBS, "default: false", "default: false\n    needs: [{knob: tensor_paralel_size, at_least: 2}]", "'tensor_paralel_size'"),
    variable("variables_are_for_the_engine_that_reads_them", 'name: VLLM_LIMIT, used: "1", engines: [megatron]', "VLLM_LIMIT"),
    variable("values_hold_for_all_users", "name: ACME_FOLDER, value: /home/me/acme", "/home/me/acme"),
    Fault("maturity_is_that_of_the_files", MATURITY, "tool: acme-smi", "tool: acme-top", "acme-top"),
    Fault("published_runs_can_be_found", RUN_FILE, "", RUN.replace("https://example.com", "a page") % ("A1", "tensor_model_parallel_size", 30), "'a page'"),
    Fault("resources_are_the_vendors", ENGINES_FILE, "distributed_backend: nccl", "distributed_backend: nccl, kubernetes: {name: gpu, source: {kind: estimated, method: a guess}}", "'gpu'"),
)
OF_AGREEMENT = (
    Fault("detector_agrees_with_its_runtime", DISCOVER, '"ACME_VISIBLE_DEVICES"', '"HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"', "outer = ''", ("*",)),
    variable("values_agree_with_other_plugins", 'name: CUDA_DEVICE_MAX_CONNECTIONS, value: "8", engines: [megatron], unless: use_megatron_fsdp', "'8'"),
    Fault("failures_agree_with_other_plugins", QUIRKS, "failures:\n", "failures:\n  - {pattern: HIP out of memory, state: failed, example: HIP out of memory, source: &same {kind: estimated, method: a guess}}\n", "'failed'", ("memory_failures_have_their_state",)),
    Fault("refused_precisions_have_no_peak", QUIRKS, "    knob: recompute_method\n    values: [block]\n    reason: the vendor's Megatron has uniform recompute only", "    knob: precision\n    values: [fp16]\n    reason: it has no units for it", "fp16", ("*",)),
    Fault("cards_are_counted", CHIP, BF16, f"bf16: {{value: 3.0e+14, source: {SHEET % '600 dense TFLOP/s a card, halved'}}}", "devices_per_card"),
    Fault("links_can_be_what_they_claim", CHIP, "  name: ACMELink", "  name: ACMELink\n  switch_reduces: true", "switch_reduces"),
    Fault("readme_names_the_tool", "README.md", "acme-smi", "acme-gmi", "acme-gmi"),
    Fault("processes_are_read", "tests/smi/acme-smi-1.txt", "", "| Process id  | Name    | MB    |\n| 0 | 4711 | python3 | 54870 |\n", "4711", ("*",)),
)
OF_TESTS = (
    Fault("failure_patterns_are_fast", QUIRKS, 'pattern: "ACME out of memory"', 'pattern: "(A+)+CME out of memory"', "nests"),
    quirk("preferred_flags_are_known", "preferred", "engine: megatron, setting: engine_args.block-size, value: 128, reason: whole blocks", "no engine_args"),
    Fault("knobs_are_complete", KNOBS, "{value: true, time", '{value: true, flags: ["--acme-overlap 4"], time', "'--acme-overlap 4'"),
    Fault("pci_vendor_is_the_vendors", DISCOVER, "pci_vendor=0xFFFF", 'pci_vendor="0xFFFF"', "'0xFFFF'", ("*",)),
    Fault("uuids_are_read", DISCOVER, "vendor_variables", "uuids=list,\n    vendor_variables", "uuids returns a list"),
    module("import_has_no_side_effects", "import subprocess\nsubprocess.run(['true'])", "it starts true"),
    variable("variables_are_of_this_vendor", 'name: HCCL_BUFFSIZE, used: "200"', "HCCL_BUFFSIZE"),
    variable("variables_do_not_debug", 'name: ACME_LAUNCH_BLOCKING, value: "1"', "ACME_LAUNCH_BLOCKING"),
    Fault("lists_have_no_duplicates", KNOBS, 'environment: {ACME_OVERLAP: "1"}}]', 'environment: {ACME_OVERLAP: "1"}}, {value: true}]', "choices has 'True' twice"),
    Fault("measured_kernels_are_possible", KERNELS, "", '{"kernel": "attention", "precision": "bf16", "batch": 1, "heads": 8, "groups": 32, "queries": 64, "keys": 64, "head_dim": 128, "us": 960}\n', "groups", WITHOUT_PROVENANCE),
    Fault("torch_of_others_is_not_trusted", DISCOVER, "vendor_variables", 'torch_attributes=("acm",),\n    vendor_variables', "acm", ("*",)),
    Fault("sources_can_be_found", CHIP, BF16, "bf16: {value: 3.0e+14, source: {kind: estimated, method: a guess, confidance: low}}", "confidance"),
    variable("system_variables_are_not_set", 'name: MASTER_PORT, value: "29500"', "MASTER_PORT"),
    hook("health_is_of_problems", "health", "return ['ok']", "'ok'"),
    Fault("tests_run_the_checks", "tests/test_conformance.py", "def plugin(", "def plugins(", "fixture named plugin"),
    Fault("transcripts_have_sources", SOURCES, "  tool: acme-smi\n", "", "no tool", ("*",)),
    Fault("variables_are_listed_once", ENVIRONMENT, "", "  - {name: ACME_QUEUES, used: '2', meaning: more, source: *made_up}\n", "value and used"),
    Fault("uuids_are_read", "tests/smi/acme-smi-1.txt", "", "UUID: GPU-0a1b-1\n", "acme-smi-1.txt"),
    Fault("curves_are_plausible", CURVE, "TODO: made up, measure", "300 of 480 TFLOP/s (TODO), measure", "300 of 480"),
    hook("vendor_is_not_guessed", "vendor", "return 'acme'", "flagcore_vendor"),
    Fault("files_are_read", "flagcore_acme/quirk.yaml", "", "notes: []\n", "quirk.yaml"),
    Fault("limits_leave_something", QUIRKS, "    values: [block]", "    above: 0", "above = 0", ("*",)),
    Fault("dates_of_sources_are_valid", COLLECTIVES, "2026-11-02", "'2026-20-11'", "'2026-20-11'"),
    Fault("tests_run_the_checks", "tests/test_conformance.py", "from flagcore_acme", "from flagcore_amd", "does not import flagcore_acme"),
    Fault("tests_run_the_checks", "tests/test_conformance.py", "class Test", "@pytest.mark.skip\nclass Test", "mark.skip"),
    Fault("project_is_built_and_named", PYPROJECT, "Apache-2.0", "Apache 2", "'Apache 2'"),
    Fault("project_is_built_and_named", PYPROJECT, 'name = "flagcore-acme"', 'name = "flagcore-acm"', "flagcore-acm"),
    reading("telemetry_is_what_the_tool_prints", "{name: value for name, value in figures.items() if name != 'power_watts'}", "power_watts"),
    Fault("incomplete_transcripts_add_no_devices", SMI, "    if memory is None:\n        return None\n", "    assert memory is not None\n", "AssertionError", ("*",)),
    Fault("curves_are_plausible", CURVE, "gemm_share: 0.75", "gemm_share: 0.075", "gemm_share = 0.075", ("large_matmuls_reach_the_peak",)),
)
PRODUCT = '{"kernel": "gemm", "precision": "int8", "m": %d, "n": 8192, "k": 8192, "us": 30000}\n'
SECOND = """\
|                       |
| 1    ACME A1          | 0000:0f:00.0         | 0%                    |
| 40C  61W / 400W               | 120MiB / 65536MiB    |                       |"""
OF_DERIVATIONS = (
    Fault("links_are_added_up", CHIP, "TODO: made up, one way", "links of 400 GB/s, halved", "one of its links"),
    Fault("large_products_have_one_rate", KERNELS, "", PRODUCT % 8192 + PRODUCT % 65536, "65536 x 8192 x 8192", WITHOUT_PROVENANCE),
    Fault("curves_are_plausible", CURVE, "gemm_share: 0.75", "gemm_share: 0.75\n  units: 6", "units = 6"),
    Fault("figures_follow_from_their_sources", CHIP, "fp32: {value: 4.0e+13, source: *made_up}", "fp32: {value: 4.0e+13, source: {kind: estimated, method: 16 cores at 1 GHz of 384 multiply-adds}}", "1.229e+13"),
    Fault("figures_match_their_sources", CHIP, "{value: 1.6e+12, source: *made_up}", "{value: 1.6e+12, source: {kind: published, where: 'acme.example/a1: 0.8 TB/s'}}", "2 times as much"),
    Fault("pcie_rates_are_one_way", CHIP, "devices_per_node: 8", "host_bytes_per_second: {value: 3.2e+10, source: {kind: published, where: 'acme.example/a1: PCIe 5.0 x16'}}\ndevices_per_node: 8", "6.4e+10"),
    Fault("placeholders_agree_with_other_plugins", ENVIRONMENT, "", "  - {name: ACCL_IB_HCA, value: '{interface}', several_nodes: true, meaning: adapters, source: *made_up}\n", "'{adapters}'"),
    Fault("contexts_are_above_idle_memory", "flagcore_acme/hooks.py", "1.2 * 2**30", "1.2 * 2**20", "device_used_bytes(0)"),
    Fault("topology_command_is_known", DISCOVER, "vendor_variables", 'topology=("acme-smi", "topo", "-m"),\n    vendor_variables', "acme-smi topo -m"),
    Fault("devices_are_selected_by_an_own_variable", DISCOVER, "vendor_variables", 'own_variables=("ACMERT_",),\n    vendor_variables', "ACMERT_"),
    Fault("all_chips_are_read", SMI, "(\\d+)\\s+(\\S.*)", "(\\d+)\\s+(ACME A2.*)", "A1", ("*",)),
    Fault("uuids_can_be_selected", SMI, "memory_bytes=int(memory[1])", "memory_bytes=int(memory[1]), uuid=f'GPU-0x{index}'", "GPU-0x0"),
    Fault("memory_patterns_match_only_memory", QUIRKS, '"ACME out of memory"', '"ACME out of memory|CUDA error"', "illegal memory access"),
    hook("measured_chip_is_valid", "measured_chip", "return 5", "flagcore_measured_chip"),
    hook("measured_chips_keep_their_names", "measured_chip", "return replace(chip, name='A2')", "'A2'"),
    hook("topologies_are_of_whole_nodes", "topology", "return own if group.devices_per_node > 8 else None", "devices_per_node = 8", also=("*",)),
    Fault("knob_values_differ", KNOBS, "[{value: true, time", '[{value: 1, time: {value: 0.97, low: 0.9, high: 1.02}, environment: {ACME_OVERLAP: "1"}}, {value: 2, time', "set the same", ("*",)),
    hook("inner_levels_have_the_rate_of_the_link", "topology", "return own and replace(own, levels=tuple(replace(each, bytes_per_second=0.1 * each.bytes_per_second) for each in own.levels))", "innermost level", also=("*",)),
    Fault("unusable_devices_are_left_out", "tests/smi/acme-smi-1.txt", SECOND, SECOND.replace("|                       |", "| Good                  |"), "'Bad'", ("*",)),
    Fault("notes_agree_with_peaks", CHIP, "TODO: what else a user should know", "It does not support bf16.", "does not support bf16"),
    Fault("detector_has_tuples", DISCOVER, "dev/acme[0-9]*", "dev/acme*", "acme_manager", ("*",)),
    Fault("knobs_name_what_the_engine_has", KNOBS, "    default: false", "    claim: 8% more throughput\n    needs: [{knob: sequence_parallel, one_of: ['true']}]\n    default: false", "'true'", ("*",)),
    Fault("knobs_name_what_the_engine_has", KNOBS, "says: collectives run on a copy engine\n    default: false\n    effect: {kind: estimated, method: a guess}\n    choices: [{value: true, time: {value: 0.97, low: 0.9", "says: collectives run on a copy engine\n    claim: faster\n    default: false\n    effect: {kind: estimated, method: a guess}\n    choices: [{value: true, time: {value: 1.01, low: 0.9", "claim = 'faster'", ("*",)),
    hook("health_is_of_problems", "health", "return (*(own or ()), 'a file of the driver is missing')", "without devices"),
    Fault("values_hold_for_all_users", ENVIRONMENT, "value: '1'", "value: '1', condition: shared devices", "shared devices"),
    Fault("refused_values_are_not_those_that_work", QUIRKS, "the vendor's Megatron has uniform recompute only", "the vendor's Megatron uses block everywhere", "'block'"),
)
OF_STATES = (
    Fault("parsers_are_tried_on_transcripts", SMI, "    if memory is None:\n        return None\n", "    if memory is None:\n        return None\n    if index > 7:\n        return f\"device {index} is lost\"\n", "is lost"),
    Fault("readings_are_found_in_transcripts", SMI, "celsius=", "megahertz=search(r\"(\\d+)MHz\", parts[0])[0],\n            celsius=", "megahertz"),
    Fault("figures_agree_with_their_second_entry", CHIP, "topology: mesh", "topology: switch", "link.topology = switch"),
    Fault("matrices_of_links_are_read", SOURCES, "  tool: acme-smi\n", "  tool: acme-smi\n  matrix: 8\n", "expected 8"),
    quirk("versions_are_those_of_their_reasons", "forced", "name: acme_old, engine: vllm, versions: '>=0.12', setting: engine_args.max-num-seqs, value: 8, reason: releases 0.11.2 and older need it", "0.11.2"),
    Fault("nodes_have_the_devices_of_transcripts", CHIP, "TODO: what else a user should know", "A node has 4 of these devices.", "notes say 4"),
    Fault("links_can_be_what_they_claim", CHIP, "TODO: what else a user should know", "The driver allows no copies between devices.", "no copies between devices"),
)
FAULTS = (*OF_STATES, *OF_DERIVATIONS, *OF_FIGURES, *OF_SECOND_ENTRIES, *OF_FILES, *OF_AGREEMENT, *OF_TESTS)
