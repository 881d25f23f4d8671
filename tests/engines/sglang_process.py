"""A process of sglang, and the fixtures of its tests, which their ``conftest.py`` files import.

Imported before any other module of sglang's: what its import needs on a machine without a GPU, and
its plug-ins, loaded as its launcher and its schedulers do first of all.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

# torchvision's compiled part needs a GPU's runtime; its Python part asks for these two operators
_TORCHVISION = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _TORCHVISION.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def load_plugins() -> None:
    from sglang.srt import plugins

    plugins.load_plugins()


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield
