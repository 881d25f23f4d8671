"""FlashInfer's wrappers, served by this package: a user changes an import.

Arguments and results are those of FlashInfer 0.7.2 in the forms that its documentation shows for
paged caches; LSEs are base 2, as FlashInfer's are.
"""

from softmax_backend.flashinfer.cascade import MultiLevelCascadeAttentionWrapper
from softmax_backend.flashinfer.merge import merge_state, merge_state_in_place, merge_states
from softmax_backend.flashinfer.mla import BatchMLAPagedAttentionWrapper
from softmax_backend.flashinfer.sparse import (
    BlockSparseAttentionWrapper,
    VariableBlockSparseAttentionWrapper,
)

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "BlockSparseAttentionWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "VariableBlockSparseAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]
