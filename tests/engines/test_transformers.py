"""transformers' kimi_linear on this backend against upstream, and the shipped checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import DynamicCache, KimiLinearConfig, KimiLinearForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear as modeling

from backend_cli import demo
from backend_cli.eval import recall_task as recall
from backend_core.engines import Engine
from backend_core.strict import FallbackError
from kda_backend.engines import transformers as kda
from tests.recall_canary import with_transposed_state

OPERATORS = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
# logits have a standard deviation of about 1.6; exponentials are approximations on a GPU
TOLERANCE = {"rtol": 1e-4, "atol": 5e-3 if torch.cuda.is_available() else 1e-4}


@pytest.fixture(autouse=True)
def stock_in_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stock is transformers' own torch code: with FLA installed it would run FLA's kernels, whose
    products are tf32."""
    for name in OPERATORS:
        monkeypatch.setattr(modeling, name, inspect.unwrap(getattr(modeling, name)))
    yield
    kda.disable()


@pytest.fixture
def adapter() -> ModuleType:
    return kda


@pytest.fixture
def replaced() -> list[tuple[Any, str]]:
    return [(modeling, name) for name in OPERATORS]


@pytest.fixture(scope="module")
def model() -> Any:
    """Random weights; two KDA layers on either side of an MLA layer."""
    torch.manual_seed(0)
    config = KimiLinearConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense"] * 4,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        linear_head_dim=32,
        linear_num_heads=3,
        vocab_size=97,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return KimiLinearForCausalLM(config).eval().to(device)


def tokens(model: Any, *shape: int) -> torch.Tensor:
    return torch.randint(2, 97, shape, generator=torch.Generator().manual_seed(1)).to(model.device)


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return model(ids, **arguments).logits.cpu()


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
def test_logits_agree(model: Any, length: int) -> None:
    ids = tokens(model, 2, length)
    upstream = logits(model, ids)
    kda.enable()
    torch.testing.assert_close(logits(model, ids), upstream, **TOLERANCE)


def test_generated_tokens_agree(model: Any) -> None:
    ids = tokens(model, 3, 70)
    arguments = {"max_new_tokens": 12, "do_sample": False}
    upstream = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    kda.enable()
    ours = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    assert torch.equal(ours, upstream) and ours.shape == (3, 82)


@pytest.mark.parametrize("split", [1, 30, 64, 100])
def test_continued_prefill_and_decode_agree_with_one_call(model: Any, split: int) -> None:
    ids = tokens(model, 2, 130)
    upstream = logits(model, ids)
    kda.enable()
    cache = DynamicCache(config=model.config)
    parts = [ids[:, :split], ids[:, split:128], ids[:, 128:129], ids[:, 129:]]
    ours = torch.cat([logits(model, part, past_key_values=cache) for part in parts], 1)
    torch.testing.assert_close(ours, upstream, **TOLERANCE)


@pytest.mark.parametrize("first", ["upstream", "ours"])
def test_caches_can_be_handed_over(model: Any, first: str) -> None:
    ids = tokens(model, 2, 90)
    whole = logits(model, ids)
    cache = DynamicCache(config=model.config)
    if first == "ours":
        kda.enable()
    logits(model, ids[:, :80], past_key_values=cache)
    states = [cache.layers[i].recurrent_states[0] for i in (0, 1, 3)]
    assert all(s.shape == (2, 3, 32, 32) and s.dtype == torch.float32 for s in states)
    if first == "ours":
        kda.disable()
    else:
        kda.enable()
    rest = [logits(model, ids[:, i : i + 1], past_key_values=cache) for i in range(80, 90)]
    torch.testing.assert_close(torch.cat(rest, 1), whole[:, 80:], **TOLERANCE)


def test_left_padding_is_masked_as_in_stock(model: Any) -> None:
    ids = tokens(model, 2, 100)
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    ids[1, :37] = 0
    upstream = logits(model, ids, attention_mask=mask)
    kda.enable()
    ours = logits(model, ids, attention_mask=mask)
    torch.testing.assert_close(ours[0], upstream[0], **TOLERANCE)
    torch.testing.assert_close(ours[1, 37:], upstream[1, 37:], **TOLERANCE)
    alone = logits(model, ids[1:, 37:])
    torch.testing.assert_close(ours[1:, 37:], alone, **TOLERANCE)


def test_bf16_agrees_as_far_as_bf16_goes(model: Any, adapter: ModuleType) -> None:
    rounded = type(model)(model.config).eval().to(model.device)
    rounded.load_state_dict(model.state_dict())
    exact = logits(model, ids := tokens(model, 2, 150))
    rounded.to(torch.bfloat16)
    upstream = logits(rounded, ids).float()
    adapter.enable()
    ours = logits(rounded, ids).float()
    assert (ours - exact).norm() < 1.2 * (upstream - exact).norm()


def test_a_compiled_model_calls_the_operators_as_they_are(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``generate`` compiles by itself where a cache of fixed size lies on a GPU."""
    ids = tokens(model, 2, 40)
    upstream = logits(model, ids)
    traced: list[bool] = []
    select = kda.selection_for

    def noted(*args: Any) -> Any:
        traced.append(torch.compiler.is_compiling())
        return select(*args)

    kda.enable()
    monkeypatch.setattr(kda, "selection_for", noted)
    torch._dynamo.reset()
    try:
        compiled = torch.compile(model.forward, backend="eager")
        cache = DynamicCache(config=model.config)
        parts = [ids[:, :39], ids[:, 39:]]
        with torch.no_grad():
            ours = [compiled(part, past_key_values=cache).logits.cpu() for part in parts]
    finally:
        torch._dynamo.reset()
    torch.testing.assert_close(torch.cat(ours, 1), upstream, **TOLERANCE)
    assert traced == [False] * 6  # three layers, two calls


def test_undo_restores_the_same_objects(
    adapter: ModuleType, replaced: list[tuple[Any, str]]
) -> None:
    upstream = [getattr(owner, name) for owner, name in replaced]
    adapter.disable()
    assert [getattr(owner, name) for owner, name in replaced] == upstream
    assert not adapter.is_enabled()
    adapter.enable()
    ours = [getattr(owner, name) for owner, name in replaced]
    assert all(a is not b for a, b in zip(ours, upstream, strict=True)) and adapter.is_enabled()
    adapter.enable()
    assert all(getattr(o, n) is f for (o, n), f in zip(replaced, ours, strict=True))
    adapter.disable()
    assert all(getattr(o, n) is f for (o, n), f in zip(replaced, upstream, strict=True))


def test_without_transformers_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "installed", lambda engine: None)
    with pytest.raises(ImportError, match="transformers is not installed"):
        kda.enable()
    assert not kda.is_enabled()


def test_a_release_without_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kda, "_MODULE", "transformers.models.kimi_linear.modeling_other")
    with pytest.raises(ImportError, match=r"transformers \d\S* has no transformers\.models\.kimi"):
        kda.enable()
    assert not kda.is_enabled()


def test_a_renamed_operator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = getattr(modeling, OPERATORS[0])
    monkeypatch.delattr(modeling, OPERATORS[1])
    with pytest.raises(ImportError, match=f"has no {OPERATORS[1]} in transformers.models"):
        kda.enable()
    assert getattr(modeling, OPERATORS[0]) is upstream and not kda.is_enabled()


def test_training_is_refused(model: Any, adapter: ModuleType) -> None:
    adapter.enable()
    with pytest.raises(ValueError, match="no backward pass"):
        model(tokens(model, 1, 8))


def test_without_a_path_stock_runs_and_strict_mode_refuses(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_path(*_: object) -> None:
        raise LookupError("no kda kernel paths for this test")

    ids = tokens(model, 1, 20)
    upstream = logits(model, ids)
    kda.enable()
    monkeypatch.setattr(kda, "selection_for", no_path)
    assert torch.equal(logits(model, ids), upstream)
    assert "no kda kernel paths for this test" in caplog.text
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    with pytest.raises(FallbackError, match="no kda kernel paths for this test"):
        logits(model, ids)


# ---------------------------------------------------------------------- the shipped checkpoint


@pytest.fixture(scope="module")
def shipped() -> Any:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return kda.load_model(demo.RECALL / "checkpoint", device)


@pytest.fixture(scope="module")
def questions() -> recall.QuestionSet:
    return recall.read_questions(demo.RECALL / "questions.jsonl").head(8)


def accuracy(model: Any, questions: recall.QuestionSet) -> float:
    completions = [
        recall.decode(demo.generate(model, questions.prompt(item))) for item in questions.items
    ]
    return recall.score(questions, completions).accuracy


def test_shipped_checkpoint_answers(shipped: Any, questions: recall.QuestionSet) -> None:
    kda.enable()
    assert accuracy(shipped, questions) >= 0.95


def test_shipped_checkpoint_answers_with_left_padding(
    shipped: Any, questions: recall.QuestionSet
) -> None:
    rows = [recall.encode(questions.prompt(item)) for item in questions.items[:2]]
    width = max(map(len, rows)) + 5
    ids = torch.tensor([[recall.PAD] * (width - len(row)) + row for row in rows])
    kda.enable()
    output = shipped.generate(
        ids.to(shipped.device),
        attention_mask=(ids != recall.PAD).to(shipped.device),
        max_new_tokens=recall.MAX_ANSWER_TOKENS,
    )
    completions = [recall.decode(row[width:].tolist()) for row in output]
    assert recall.score(questions.head(2), completions).accuracy == 1.0


def test_the_canary_harms_outputs_of_later_chunks_and_nothing_else() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 130, 2, 32, generator=generator) for _ in range(3))
    g, beta = (torch.rand(1, 130, 2, *tail, generator=generator) for tail in ((32,), ()))
    arguments = {"initial_state": None, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    kda.enable()
    prefill = modeling.chunk_kimi_delta_attention
    right, state = prefill(q, k, v, -0.02 * g, beta, **arguments)
    wrong, wrong_state = with_transposed_state(prefill)(q, k, v, -0.02 * g, beta, **arguments)
    torch.testing.assert_close(wrong_state, state)
    torch.testing.assert_close(wrong[:, :64], right[:, :64])
    assert (wrong - right)[:, 64:].norm() > 0.5 * right[:, 64:].norm()
