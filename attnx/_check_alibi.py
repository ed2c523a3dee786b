"""The checks of an `Alibi` (S2.7): slopes for every query head, positions by the rules of masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from attnx import _checks
from attnx._alibi import Alibi
from attnx._check_masks import check_lengths, positions_of, refuse_open
from attnx.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from attnx._call import Dims
    from attnx._lane import Lane
    from attnx.masks import Mask

__all__ = ["NO_GRADIENT", "check_alibi", "refuse_gradient"]

NO_GRADIENT = (
    "bias: the slopes of an Alibi have no gradient: detach them; to learn them, pass "
    "-slopes[:, None, None] * |p - j| as an array"
)


def check_alibi(
    lane: Lane, bias: Any, q: Any, dtype: str, mask: Mask | None, dims: Dims
) -> Alibi | None:
    """An `Alibi` with arrays of the call's framework and its alignment settled; None for others.

    Raises:
        ArgumentError: slopes or positions of another shape, or an alignment without a meaning.
        ArgumentTypeError: slopes or positions of another dtype.
        UnsupportedError: the framework records a gradient of the slopes.
    """
    if not isinstance(bias, Alibi):
        return None
    align = bias.align
    if align is None and bias.q_pos is None:
        if dims.Lq != dims.Lk:
            refuse_open("bias", bias, dims)
        align = "top_left" if bias.kv_pos is None else None
    if align == "bottom_right":
        check_lengths("bias", mask)
    slopes = _slopes(lane, bias.slopes, q, dtype, dims)
    made = [
        None if leaf is None else positions_of(lane, f"Alibi.{name}", leaf, q, length, dims)
        for name, leaf, length in (
            ("q_pos", bias.q_pos, dims.Lq), ("kv_pos", bias.kv_pos, dims.Lk),
        )
    ]  # fmt: skip
    return Alibi._of(slopes, align, *made)


def _slopes(lane: Lane, slopes: Any, q: Any, dtype: str, dims: Dims) -> Any:
    """An array (Hq,), constant to differentiation."""
    if isinstance(slopes, tuple):
        _check_count((len(slopes),), dims)
        wide = lane.xp.float64 if dtype == "float64" else lane.xp.float32
        return lane.floats(slopes, wide, like=q)
    _checks.check_companion("Alibi.slopes", lane.dtype_name(slopes), dtype)
    _check_count(tuple(slopes.shape), dims)
    return lane.constant(slopes, refuse_gradient)


def _check_count(shape: tuple[int, ...], dims: Dims) -> None:
    if shape != (dims.Hq,):
        raise ArgumentError(
            f"Alibi.slopes: expected shape (Hq,) = ({dims.Hq},), one slope a query head, "
            f"got {shape}"
        )


def refuse_gradient() -> NoReturn:
    """Slopes are constants; a zero in place of their gradient would be a wrong number."""
    raise UnsupportedError(NO_GRADIENT)
