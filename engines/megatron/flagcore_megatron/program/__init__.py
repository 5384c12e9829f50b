"""Megatron-LM's programs: their arguments by release, and the command of a user that starts one."""
