"""A template for backends of torchbay: float32 with NumPy."""

from torchbay.plugin import Backend, hookimpl


@hookimpl
def torchbay_make_backend() -> Backend:
    """Return the backend named ``example``."""
    from ._backend import ExampleBackend

    return ExampleBackend()
