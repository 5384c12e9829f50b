"""What vendors need to describe their chips: chip files, and what a management tool prints. Unused by the core."""
