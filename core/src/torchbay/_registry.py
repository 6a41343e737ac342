"""Chooses a backend, and has its plugin imported, alone, when it is first used.

Imports neither torch nor a plugin itself, so that listing backends stays quick.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Literal

import attrs

from torchbay import _discovery
from torchbay.errors import (
    AmbiguousBackend,
    BackendBroken,
    BackendError,
    BackendOutdated,
    InvalidArgument,
    NoBackend,
    TorchbayWarning,
)

if TYPE_CHECKING:
    from torchbay._plugins import Plugins
    from torchbay.plugin import Backend

REFERENCE = "eager"


@attrs.frozen(kw_only=True)
class BackendListing:
    """An installed backend as its distribution announces it; nothing is imported to make one.

    Attributes:
        name: What to pass as ``backend=``.
        distribution: The distribution that brings it; all of them where several claim the name.
        version: The version of that distribution.
        state: ``installed`` until it is first used, then ``loaded`` or ``broken``. ``ambiguous``
            if several distributions claim the name, ``skipped`` if ``TORCHBAY_SKIP_BACKENDS``
            hides it.
        error: Why it cannot be used, where that is known.
    """

    name: str
    distribution: str
    version: str
    state: Literal["installed", "loaded", "broken", "ambiguous", "skipped"] = "installed"
    error: BackendError | None = None


class Registry:
    """The backends of one process: what is installed, what is loaded, what is broken."""

    def __init__(self) -> None:
        self.default: str | None = None
        # Listing takes no lock: a plugin may be slow to import, or wait for a thread that lists.
        self._lock = threading.RLock()
        self._making: set[str] = set()
        self._loaded: dict[str, Backend] = {}
        self._errors: dict[str, BackendError] = {}
        self._observers_are_loaded = False

    @functools.cached_property
    def claims(self) -> Mapping[str, Sequence[EntryPoint]]:
        """The entry points of each name, scanned once."""
        return _discovery.scan()

    @functools.cached_property
    def plugins(self) -> Plugins:
        """The plugins imported so far."""
        from torchbay._plugins import Plugins

        return Plugins()

    def listings(self) -> list[BackendListing]:
        """Describe every installed backend, in alphabetical order."""
        return [self._listing(name, entries) for name, entries in self.claims.items()]

    def usable(self) -> list[str]:
        """Return the installed names that are not hidden."""
        hidden = _discovery.hidden()
        return [name for name in self.claims if name not in hidden]

    def loaded(self) -> list[Backend]:
        """Return the backends that were used so far."""
        return list(self._loaded.values())

    def origin(self, backend: Backend) -> str | None:
        """Say which plugin made a backend, or return None if none did."""
        if self._loaded.get(backend.name) is not backend:
            return None
        return _discovery.origin(self.claims[backend.name][0])

    def find(self, name: str, asked_by: str = "") -> EntryPoint:
        """Return the one entry point of this name. Imports nothing."""
        entries = self.claims.get(name)
        if not entries:
            raise _discovery.unknown(name, self.usable(), asked_by)
        if name in _discovery.hidden():
            raise _discovery.skipped(entries[0])
        if len(entries) > 1:
            raise _discovery.claimed_twice(entries)
        return entries[0]

    def load(self, name: str, asked_by: str = "") -> Backend:
        """Return the backend of this name, importing its plugin on first use."""
        entry = self.find(name, asked_by)
        with self._lock:
            if name in self._loaded:
                return self._loaded[name]
            if error := self._errors.get(name):
                # A copy, so that the kept one gathers no frames of callers.
                raise copy(error) from error.__cause__
            self._loaded[name] = self._make(entry)
            return self._loaded[name]

    def notify(self, hook: str, report: object) -> None:
        """Tell every plugin that observes; imports those that only observe on first use."""
        if not self._observers_are_loaded:
            self._load_observers()
        self.plugins.notify(hook, report)

    def _listing(self, name: str, entries: Sequence[EntryPoint]) -> BackendListing:
        listing = BackendListing(
            name=name,
            distribution=", ".join(_discovery.distribution(entry) for entry in entries),
            version=", ".join(_discovery.version(entry) for entry in entries),
        )
        if name in _discovery.hidden():
            return attrs.evolve(listing, state="skipped")
        if len(entries) > 1:
            error = _discovery.claimed_twice(entries)
            return attrs.evolve(listing, state="ambiguous", error=error)
        if name in self._errors:
            return attrs.evolve(listing, state="broken", error=self._errors[name])
        return attrs.evolve(listing, state="loaded") if name in self._loaded else listing

    def _make(self, entry: EntryPoint) -> Backend:
        if entry.name in self._making:
            raise _makes_itself(entry)
        self._making.add(entry.name)
        try:
            return self.plugins.make(entry)
        except BackendError as error:
            self._errors[entry.name] = copy(error)
            self._errors[entry.name].__cause__ = error.__cause__
            raise
        finally:
            self._making.discard(entry.name)

    def _load_observers(self) -> None:
        with self._lock:
            if self._observers_are_loaded:
                return
            plugins = self.plugins
            # Before the imports, which may compile something themselves.
            self._observers_are_loaded = True
            for entry in _discovery.observers():
                plugins.observe(entry)


_registry = Registry()


def backends() -> list[BackendListing]:
    """List the installed backends. Imports none of them."""
    return _registry.listings()


def load(name: str) -> Backend:
    """Return the backend of this name, importing its plugin, and no other, on first use."""
    return _registry.load(name)


def check_name(name: str) -> None:
    """Raise what `load` would for a name that cannot be used. Imports nothing."""
    _registry.find(name)


def loaded() -> list[Backend]:
    """Return the backends that plugins have made so far."""
    return _registry.loaded()


def notify(hook: str, report: object) -> None:
    """Tell observers; what they raise is logged, never raised."""
    _registry.notify(hook, report)


def forget() -> None:
    """Scan anew and load anew on next use."""
    global _registry
    _registry = Registry()


def set_default_backend(name: str | None) -> None:
    """Use this backend wherever none is named; None takes the choice back.

    Raises:
        UnknownBackend: No installed backend has this name. Its plugin is not imported yet.
    """
    if name is not None and not isinstance(name, str):
        raise InvalidArgument(
            f"the default backend is chosen by name, not by {name!r}",
            remedy="Pass the name of an installed backend, or None",
        )
    if name is not None:
        _registry.find(name)
    _registry.default = name


def choose(backend: object | None) -> Backend:
    """Return the backend that an argument means, or the default if it is None."""
    if backend is None:
        return _default()
    if isinstance(backend, str):
        return load(backend)
    return _adopted(backend)


def account(backend: Backend) -> str:
    """Say in a few words which backend this is and who brought it."""
    from torchbay._contract import address
    from torchbay._plain import PlainBackend

    subject = backend.function if isinstance(backend, PlainBackend) else backend
    return _registry.origin(backend) or f"backend {backend.name!r} ({address(subject)})"


def _default() -> Backend:
    if name := _registry.default:
        return load(name)
    if name := os.environ.get("TORCHBAY_BACKEND"):
        return _registry.load(name, asked_by="named by TORCHBAY_BACKEND")
    names = _registry.usable()
    compiling = [name for name in names if name != REFERENCE]
    if len(compiling) > 1:
        raise _undecided(compiling)
    if compiling:
        return _preferred(compiling[0], names)
    if REFERENCE in names:
        return load(REFERENCE)
    raise _nothing_installed()


def _preferred(name: str, names: Sequence[str]) -> Backend:
    try:
        return load(name)
    except (BackendBroken, BackendOutdated) as error:
        if REFERENCE not in names:
            raise
        warnings.warn(f"using {REFERENCE!r} instead: {error}", TorchbayWarning, stacklevel=4)
        return load(REFERENCE)


def _adopted(candidate: Any) -> Backend:
    from torchbay._contract import address, check_version, fault
    from torchbay._plain import PlainBackend

    if callable(candidate) and not hasattr(candidate, "api_version"):
        return PlainBackend(candidate)
    check_version(candidate, address(candidate))
    if complaint := fault(candidate):
        raise InvalidArgument(
            f"{candidate!r} cannot be used as a backend: {complaint}",
            remedy="Pass the name of an installed backend, an object that satisfies "
            "torchbay.plugin.Backend, or a function (graph_module, example_inputs, **options)",
        )
    return candidate  # type: ignore[no-any-return]


def _makes_itself(entry: EntryPoint) -> BackendBroken:
    return BackendBroken(
        f"its plugin {entry.value} uses the backend that it is about to make",
        account=_discovery.origin(entry),
        remedy=f"Report it to the authors of {_discovery.distribution(entry)}",
    )


def _undecided(names: Sequence[str]) -> AmbiguousBackend:
    return AmbiguousBackend(
        f"several backends are installed and none was chosen: {', '.join(names)}",
        remedy='Pass backend="...", call torchbay.set_default_backend, or set TORCHBAY_BACKEND',
    )


def _nothing_installed() -> NoBackend:
    if _registry.claims:
        return NoBackend(
            "TORCHBAY_SKIP_BACKENDS hides every installed backend",
            remedy="Remove one from that variable",
        )
    others = " and ".join(_discovery.PROVIDERS[name] for name in ("aoti", "eager"))
    return NoBackend(
        "no backend is installed, and torchbay compiles nothing by itself",
        remedy=f"Install one: {_discovery.install(['inductor_triton'])} (others are {others})",
    )
