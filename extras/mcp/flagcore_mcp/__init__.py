"""The commands of flagcore as tools of the Model Context Protocol."""
