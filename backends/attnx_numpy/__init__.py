"""The NumPy backend's plugin: the spec alone, so that finding it costs no import of NumPy."""

from __future__ import annotations

from attnx.plugin import Backend, BackendSpec, Lane, hookimpl

__all__ = ["attnx_backends"]


def _make_lane() -> Lane:
    from attnx_numpy._lane import LANE

    return LANE


def _load() -> Backend:
    from attnx_numpy._backend import NumpyBackend

    return NumpyBackend()


@hookimpl
def attnx_backends() -> list[BackendSpec]:
    """The spec of the NumPy backend."""
    return [
        BackendSpec(
            name="numpy",
            array_types=("numpy.ndarray",),
            load=_load,
            lane=_make_lane,
            requires=("numpy",),
            summary="blocked tiles on BLAS with worker threads",
        )
    ]
