"""The paths of `compress_low_ratio_`."""
