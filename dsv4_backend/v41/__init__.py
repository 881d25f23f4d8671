"""The paths of `compress_v41_`."""
