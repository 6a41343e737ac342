"""Checks ``mode`` and ``options`` against a backend's options class, before any work."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

import attrs

from torchbay._registry import account
from torchbay.errors import InvalidArgument, UnknownOption
from torchbay.plugin import Backend

_NUMBERS: dict[object, tuple[type, ...]] = {int: (int,), float: (int, float)}


def read(backend: Backend, mode: str | None, options: Mapping[str, object] | None) -> Any:
    """Return an instance of the backend's options class, or refuse what it does not have."""
    passed = given(mode, options)
    kind = backend.options
    if attrs.has(kind):
        _check(backend, passed)
    try:
        return kind(**passed)
    except (TypeError, ValueError) as error:
        raise UnknownOption(
            f"options {passed!r} were refused: {error!r}",
            account=account(backend),
            remedy=_known(backend),
        ) from error


def given(mode: object, options: object) -> dict[str, object]:
    """Return what a caller passed, by name, or refuse what no backend could take."""
    if mode is not None and options is not None:
        raise InvalidArgument(
            "mode and options were both passed",
            remedy="Pass one of them; a mode is a set of options.",
        )
    if mode is not None:
        return _given_mode(mode)
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise InvalidArgument(
            f"options must map names to values, and {options!r} is no such mapping",
            remedy='Pass a dictionary such as {"name": value}.',
        )
    return dict(options)


def _given_mode(mode: object) -> dict[str, object]:
    if isinstance(mode, str):
        return {"mode": mode}
    raise InvalidArgument(f"mode must be a string, not {mode!r}", remedy="Pass the name of a mode.")


def _check(backend: Backend, given: dict[str, object]) -> None:
    fields = _fields(backend.options)
    hints = _hints(backend.options)
    for name, value in given.items():
        if name not in fields:
            raise _unknown(backend, name, list(fields))
        # A converter decides for itself what it takes.
        hint = Any if fields[name].converter else hints.get(fields[name].name, Any)
        if not _fits(value, hint):
            raise UnknownOption(
                f"option {name!r} takes {_spelled(hint)}, not {value!r}",
                account=account(backend),
                remedy="Pass a value of that type.",
            )


def _fields(kind: type[Any]) -> dict[str, attrs.Attribute[Any]]:
    return {field.alias or field.name: field for field in attrs.fields(kind) if field.init}


def _hints(kind: type[Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind)
    except NameError:  # annotations that exist for type checkers only
        return {}


def _fits(value: object, hint: Any) -> bool:
    """Whether a value has the annotated type; yes where the annotation is not a simple one."""
    if hint is None or hint is type(None):
        return value is None
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, member) for member in typing.get_args(hint))
    if origin is Literal:
        return any(value == one and type(value) is type(one) for one in typing.get_args(hint))
    if hint in _NUMBERS:
        return isinstance(value, _NUMBERS[hint]) and not isinstance(value, bool)
    if hint in (bool, str):
        return isinstance(value, hint)
    return True


def _spelled(hint: Any) -> str:
    if hint is None or hint is type(None):
        return "None"
    if typing.get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_spelled(member) for member in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return " or ".join(repr(one) for one in typing.get_args(hint))
    return str(getattr(hint, "__name__", hint))


def _unknown(backend: Backend, name: str, known: list[str]) -> UnknownOption:
    if name == "mode":
        what = f"backend {backend.name!r} has no modes"
    elif not known:
        what = f"backend {backend.name!r} has no options, hence no {name!r}"
    else:
        what = f"backend {backend.name!r} has no option {name!r}"
    near = difflib.get_close_matches(name, known)
    meant = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
    return UnknownOption(what, account=account(backend), remedy=f"{meant}{_known(backend)}")


def _known(backend: Backend) -> str:
    if not attrs.has(backend.options):
        return "Look them up in the backend's documentation."
    known = sorted(_fields(backend.options))
    return f"Known options: {', '.join(known)}." if known else "Pass none."
