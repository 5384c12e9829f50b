"""The servers of vendors, as their documentation describes them. No server was run."""
