"""The knobs and settings of Megatron, their rules, and the values in production and in published runs."""
