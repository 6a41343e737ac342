"""Imports plugins, and calls their hooks, so that the fault of one is never another's."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import Any

import pluggy

from torchbay import _discovery
from torchbay._contract import check_version, fault
from torchbay.errors import BackendBroken
from torchbay.plugin import Backend, Hooks

__all__ = ["Plugins", "broken"]

_logger = logging.getLogger("torchbay")


class Plugins:
    """The plugins imported so far: those that made a backend, and those that only observe."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager("torchbay")
        self._manager.add_hookspecs(Hooks)
        self._entries: dict[str, EntryPoint] = {}

    def make(self, entry: EntryPoint) -> Backend:
        """Import a plugin and return the backend it makes.

        Raises:
            BackendBroken: It cannot be imported, or makes no usable backend. Nothing of it stays.
            BackendOutdated: It speaks another version of the contract.
        """
        plugin = _imported(entry)
        try:
            self._register(entry, plugin)
            backend: Backend = self._ask(entry, plugin)
            _check(backend, entry)
        except BaseException:
            self._drop(entry)
            raise
        return backend

    def observe(self, entry: EntryPoint) -> None:
        """Import a plugin that only observes; if it is unusable, log that and do without it."""
        try:
            plugin = _imported(entry)
            # One module may be a backend's plugin and an observer.
            if not self._manager.is_registered(plugin):
                self._register(entry, plugin)
        except BackendBroken as error:
            self._drop(entry)
            _logger.warning("%s", error, exc_info=error.__cause__)

    def notify(self, hook: str, report: object) -> None:
        """Call an observing hook of every plugin; what one raises is logged, never raised."""
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            self._tell(implementation, hook, report)

    def _register(self, entry: EntryPoint, plugin: object) -> None:
        try:
            if self._manager.get_name(plugin) in self._observing():
                self._manager.unregister(plugin)
            self._entries[_key(entry)] = entry
            self._manager.register(plugin, name=_key(entry))
            self._manager.check_pending()
        except Exception as error:
            raise broken(entry, f"failed to load: {error!r}") from error

    def _observing(self) -> Sequence[str]:
        return [key for key, one in self._entries.items() if one.group == _discovery.OBSERVERS]

    def _ask(self, entry: EntryPoint, plugin: object) -> Any:
        """Call the factory of this plugin alone: another must never answer for it."""
        others = self._manager.get_plugins() - {plugin}
        make = self._manager.subset_hook_caller("torchbay_make_backend", others)
        try:
            backend = make()
        except (Exception, SystemExit) as error:
            raise broken(entry, f"failed to load: {error!r}") from error
        if backend is None:
            raise broken(
                entry, "offers no backend: it has no torchbay_make_backend marked with hookimpl"
            )
        return backend

    def _drop(self, entry: EntryPoint) -> None:
        # By name: the same module may be in use under another.
        if self._manager.has_plugin(_key(entry)):
            self._manager.unregister(name=_key(entry))

    def _tell(self, implementation: pluggy.HookImpl, hook: str, report: object) -> None:
        others = self._manager.get_plugins() - {implementation.plugin}
        try:
            self._manager.subset_hook_caller(hook, others)(report=report)
        except Exception as error:
            account = _discovery.origin(self._entries[implementation.plugin_name])
            _logger.warning("%s: %s raised %r", account, hook, error, exc_info=True)


def broken(entry: EntryPoint, what: str) -> BackendBroken:
    """Make the error for a plugin that cannot be used."""
    return BackendBroken(
        f"its plugin {entry.value} {what}",
        account=_discovery.origin(entry),
        remedy=f"Repair or reinstall {_discovery.distribution(entry)}; "
        "other plugins are not affected",
    )


def _key(entry: EntryPoint) -> str:
    return f"{entry.group}: {entry.name} = {entry.value}"


def _imported(entry: EntryPoint) -> object:
    try:
        return entry.load()
    except (Exception, SystemExit) as error:
        raise broken(entry, f"failed to import: {error!r}") from error


def _check(backend: Any, entry: EntryPoint) -> None:
    check_version(backend, _discovery.origin(entry))
    if complaint := fault(backend) or _misnamed(backend, entry.name):
        raise broken(entry, f"made an unusable backend: {complaint}")


def _misnamed(backend: Backend, expected: str) -> str | None:
    return None if backend.name == expected else f"it calls itself {backend.name!r}"
