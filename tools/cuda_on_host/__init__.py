"""The CUDA kernels on the CPU: compiled by g++ from their own sources, with ``hopper.cuh`` here in
the place of the GPU's instructions, and run by a scheduler with a seed (``runtime.h``)."""
