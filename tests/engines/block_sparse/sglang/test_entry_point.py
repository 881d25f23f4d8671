"""The plug-in is announced to sglang's video server, in every release of sglang."""

from __future__ import annotations

from importlib.metadata import entry_points

from block_sparse_backend.engines import sglang_diffusion


def test_entry_point() -> None:
    (found,) = [
        entry
        for entry in entry_points(group="sglang.multimodal_gen.plugins")
        if entry.value.startswith("block_sparse_backend.")
    ]
    assert found.load() is sglang_diffusion.register
