"""The signatures are those of FLA's operators: a user changes one import."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from kda_backend import chunk_kda, fused_recurrent_kda

REQUIRED = inspect.Parameter.empty

# flash-linear-attention 0.6.0, fla/ops/kda/chunk.py and fla/ops/kda/fused_recurrent.py: the
# parameters in their order, with their defaults. chunk_kda takes A_log, dt_bias and chunk_size
# through **kwargs there, so by keyword only.
CHUNK_KDA = {
    "q": REQUIRED,
    "k": REQUIRED,
    "v": REQUIRED,
    "g": REQUIRED,
    "beta": REQUIRED,
    "scale": None,
    "initial_state": None,
    "output_final_state": False,
    "use_qk_l2norm_in_kernel": False,
    "use_gate_in_kernel": False,
    "use_beta_sigmoid_in_kernel": False,
    "allow_neg_eigval": False,
    "safe_gate": False,
    "lower_bound": None,
    "disable_recompute": False,
    "return_intermediate_states": False,
    "state_v_first": False,
    "cu_seqlens": None,
    "cu_seqlens_cpu": None,
    "cp_context": None,
    "use_graph": False,
    "max_num_seqs": None,
}
CHUNK_KDA_BY_KEYWORD = {"A_log": None, "dt_bias": None, "chunk_size": 64}
FUSED_RECURRENT_KDA = {
    "q": REQUIRED,
    "k": REQUIRED,
    "v": REQUIRED,
    "g": REQUIRED,
    "beta": REQUIRED,
    "A_log": None,
    "dt_bias": None,
    "scale": None,
    "initial_state": None,
    "output_final_state": False,
    "use_qk_l2norm_in_kernel": False,
    "use_gate_in_kernel": False,
    "use_beta_sigmoid_in_kernel": False,
    "allow_neg_eigval": False,
    "lower_bound": None,
    "state_v_first": False,
    "cu_seqlens": None,
}


@pytest.mark.parametrize(
    ("operator", "positional", "by_keyword"),
    [
        (chunk_kda, CHUNK_KDA, CHUNK_KDA_BY_KEYWORD),
        (fused_recurrent_kda, FUSED_RECURRENT_KDA, {}),
    ],
)
def test_names_order_and_defaults_are_those_of_fla(
    operator: Callable[..., object], positional: dict[str, object], by_keyword: dict[str, object]
) -> None:
    parameters = inspect.signature(operator).parameters
    ours = {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
    assert list(ours.items()) == list(positional.items())
    extra = {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert by_keyword.items() <= extra.items()
    assert set(extra) - set(by_keyword), "the pool and the plan are ours"
    # what goes beyond FLA is optional
    assert all(extra[name] is None for name in set(extra) - set(by_keyword))
    assert len(ours) + len(extra) == len(parameters), "unknown arguments must raise"


def test_what_is_no_tensor_is_named() -> None:
    x = torch.rand(1, 3, 2, 16)
    tokens = {"q": x, "k": x, "v": x, "g": -x, "beta": x[..., 0]}
    gate = {"use_gate_in_kernel": True, "A_log": torch.zeros(2)}
    given = tokens | gate | {"cu_seqlens": torch.tensor([0, 3])}
    for name in (*tokens, "A_log", "cu_seqlens"):
        wrong = given[name].tolist()  # type: ignore[attr-defined]
        for operator in (chunk_kda, fused_recurrent_kda):
            with pytest.raises(ValueError, match=f"{name} must be a torch.Tensor, got list"):
                operator(**given | {name: wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("operator", [chunk_kda, fused_recurrent_kda])
def test_compiled_code_breaks_its_graph_once(operator: Callable[..., Any]) -> None:
    """As at FLA's: what is before and after it is compiled, and nothing within, of any length."""

    def model(q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        out, state = operator(q + 1.0, *rest, output_final_state=True)
        return out * 2.0 + state.sum()  # type: ignore[no-any-return]

    graphs = CompileCounter()
    compiled = torch.compile(model, backend=graphs, dynamic=True)
    for length in (3, 70):
        q, k, v, g = torch.rand(4, 1, length, 2, 16).unbind(0)
        tokens = (q, k, v, -g, torch.rand(1, length, 2))
        torch.testing.assert_close(compiled(*tokens), model(*tokens), rtol=0, atol=0)
    assert graphs.frame_count <= 3
