"""Models: what config.json and GGUF files describe, public models by name, and kinds of layers."""

SDK = ("config", "gguf", "layers", "mixers", "networks", "public")
