"""Where the user's code is, and names for what emitted code refers to."""

from __future__ import annotations

import builtins
import functools
import keyword
import linecache
import re
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

_TORCH = str(Path(torch.__file__).parent) + "/"
_packages = Path(torch.__file__).parent.parent
_OURS = str(Path(__file__).parent) + "/"
# What PyTorch itself runs on.
_BELOW_TORCH = tuple(
    f"{_packages}/{name}" for name in ("mpmath/", "networkx/", "sympy/", "typing_extensions.py")
)
_GENERATED = ("<frozen", "<attrs generated", "<torchbay", "<eval_with_key")
_STDLIB = tuple(sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib"))


@functools.lru_cache(maxsize=4096)
def is_user_file(filename: str) -> bool:
    """Whether a file holds a user's code: neither torch, nor Python's own library, nor torchbay."""
    if filename.startswith(_GENERATED):
        return False
    if is_library_file(filename):
        return not filename.startswith((_TORCH, _OURS, *_BELOW_TORCH))
    return not filename.startswith((_TORCH, _OURS, *_STDLIB))


def is_library_file(filename: str) -> bool:
    """Whether a file belongs to an installed distribution."""
    return "site-packages" in filename or "dist-packages" in filename


def user_frame() -> FrameType | None:
    """Return the innermost active frame of a user's code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_line() -> str:
    """Return ``file:line`` of the innermost active frame of a user's code, or an empty string."""
    frame = user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def user_stack_entry() -> str:
    """Return the innermost user frame as a traceback shows it, or an empty string."""
    frame = user_frame()
    if frame is None:
        return ""
    code: CodeType = frame.f_code
    line = linecache.getline(code.co_filename, frame.f_lineno).strip()
    return f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n    {line}\n'


def definition(function: object) -> str:
    """Return ``file:line`` of a callable's definition, or its type where there is none."""
    code = getattr(function, "__code__", None) or getattr(
        getattr(type(function), "forward", None), "__code__", None
    )
    if code is None:
        return f"{type(function).__module__}.{type(function).__qualname__}"
    return f"{code.co_filename}:{code.co_firstlineno}"


class Symbol:
    """A name that stands for itself where a value is shown."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


class Names:
    """Gives objects names that emitted source can use, readable and one for each object."""

    def __init__(self, *reserved: str) -> None:
        self._taken: set[str] = {*keyword.kwlist, *dir(builtins), *reserved}
        self._by_id: dict[int, str] = {}
        self.values: dict[str, Any] = {}

    def of(self, value: object, hint: str) -> str:
        """Return the name of an object, made from the hint when it is new."""
        if (name := self._by_id.get(id(value))) is None:
            name = self.fresh(hint)
            self._by_id[id(value)] = name
            self.values[name] = value
        return name

    def fresh(self, hint: str) -> str:
        """Return an identifier nobody has yet."""
        stem = re.sub(r"\W+", "_", hint).strip("_") or "value"
        stem = f"_{stem}" if stem[0].isdigit() else stem
        name, count = stem, 1
        while name in self._taken:
            name, count = f"{stem}_{count}", count + 1
        self._taken.add(name)
        return name
