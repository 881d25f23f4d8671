"""torch.compile's backend in tests."""

import torch


def compiler(device: torch.device) -> str:
    """Inductor on a GPU; on a CPU, where it would need a C++ compiler, graphs run as they are."""
    return "inductor" if device.type == "cuda" else "aot_eager"
