"""A user's own launch command: parses its arguments for a release of Megatron-LM and turns it into a trial."""
