"""How the recall checkpoints are trained: the bounded gate, KDA for a CPU, and going on."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import KimiLinearConfig, KimiLinearForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear as modeling

from backend_cli.eval.recall_task import Question
from backend_core.testing.numerics import relative_error
from benchmarks.recall import bounded_gate, train
from kda_backend import reference

RECALL = Path(__file__).parents[2] / "benchmarks" / "recall"


def drawn(tokens: int = 70) -> list[torch.Tensor]:
    """q, k, v, g, beta with batch 1; g reaches the lower bound."""
    rng = torch.Generator().manual_seed(3)
    q, k, v, raw = (torch.randn(1, tokens, 2, 32, generator=rng) for _ in range(4))
    g = reference.log_decay(4 * raw, torch.zeros(2), None, bounded_gate.LOWER_BOUND)
    return [q, k, v, g, torch.rand(1, tokens, 2, generator=rng)]


def test_kda_for_a_cpu_is_the_definition_and_has_its_gradients() -> None:
    q, k, v, g, beta = drawn()
    leaves = [x.double().requires_grad_() for x in (q, k, v, g, beta)]
    want, state = reference.recurrent_kda(
        *(reference.l2norm(x)[0] for x in leaves[:2]),
        *(x[0] for x in leaves[2:]),
        scale=32**-0.5,
        state=torch.zeros(1, 2, 32, 32, dtype=torch.float64),
        cu_seqlens=[0, q.shape[1]],
    )
    want.square().sum().backward()
    own = [x.clone().requires_grad_() for x in (q, k, v, g, beta)]
    got, after = train.chunk_kda_torch(*own)
    got.square().sum().backward()
    assert relative_error(got[0].detach(), want.detach()) < 1e-5
    assert after is not None and relative_error(after.detach().mT, state.detach()) < 1e-5
    for mine, right in zip(own, leaves, strict=True):
        assert mine.grad is not None and right.grad is not None
        assert relative_error(mine.grad, right.grad) < 1e-4


def tiny() -> KimiLinearForCausalLM:
    config = {**train.CONFIG, "hidden_size": 32, "intermediate_size": 32, "kv_lora_rank": 16}
    config |= {"num_hidden_layers": 2, "first_k_dense_replace": 2}
    config["linear_attn_config"] = {
        **train.CONFIG["linear_attn_config"],
        "kda_layers": [1],
        "full_attn_layers": [2],
    }
    torch.manual_seed(5)
    return KimiLinearForCausalLM(KimiLinearConfig(**config)).float()


def test_bounded_gates_decay_as_the_gates_did_where_those_are_slow(own_modeling: None) -> None:
    model = tiny()
    layer = next(m for m in model.modules() if isinstance(m, modeling.KimiLinearDeltaAttention))
    nn.init.uniform_(layer.forget_gate.A_log, 0.0, 1.0)
    nn.init.uniform_(layer.forget_gate.dt_bias, -9.0, -5.0)
    x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(1))
    before, gate = layer.forget_gate(x), layer.g_b_proj(layer.g_a_proj(x))
    bounded_gate.bound_gates(model)
    assert relative_error(layer.forget_gate(x).detach(), before.detach().double()) < 1e-2
    assert relative_error(layer.g_b_proj(layer.g_a_proj(x)).detach(), gate.detach().double()) < 1e-5
    layer.forget_gate.dt_bias.data += 40.0
    bound = layer.forget_gate(x)
    assert torch.equal(bound, torch.full_like(bound, bounded_gate.LOWER_BOUND))
    names = {bounded_gate.published_name(name) for name, _ in model.named_parameters()}
    assert "model.layers.0.self_attn.g_proj.weight" in names
    assert not any("g_a_proj" in name or "g_b_proj" in name for name in names)


@pytest.fixture
def own_modeling(monkeypatch: pytest.MonkeyPatch) -> None:
    """What training exchanges in transformers comes back."""
    for owner, name in (
        *((modeling, name) for name in ("chunk_kimi_delta_attention", "causal_conv1d_fn")),
        (modeling.KimiLinearForgetGate, "forward"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))


def test_training_learns(own_modeling: None) -> None:
    """Two steps of a tiny model."""
    modeling.chunk_kimi_delta_attention = train.chunk_kda_torch
    modeling.causal_conv1d_fn = train.causal_conv1d_torch
    questions = [Question(f"How many of {n} are left? Say it.", str(n)) for n in range(30)]
    args = argparse.Namespace(
        **{"device": "cpu", "seed": 0, "steps": 2, "batch_tokens": 1024, "workers": 0, "lr": 1e-2},
        **{"minutes": 1.0, "log_every": 1, "start_from": None},
    )
    model = tiny()
    bounded_gate.bound_gates(model)
    before = model.model.embed_tokens.weight.detach().clone()
    found = train.train(args, train.Corpus(questions), model, train.MlaDrop(model))
    assert [entry["step"] for entry in found["log"]] == [0, 1] and found["steps"] == 2
    after = model.model.embed_tokens.weight
    assert after.isfinite().all() and not torch.equal(before, after)


def test_the_bounded_checkpoints_files() -> None:
    """Kimi-K3's names and configuration beside the first checkpoint's."""
    folder, plain = RECALL / "checkpoint_bounded", RECALL / "checkpoint"
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 12_000_000
    raw = json.loads((folder / "config.json").read_text())
    assert raw == bounded_gate.configuration(json.loads((plain / "config.json").read_text()))
    linear = raw["linear_attn_config"]
    assert linear["use_full_rank_gate"] is True and linear["gate_lower_bound"] == -5.0
    weights, others = (load_file(place / "model.safetensors") for place in (folder, plain))
    assert all(w.dtype == torch.bfloat16 and w.isfinite().all() for w in weights.values())
    assert {name.replace("g_proj", "g_b_proj") for name in weights} == {
        name for name in others if "g_a_proj" not in name
    }
    assert weights["model.layers.0.self_attn.g_proj.weight"].shape == (256, 256)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (folder / file).read_bytes() == (plain / file).read_bytes()


def test_the_committed_training_saw_what_it_must() -> None:
    result = RECALL.parent / "results" / "recall_training_bounded.json"
    record = json.loads(result.read_text())
    assert record["arguments"]["gate"] == "bounded" and record["arguments"]["start_from"]
    found = record["held_out"]
    assert found["accuracy_committed"] == 1.0 and found["accuracy"] > 0.98
    assert found["accuracy_without_mla"] > 0.9  # its KDA layers carry the answer
    for fault in ("accuracy_state_transposed", "accuracy_gate_unbounded"):
        assert found[fault] < 0.2, fault
