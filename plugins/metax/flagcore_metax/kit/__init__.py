"""What every vendor's plugin needs and says nothing of a vendor. The same files are in each of flagcore's plugins."""
