"""Video transformers: the settings on their own, and the plans that calls share."""

from __future__ import annotations

import gc
import pickle
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from backend_core.testing.numerics import relative_error
from block_sparse_backend import video
from block_sparse_backend.plan import kept
from block_sparse_backend.video import VideoAttention
from tests.block_sparse.compiler import compiler
from tests.block_sparse.test_sliding_tile import seen_of

CANVAS, TEXT = (4, 6, 7), 9
TOKENS = 4 * 6 * 7 + TEXT


def make(seed: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (3, 2, TOKENS, 2, 64)
    return list(torch.randn(shape, generator=generator).half().to(device))


@pytest.mark.parametrize("eight_bit", [False, True])
@pytest.mark.parametrize("kind", ["dense", "predicted", "sliding_tile"])
def test_kinds(kind: str, eight_bit: bool, seed: int, device: torch.device) -> None:
    q, k, v = make(seed, device)
    settings = VideoAttention(
        kind,  # type: ignore[arg-type]
        eight_bit,
        topk=1.0,
        canvas=CANVAS if kind == "sliding_tile" else None,
        tile=(2, 3, 4),
        windows=((1, 1, 2), (2, 1, 1)),
        even_windows="wide",
    )
    seen = torch.ones(1, dtype=torch.bool)
    if kind == "sliding_tile":
        seen = torch.stack([seen_of(CANVAS, (2, 3, 4), w, TEXT) for w in settings.windows])
        assert not bool(seen.all())
    double = [x.cpu().double().transpose(1, 2) for x in (q, k, v)]
    want = scaled_dot_product_attention(*double, seen.expand(2, TOKENS, TOKENS)).transpose(1, 2)
    assert relative_error(settings(q, k, v).cpu(), want) < (6e-2 if eight_bit else 2e-3)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="canvas must be given for sliding tiles alone"):
        VideoAttention("sliding_tile")
    with pytest.raises(ValueError, match="kind must be"):
        VideoAttention("radial")  # type: ignore[arg-type]
    x = torch.zeros(1, 5, 1, 64)
    with pytest.raises(ValueError, match="over at least 8 tokens"):
        VideoAttention("sliding_tile", canvas=(2, 2, 2))(x.half(), x.half(), x.half())
    with pytest.raises(ValueError, match=r"query must be bfloat16 or float16, got torch.float32"):
        VideoAttention()(x, x, x)
    for name, wrong in (("canvas", (2, 2)), ("canvas", (2, 0, 2)), ("tile", 6), ("tile", "688")):
        with pytest.raises(ValueError, match=rf"{name} must be three positive integers"):
            VideoAttention("sliding_tile", **{"canvas": (2, 2, 2), name: wrong})  # type: ignore[arg-type]
    for name, wrong in (
        ("topk", 0.0),
        ("topk", 1.5),
        ("topk", [0.5]),
        ("topk", "1"),
        ("eight_bit", "no"),
        ("even_windows", "odd"),
    ):
        with pytest.raises(ValueError, match=f"{name} must be"):
            VideoAttention("predicted", **{name: wrong})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"even_windows must be .* for the window \(2, 3, 3\)"):
        VideoAttention("sliding_tile", canvas=(2, 2, 2), windows=((2, 3, 3),))
    with pytest.raises(ValueError, match=r"k must be a torch.Tensor, got list"):
        VideoAttention()(x, x.tolist(), x)  # type: ignore[arg-type]
    for windows in ((), (3, 3, 3), "333"):
        with pytest.raises(ValueError, match="windows must be"):
            VideoAttention(windows=windows)  # type: ignore[arg-type]


@pytest.mark.parametrize("eight_bit", [False, True])
@pytest.mark.parametrize("kind", ["dense", "predicted", "sliding_tile"])
def test_tensors_that_kernels_cannot_read(
    kind: Any, eight_bit: bool, seed: int, device: torch.device
) -> None:
    """Channels that are not adjacent, rows that begin anywhere, grouped heads, and no tokens."""
    tiles: Any = {"canvas": CANVAS, "tile": (2, 3, 4)} if kind == "sliding_tile" else {}
    attend = VideoAttention(kind, eight_bit, topk=1.0, **tiles)
    q, k, v = make(seed, device)
    want = attend(q, k, v)
    by_channel = q.mT.contiguous().mT, functional.pad(k, (1, 1))[..., 1:-1], v.mT.contiguous().mT
    torch.testing.assert_close(attend(*by_channel), want, rtol=0, atol=1e-3)
    one = k[:, :, :1], v[:, :, :1]
    grouped = attend(q, *(x.expand_as(q) for x in one))
    torch.testing.assert_close(attend(q, *one), grouped, rtol=0, atol=1e-3)
    assert attend(q[:0], k[:0], v[:0]).shape == q[:0].shape
    # values of another length ended a GPU's context under tiles
    for wrong, message in (
        ((q, k, v[:, :20]), r"v must have shape \[2, 177, 2, D\], got \[2, 20, 2, 64\]"),
        ((q, k[:1], v[:1]), r"k must have shape \[2, L, H, 64\], got \[1, 177, 2, 64\]"),
        ((q[..., :0], k[..., :0], v), "q must have at least one channel"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(*wrong)


def test_lists_are_tuples(seed: int, device: torch.device) -> None:
    given: Any = {"canvas": list(CANVAS), "tile": [2, 3, 4], "windows": [[1, 1, 3], [3, 1, 1]]}
    settings = VideoAttention("sliding_tile", **given)
    tuples: Any = {"canvas": CANVAS, "tile": (2, 3, 4), "windows": ((1, 1, 3), (3, 1, 1))}
    assert settings == VideoAttention("sliding_tile", **tuples) and hash(settings)
    q, k, v = make(seed, device)
    assert settings(q, k, v).shape == q.shape


@pytest.mark.parametrize("size", [40, 96])
@pytest.mark.parametrize("eight_bit", [False, True])
@pytest.mark.parametrize("kind", ["dense", "predicted", "sliding_tile"])
def test_heads_of_other_sizes(
    kind: str, eight_bit: bool, size: int, seed: int, device: torch.device
) -> None:
    q, k, v = (x[..., :1].expand(*x.shape[:3], size).contiguous() for x in make(seed, device))
    q, k, v = (x + 0.1 * torch.arange(size, device=device) / size for x in (q, k, v))
    canvas = CANVAS if kind == "sliding_tile" else None
    windows = ((9, 9, 9),)
    settings = VideoAttention(kind, eight_bit, topk=1.0, canvas=canvas, windows=windows)  # type: ignore[arg-type]
    q, k, v = (x.half() for x in (q, k, v))
    double = [x.cpu().double().transpose(1, 2) for x in (q, k, v)]
    want = scaled_dot_product_attention(*double).transpose(1, 2)
    got = settings(q, k, v)
    assert got.shape == q.shape and relative_error(got.cpu(), want) < (6e-2 if eight_bit else 2e-3)
    message = f"heads must have at most 128 channels, got {2 * 96} and {2 * 96}"
    with pytest.raises(ValueError, match=message):
        VideoAttention()(*(torch.cat([x] * 5, 3)[..., :192] for x in (q, k, v)))


class Made:
    """Stands for a plan."""


@pytest.fixture
def plans() -> kept.Plans[Made]:
    return kept.Plans(lambda device, *key: Made())


def test_a_plan_is_complete_before_another_stream_reads_it(
    plans: kept.Plans[Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[Any] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append(device))
    device = torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of: stream if of == device else None)
    monkeypatch.setattr(kept, "is_capturing", lambda device: False)
    assert plans.of(device, 5) is plans.of(device, 5) is not plans.of(device, 6)
    assert waited == [device, device]


def test_a_plan_that_a_graph_has_seen_is_kept(
    plans: kept.Plans[Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay reads at the addresses of the capture, however many shapes come in between."""
    capturing, cpu = [False], torch.device("cpu")
    monkeypatch.setattr(kept, "is_capturing", lambda device: capturing[0])
    seen, unseen = weakref.ref(plans.of(cpu, 0)), weakref.ref(plans.of(cpu, 1))
    capturing[0] = True
    assert plans.of(cpu, 0) is seen()
    capturing[0] = False
    for number in range(2, 70):
        plans.of(cpu, number)
    gc.collect()
    assert seen() is not None and unseen() is None
    assert plans.of(cpu, 0) is seen()


def test_a_plan_that_a_capture_makes_serves_no_other_call(
    plans: kept.Plans[Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors hold nothing until the graph is replayed."""
    capturing, cpu = [True], torch.device("cpu")
    for module in (kept, video):
        monkeypatch.setattr(module, "is_capturing", lambda device: capturing[0])
    of_graph = plans.of(cpu, 0)
    capturing[0] = False
    assert plans.of(cpu, 0) is not of_graph
    x = torch.zeros(1, 60, 1, 64)
    capturing[0] = True
    tiles = VideoAttention("sliding_tile", eight_bit=False, canvas=(3, 4, 5))
    with pytest.raises(
        ValueError, match=r"tiles over \(3, 4, 5\) tokens must be called once before"
    ):
        tiles(x, x, x)


@pytest.mark.parametrize("stored", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_compiled_code_is_one_graph(
    stored: tuple[int, ...], seed: int, device: torch.device
) -> None:
    """Whatever the order of the memory; and what it is told of the operator's output is so."""
    given = make(seed, device)
    q, k, v = (x.permute(stored).contiguous().permute(stored) for x in given)
    for settings in (
        VideoAttention("predicted", topk=0.5),
        VideoAttention("sliding_tile", False, canvas=CANVAS, tile=(2, 3, 4), even_windows="wide"),
    ):
        compiled = torch.compile(settings.__call__, backend=compiler(device), fullgraph=True)
        torch.testing.assert_close(compiled(q, k, v), settings(q, k, v), rtol=0, atol=0)
        arguments = (q, k, v, None, pickle.loads(pickle.dumps(settings))._text)
        torch.library.opcheck(torch.ops.block_sparse_backend.video_attention, arguments)


def test_gradients_are_refused_after_inference_mode(seed: int, device: torch.device) -> None:
    """Tiles of a plan that it made ended in torch's error."""
    q, k, v = make(seed, device)
    settings = VideoAttention("sliding_tile", canvas=CANVAS, tile=(2, 3, 4))
    with torch.inference_mode():
        want = settings(q, k, v)
    with pytest.raises(ValueError, match="block_sparse_backend has no backward pass"):
        settings(q.clone().requires_grad_(), k, v)
    assert torch.equal(settings(q, k, v), want)


@pytest.mark.parametrize("number", [0.2, torch.tensor(0.2)])
def test_a_scale_in_compiled_code(number: Any, seed: int, device: torch.device) -> None:
    """One that is a tensor was an error, and parts the graph."""
    q, k, v = make(seed, device)
    settings = VideoAttention()
    compiled = torch.compile(lambda q, scale: settings(q + 1.0, k, v, scale), backend="eager")
    want = settings(q + 1.0, k, v, 0.2)
    torch.testing.assert_close(compiled(q, number), want, rtol=0, atol=1e-3)


def test_compiled_code_keeps_plans(
    seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo traces through what keeps a function's results, and would make every plan anew."""
    made = []
    plans = kept.Plans(lambda device, *key: made.append(key) or video._tile_plan(device, *key))
    monkeypatch.setattr(video, "_tile_plans", plans)
    q, k, v = make(seed, device)
    settings = VideoAttention("sliding_tile", eight_bit=False, canvas=CANVAS, tile=(2, 3, 4))
    compiled = torch.compile(lambda q: settings(q + 1.0, k, v), backend="eager")
    want = settings(q + 1.0, k, v)
    torch.testing.assert_close(compiled(q), want, rtol=0, atol=0)
    torch.testing.assert_close(compiled(q), want, rtol=0, atol=0)
    assert len(made) == 1
