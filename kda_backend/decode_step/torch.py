"""The decode step in torch, which serves on a CPU."""

from kda_backend.torch_steps import bind as bind
