"""What the caller of `torchbay.compile` asked for, checked before any work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import attrs

from torchbay._claims import check_sizes
from torchbay._options import given as given_options
from torchbay._options import read as read_options
from torchbay._registry import check_name, choose
from torchbay._torch_autograd import Partitioner
from torchbay.errors import InvalidArgument
from torchbay.plugin import Backend

__all__ = ["Settings"]

_TRACERS = ("auto", "make_fx", "dynamo")


@attrs.frozen(kw_only=True)
class Settings:
    """The arguments of `torchbay.compile` besides the callable.

    Raises:
        InvalidArgument: A value that cannot be used, with those that can.
    """

    backend: Any = None
    fullgraph: bool = False
    dynamic: bool | None = None
    dynamic_shapes: Any = None
    mode: str | None = None
    options: Mapping[str, Any] | None = None
    tracer: str = "auto"
    partitioner: Partitioner = "min_cut"
    fallback: Any = ...
    recompile_limit: int = 8
    fail_on_recompile_limit: bool = False
    name: str | None = None

    def __attrs_post_init__(self) -> None:
        self._check_choices()
        self._check_dynamic()
        given_options(self.mode, self.options)

    @property
    def _asks_for_symbols(self) -> bool:
        return bool(self.dynamic) or self.dynamic_shapes is not None

    def check_sizes(self, backend: Backend) -> None:
        """Refuse a backend that cannot take the symbolic sizes that were asked for.

        Raises:
            InvalidArgument: It cannot.
        """
        if self._asks_for_symbols:
            check_sizes(backend, "dynamic=True" if self.dynamic else "dynamic_shapes")

    def name_for(self, function: Any) -> str:
        """Return what messages call a compiled object."""
        return str(self.name or getattr(function, "__name__", type(function).__name__))

    def check_backend(self) -> None:
        """Refuse what can be refused without importing a backend that was not asked to do more.

        Raises:
            UnknownBackend, InvalidArgument, UnknownOption: As `torchbay.compile` says.
        """
        if self.fallback not in (None, ...):
            check_name(self.fallback) if isinstance(self.fallback, str) else choose(self.fallback)
        if self.backend is None:
            return
        if self._asks_for_symbols:
            self.check_sizes(choose(self.backend))
        if isinstance(self.backend, str) and self.mode is None and self.options is None:
            check_name(self.backend)
        else:
            read_options(choose(self.backend), self.mode, self.options)

    def _check_choices(self) -> None:
        for name in ("fullgraph", "fail_on_recompile_limit"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgument(
                    f"{name} is {getattr(self, name)!r}", remedy="Pass True or False"
                )
        limit = self.recompile_limit
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise InvalidArgument(
                f"recompile_limit is {limit!r}", remedy="Pass a whole number of at least 1"
            )
        if self.tracer not in _TRACERS:
            raise InvalidArgument(
                f"tracer is {self.tracer!r}", remedy=f"Known tracers: {', '.join(_TRACERS)}"
            )
        if self.partitioner not in get_args(Partitioner):
            raise InvalidArgument(
                f"partitioner is {self.partitioner!r}",
                remedy=f"Known partitioners: {', '.join(get_args(Partitioner))}",
            )
        if self.name is not None and not isinstance(self.name, str):
            raise InvalidArgument(f"name is {self.name!r}", remedy="Pass a string")

    def _check_dynamic(self) -> None:
        if self.dynamic is not None and not isinstance(self.dynamic, bool):
            raise InvalidArgument(f"dynamic is {self.dynamic!r}", remedy="Pass True, False or None")
        if self.dynamic is not None and self.dynamic_shapes is not None:
            raise InvalidArgument(
                "both dynamic and dynamic_shapes are given",
                remedy="Give one: dynamic_shapes says for each size what dynamic says for all",
            )
        if self.tracer == "dynamo" and self.dynamic_shapes is not None:
            raise InvalidArgument(
                "tracer='dynamo' takes no dynamic_shapes",
                remedy="Pass dynamic, or mark dimensions with torch._dynamo.mark_dynamic",
            )
