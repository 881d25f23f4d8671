"""The paths of `kda_decode_step`: one token of each sequence."""
