"""Block-sparse attention in 16 and in 8 bits.

A *plan* says which blocks of keys each tile of queries attends to. The operators are
`block_sparse.block_sparse_attention` and `sage.quantised_attention`.
"""
