"""Softmax attention in three steps: plan, run and combine.

A *plan* says which blocks of keys each query tile attends to, *run* computes them, and *combine*
merges partial results by their log-sum-exp. The operators are `api.mla_decode`,
`sparse_mla.sparse_mla`, `block_sparse.block_sparse_attention` and `sage.quantised_attention`.
"""
