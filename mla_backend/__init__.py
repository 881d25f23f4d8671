"""Multi-head latent attention in three steps: plan, run and combine.

A *plan* splits the keys of each request among programs, *run* computes attention over the pieces,
and *combine* merges partial results by their log-sum-exp. The operators are `api.mla_decode` and
`sparse_mla.sparse_mla`.
"""
