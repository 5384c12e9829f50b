"""The search space of serving engines: knobs, rules, devices, and the settings of candidates."""
