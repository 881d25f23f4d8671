"""The paths of `fused_recurrent_kda`, which walks sequences token by token."""
