"""Guards become one readable Python function."""

from __future__ import annotations

import ast
import itertools
import linecache
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from torchbay._guards._kinds import (
    CANNOT_LOOK,
    AmbientGuard,
    Guard,
    Mismatch,
    TensorGuard,
    UniqueTensorsGuard,
)
from torchbay._source import Names
from torchbay._structure import is_plain, same_value
from torchbay._torch_compat import ambient_state_guard

__all__ = ["GuardFunction", "compile_source", "emit"]

_counter = itertools.count()
_INDENT = "    "


@attrs.frozen(eq=False)
class GuardFunction:
    """All guards of a specialization, as data and as the function that checks them.

    Attributes:
        guards: The guards, in the order they are checked.
        source: The function as Python source.
        match: The function: ``(args, kwargs)`` to the graph's inputs, or None on a miss.
        variables: What the function's source names.
        sources: Each guard as Python source.
    """

    guards: tuple[Guard, ...]
    source: str
    match: Callable[[tuple[Any, ...], Mapping[str, Any]], list[torch.Tensor] | None]
    variables: Mapping[str, Any]
    sources: tuple[str, ...]

    def is_like(self, other: GuardFunction) -> bool:
        """Whether another function checks the same of the same objects."""
        if self.source != other.source:
            return False
        shared = self.variables.keys() - _OWN
        return all(_is_same(self.variables[key], other.variables.get(key)) for key in shared)

    def inside(self) -> GuardFunction:
        """Return the same guards but the one on ambient state, for a run that has changed it."""
        kept = [not isinstance(guard, AmbientGuard) for guard in self.guards]
        variables = {**self.variables, "ambient_state_is_unchanged": _no_question}
        match = compile_source(self.source, "match", variables)
        return attrs.evolve(
            self,
            guards=tuple(itertools.compress(self.guards, kept)),
            sources=tuple(itertools.compress(self.sources, kept)),
            match=match,
            variables=match.__globals__,
        )

    def mismatches(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Mismatch]:
        """Return every guard that fails for a call, and how; empty only for a hit."""
        variables = {**self.variables, "args": args, "kwargs": kwargs}
        found = [m for guard in self.guards if (m := guard.mismatch(variables)) is not None]
        if found or self.match(args, kwargs) is not None:
            return found
        if not self.variables["ambient_state_is_unchanged"]():
            return [
                Mismatch("ambient state", "PyTorch's flags as they were", "one of them changed")
            ]
        return [Mismatch("the call", "what its guards say", "something that none of them names")]


def _no_question() -> bool:
    return True


# Made anew for each function, from what its source says.
_OWN = frozenset({"__builtins__", "match", "ambient_state_is_unchanged", "are_alike"})


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one is other or (is_plain(one) and same_value(one, other))


def emit(
    before: Sequence[Guard],
    tensors: Sequence[TensorGuard],
    numbers: Sequence[str],
    after: Sequence[Guard],
    names: Names,
    are_alike: Callable[..., bool] | None,
) -> GuardFunction:
    """Emit the function that checks guards and returns the graph's inputs.

    Args:
        before: Guards that need no input: the call's form, values, modules.
        tensors: One guard for each tensor among the inputs.
        numbers: Expressions for the numbers that follow them.
        after: Guards on relations between inputs.
        names: The names that the guards' expressions use.
        are_alike: Checks all tensors at once, or None if there are none.
    """
    names.values |= {
        "ambient_state_is_unchanged": ambient_state_guard(),
        "are_alike": are_alike,
        "CANNOT_LOOK": CANNOT_LOOK,
    }
    ambient, unique = AmbientGuard(), _unique(tensors)
    guards = (*before, ambient, *tensors, *unique, *after)
    sources = {id(guard): guard.source(names) for guard in guards}
    body = _refusals([sources[id(guard)] for guard in before])
    body += _input_list(tensors, numbers)
    body += _refusals([sources[id(guard)] for guard in after])
    body.append("return inputs")
    source = "\n".join(
        [
            "def match(args, kwargs):",
            f"{_INDENT}if not ambient_state_is_unchanged():",
            f"{_INDENT * 2}return None",
            f"{_INDENT}try:",
            *(f"{_INDENT * 2}{line}" for line in body),
            f"{_INDENT}except CANNOT_LOOK:",
            f"{_INDENT * 2}return None",
            "",
        ]
    )
    function = compile_source(source, "match", names.values)
    texts = tuple(sources[id(guard)] for guard in guards)
    return GuardFunction(guards, source, function, function.__globals__, texts)


def _unique(tensors: Sequence[TensorGuard]) -> list[UniqueTensorsGuard]:
    places = tuple((guard.path, guard.access) for guard in tensors)
    return [UniqueTensorsGuard(places)] if len(places) > 1 else []


def _input_list(guards: Sequence[TensorGuard], numbers: Sequence[str]) -> list[str]:
    """Return lines that collect the inputs and check all tensors at once."""
    rows = [f"{_INDENT}{guard.access},  # {guard.path}: {guard.facts}" for guard in guards]
    lines = ["inputs = [", *rows, "]"] if rows else ["inputs = []"]
    lines += _refusals(["are_alike(*inputs)"]) if rows else []
    return [*lines, *(f"inputs.append({number})" for number in numbers)]


def _refusals(tests: Sequence[str]) -> list[str]:
    """Return lines that leave with a miss unless every test is true."""
    if not tests:
        return []
    if len(tests) == 1:
        return [f"if not ({tests[0]}):", f"{_INDENT}return None"]
    joined = [f"{_INDENT}{'' if i == 0 else 'and '}{test}" for i, test in enumerate(tests)]
    return ["if not (", *joined, "):", f"{_INDENT}return None"]


def compile_source(source: str, name: str, variables: Mapping[str, Any]) -> Any:
    """Compile emitted source; tracebacks and ``inspect.getsource`` show it."""
    filename = f"<torchbay {name} {next(_counter)}>"
    # Only what the source names: the rest may be a user's objects, to be let go.
    used = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    namespace = {key: value for key, value in variables.items() if key in used}
    exec(compile(source, filename, "exec"), namespace)  # noqa: S102 - our own source
    lines = source.splitlines(keepends=True)
    linecache.cache[filename] = (len(source), None, lines, filename)
    weakref.finalize(namespace[name], linecache.cache.pop, filename, None)
    return namespace[name]
