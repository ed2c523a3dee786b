"""The PyTorch backend's plugin: the spec alone, so that finding it costs no import of torch."""

from __future__ import annotations

from attnx.plugin import Backend, BackendSpec, Lane, hookimpl

__all__ = ["attnx_backends"]


def _make_lane() -> Lane:
    from attnx_torch._lane import LANE

    return LANE


def _make_backend() -> Backend:
    from attnx_torch._backend import TorchBackend

    return TorchBackend()


@hookimpl
def attnx_backends() -> list[BackendSpec]:
    """The spec of the PyTorch backend."""
    return [
        BackendSpec(
            name="torch",
            array_types=("torch.Tensor",),
            load=_make_backend,
            lane=_make_lane,
            requires=("torch",),
            summary="scaled_dot_product_attention where it is exact, else tiles over public ops",
            install_hint="pip install 'attnx[torch]'",
        )
    ]
