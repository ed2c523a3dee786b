"""A whole backend: NumPy's arrays, by the array base class, registered by an entry point."""

from attnx.plugin import ArrayBackend, Backend, BackendSpec, hookimpl, lane


def load() -> Backend:
    """The backend; whatever has to be imported for it is imported here."""
    return ArrayBackend("echo", lane("numpy"))


@hookimpl
def attnx_backends() -> list[BackendSpec]:
    """What this plugin brings."""
    return [BackendSpec("echo", load, framework="numpy", summary="the array base class")]
