"""Block-sparse softmax attention as plan, run and combine.

A *plan* says which blocks of keys each query tile meets; *run* walks them; *combine* merges partial
results by their log-sum-exp. Its first operator is MLA decode.
"""
