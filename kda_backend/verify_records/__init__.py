"""The paths of `kda_verify_step` with records in place of states, and of `kda_commit_`."""
