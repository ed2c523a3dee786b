"""The CuPy backend's plugin: the spec alone, so that finding it costs no import of CuPy."""

from __future__ import annotations

from attnx.plugin import Backend, BackendSpec, Lane, hookimpl

__all__ = ["attnx_backends"]


def _make_lane() -> Lane:
    from attnx_cupy._lane import LANE

    return LANE


def _make_backend() -> Backend:
    from attnx_cupy._backend import CupyBackend

    return CupyBackend()


@hookimpl
def attnx_backends() -> list[BackendSpec]:
    """The spec of the CuPy backend."""
    return [
        BackendSpec(
            name="cupy",
            array_types=("cupy.ndarray",),
            load=_make_backend,
            lane=_make_lane,
            requires=("cupy",),
            summary="large tiles on cuBLAS, the softmax fused in CUDA kernels",
            install_hint="pip install 'attnx[cuda13]', or cuda12 for an older driver",
        )
    ]
