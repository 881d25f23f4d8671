"""The paths of `kda_verify_step`: the drafted tokens of each sequence."""
