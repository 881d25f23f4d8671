"""What tests, ``check``, ``tune`` and the benchmarks of every family measure and compare with."""
