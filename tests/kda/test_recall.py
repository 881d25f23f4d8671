"""The recall task, its committed items, and the checkpoint's files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from backend_cli.eval import recall_task as recall
from backend_cli.eval.recall_task import Question, QuestionSet
from benchmarks.recall.make_questions import MIN_CONTEXT_QUESTIONS, make_questions, write_questions

RECALL = Path(__file__).parents[2] / "benchmarks" / "recall"
CHECKPOINT = RECALL / "checkpoint"


@pytest.fixture(scope="module")
def committed() -> QuestionSet:
    return recall.read_questions(RECALL / "questions.jsonl")


def token_counts(questions: QuestionSet) -> list[int]:
    return [len(recall.encode(questions.prompt(item))) for item in questions.items]


def test_contexts_have_different_answers_and_hold_the_question(committed: QuestionSet) -> None:
    questions = make_questions(committed.pool, 50, seed=6)
    for item in questions.items:
        answers = [questions.pool[index].answer for index in item.context]
        assert len(set(answers)) == len(answers) >= MIN_CONTEXT_QUESTIONS
        assert item.asked in item.context


def test_every_place_of_a_context_is_asked(committed: QuestionSet) -> None:
    places = [item.context.index(item.asked) / (len(item.context) - 1) for item in committed.items]
    assert 0.0 in places and 1.0 in places
    assert 0.4 < sum(places) / len(places) < 0.6


def test_too_few_questions_raise() -> None:
    with pytest.raises(ValueError, match=r"fill 1 prompts of 500 to 2000 tokens, got 1 questions"):
        make_questions([Question("Why?", "1")], 1, seed=0)


def test_committed_items(committed: QuestionSet) -> None:
    counts = token_counts(committed)
    assert len(committed.items) >= 300
    assert min(counts) >= 500 and max(counts) <= 2000
    assert sum(count > 1500 for count in counts) > 50  # many states of 24 chunks and more
    assert (RECALL / "questions.jsonl").stat().st_size < 1_000_000
    assert max(len(q.answer) for q in committed.pool) < recall.MAX_ANSWER_TOKENS


def test_question_files_round_trip(tmp_path: Path, committed: QuestionSet) -> None:
    write_questions(tmp_path / "q.jsonl", committed, "a source")
    assert recall.read_questions(tmp_path / "q.jsonl") == committed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json\n",
        '{"format": "another"}\n',
        '{"format": "kda-dsv4 recall 1", "pool": 1, "items": 0}\n',
        '{"format": "kda-dsv4 recall 1", "pool": 1, "items": 0}\n{"question": 3, "answer": "3"}\n',
        '{"format": "kda-dsv4 recall 1", "pool": 0, "items": 1}\n{"context": [0], "asked": 0}\n',
    ],
)
def test_other_question_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "q.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"q\.jsonl: expected a file of format 'kda-dsv4 recall"):
        recall.read_questions(tmp_path / "q.jsonl")


def test_read_gsm8k(tmp_path: Path) -> None:
    line = json.dumps({"question": "A\nb  c?", "answer": "So <<1*1=1>> on.\n#### 1,234"})
    (tmp_path / "d.jsonl").write_text(line + "\n")
    assert recall.read_gsm8k(tmp_path / "d.jsonl") == [Question("A b c?", "1234")]


def test_score_is_exact_match_up_to_the_terminator(committed: QuestionSet) -> None:
    questions = committed.head(4)
    right = [questions.answer(item) for item in questions.items]
    completions = [right[0], right[1] + "\nQ: more", right[2] + "0\n", ""]
    score = recall.score(questions, completions)
    assert score.right == (True, True, False, False)
    assert score.accuracy == 0.5
    with pytest.raises(ValueError, match="completions must number 4, one per item, got 3"):
        recall.score(questions, completions[:3])


def test_the_task_needs_no_torch() -> None:
    code = "import sys, backend_cli.eval.recall_task; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=RECALL.parents[1])


def test_tokenizer_maps_every_byte_to_its_id(committed: QuestionSet) -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    texts = [committed.prompt(committed.items[0]), "£ é 数 \U0001f642 \x00\t\r\n  x", ""]
    texts += [chr(code) for code in range(0x180)]
    for text in texts:
        assert tokenizer(text).input_ids == recall.encode(text)
        assert tokenizer.decode(recall.encode(text)) == text == recall.decode(recall.encode(text))
    for token, token_id in recall.SPECIAL_TOKENS.items():
        assert tokenizer.convert_tokens_to_ids(token) == token_id
        assert recall.decode([65, token_id, 66]) == "AB"
    assert tokenizer.pad_token_id == recall.PAD and tokenizer.padding_side == "left"
    assert len(tokenizer) <= recall.VOCAB_SIZE


def test_checkpoint_files() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= 12_000_000
    weights = load_file(CHECKPOINT / "model.safetensors")
    assert all(w.dtype == torch.bfloat16 and w.isfinite().all() for w in weights.values())
    # the names under which the published model stores a layer with a dense MLP
    names = {name.removeprefix("model.layers.0.") for name in weights if ".layers.0." in name}
    attention = "A_log dt_bias b_proj.weight f_a_proj.weight f_b_proj.weight g_a_proj.weight"
    attention += " g_b_proj.weight k_conv1d.weight k_proj.weight o_norm.weight o_proj.weight"
    attention += " q_conv1d.weight q_proj.weight v_conv1d.weight v_proj.weight"
    others = "input_layernorm.weight post_attention_layernorm.weight mlp.down_proj.weight"
    others += " mlp.gate_proj.weight mlp.up_proj.weight"
    assert names == {f"self_attn.{name}" for name in attention.split()} | set(others.split())


def test_configuration_reads_the_same_for_transformers_and_the_engines() -> None:
    raw = json.loads((CHECKPOINT / "config.json").read_text())
    config = AutoConfig.from_pretrained(CHECKPOINT)
    linear = raw["linear_attn_config"]
    layers = range(1, raw["num_hidden_layers"] + 1)
    assert sorted(linear["kda_layers"] + linear["full_attn_layers"]) == list(layers)
    assert config.layer_types == [
        "linear_attention" if layer in linear["kda_layers"] else "full_attention"
        for layer in layers
    ]
    assert config.mlp_layer_types == ["dense"] * len(layers)
    assert (config.linear_head_dim, config.linear_num_heads) == (128, 2)
    assert (config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim) == (512, 128, 64)
    assert raw["first_k_dense_replace"] >= raw["num_hidden_layers"] and "num_experts" not in raw
    assert raw["mla_use_nope"] and raw["vocab_size"] == recall.VOCAB_SIZE
