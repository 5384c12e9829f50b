"""A user's own launch command: its arguments are parsed for a release of Megatron-LM and changed for a trial."""
