"""KDA's test kit: inputs, gate regimes, what the definition says of them, tolerances.

Used by the tests, by ``kda-dsv4 check`` and ``tune`` and by the benchmarks.
"""
