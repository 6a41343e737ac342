"""Every error torchbay raises on purpose.

* TorchbayError
  x InvalidArgument            what the caller passed cannot be used (also a ValueError)
    + UnknownOption            an option the backend does not have
  x BackendError               something about a backend
    + UnknownBackend           no installed backend has this name (also a LookupError)
    + NoBackend                nothing is installed that could compile
    + AmbiguousBackend         two distributions claim one name, or several backends and no choice
    + BackendBroken            the plugin cannot be loaded
    + BackendOutdated          the plugin speaks another version of the plugin API
    + UnsupportedGraph         a backend declines a graph; raised by backends
    + BackendFailed            a backend raised anything else
  x CaptureError               a call cannot be served from a graph
    + NotServed                ... and the caller asked for nothing less; carries the call's result
    + RecompileLimit           ... because the limit of specializations is reached
    + DoubleBackward           ... that is asked for a gradient of its gradient
    + DimensionFixed           ... with a size the caller declared to be dynamic; carries the result

Each has three parts: what happened, on whose account, and what to do about it.
"""

from __future__ import annotations

__all__ = [
    "AmbiguousBackend",
    "BackendBroken",
    "BackendError",
    "BackendFailed",
    "BackendOutdated",
    "CaptureError",
    "DimensionFixed",
    "DoubleBackward",
    "InvalidArgument",
    "NoBackend",
    "NotServed",
    "RecompileLimit",
    "TorchbayError",
    "TorchbayWarning",
    "UnknownBackend",
    "UnknownOption",
    "UnsupportedGraph",
]


class TorchbayError(Exception):
    """An error with three parts, each also an attribute.

    Args:
        what: What happened, with the ``repr`` of the cause where there is one.
        account: On whose account: a backend with its distribution and version, or the file and
            line of the user's code. Empty when ``what`` says it already.
        remedy: What to do about it.
    """

    def __init__(self, what: str, *, account: str = "", remedy: str = "") -> None:
        self.what = what
        self.account = account
        self.remedy = remedy
        super().__init__(what, account, remedy)

    def __str__(self) -> str:
        account = f" ({self.account})" if self.account else ""
        remedy = f". {self.remedy}" if self.remedy else ""
        return f"{self.what}{account}{remedy}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.account, self.remedy)


def _rebuild(kind: type[TorchbayError], what: str, account: str, remedy: str) -> TorchbayError:
    return kind(what, account=account, remedy=remedy)


class InvalidArgument(TorchbayError, ValueError):
    """An argument cannot be used; raised before any work is done."""


class UnknownOption(InvalidArgument):
    """An option or mode the backend does not have, or a value of the wrong type for one it has."""


class BackendError(TorchbayError):
    """Something about a backend."""


class UnknownBackend(BackendError, LookupError):
    """No installed backend has the name that was asked for."""


class NoBackend(BackendError):
    """No backend is installed."""


class AmbiguousBackend(BackendError):
    """Two distributions claim one name, or several backends are installed and none was chosen."""


class BackendBroken(BackendError):
    """A plugin cannot be loaded: its import or its factory raised, or what it made is no backend."""


class BackendOutdated(BackendError):
    """A plugin was written for a version of the plugin API that this torchbay does not speak."""


class UnsupportedGraph(BackendError):
    """A backend declines a graph. Declining is ordinary: the caller's fallback is tried next."""


class BackendFailed(BackendError):
    """A backend raised something other than `UnsupportedGraph`. Never turned into a fallback."""


class CaptureError(TorchbayError):
    """A call cannot be served from a graph."""


class NotServed(CaptureError):
    """A call could not be served from a graph and ``fullgraph=True`` asked for nothing less.

    The call itself did happen: its value is in ``result``.
    """

    result: object = None


class DoubleBackward(CaptureError):
    """A gradient of a gradient was asked of a call that was served from a graph."""


class DimensionFixed(CaptureError):
    """The program serves one size only of a dimension that was declared to be dynamic.

    The call itself did happen: its value is in ``result``.
    """

    result: object = None


class RecompileLimit(CaptureError):
    """A compiled object holds as many specializations as its ``recompile_limit`` allows."""


class TorchbayWarning(UserWarning):
    """The category of every warning torchbay issues."""
