"""The call signatures of other libraries, for code that changes its import and nothing else."""
