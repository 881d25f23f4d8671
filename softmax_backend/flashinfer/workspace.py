"""FlashInfer's workspaces, which the wrappers here do without."""

from __future__ import annotations

import torch

from backend_core.contracts import expect_device


def check_workspaces(
    device: torch.device,
    float_workspace_buffer: torch.Tensor,
    *int_workspace_buffers: torch.Tensor | None,
) -> None:
    """What ``reset_workspace_buffer`` can mean where there is no workspace.

    The buffers are neither kept nor used, so that the caller may free them and the plan stays. A
    wrapper's device is that of the buffer it was made with, and later ones must be there too.

    Raises:
        ValueError: a buffer is on another device than the wrapper.
    """
    expect_device("float_workspace_buffer", float_workspace_buffer, device)
    for buffer in int_workspace_buffers:
        if buffer is not None:
            expect_device("int_workspace_buffer", buffer, device)
