"""Reads from metadata which plugins are installed, and says what to do about those that are not."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points

from torchbay.errors import AmbiguousBackend, UnknownBackend

BACKENDS = "torchbay.backends"
OBSERVERS = "torchbay.observers"
PROVIDERS = {
    "aoti": "torchbay-aoti",
    "eager": "torchbay-eager",
    "inductor_triton": "torchbay-inductor-triton",
}

_logger = logging.getLogger("torchbay")


def scan() -> Mapping[str, Sequence[EntryPoint]]:
    """Return the entry points of each backend name. Imports none of them."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in sorted(_announced(BACKENDS), key=lambda entry: entry.name):
        found.setdefault(entry.name, []).append(entry)
    return {name: _distinct(entries) for name, entries in found.items()}


def observers() -> Sequence[EntryPoint]:
    """Return the entry points of plugins that only observe. Imports none of them."""
    return [entry for entry in _announced(OBSERVERS) if entry.name not in hidden()]


def hidden() -> frozenset[str]:
    """Return the names that the environment hides."""
    names = os.environ.get("TORCHBAY_SKIP_BACKENDS", "").split(",")
    return frozenset(name.strip() for name in names)


def distribution(entry: EntryPoint) -> str:
    """Name the distribution that brings an entry point."""
    return _metadata(entry, "Name") or "an unknown distribution"


def version(entry: EntryPoint) -> str:
    """Return that distribution's version, empty if unknown."""
    return _metadata(entry, "Version")


def provider(entry: EntryPoint) -> str:
    """Name the distribution together with its version."""
    return f"{distribution(entry)} {version(entry)}".rstrip()


def origin(entry: EntryPoint) -> str:
    """Say which plugin this is and who brings it, for an error's account."""
    kind = "observer" if entry.group == OBSERVERS else "backend"
    return f"{kind} {entry.name!r} from {provider(entry)}"


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
        remedy="Remove it from that variable, or choose another backend",
    )


def claimed_twice(entries: Sequence[EntryPoint]) -> AmbiguousBackend:
    """Make the error for a name that several distributions claim."""
    providers = " and ".join(provider(entry) for entry in entries)
    return AmbiguousBackend(
        f"backend {entries[0].name!r} is claimed by {providers}",
        remedy="Uninstall all but one of them",
    )


def _announced(group: str) -> Iterable[EntryPoint]:
    try:
        return entry_points(group=group)
    except Exception:  # noqa: BLE001  one unreadable distribution spoils the whole scan
        return list(_readable(group))


def _readable(group: str) -> Iterator[EntryPoint]:
    """Yield what the distributions whose metadata can be read announce."""
    for found in distributions():
        try:
            yield from found.entry_points.select(group=group)
        except Exception as error:  # noqa: BLE001  whatever a parser raises
            _logger.warning("ignoring the entry points of %s: %r", _path(found), error)


def _path(found: Distribution) -> object:
    return getattr(found, "_path", found)


def _distinct(entries: Sequence[EntryPoint]) -> Sequence[EntryPoint]:
    """Drop what one distribution repeats: uninstalling leaves renamed folders behind."""
    seen = {(distribution(entry), entry.value): entry for entry in reversed(entries)}
    return list(reversed(seen.values()))


def _metadata(entry: EntryPoint, field: str) -> str:
    try:
        return str(entry.dist.metadata[field] or "") if entry.dist else ""
    except Exception:  # noqa: BLE001  a damaged installation still has a name to list
        return ""


def _suggestion(name: str, installed: Sequence[str]) -> str:
    if name in PROVIDERS:
        return f"{PROVIDERS[name]} provides it: {install([name])}"
    near = _near(name, {*installed, *PROVIDERS})
    if not near:
        return "torchbay.backends() lists what is installed"
    absent = [meant for meant in near if meant not in installed]
    hint = f" {install(absent)} provides {_either(absent)}" if absent else ""
    return f"Did you mean {_either(near)}?{hint}"


def _near(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that may be meant; a distribution's name counts, or half a name."""
    asked = name.lower().replace("-", "_").removeprefix("torchbay_")
    parts = [one for one in sorted(known) if asked and asked in one.split("_")]
    return [asked] if asked in known else parts or difflib.get_close_matches(asked, sorted(known))


def _either(names: Iterable[str]) -> str:
    return " or ".join(repr(name) for name in names)
