"""The core of all families: hardware target, path tables, contracts and the launch of kernels.

Nothing here knows a model or an engine.
"""

__version__ = "0.1.0"
