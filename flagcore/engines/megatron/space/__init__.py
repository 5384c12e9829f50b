"""The knobs and settings of Megatron, their rules, and what production and published runs use."""
