"""The compressor's pipelines: how a checked call becomes the launches of its kernel path.

A pipeline is bound once for the calls of one layer that agree in all that a check looks at
(``bound.LaunchCache``), and then takes a call and its step plan.
"""
