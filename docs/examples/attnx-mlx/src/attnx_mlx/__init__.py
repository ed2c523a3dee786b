"""The MLX backend's plugin: the spec alone, so that finding it costs no import of MLX."""

from __future__ import annotations

from attnx.plugin import Backend, BackendSpec, Lane, hookimpl

__all__ = ["attnx_backends"]


def _make_lane() -> Lane:
    from attnx_mlx._lane import LANE

    return LANE


def _make_backend() -> Backend:
    from attnx_mlx._backend import MlxBackend

    return MlxBackend()


@hookimpl
def attnx_backends() -> list[BackendSpec]:
    """The spec of the MLX backend."""
    return [
        BackendSpec(
            name="mlx",
            array_types=("mlx.core.array",),
            load=_make_backend,
            lane=_make_lane,
            requires=("mlx", "mlx.core"),
            summary="mx.fast where it gives the spec's answer, array tiles elsewhere",
            install_hint="pip install mlx, or 'mlx[cpu]' on Linux",
        )
    ]
