"""The compressor's test kit: an engine in miniature, the oracle, check cases and measures.

Tests, ``kda-dsv4 check``, ``kda-dsv4 tune`` and the benchmarks use it.
"""
