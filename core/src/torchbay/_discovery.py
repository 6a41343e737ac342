"""Reads from metadata which backends are installed, and says what to do about those that are not."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points

from torchbay.errors import AmbiguousBackend, UnknownBackend

GROUP = "torchbay.backends"
PROVIDERS = {
    "aoti": "torchbay-aoti",
    "eager": "torchbay-eager",
    "inductor_triton": "torchbay-inductor-triton",
}


def scan() -> Mapping[str, Sequence[EntryPoint]]:
    """Return the entry points of each backend name. Imports none of them."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        found.setdefault(entry.name, []).append(entry)
    return found


def hidden() -> frozenset[str]:
    """Return the names that the environment hides."""
    names = os.environ.get("TORCHBAY_SKIP_BACKENDS", "").split(",")
    return frozenset(name.strip() for name in names)


def distribution(entry: EntryPoint) -> str:
    """Name the distribution that brings an entry point."""
    return entry.dist.name if entry.dist else "an unknown distribution"


def version(entry: EntryPoint) -> str:
    """Return that distribution's version, empty if unknown."""
    return entry.dist.version if entry.dist else ""


def provider(entry: EntryPoint) -> str:
    """Name the distribution together with its version."""
    return f"{distribution(entry)} {version(entry)}".rstrip()


def origin(entry: EntryPoint) -> str:
    """Say which backend this is and who brings it, for an error's account."""
    return f"backend {entry.name!r} from {provider(entry)}"


def install(names: Iterable[str]) -> str:
    """Return the command that installs these known backends."""
    return f"pip install {' '.join(PROVIDERS[name] for name in names)}"


def unknown(name: str, installed: Sequence[str], asked_by: str) -> UnknownBackend:
    """Make the error for a name that no installed backend has."""
    return UnknownBackend(
        f"no backend is called {name!r}; installed: {', '.join(installed) or 'none'}",
        account=asked_by,
        remedy=_suggestion(name, installed),
    )


def skipped(entry: EntryPoint) -> UnknownBackend:
    """Make the error for a name that the environment hides."""
    return UnknownBackend(
        f"backend {entry.name!r} is hidden by TORCHBAY_SKIP_BACKENDS",
        account=origin(entry),
        remedy="Remove it from that variable, or choose another backend.",
    )


def claimed_twice(entries: Sequence[EntryPoint]) -> AmbiguousBackend:
    """Make the error for a name that several distributions claim."""
    providers = " and ".join(provider(entry) for entry in entries)
    return AmbiguousBackend(
        f"backend {entries[0].name!r} is claimed by {providers}",
        remedy="Uninstall all but one of them.",
    )


def _suggestion(name: str, installed: Sequence[str]) -> str:
    if name in PROVIDERS:
        return f"{PROVIDERS[name]} provides it: {install([name])}."
    near = difflib.get_close_matches(name, {*installed, *PROVIDERS})
    if not near:
        return "torchbay.backends() lists what is installed."
    absent = [meant for meant in near if meant not in installed]
    hint = f" {install(absent)} provides {_either(absent)}." if absent else ""
    return f"Did you mean {_either(near)}?{hint}"


def _either(names: Iterable[str]) -> str:
    return " or ".join(repr(name) for name in names)
