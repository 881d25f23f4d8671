"""Pieces of the walk of ``block_walk.py`` for Hopper that a FORM turns on.

FORM names those of ``GluonPrefillParams`` that are on, with spaces between.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.constexpr_function
def has(form, name):
    """Whether FORM names it."""
    return name in form.split()


@gluon.constexpr_function
def takes_turns_by_mbarrier(form):
    """Whether ``take_turn`` and ``give_turn`` use their mbarriers."""
    return "ping_pong" in form.split() and "named_turns" not in form.split()


@gluon.constexpr_function
def _rescale_text(count):
    """PTX: ``count`` accumulators times their factors, unless the warp passes over.

    Operands: accumulators as results, the same as inputs, factors, whether any has moved."""
    products = [f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)]
    head = "{ .reg .pred moved; setp.ne.s32 moved, " + f"${3 * count}, 0; @!moved bra SAME;"
    return " ".join([head, *products, "SAME: }"])


@gluon.constexpr_function
def _rescale_operands(count):
    """The constraints of ``_rescale_text``'s operands."""
    same = [str(i) for i in range(count)]
    return ",".join(["=f"] * count + same + ["f"] * count + ["r"] * count)


@gluon.jit
def rescaled_where_moved(acc, alpha, o_layout: gl.constexpr, D: gl.constexpr):
    """acc times alpha, passed over by warps whose rows all keep their maxima: x times 1 is x."""
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))
    moved = gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.neu.f32 p, $2, 0f3F800000; setp.neu.or.f32 p, $3, 0f3F800000, p;"
        " vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; selp.s32 $1, 1, 0, p; }",
        "=r,=r,f,f",
        [alpha],
        dtype=gl.int32,
        is_pure=False,
        pack=2,  # a thread has two rows, and all of a warp get the same answer
    )
    return gl.inline_asm_elementwise(
        _rescale_text(D // 2),
        _rescale_operands(D // 2),
        [acc, alpha[:, None], moved[:, None]],
        dtype=gl.float32,
        is_pure=False,
        pack=D // 2,
    )


@gluon.jit
def before_wait(total):
    """The same sums. Nothing that they are made of is computed after what follows.

    ptxas moves arithmetic behind a wait for products, where it overlaps with none. The sleep, which
    no sum below zero ever asks for, depends on the sums, and ptxas leaves it in front.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .f32 least; min.f32 least, $2, $3; setp.lt.f32 p, least, 0f00000000;"
        " @p nanosleep.u32 0; mov.f32 $0, $2; mov.f32 $1, $3; }",
        "=&f,=&f,f,f",
        [total],
        dtype=gl.float32,
        is_pure=False,
        pack=2,
    )


@gluon.constexpr_function
def _turn_text(instruction, warpgroup):
    """PTX on the barrier of a warpgroup's turn: of 16 the last two, Triton takes the first."""
    return f"bar.{instruction} {14 + warpgroup}, 256; mov.u32 $0, 0;"


@gluon.jit
def _hardware_barrier(INSTRUCTION: gl.constexpr, WARPGROUP: gl.constexpr):
    """ "arrive" gives the turn to a warpgroup, "sync" waits for one's own."""
    gl.inline_asm_elementwise(
        _turn_text(INSTRUCTION, WARPGROUP), "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def open_turns(WARPGROUP: gl.constexpr, FORM: gl.constexpr):
    """With hardware barriers the first turn is given once in a CTA."""
    if has(FORM, "named_turns"):  # noqa: SIM102  each is decided when the kernel is compiled
        if WARPGROUP == 1:
            _hardware_barrier("arrive", 0)


@gluon.jit
def close_turns(WARPGROUP: gl.constexpr, FORM: gl.constexpr):
    """The turn that nobody takes is taken, so that no barrier is left half full."""
    if has(FORM, "named_turns"):  # noqa: SIM102  each is decided when the kernel is compiled
        if WARPGROUP == 0:
            _hardware_barrier("sync", 0)


@gluon.jit
def take_turn(turn, count, WARPGROUP: gl.constexpr, FORM: gl.constexpr):
    """Wait for the turn of this number, from 1 on."""
    if has(FORM, "named_turns"):
        _hardware_barrier("sync", WARPGROUP)
    elif has(FORM, "ping_pong"):
        mbarrier.wait(turn.index(WARPGROUP), (count & 1) ^ WARPGROUP)


@gluon.jit
def give_turn(turn, WARPGROUP: gl.constexpr, FORM: gl.constexpr):
    """To the other warpgroup."""
    if has(FORM, "named_turns"):
        _hardware_barrier("arrive", 1 - WARPGROUP)
    elif has(FORM, "ping_pong"):
        mbarrier.arrive(turn.index(1 - WARPGROUP), count=1)
