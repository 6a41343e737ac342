"""A program as a tree of statements, and its Python source."""

from __future__ import annotations

import linecache
import sys
from textwrap import indent
from types import ModuleType
from typing import Any

import attrs

__all__ = ["FORMS", "Block", "Both", "CallKind", "Line", "Program", "Statement", "load", "place"]

FORMS = ("function", "closure", "method", "module")
"""Where a program keeps its state: in globals, a closure, an object or a module."""

_INDENT = "    "

_HEAD = """\
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass
class Record:
    left: object
    right: object


def helper(t):
    return t.abs() + 1


def helper_(t):
    t.mul_(2)
    return t


"""

_STATE = {
    "weight": "torch.tensor([0.5, -1.0, 2.0])",
    "total": "torch.tensor(0.25)",
    "cells": "[torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([-0.5])]",
    "slots": '{"bias": torch.tensor([1.0, 0.0, -1.0])}',
    "limit": "2",
    "seen": "[]",
    "memo": "None",
}


@attrs.frozen
class Line:
    """One statement."""

    text: str

    def source(self) -> str:
        return self.text


@attrs.frozen
class Block:
    """A statement with a body, such as a branch or a loop."""

    head: str
    body: tuple[Statement, ...]

    def source(self) -> str:
        lines = [statement.source() for statement in self.body] or ["pass"]
        return "\n".join([self.head, *(indent(line, _INDENT) for line in lines)])


@attrs.frozen
class Both:
    """Two statements that belong together, such as a branch and its other side."""

    first: Statement
    second: Statement

    def source(self) -> str:
        return f"{self.first.source()}\n{self.second.source()}"


Statement = Line | Block | Both


@attrs.frozen
class CallKind:
    """What a call's arguments are like, apart from their data.

    Attributes:
        rows: How many rows the tensors have.
        sharing: How ``y`` lies in memory relative to ``x``.
        layout: How ``x`` lies in memory.
        shares_box: Whether the container holds ``x`` itself.
        k: An argument, for loops and slices.
        flag: An argument, for branches.
        scale: An argument, to compute with.
    """

    rows: int
    sharing: str = "apart"
    layout: str = "contiguous"
    shares_box: bool = False
    k: int = 1
    flag: bool = True
    scale: float = 0.5


@attrs.frozen
class Program:
    """A program, and how it is called.

    Attributes:
        form: Where it keeps its state.
        body: Its statements, the last of which returns.
        box: The kind of container it is passed.
        kinds: What its calls are like.
        calls: For each call its kind, and the seed of its data.
    """

    form: str
    body: tuple[Statement, ...]
    box: str
    kinds: tuple[CallKind, ...]
    calls: tuple[tuple[int, int], ...]

    def source(self) -> str:
        """Return a module that defines ``program``."""
        makers = {"function": _function, "closure": _closure, "method": _class, "module": _class}
        return _HEAD + makers[self.form](self)

    def __str__(self) -> str:
        calls = "\n".join(f"  {self.kinds[kind]}, data {seed}" for kind, seed in self.calls)
        return f"{self.source()}\nbox: {self.box}\ncalls:\n{calls}"


def place(form: str, name: str) -> str:
    """Return how a program of this form names a piece of its state."""
    if form == "function":
        return name.upper()
    return name if form == "closure" else f"self.{name}"


def _definition(program: Program, first: str, scope: str) -> Block:
    names = ("limit", "memo")
    rebound = (f"{scope} {', '.join(place(program.form, name) for name in names)}",)
    declared = map(Line, rebound if scope else ())
    return Block(f"def {first}x, y, k, flag, scale, box):", (*declared, *program.body))


def _function(program: Program) -> str:
    state = "\n".join(f"{name.upper()} = {value}" for name, value in _STATE.items())
    return f"{state}\n\n\n{_definition(program, 'program(', 'global').source()}\n"


def _closure(program: Program) -> str:
    state = [Line(f"{name} = {value}") for name, value in _STATE.items()]
    inner = _definition(program, "program(", "nonlocal")
    whole = Block("def make():", (*state, inner, Line("return program")))
    return f"{whole.source()}\n\n\nprogram = make()\n"


def _class(program: Program) -> str:
    is_module = program.form == "module"
    state = [
        Line(f"self.{name} = {_held(name, value, is_module)}") for name, value in _STATE.items()
    ]
    start = [Line("super().__init__()")] if is_module else []
    made = Block("def __init__(self):", (*start, *state))
    method = "forward" if is_module else "run"
    base = "(nn.Module)" if is_module else ""
    kind = Block(f"class Model{base}:", (made, _definition(program, f"{method}(self, ", "")))
    return f"{kind.source()}\n\n\nmodel = Model()\nprogram = model{'' if is_module else '.run'}\n"


def _held(name: str, value: str, is_module: bool) -> str:
    if not is_module:
        return value
    wrapped = {"weight": "nn.Parameter({}, requires_grad=False)", "total": "nn.Buffer({})"}
    return wrapped.get(name, "{}").format(value)


def load(program: Program, name: str) -> ModuleType:
    """Run a program's module under a name; tracebacks and user lines show its source."""
    source, filename = program.source(), f"<{name}>"
    module: Any = ModuleType(name)
    module.__file__ = filename
    sys.modules[name] = module
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec", dont_inherit=True), vars(module))
    return module
