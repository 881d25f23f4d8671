"""What both backends share: hardware target, kernel path table, contracts and kernel launch.

Nothing here knows a model or an engine.
"""

__version__ = "0.1.0"
