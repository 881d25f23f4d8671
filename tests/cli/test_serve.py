"""``serve``: the command line it runs, and each reason not to run one."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from backend_cli import serve as serve_module
from backend_cli.terminal import shown_command
from backend_core.engines import Engine, seams
from backend_core.engines.seams import Part
from backend_core.target import KNOWN_TARGETS
from tests.cli.program import assert_one_sentence, run

KIMI = {
    "model_type": "kimi_linear",
    "linear_attn_config": {
        "kda_layers": [1],
        "full_attn_layers": [2],
        "head_dim": 128,
        "num_heads": 32,
    },
}


def of_kda(**fields: object) -> dict[str, Any]:
    """Kimi-Linear's configuration with other KDA layers."""
    return KIMI | {"linear_attn_config": KIMI["linear_attn_config"] | fields}  # type: ignore[operator]


LING = {  # of the fields of Ling-3.0-Flash's config.json, those that say something of its layers
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_hybrid",
    "num_hidden_layers": 42,
    "num_attention_heads": 32,
    "head_dim": 128,
    "layer_group_size": 6,
    "short_conv_kernel_size": 4,
    "no_kda_lora": True,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """An H200 with engines of given versions, whose programs write down how they were called."""
    for name in serve_module.SERVERS:
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!{sys.executable}\nimport sys\nprint('ran', *sys.argv[1:])\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(serve_module.sys, "executable", str(tmp_path / "nowhere" / "python"))
    monkeypatch.setattr(serve_module, "detect_target", lambda: KNOWN_TARGETS["H200"])

    # what is relied on is there, but no files of an engine are
    monkeypatch.setattr(seams, "difference", lambda part: None)

    def install(**versions: str) -> None:
        monkeypatch.setattr(Engine, "installed", lambda engine: versions.get(engine.name))

    install(vllm="0.33.0", sglang="0.5.23")
    return install


def model(tmp_path: Path, config: Any) -> str:
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text)
    return str(folder)


@pytest.mark.parametrize(
    ("engine", "version", "flag", "state"),
    [
        ("vllm", "0.33.0+cu130", "KDA", "tested; what is relied on holds"),
        ("vllm", "0.34.0", "KDA", "not tested (0.32.0, 0.33.0 are); what is relied on holds"),
        ("sglang", "0.5.22", "kda", "tested; what is relied on holds"),
    ],
)
def test_the_command(
    engine: str, version: str, flag: str, state: str, engines: Callable[..., None], tmp_path: Path
) -> None:
    engines(**{engine: version})
    folder = model(tmp_path, KIMI)
    code, out, _ = run("serve", "--engine", engine, folder, "--dry-run", "--port", "9000")
    assert code == 0
    name = folder if engine == "vllm" else f"--model-path {folder}"
    program = tmp_path / "bin" / engine
    assert out.splitlines()[-1] == f"{program} serve {name} --attention-backend {flag} --port 9000"
    assert f"{engine} {version} on H200 (sm90), 1 GPU\n" in out
    assert f"{engine} {version}: {state}" in out.splitlines()
    rows = [re.split("  +", line)[1:] for line in out.splitlines() if line.startswith("  ")]
    assert rows[0] == ["32 heads per GPU"]
    assert ["prefill", "any size", "two_stage_sm90"] in [row[:3] for row in rows]
    sizes, path, measured = next(row for row in rows if row[0] == "decode_step")[1:]
    assert (sizes, path) == ("any size", "fused_sm90") and date.fromisoformat(measured)
    assert all(len(line) <= 80 for line in out.splitlines()[:-1])


def test_it_runs_the_engine(
    engines: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(serve_module.os, "execvp", lambda *command: ran.append(command))
    folder = model(tmp_path, {"text_config": KIMI})
    assert run("serve", "--engine", "vllm", folder, "-tp", "4")[0] == 0
    program = str(tmp_path / "bin" / "vllm")
    command = [program, "serve", folder, "--attention-backend", "KDA", "-tp", "4"]
    assert ran == [(program, command)]


@pytest.mark.parametrize(
    "tp", [["--tensor-parallel-size=8"], ["-tp", "8"], ["--tensor_parallel_size", "8"]]
)
def test_heads_are_split_over_gpus(
    tp: list[str], engines: Callable[..., None], tmp_path: Path
) -> None:
    _, out, _ = run("serve", "--engine", "vllm", model(tmp_path, KIMI), "--dry-run", *tp)
    assert "8 GPUs" in out and "4 heads per GPU" in out


@pytest.mark.parametrize(
    ("options", "heads"),
    [
        (["--dp-size", "2"], 1),
        (["--enable-dp-attention", "--dp-size", "8"], 8),
        (["--attn-dp-size=32"], 32),
        (["--attn-dp-size", "4", "--attn-cp-size", "2"], 8),
    ],
)
def test_groups_of_gpus_have_all_heads(
    options: list[str], heads: int, engines: Callable[..., None], tmp_path: Path
) -> None:
    """sglang's attention in data or context parallel."""
    command = ("serve", "--engine", "sglang", model(tmp_path, KIMI), "--dry-run", "--tp", "32")
    code, out, err = run(*command, *options)
    assert code == 0, err
    assert "32 GPUs" in out and f" {heads} heads per GPU" in out


@pytest.mark.parametrize(("engine", "flag"), [("vllm", "KDA"), ("sglang", "kda")])
@pytest.mark.parametrize("written", ["text", "text and images", "what differs from defaults"])
def test_glm(
    written: str, engine: str, flag: str, engines: Callable[..., None], tmp_path: Path
) -> None:
    """GLM-5.3-Flash as transformers' own class describes it: 64 heads, a bounded gate."""
    from transformers import Glm5NextConfig

    config = json.loads(Glm5NextConfig().to_json_string(use_diff=False))
    if written == "text":
        config = config["text_config"]
    elif written != "text and images":
        config = json.loads(Glm5NextConfig().to_json_string())
    arguments = (model(tmp_path, config), "--dry-run", "--tensor-parallel-size=2")
    code, out, err = run("serve", "--engine", engine, *arguments)
    assert (code, err) == (0, "") and f"--attention-backend {flag}" in out
    assert "32 heads per GPU" in out and "  two_stage_sm90 " in out and "MLA" not in out


@pytest.mark.parametrize(("engine", "flag"), [("vllm", "KDA"), ("sglang", "kda")])
def test_ling(engine: str, flag: str, engines: Callable[..., None], tmp_path: Path) -> None:
    """Ling-V3: its KDA layers give the flag, and its MLA layers are described too."""
    from transformers import BailingHybridConfig

    written = json.loads(BailingHybridConfig(no_kda_lora=True).to_json_string())
    assert written["head_dim"] == 64  # there the width of the rotation; linear_head_dim is KDA's
    for config in (LING, {"model_type": "bailing_moe_v3_vl", "text_config": LING}, written):
        folder = model(tmp_path, config)
        code, out, err = run("serve", "--engine", engine, folder, "--dry-run")
        assert (code, err) == (0, "") and f"--attention-backend {flag}" in out
        assert "32 heads per GPU" in out and "  decode_step " in out


LLAMA = {"model_type": "llama"}
DRY = "--dry-run"
MLA = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
LING_2 = {key: x for key, x in LING.items() if "kda" not in key and key != "short_conv_kernel_size"}


@pytest.mark.parametrize(
    ("config", "args", "code", "message"),
    [
        (KIMI, ["--engine", "tgi"], 2, "--engine must be vllm or sglang, got 'tgi'"),
        (KIMI, ["--engine", "vllm", "--attention-backend", "X"], 2, "--attention-backend is what"),
        (KIMI, ["--engine", "vllm", "--dry-run", "--attention_backend=X"], 2, "is what serve adds"),
        (KIMI, ["--engine", "vllm", "-tp", "\u00b2"], 2, "must be a positive number, got"),
        (KIMI, ["--engine", "vllm", "-tp", "many"], 2, "must be a positive number, got 'many'"),
        (KIMI, ["--engine", "vllm", "-tp"], 2, "must be a positive number, got ''"),
        (KIMI, ["--engine", "vllm", "-tp", "3"], 2, "32 heads cannot be split over 3 GPUs"),
        (LLAMA, ["--engine", "vllm"], 2, "must have layers of a family, got a 'llama' model"),
        ("{", ["--engine", "vllm"], 2, "config.json must be JSON"),
        ("[]", ["--engine", "vllm"], 2, "config.json must be a JSON object, got list"),
        (KIMI | {"linear_attn_config": {"kda_layers": [1]}}, ["--engine", "vllm"], 2, "num_heads"),
        (of_kda(num_heads=0), ["--engine", "vllm"], 2, "must be positive, got 0 and 128"),
        (of_kda(head_dim=-128), ["--engine", "sglang"], 2, "must be positive, got 32 and -128"),
        (of_kda(num_heads=1.5), ["--engine", "vllm", DRY], 2, "must be a whole number, got 1.5"),
        (of_kda(num_heads=math.inf), ["--engine", "sglang"], 2, "must be a whole number, got inf"),
        (MLA | {"num_attention_heads": 1.5}, ["--engine", "vllm", DRY], 2, "number, got 1.5"),
        (MLA, ["--engine", "vllm"], 2, "the configuration must have num_attention_heads"),
        (of_kda(short_conv_kernel_size=5), ["--engine", "vllm"], 1, "must have 4 taps, got 5"),
        (LING_2 | {"kv_lora_rank": None}, ["--engine", "vllm"], 2, "GLM-5.3-Flash or Ling-V3"),
        ({"model_type": "glm5_next"}, ["--engine", "vllm"], 2, "linear_num_heads"),
        (LING | {"head_dim": None}, ["--engine", "vllm"], 2, "num_attention_heads and head_dim"),
    ],
)
def test_refusals(
    config: Any,
    args: list[str],
    code: int,
    message: str,
    engines: Callable[..., None],
    tmp_path: Path,
) -> None:
    found, out, err = run("serve", model(tmp_path, config), *args)
    assert (found, out) == (code, "") and message in err
    assert_one_sentence(err)


def test_an_engine_that_is_not_installed(engines: Callable[..., None], tmp_path: Path) -> None:
    engines()
    code, _, err = run("serve", "--engine", "vllm", model(tmp_path, KIMI))
    assert (code, err) == (1, "kda-dsv4: vllm is not installed here\n")


def test_a_release_that_does_not_fit(
    engines: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family that it does not fit stays the engine's; without the flag there is nothing to do."""
    engines(vllm="0.34.0")

    def difference(part: Part) -> str | None:
        return f"vllm 0.34.0 does not fit the {part.name}" if part.name in names else None

    monkeypatch.setattr(seams, "difference", difference)
    names = {"attention of DeepSeek-V4"}
    code, out, _ = run("serve", "--engine", "vllm", model(tmp_path, KIMI), "--dry-run")
    assert code == 0 and "left to vllm's own code: attention of DeepSeek-V4\n" in out
    names = {"flag"}
    code, _, err = run("serve", "--engine", "vllm", model(tmp_path, KIMI))
    message = "vllm 0.34.0 does not fit the flag: serve it without this backend"
    assert (code, err) == (1, f"kda-dsv4: {message}\n")


def test_a_part_without_paths(
    engines: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turing = serve_module.detect_target().__class__("nvidia", "sm75", 72, "T4")
    monkeypatch.setattr(serve_module, "detect_target", lambda: turing)
    code, _, err = run("serve", "--engine", "vllm", model(tmp_path, KIMI))
    assert code == 1 and "this machine has no kernel path for this model: no kda" in err
    monkeypatch.setattr(serve_module, "detect_target", lambda: KNOWN_TARGETS["cpu"])
    code, _, err = run("serve", "--engine", "vllm", model(tmp_path, KIMI))
    assert code == 1 and "vllm needs a GPU for this model, and there is none here" in err


@pytest.mark.parametrize(("engine", "flag"), [("sglang", "dsv4"), ("vllm", "DSV4")])
def test_deepseek_v4(
    engine: str,
    flag: str,
    engines: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = model(tmp_path, {"model_type": "deepseek_v4", "num_attention_heads": 64})
    code, out, _ = run("serve", "--engine", engine, "--dry-run", folder)
    assert code == 0 and f"--attention-backend {flag}" in out
    assert re.search(r"main_c4_decode +any size +one_launch ", out)
    prefill = "one_launch" if engine == "vllm" else "upstream's sglang_jit"
    assert re.search(rf"main_c4_prefill +any size +{prefill} ", out) and "v41" not in out
    volta = serve_module.detect_target().__class__("nvidia", "sm70", 80, "V100")
    monkeypatch.setattr(serve_module, "detect_target", lambda: volta)
    code, _, err = run("serve", "--engine", engine, "--dry-run", folder)
    assert code == 1 and "this machine has no kernel path for this model: no dsv4" in err
    assert_one_sentence(err)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("kind", ["deepseek_v4", "deepseek_v41"])
def test_the_attention_of_deepseek_v4_and_v41_is_described(
    kind: str, engine: str, engines: Callable[..., None], tmp_path: Path
) -> None:
    folder = model(tmp_path, {"model_type": kind, "num_attention_heads": 64})
    options = ["--engine", engine, "--dry-run", "--tensor-parallel-size", "8"]
    code, out, _ = run("serve", folder, *options)
    assert code == 0 and "  8 heads per GPU" in out and "  attention in decodes, where" in out
    assert re.search(r"sparse_mla, decode +any size", out)


def test_no_such_model(engines: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*_: str) -> str:
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    code, _, err = run("serve", "--engine", "vllm", "moonshotai/None")
    assert code == 2 and "MODEL must be a folder with config.json or a model on the hub" in err
    assert_one_sentence(err)


def test_an_installed_engine_without_its_program(
    engines: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    code, _, err = run("serve", "--engine", "vllm", model(tmp_path, KIMI))
    assert (code, err) == (1, "kda-dsv4: vllm is installed, but its program is not on the path\n")


def test_keys_are_passed_on_and_not_printed(
    engines: Callable[..., None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = ["--api-key", "k1", "k2", "--hf-token=k3", "--enable-log", "--proxy", "http://u:k4@h"]
    code, out, _ = run("serve", model(tmp_path, KIMI), "--engine", "vllm", "--dry-run", *keys)
    line = out.splitlines()[-1]
    assert code == 0 and not any(f"k{n}" in line for n in range(1, 5))
    assert line.endswith("--api-key *** --hf-token=*** --enable-log --proxy http://***@h")
    for option in ("--token", "--client-secret", "--apikey", "--api-key", "--bearer-token"):
        assert shown_command(f"{option} --k5 --tokenizer m") == f"{option} *** --tokenizer m"
    variables = "docker run -e HF_TOKEN=k7 -e VLLM_API_KEY='k 8' -e MAX_TOKENS=9 i --url h?token=k"
    shown = "docker run -e HF_TOKEN=*** -e VLLM_API_KEY=*** -e MAX_TOKENS=9 i --url h?token=***"
    assert shown_command(variables) == shown
    config = """--max-num-batched-tokens 8 --config '{"aws_secret_access_key": "k\\"6", "a": 1}'"""
    assert shown_command(config) == config.replace('k\\"6', "***")
