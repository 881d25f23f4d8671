"""The compressor's kernels, one per file, and the ``@triton.jit`` functions that they share.

Without a kernel: ``arguments``, ``locate``, ``pooling``, ``state_rows``, ``finish``, ``records``.
"""
