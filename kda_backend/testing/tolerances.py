"""The allowed relative L2 errors of output and state against float64, and where they come from."""

from __future__ import annotations

import torch

# 16-bit inputs: the project's bounds; rounding the output alone costs 1.7e-3 in bf16, and 3.3e-3
# under Triton's interpreter, which truncates instead.
# fp16 inputs: the kernels' operands are fp16 too, which costs up to 1.6e-3 where keys are nearly
# parallel (studies/kda.md, an emulation); 2.3e-3 is the worst of 20,000 random calls of the
# family on an H200.
# fp32 inputs on a GPU: exponentials and logarithms are 2^-22 approximations there, and the gate
# multiplies theirs by exp(A_log), up to 201.
_FP32 = 1e-4 if torch.cuda.is_available() else 1e-5
TOLERANCES = {
    torch.bfloat16: (5e-3, 4e-3),
    torch.float16: (2.5e-3, 2.5e-3),
    torch.float32: (_FP32, _FP32),
}
"""(output, state) of the operators on sequences, by dtype of the inputs."""
ONE_HEAD = 4.0
"""Factor for one sequence and head alone: the error of a dot product may meet a small value."""
STEP_TOLERANCES = {
    torch.float32: (5e-3, 1e-4),
    torch.bfloat16: (6e-3, 5e-3),
    torch.float16: (5e-3, 7e-4),
}
"""(output, state) of a decode step with bf16 tokens, by dtype of the state."""
LAYER_TOLERANCE = 1.5e-2
"""Error of a layer in bf16, which rounds the convolution's output, the delta rule's, the norm's."""
