"""Kinds of layers with mixers other than attention. Each module is one kind; entry points name them."""
