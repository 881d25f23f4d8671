"""One pipeline per kernel path: (path, inputs, scratch, pdl_prefetch_safe) -> None."""
