"""FlashInfer's wrapper of several levels of keys, served by this package: a user changes an import.

Arguments and results are those of FlashInfer 0.7.2 and 0.7.4, whose wrappers are the same, in the
forms that their documentation shows for paged caches.
"""

from mla_backend.drop_ins.flashinfer.cascade import MultiLevelCascadeAttentionWrapper

__all__ = ["MultiLevelCascadeAttentionWrapper"]
