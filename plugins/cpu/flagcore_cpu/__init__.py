"""The plain CPU of the machine as a flagcore plugin: the reference plugin and the embedded default."""
