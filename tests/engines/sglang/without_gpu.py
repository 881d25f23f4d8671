"""What importing sglang needs on a machine without a GPU; imported before it."""

from __future__ import annotations

import torch

# torchvision's compiled part needs a GPU's runtime; its Python part asks for these two operators
_TORCHVISION = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _TORCHVISION.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
