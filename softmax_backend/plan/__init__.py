"""Which key blocks each query tile attends: plans and the functions that make them."""
