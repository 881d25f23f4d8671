"""Run the machine code that Triton makes for CDNA GPUs on a CPU, instruction by instruction.

``program`` reads the ``amdgcn`` text, ``isa`` turns each instruction into a function of a wave, and
``workgroup`` runs the waves of a workgroup between barriers. ``device`` stands in for the GPU:
Triton kernels launched inside it are compiled for gfx942 or gfx950 and executed on CPU tensors.

What it models: all 64 lanes and EXEC, the scalar and vector units, MFMA, DPP and the other lane
movements, LDS, global and scratch memory with bounds, ``s_waitcnt`` as counters of operations in
flight, and barriers. What it reports as an error: an instruction it does not know, a register used
before its load was waited for, two waves that touch the same byte without a barrier between them,
an access outside every tensor, waves at different barriers. It models neither time nor caches.
"""
