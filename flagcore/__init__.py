"""flagcore finds the fastest way to train or serve a large language model on any AI chip.

Importing this package costs nothing: every heavy import happens where it is first needed.
"""

__version__ = "0.1.0"
