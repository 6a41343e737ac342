"""What code can name, told without running it: attributes, modules, facts about tensors."""

from __future__ import annotations

import dis
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, ModuleType
from typing import Any

import torch

from torchbay._call import Place
from torchbay._reason import Reason
from torchbay._source import is_library_file
from torchbay._structure import is_plain

__all__ = [
    "attribute_obstacles",
    "imports_in",
    "is_named",
    "named_attributes",
    "names_in",
    "names_nothing",
    "version_obstacles",
]

_ANY_NAME = frozenset({"getattr", "vars", "__dict__", "attrgetter", "methodcaller"})


def names_in(code: CodeType) -> set[str]:
    """Return the names and the strings in code, and its own name."""
    strings = {const for const in code.co_consts if isinstance(const, str) and const.isidentifier()}
    return strings.union(code.co_names, (code.co_name,))


def names_nothing(code: CodeType) -> bool:
    """Whether code can read attributes that it does not name."""
    return not _ANY_NAME.isdisjoint(code.co_names) or _has(code, "MATCH_CLASS")


def _has(code: CodeType, operation: str) -> bool:
    return dis.opmap[operation] in code.co_code[::2]


def is_named(name: str, names: frozenset[str] | None) -> bool:
    """Whether a name is among these; None stands for every name."""
    return names is None or name in names


def imports_in(code: CodeType, variables: Mapping[str, Any]) -> Iterator[tuple[ModuleType, Any]]:
    """Yield what code imports where it runs: modules, with the names taken from them or None."""
    if not _has(code, "IMPORT_NAME"):
        return
    package = variables.get("__package__") or ""
    steps = [i for i in dis.get_instructions(code) if i.opname != "EXTENDED_ARG"]
    for level, names, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opname == "IMPORT_NAME":
            name = _absolute("." * level.argval + step.argval, package)
            bound = name if names.argval else name.partition(".")[0]
            if (module := sys.modules.get(bound)) is not None:
                yield module, names.argval


def _absolute(name: str, package: str) -> str:
    try:
        return importlib.util.resolve_name(name, package)
    except ImportError:
        return name


def version_obstacles(codes: Iterable[CodeType]) -> list[Reason]:
    """Return where a user's own code asks how often a tensor was written."""
    what = "how often a tensor was written, _version, cannot be watched"
    own = (code for code in codes if not is_library_file(code.co_filename))
    asking = (code for code in own if "_version" in code.co_names)
    return [Reason(what, f"{code.co_filename}:{_line(code, '_version')}") for code in asking]


def _line(code: CodeType, name: str) -> int:
    found = (i for i in dis.get_instructions(code) if i.argval == name and i.positions)
    return next((i.positions.lineno or 0 for i in found if i.positions), code.co_firstlineno)


def attribute_obstacles(tensors: Iterable[Place], names: frozenset[str] | None) -> list[Reason]:
    """Return the attributes of tensors that code can name and no guard can watch."""
    return [
        Reason(f"changes of {place.path}.{name}, an attribute of a tensor, cannot be watched")
        for place in tensors
        for name, value in named_attributes(place.value, names)
        if not (is_plain(value) or isinstance(value, _FIXED))
    ]


def named_attributes(
    tensor: torch.Tensor, names: frozenset[str] | None
) -> Iterator[tuple[str, Any]]:
    """Yield the Python attributes of a tensor that code can name; marks on sizes are none."""
    for name, value in vars(tensor).items():
        if is_named(name, names) and not name.startswith("_dynamo_"):
            yield name, value


_FIXED = (torch.Tensor, type(is_named))
