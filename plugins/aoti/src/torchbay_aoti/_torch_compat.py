"""AOTInductor's private names, all of them; no other file of this plugin touches any.

Written against torch 2.13. Inductor is imported on use: its import takes seconds.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeGuard, Union, get_args, get_origin

import torch
from torch.fx import Graph, GraphModule

from torchbay.plugin import CompileRequest

__all__ = [
    "LOADING_PROGRAM",
    "accept_nothing",
    "acceptance_of",
    "cpp_compiler",
    "has_type",
    "is_plain_tensor",
    "load_package",
    "mode_settings",
    "setting_types",
    "settings_digest",
    "write_package",
]

_NAME = "graph"

LOADING_PROGRAM = f"""
import torch
torch._C._aoti.AOTIModelPackageLoader({{path!r}}, {_NAME!r}, False, 1, {{index}})
"""


def write_package(request: CompileRequest, settings: Mapping[str, Any], path: Path) -> Path:
    """Compile the graph of a request and write the package to ``path``."""
    from torch._inductor import aot_compile

    graph, example_inputs = _copied(request.graph), tuple(request.example_inputs)
    with _own_deprecations_ignored(), torch.no_grad(), torch._C._DisableAutocast():
        from torch._inductor.package import package_aoti

        files = aot_compile(graph, example_inputs, options=dict(settings))
        package_aoti(str(path), {_NAME: files})
    return path


@contextlib.contextmanager
def _own_deprecations_ignored() -> Iterator[None]:
    """Keep quiet about PyTorch using names that PyTorch deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _copied(module: GraphModule) -> GraphModule:
    copied = Graph()
    copied.output(copied.graph_copy(module.graph, {}))
    return GraphModule(module, copied)


def load_package(path: Path, device_index: int) -> Callable[[list[Any]], Sequence[Any]]:
    """Load a package without importing Inductor; -1 is the CPU's index."""
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), _NAME, False, 1, device_index)
    run: Callable[[list[Any]], Sequence[Any]] = loader.boxed_run
    return run


def is_plain_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Tell whether a value is a tensor with memory of its own kind, no subclass that acts."""
    if not isinstance(value, torch.Tensor):
        return False
    return type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def accept_nothing(*_inputs: object) -> bool:
    """Stand for the acceptance of no inputs at all."""
    return False


def acceptance_of(inputs: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a fast check that holds for tensors like these only; it keeps none of them.

    It compares type, dispatch keys (layout, conjugation, negation), dtype, device, sizes and
    strides, all in C++. It may refuse what is fit, never accept what is not.
    """
    from torch._C._dynamo.guards import TensorGuards

    if not inputs:
        return accept_nothing
    sizes: Any = [list(tensor.shape) for tensor in inputs]
    strides: Any = [list(tensor.stride()) for tensor in inputs]
    guards = TensorGuards(*inputs, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = guards.check
    return check


@functools.cache
def setting_types() -> Mapping[str, Any]:
    """Return the type of each setting of Inductor, as annotated."""
    from torch._inductor import config

    return {name: config.get_type(name) for name in config.get_config_copy()}


def mode_settings(mode: str) -> Mapping[str, Any]:
    """Return the settings that a mode of ``torch.compile`` stands for."""
    from torch._inductor import list_mode_options

    return list_mode_options(mode)


def settings_digest() -> str:
    """Return a digest of the settings that shape code, whoever changed them."""
    from torch._inductor import config

    plain = (bool, int, float, str, type(None))
    portable = config.save_config_portable()
    shaping = {name: value for name, value in portable.items() if isinstance(value, plain)}
    return hashlib.sha256(repr(sorted(shaping.items())).encode()).hexdigest()[:16]


def has_type(value: object, expected: Any) -> bool:
    """Tell whether a setting annotated as ``expected`` may hold ``value``."""
    origin, choices = get_origin(expected), get_args(expected)
    if origin is Literal:
        return value in choices
    if origin in (Union, UnionType):
        return any(has_type(value, choice) for choice in choices)
    kind = origin or expected
    if isinstance(value, bool) and kind in (int, float):
        return False
    return not isinstance(kind, type) or isinstance(value, (int, float) if kind is float else kind)


def cpp_compiler() -> str | None:
    """Return the C++ compiler that Inductor would call, or None."""
    from torch._inductor import config

    candidates = config.cpp.cxx
    if not isinstance(candidates, list | tuple):
        candidates = (candidates,)
    return next(filter(None, map(shutil.which, filter(None, candidates))), None)
