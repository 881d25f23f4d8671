"""Measurement and comparison for tests, ``check``, ``tune`` and benchmarks of every family."""
