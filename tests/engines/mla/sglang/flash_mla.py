"""What sglang's interface to FlashMLA imports of FlashMLA, of which no build runs here."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType


def install() -> None:
    """Put modules of these names in place, with the names that are imported from them."""
    if importlib.util.find_spec("flash_mla") is not None:
        return
    package, interface = ModuleType("flash_mla"), ModuleType("flash_mla.flash_mla_interface")
    package.__dict__["fused_norm_rope_attn_rope_cast"] = ModuleType("fused")
    interface.__dict__["FlashMLASchedMeta"] = type("FlashMLASchedMeta", (), {})
    package.__dict__["flash_mla_interface"] = interface
    sys.modules[package.__name__], sys.modules[interface.__name__] = package, interface
