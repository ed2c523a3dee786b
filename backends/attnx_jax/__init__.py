"""The JAX backend's plugin: the spec alone, so that finding it costs no import of JAX."""

from __future__ import annotations

from attnx.plugin import Backend, BackendSpec, Lane, hookimpl

__all__ = ["attnx_backends"]


def _make_lane() -> Lane:
    from attnx_jax._lane import LANE

    return LANE


def _load() -> Backend:
    from attnx_jax._backend import JaxBackend

    return JaxBackend()


@hookimpl
def attnx_backends() -> list[BackendSpec]:
    """The spec of the JAX backend."""
    return [
        BackendSpec(
            name="jax",
            array_types=("jax.Array", "jax.core.Tracer"),
            load=_load,
            lane=_make_lane,
            requires=("jax",),
            summary="blocked tiles under custom_vjp, compiled by XLA",
            install_hint="pip install 'attnx[jax]'",
        )
    ]
