"""The engine `fsdp2`: flagcore's own trial program on the `fully_shard` of torch."""
