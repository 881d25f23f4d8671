"""A CUDA graph of one KDA layer's step without a GPU: recorded calls on the builder's buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode

from kda_backend import layer as operators
from tests.engines.kda.vllm.harness import cache_spec, hidden, run_layer
from tests.engines.vllm_process import builder_of, common_metadata

SIZE = 4  # requests of the captured batch


class Graph:
    """A captured step of `SIZE` requests with ``tokens`` each, by the layer's own builder.

    The projections and the norm of a graph come to the same kernels and are run anew.
    """

    def __init__(self, layer: Any, config: Any, tokens: int = 1) -> None:
        self.layer, self.config, self.tokens = layer, config, tokens
        compilation = config.compilation_config
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compilation, "cudagraph_mode", CUDAGraphMode.FULL_DECODE_ONLY)
            patch.setattr(compilation, "max_cudagraph_capture_size", SIZE * tokens)
            self.builder = builder_of(layer, config, cache_spec(layer, config))

    def batch(self, slots: list[int]) -> Any:
        """Of requests in these slots, padded as the runner pads a batch."""
        number = len(slots)
        bounds = self.tokens * torch.arange(SIZE + 1, dtype=torch.int32).clamp(max=number)
        table = torch.zeros(SIZE, 4, dtype=torch.int32)
        table[:number] = torch.tensor(slots, dtype=torch.int32)[:, None]
        lengths = torch.full((SIZE,), 20, dtype=torch.int32)
        places = torch.zeros(SIZE * self.tokens, dtype=torch.int64)
        prefilling = torch.zeros(SIZE, dtype=torch.bool)
        return common_metadata(bounds, lengths, table, places, is_prefilling=prefilling)

    def capture(self) -> None:
        """With dummy requests, which are the null block's; the step is one call of an operator."""
        metadata = self.builder.build_for_cudagraph_capture(self.batch([0] * SIZE))
        calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        with pytest.MonkeyPatch.context() as patch:
            for name in ("decode", "prefill", "verify"):
                operator = getattr(operators, name)

                def recorded(
                    *args: Any, name: str = name, operator: Any = operator, **options: Any
                ) -> None:
                    calls.append((name, args, options))
                    operator(*args, **options)

                patch.setattr(operators, name, recorded)
            run_layer(self.layer, self.config, hidden(SIZE * self.tokens), metadata)
        (self.call,) = calls

    def replay(self, x: torch.Tensor, metadata: Any) -> torch.Tensor:
        """This batch's tokens; the graph's weights, pools, slots, offsets and records."""
        name, args, options = self.call
        operator = getattr(operators, name)

        def redirected(*given: Any, **_: Any) -> None:
            operator(*args[:2], given[2], *args[3:], **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(operators, name, redirected)
            return run_layer(self.layer, self.config, x, metadata)
