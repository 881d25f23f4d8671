"""FlashInfer's wrapper of several levels of keys, served by this package: a user changes an import.

Arguments and results are those of FlashInfer 0.7.2 in the forms that its documentation shows for
paged caches.
"""

from mla_backend.drop_ins.flashinfer.cascade import MultiLevelCascadeAttentionWrapper

__all__ = ["MultiLevelCascadeAttentionWrapper"]
