"""Clusters with several kinds of chips: the sizes and layers of each node group."""
