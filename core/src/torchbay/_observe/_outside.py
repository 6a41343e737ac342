"""What calls of functions do that is not Python state: told from the function alone."""

from __future__ import annotations

import _thread
import copy
import dataclasses
import inspect
import io
import logging
import os
import pickle
import random
import socket
import sys
import threading
import time
from contextvars import ContextVar
from types import CodeType, ModuleType
from typing import Any

import torch

__all__ = [
    "ASKED",
    "CLOCKS",
    "READS_ALL",
    "SETTERS",
    "asked_by",
    "change_by",
    "is_lookup",
    "reads_all",
]


def _by_code(*functions: Any) -> dict[CodeType, str]:
    return {inspect.unwrap(function).__code__: function.__name__ for function in functions}


SETTERS = _by_code(
    logging.Logger.setLevel,
    logging.disable,
    torch.manual_seed,
    torch.seed,
    torch.set_rng_state,
    torch.random.fork_rng,
    torch.cuda.manual_seed,
    torch.cuda.manual_seed_all,
    torch.cuda.set_rng_state,
    torch.set_default_device,
    torch.set_default_dtype,
    torch.set_default_tensor_type,
    torch.set_deterministic_debug_mode,
    torch.set_float32_matmul_precision,
    torch.use_deterministic_algorithms,
)
"""What sets state that a graph can only run under."""

ASKED = _by_code(
    logging.Logger.getEffectiveLevel,
    threading.current_thread,
    torch.initial_seed,
    torch.get_rng_state,
    torch.cuda.initial_seed,
    torch.cuda.get_rng_state,
)
"""What tells of state that no guard watches, when a user's code calls it itself."""

READS_ALL = frozenset(
    _by_code(
        copy.copy,
        copy.deepcopy,
        dataclasses.asdict,
        dataclasses.astuple,
        dataclasses.fields,
        dataclasses.replace,
        inspect.getmembers,
    )
)
"""What reads every attribute of what it is given."""


def reads_all(function: Any) -> bool:
    """Whether a function in C may read attributes that no code names."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, str) and function.__name__ in ("format", "format_map"):
        return "." in owner
    return function in _PICKLERS


_PICKLERS = (pickle.dump, pickle.dumps)
CLOCKS = frozenset(
    getattr(time, name)
    for name in ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns")
)
_LOOKUPS = (globals, eval, exec, _thread.get_ident, _thread.get_native_id)
_GENERATOR_METHODS = frozenset(
    {"manual_seed", "seed", "set_state", "set_offset", "initial_seed", "get_state", "get_offset"}
)


def asked_by(function: Any) -> str | None:
    """Return what a function in C asks or sets that no guard watches, whoever calls it."""
    owner = getattr(function, "__self__", None)
    if function in CLOCKS:
        return "the call reads a clock"
    if isinstance(owner, random.Random):
        return "the call draws Python's random numbers"
    if isinstance(owner, torch.Generator) and function.__name__ in _GENERATOR_METHODS:
        return f"the call sets or asks a random generator, {function.__name__}()"
    if isinstance(owner, ContextVar) and function.__name__ == "get":
        return f"the call reads a ContextVar, {owner.name}"
    return None


def is_lookup(function: Any) -> bool:
    """Whether a function in C, called by a user's code itself, tells what no guard watches."""
    owner = getattr(function, "__self__", None)
    return function in _LOOKUPS or (
        isinstance(owner, _thread.LockType) and function.__name__ == "locked"
    )


_SYSTEM = frozenset({os.name, "_posixsubprocess", "_socket"})
_READ_ONLY = frozenset(
    {
        "access",
        "confstr",
        "cpu_count",
        "device_encoding",
        "fpathconf",
        "fspath",
        "fstat",
        "fstatvfs",
    }
    | {"listdir", "lseek", "lstat", "major", "makedev", "minor", "pathconf", "pread", "read"}
    | {"readlink", "scandir", "stat", "statvfs", "strerror", "sysconf", "times", "ttyname", "uname"}
    | {"urandom"}
)
_READ_ONLY_PREFIXES = ("get", "sched_get", "is", "W", "_path_", "hton", "ntoh", "inet_")


def change_by(function: Any) -> str | None:
    """Return what a function in C changes outside Python's memory, if it does."""
    owner, name = getattr(function, "__self__", None), function.__name__
    if function in _WRITERS:
        return _WRITERS[function]
    if isinstance(owner, ModuleType) and owner.__name__ in _SYSTEM:
        return None if _is_read_only(name) else f"what {owner.__name__}.{name}() does"
    if isinstance(owner, socket.SocketType):
        return None if _is_read_only(name) else f"what socket.{name}() does"
    return "what is written to a file" if name in _WRITES and _is_file(owner) else None


_WRITERS = {print: "what print() shows", open: "a file that open() opens"}
_WRITES = ("write", "writelines", "truncate")


def _is_read_only(name: str) -> bool:
    return name in _READ_ONLY or name.startswith(_READ_ONLY_PREFIXES)


def _is_file(owner: Any) -> bool:
    """Whether an object is a file rather than memory; standard output may be either."""
    is_memory = isinstance(owner, (io.StringIO, io.BytesIO))
    is_standard = owner is sys.stdout or owner is sys.stderr
    return is_standard or (isinstance(owner, io.IOBase) and not is_memory)
