"""The contract of the compressor's operators; every message says what was expected and what came.

Only what the host knows is checked: shapes, dtypes, strides and devices. Values on the device
(rows, slots, positions) are not read; what each sentinel does is documented with the step plans.
``values`` has the checks of single arguments, ``calls`` those of an operator's whole call.
"""
