"""The kubernetes launcher, and manifests for Kubernetes."""
