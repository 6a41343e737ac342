"""Checks that an object has the shape, and speaks the version, of the plugin contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchbay.errors import BackendOutdated
from torchbay.plugin import API_VERSION, OLDEST_API_VERSION, Backend

_MEMBERS = tuple(member for member in vars(Backend) if not member.startswith("_"))


def fault(candidate: Any) -> str | None:
    """Say why this is no `Backend`, or return None if it is one."""
    try:
        return next(_faults(candidate), None)
    except Exception as error:  # noqa: BLE001  a member may be a property that raises
        return f"reading its members raised {error!r}"


def check_version(candidate: Any, account: str) -> None:
    """Refuse an object that states a version of the contract not spoken here."""
    stated = _stated_version(candidate)
    if stated is None or OLDEST_API_VERSION <= stated <= API_VERSION:
        return
    raise BackendOutdated(
        f"it speaks plugin API {stated}; this torchbay speaks {_spoken()}",
        account=account,
        remedy="Upgrade the backend, or pin an older torchbay"
        if stated < OLDEST_API_VERSION
        else "Upgrade torchbay",
    )


def address(candidate: Any) -> str:
    """Say where an object that no plugin made was written."""
    if hasattr(candidate, "__qualname__"):
        return f"{candidate.__module__}.{candidate.__qualname__}"
    return f"object of {type(candidate).__module__}.{type(candidate).__qualname__}"


def _faults(candidate: Any) -> Iterator[str]:
    """Yield what is wrong, first that which makes the rest unreadable."""
    missing = [member for member in _MEMBERS if not _has(candidate, member)]
    if missing:
        yield f"{type(candidate).__name__} lacks {', '.join(missing)}"
    if isinstance(candidate, type):
        yield f"{candidate.__name__} is a class, not an instance of it"
    if type(candidate.api_version) is not int:
        yield f"its api_version is {candidate.api_version!r}, not an integer"
    if not isinstance(candidate.name, str):
        yield f"its name is {candidate.name!r}, not a string"
    if not isinstance(candidate.options, type):
        yield f"its options are {candidate.options!r}, not a class"
    for method in ("compile", "fingerprint"):
        if not callable(getattr(candidate, method)):
            yield f"its {method} is {getattr(candidate, method)!r}, not a method"


def _stated_version(candidate: Any) -> int | None:
    try:
        stated = candidate.api_version
    except Exception:  # noqa: BLE001  `fault` will say so
        return None
    return stated if type(stated) is int else None


def _has(candidate: object, member: str) -> bool:
    # A property is not evaluated to find out: it may be costly.
    return hasattr(type(candidate), member) or hasattr(candidate, member)


def _spoken() -> str:
    if OLDEST_API_VERSION == API_VERSION:
        return str(API_VERSION)
    return f"{OLDEST_API_VERSION} to {API_VERSION}"
