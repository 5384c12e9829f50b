"""The LMDeploy server."""
