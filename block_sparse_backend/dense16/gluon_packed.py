"""The same of any sequences, packed ones and keys in pages of whole blocks among them."""

from __future__ import annotations

from backend_core.launch.triton import KernelLaunch
from backend_core.tables.schema import KernelPath
from backend_core.target import Target
from block_sparse_backend.contract import BlockSparseInputs
from block_sparse_backend.dense16 import BlockSparseRun
from block_sparse_backend.dense16.gluon import AXES, OPTIONS, arguments, constexprs
from block_sparse_backend.kernels.sm90.block_load import packed_keys, paged_keys
from block_sparse_backend.kernels.sm90.block_sparse import block_sparse_packed_sm90_kernel
from block_sparse_backend.spec import BlockSparseSpec


def bind(row: KernelPath, spec: BlockSparseSpec, target: Target) -> BlockSparseRun:
    constants = constexprs(spec) | {"at_keys": paged_keys if spec.page_size else packed_keys}
    kernel = KernelLaunch(block_sparse_packed_sm90_kernel, constants, OPTIONS, axes=AXES)
    launch = kernel.launch

    def run(x: BlockSparseInputs) -> None:
        k, v, pages, indices, page_size = x.k, x.v, x.plan.pages, x.plan.cols, 1
        if pages is not None:  # [pages, page_size, Hkv, D]
            k, v = k.transpose(1, 2), v.transpose(1, 2)
            indices, page_size = pages.indices, pages.size
        named = arguments(x, k, v)
        launch((len(x.plan.work), 1, 1), **named, pages_ptr=indices, page_size=page_size)

    return run
