"""A user's own launch command: what its arguments mean in a release of Megatron-LM, and how a trial runs it."""
