"""The hardware a kernel path is chosen for; the only module that asks the device."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Target:
    """One kind of processor.

    Attributes:
        vendor: ``"nvidia"``, ``"amd"`` or ``"cpu"``.
        arch: ``"sm90"``, ``"gfx942"``, ...; ``"cpu"`` for a CPU.
        num_sms: streaming multiprocessors (NVIDIA) or compute units (AMD; of one die of an MI250X);
            1 for a CPU.
        name: the part's own name, for people.
    """

    vendor: str
    arch: str
    num_sms: int
    name: str

    @property
    def key(self) -> str:
        """The stem of this target's path table: ``nvidia_sm90``, ``amd_gfx942``, ``cpu``."""
        return "cpu" if self.vendor == "cpu" else f"{self.vendor}_{self.arch}"


# One representative part of each architecture that a shipped path table serves.
KNOWN_TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("nvidia", "sm90", 132, "H200"),
        Target("nvidia", "sm80", 108, "A100"),
        Target("nvidia", "sm86", 84, "A40"),
        Target("nvidia", "sm89", 142, "L40S"),
        Target("nvidia", "sm100", 148, "B200"),
        Target("nvidia", "sm103", 148, "B300"),
        Target("nvidia", "sm120", 170, "RTX 5090"),
        Target("nvidia", "sm121", 48, "GB10"),
        Target("amd", "gfx90a", 110, "MI250X"),
        Target("amd", "gfx942", 304, "MI300X"),
        Target("amd", "gfx950", 256, "MI355X"),
        Target("cpu", "cpu", 1, "cpu"),
    )
}


def detect_target(device: torch.device | None = None) -> Target:
    """The target of ``device``, by default of the current GPU, or the CPU without one.

    Cached for each device. Without torch nothing can run but ``info``, which is told "cpu".

    Raises:
        ValueError: the device is neither a CPU nor a CUDA or HIP device.
    """
    if device is not None and device.type == "cuda" and device.index is not None:
        return _detect_gpu(device.index)  # what an operator asks in every call
    try:
        import torch
    except ModuleNotFoundError:
        return KNOWN_TARGETS["cpu"]
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        return KNOWN_TARGETS["cpu"]
    if device.type != "cuda":
        raise ValueError(f"device must be a CPU, CUDA or HIP device, got {device}")
    index = torch.cuda.current_device() if device.index is None else device.index
    return _detect_gpu(index)


@functools.cache
def _detect_gpu(index: int) -> Target:
    import torch

    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        # gcnArchName carries feature flags: "gfx942:sramecc+:xnack-".
        arch = properties.gcnArchName.split(":")[0]
        return Target("amd", arch, properties.multi_processor_count, properties.name)
    arch = f"sm{properties.major}{properties.minor}"
    return Target("nvidia", arch, properties.multi_processor_count, properties.name)
