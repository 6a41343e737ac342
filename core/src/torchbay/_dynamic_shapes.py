"""The argument ``dynamic_shapes``: what the caller declares about sizes, as torch.export takes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch

from torchbay._call import Call
from torchbay._source import definition
from torchbay._structure import take_apart
from torchbay._symbolic import Declarations, Declared
from torchbay._torch_dims import DimSpec, dim_spec
from torchbay.errors import InvalidArgument

__all__ = ["check_dynamic_shapes", "declared_by"]

_BY = "dynamic_shapes"
_FORMS = "Dim, Dim.AUTO, Dim.DYNAMIC, Dim.STATIC, an int or None"


def check_dynamic_shapes(given: Any, function: Callable[..., Any]) -> None:
    """Refuse what can be refused without a call.

    Raises:
        InvalidArgument: It has no form of torch.export's, names an argument that the callable does
            not have, or relates dimensions that cannot be related.
    """
    if not isinstance(given, (dict, tuple, list)):
        raise _refusal(f"dynamic_shapes is {given!r}", remedy="Pass a dict by argument name")
    parameters = _parameters(function)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values()) or not parameters
    for name in given if isinstance(given, dict) else ():
        if name not in parameters and not takes_any:
            known = ", ".join(parameters)
            what = f"dynamic_shapes names {name!r}, which is no argument"
            raise _refusal(what, function, f"Arguments: {known}")
    _check_relations([spec for place, spec in _specs(given, "")])


def declared_by(given: Any, call: Call) -> Declarations:
    """Return what ``dynamic_shapes`` says about each dimension and number of a call.

    What it leaves out is fixed.

    Raises:
        InvalidArgument: It does not fit the call's arguments.
    """
    found = {
        (item.path, dim): Declared(is_open=False, by=_BY)
        for item in call.tensors
        for dim in range(item.value.dim())
    }
    found |= {(item.path, -1): Declared(is_open=False, by=_BY) for item in call.numbers}
    for name, spec, value in _arguments(given, call):
        found |= _read(spec, value, name, call.function)
    return found


def _read(spec: Any, value: Any, path: str, function: Any) -> Declarations:
    """Walk a part of ``dynamic_shapes`` along the argument it is about."""
    if spec is None:
        return {}
    if isinstance(value, torch.Tensor):
        return dict(_of_tensor(spec, value, path, function))
    if (container := take_apart(value)) is not None:
        found: dict[tuple[str, int], Declared] = {}
        for label, part, child in _paired(spec, value, container, path, function):
            found |= _read(part, child, path + label, function)
        return found
    if type(value) in (int, float) and (said := dim_spec(spec)) is not None:
        return {(path, -1): _declaration(said)}
    raise _refusal(
        f"dynamic_shapes has {spec!r} for {path}, which is a {type(value).__qualname__}",
        function,
        "Leave it out, or give None",
    )


def _of_tensor(
    spec: Any, tensor: torch.Tensor, path: str, function: Any
) -> Iterator[tuple[tuple[str, int], Declared]]:
    rank = tensor.dim()
    if isinstance(spec, (tuple, list)) and len(spec) != rank:
        what = f"dynamic_shapes has {len(spec)} dimensions for {path}, which has {rank}"
        raise _refusal(what, function, "Give one entry for each, or a dict by dimension")
    if not isinstance(spec, (dict, tuple, list)):
        what = f"dynamic_shapes has {spec!r} for {path}, which is a tensor"
        raise _refusal(what, function, "Give a dict by dimension")
    for dim, given in spec.items() if isinstance(spec, dict) else enumerate(spec):
        if not isinstance(dim, int) or not 0 <= dim < rank:
            what = f"dynamic_shapes names dimension {dim!r} of {path}, which has {rank}"
            raise _refusal(what, function, "Name a dimension from 0 up")
        if given is not None and (said := dim_spec(given)) is not None:
            yield (path, dim), _declaration(said)


def _paired(
    spec: Any, value: Any, container: Any, path: str, function: Any
) -> Iterator[tuple[str, Any, Any]]:
    """Pair what a container holds with what ``dynamic_shapes`` says of it."""
    children = list(container)
    if isinstance(spec, dict) and isinstance(value, Mapping):
        labels = dict(zip(value, children, strict=True))
        if unknown := [key for key in spec if key not in labels]:
            what = f"dynamic_shapes names {path}[{unknown[0]!r}], which the call does not have"
            raise _refusal(what, function, f"It has {', '.join(map(repr, labels))}")
        for key, part in spec.items():
            label, child = labels[key]
            yield label, part, child
    elif isinstance(spec, (tuple, list)) and len(spec) == len(children):
        for part, (label, child) in zip(spec, children, strict=True):
            yield label, part, child
    else:
        kind = f"{type(value).__qualname__} of {len(children)}"
        what = f"dynamic_shapes has {spec!r} for {path}, which is a {kind}"
        raise _refusal(what, function, "Give the same structure, with None for what is fixed")


def _declaration(said: DimSpec) -> Declared:
    return Declared(by=_BY, **attrs.asdict(said, recurse=False))


def _arguments(given: Any, call: Call) -> Iterator[tuple[str, Any, Any]]:
    """Pair each part of ``dynamic_shapes`` with the path and value of its argument."""
    bound = inspect.signature(_target(call.function)).bind(*call.args, **call.kwargs)
    values = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            values |= values.pop(name, {})
    if isinstance(given, dict):
        for name, spec in given.items():
            if name in values:
                yield name, spec, values[name]
            elif spec is not None and name not in bound.signature.parameters:
                known = ", ".join(values)
                what = f"dynamic_shapes names {name!r}, which the call does not have"
                raise _refusal(what, call.function, f"It has {known}")
        return
    if len(given) > len(values):
        what = f"dynamic_shapes has {len(given)} entries for {len(values)} arguments"
        raise _refusal(what, call.function, "Give one for each, or a dict by name")
    for spec, (name, value) in zip(given, values.items(), strict=False):
        yield name, spec, value


def _specs(given: Any, path: str) -> Iterator[tuple[str, DimSpec]]:
    """Return every dimension that is declared.

    Raises:
        InvalidArgument: Something that declares nothing stands there.
    """
    if isinstance(given, dict):
        for key, part in given.items():
            yield from _specs(part, f"{path}[{key!r}]")
    elif isinstance(given, (tuple, list)):
        for i, part in enumerate(given):
            yield from _specs(part, f"{path}[{i}]")
    elif given is not None:
        said = dim_spec(given)
        if said is None:
            raise _refusal(f"dynamic_shapes{path} is {given!r}", remedy=f"Give {_FORMS}")
        yield path, said


def _check_relations(specs: list[DimSpec]) -> None:
    """Refuse one name with two ranges, and a dimension derived from one that is not there."""
    roots: dict[str, DimSpec] = {}
    for said in specs:
        if said.same and said.derived is None:
            first = roots.setdefault(said.same, said)
            if (first.low, first.high) != (said.low, said.high):
                what = f"dynamic_shapes has two dimensions {said.same!r} with different ranges"
                raise _refusal(what, remedy="Use one Dim for both, or two names")
    for said in specs:
        if said.same and said.same not in roots:
            what = f"dynamic_shapes derives a dimension from {said.same!r}, which no argument has"
            raise _refusal(what, remedy=f"Declare a dimension as {said.same}, or use Dim.DYNAMIC")


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(_target(function)).parameters
    except (TypeError, ValueError):
        return {}


def _target(function: Any) -> Any:
    return function.forward if isinstance(function, torch.nn.Module) else function


def _refusal(what: str, function: Any = None, remedy: str = "") -> InvalidArgument:
    account = definition(function) if function is not None else ""
    return InvalidArgument(what, account=account, remedy=remedy)
