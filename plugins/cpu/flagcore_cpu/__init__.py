"""The machine's CPU as a flagcore plugin: the reference plugin and the built-in default."""
