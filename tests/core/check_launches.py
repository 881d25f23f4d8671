"""Which kernels the calls of ``kda-dsv4 check`` launch, found on a CPU without running any.

    TRITON_INTERPRET=1 python -m tests.core.check_launches H200

It prints a JSON list of [family, kernel]. In a process of its own, since families keep the kernels
that they have made.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from triton.runtime.interpreter import InterpretedFunction

from backend_cli.check.probes import Probe, probes
from backend_core.launch.cuda import CudaKernel
from backend_core.launch.triton import KernelLaunch
from backend_core.target import KNOWN_TARGETS, Target
from block_sparse_backend import selection
from dsv4_backend.testing import check_cases as dsv4_cases
from mla_backend.decode import sm90 as mla_sm90
from mla_backend.testing import sparse_mla_checks

CPU = torch.device("cpu")
_launched: set[str] = set()


class _Recorder:
    """A kernel that is never compiled: ``kernel[grid](...)`` says that it was asked for."""

    def __init__(self, kernel: Any) -> None:
        self.__name__ = kernel.__name__

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: _launched.add(self.__name__)


def record(target: Target) -> None:
    """From now on a launch says its kernel's name and does nothing else, on a part that is not
    there; and the compressor's calls all seem right, so that the first does not end the others."""
    make = KernelLaunch.__init__

    def interpreted(self: Any, *_: object, **__: object) -> None:
        _launched.add(self.fn.__name__)

    def triton_init(self: KernelLaunch, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        if not self._interpreted:  # Gluon's, which no interpreter runs
            self._interpreted, self._fn = True, _Recorder(self._fn)
            self.launch = self._call_by_name

    def cuda_init(self: CudaKernel, source: object, name: str, *_: object) -> None:
        self._name = name

    def cuda_call(self: CudaKernel, grid: int, *_: object, **__: object) -> None:
        if grid:
            _launched.add(self._name)

    for place, name, stand_in in (
        (InterpretedFunction, "run", interpreted),
        (KernelLaunch, "__init__", triton_init),
        (CudaKernel, "__init__", cuda_init),
        (CudaKernel, "__call__", cuda_call),
        (CudaKernel, "load", lambda self: None),
        (mla_sm90, "_tensor_map", lambda *_: bytes(128)),
        (selection, "detect_target", lambda device: target),
        (dsv4_cases, "_bits", lambda x: torch.zeros(1)),
        (dsv4_cases, "_different", lambda *_: 0.0),
        (sparse_mla_checks, "expected", lambda case: None),  # in float64, for seconds
        (sparse_mla_checks, "_judged", lambda *_: (0.0, 1.0)),
    ):
        mock.patch.object(place, name, stand_in).start()


def launched_by(probe: Probe, target: Target) -> set[str]:
    """The kernels that one call asks for. That it ends in an error is no wonder without results;
    what it would have launched behind that is not seen."""
    _launched.clear()
    assert probe.run is not None
    with contextlib.suppress(RuntimeError, ValueError, IndexError):
        probe.run(target, CPU)
    return set(_launched)


def main(name: str) -> None:
    target = KNOWN_TARGETS[name]
    torch.use_deterministic_algorithms(True)  # what is never written is filled, and the same always
    record(target)
    found = {
        (probe.family, kernel)
        for probe in probes(target, interpreted=False)
        if probe.run is not None
        for kernel in launched_by(probe, target)
    }
    print(json.dumps(sorted(found)))


if __name__ == "__main__":
    main(sys.argv[1])
