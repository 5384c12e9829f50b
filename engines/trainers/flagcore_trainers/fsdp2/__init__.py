"""The engine `fsdp2`: predictions of programs on the `fully_shard` of torch."""
