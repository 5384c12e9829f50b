"""One file an engine, behind `contract.Engine`."""
