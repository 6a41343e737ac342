"""What a call does without an operator: the Python code it runs, the functions in C it calls.

A profile function sees these without changing what the call does. A torch-function mode would see
them too, but with one active, PyTorch's own modules take other paths than without.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from torchbay._observe._names import names_in, names_nothing
from torchbay._observe._ops import Gate
from torchbay._observe._outside import (
    ASKED,
    CLOCKS,
    READS_ALL,
    SETTERS,
    asked_by,
    change_by,
    is_lookup,
    reads_all,
)
from torchbay._observe._reach import Reach
from torchbay._observe._recorder import OpRecorder
from torchbay._observe._snapshot import Change
from torchbay._reason import CannotServe, Reason, Unsettled
from torchbay._source import is_library_file, is_user_file, user_line
from torchbay._torch_compat import compiled_name, is_dynamo_entry, suspend_compiler_flag
from torchbay._torch_encoder import ENCODER_CODE, PADDED_CODE, drops_padding, follows

__all__ = ["ProfileRecorder", "StrictRecorder", "profiled"]

_TENSOR_METHODS = {
    "numpy": "numpy()",
    "data_ptr": "data_ptr()",
    "untyped_storage": "untyped_storage()",
    "resize_": "resize_()",
    "set_": "set_()",
}
"""Methods written in C that read or change a tensor without an operator a graph can hold."""

_TENSOR_CODE = {
    method.__code__: name
    for name, method in {
        "numpy conversion": torch.Tensor.__array__,
        "repr() of a tensor": torch.Tensor.__repr__,
        "formatting a tensor": torch.Tensor.__format__,
        "DLPack export": torch.Tensor.__dlpack__,
        "share_memory_()": torch.Tensor.share_memory_,
        "storage()": torch.Tensor.storage,
    }.items()
}
"""The same, for methods written in Python."""

_ENCODER_CODES = frozenset({ENCODER_CODE, PADDED_CODE})
_encoder_arguments = itemgetter("self", "src", "mask", "src_key_padding_mask")

_ENVIRONMENT: dict[bytes, bytes] = vars(os.environ)["_data"]
_ENVIRONMENT_CODE = type(os.environ).__getitem__.__code__
_ENABLED_CODE = logging.Logger.isEnabledFor.__code__


class ProfileRecorder:
    """A profile function, as `sys.setprofile` takes it.

    Attributes:
        codes: The code that ran and could read attributes of modules and objects.
        user_codes: The part of it that is a user's, with its globals.
        obstacles: What the call did that no graph can do.
        effects: What the call changed outside Python's memory.
        environment: The environment variables it read, with their values.
        levels: The loggers it asked whether a level is enabled, with the answers.
        reads_fast_path: Whether an encoder would drop padding only with its fast path enabled.
        asks_gradients: Whether code ran that names ``grad``, as who asks a tensor for it does.
    """

    def __init__(self, operators: OpRecorder) -> None:
        self.codes: set[CodeType] = set()
        self.user_codes: dict[CodeType, dict[str, Any]] = {}
        self.obstacles: list[Reason] = []
        self.effects: list[Change] = []
        self.environment: dict[str, str | None] = {}
        self.levels: dict[tuple[logging.Logger, int], bool] = {}
        self.reads_fast_path = False
        self.asks_gradients = False
        self._reads_all = False
        self._operators = operators
        self._collecting = {getattr(callback, "__code__", None) for callback in gc.callbacks}
        self._collection: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, function: Any) -> None:
        # What a Python kernel does is the operator's business.
        if self._operators.inside.is_operator or self._is_collecting(frame, event):
            return
        try:
            self._record(frame, event, function)
        except Exception as error:  # noqa: BLE001 - the call goes on, whatever happens here
            self.obstacles.append(Reason(f"observing the call raised {error!r}"))

    def _record(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            self._called_c(frame, function)
        elif event == "call":
            self._called(frame)
        elif event == "return" and frame.f_code is _ENABLED_CODE:
            self._asked_logger(frame, is_enabled=function)

    def _is_collecting(self, frame: FrameType, event: str) -> bool:
        """Whether Python collects garbage, whose callbacks may run in the midst of anything."""
        if self._collection is None:
            is_start = event == "call" and frame.f_code in self._collecting
            self._collection = frame if is_start else None
            return is_start
        if frame is self._collection and event == "return":
            self._collection = None
        return True

    def names(self) -> frozenset[str] | None:
        """Return every name the code that ran can use to read an attribute; None if any name.

        A user's own code that computes the names of attributes can read every one. In libraries
        ``getattr`` is taken to be called with names that their code spells out.
        """
        own = (code for code in self.user_codes if not is_library_file(code.co_filename))
        if self._reads_all or any(map(names_nothing, own)):
            return None
        return frozenset(name for code in self.codes for name in names_in(code))

    def _called(self, frame: FrameType) -> None:
        code = frame.f_code
        if is_dynamo_entry(code):
            what = f"{compiled_name(frame.f_locals)}, under torch.compile, runs in the call"
            self.give_up(Reason(what, user_line()))
        elif code in _TENSOR_CODE:
            self._refuse(f"{_TENSOR_CODE[code]} is not an operator", frame.f_back)
        elif code in SETTERS:
            self._refuse(f"the call sets ambient state, {SETTERS[code]}()", frame.f_back)
        elif code in ASKED and frame.f_back is not None and _is_users(frame.f_back):
            self._refuse(f"what {ASKED[code]}() tells cannot be watched", frame.f_back)
        elif code in READS_ALL:
            self._reads_all |= _is_own(_blamed(frame.f_back))
        elif code is _ENVIRONMENT_CODE:
            self._read_variable(frame.f_locals["key"])
        elif code not in self.codes and code.co_name != "<module>":
            self._add(code, frame)
        if code in _ENCODER_CODES:
            self._called_encoder(frame)

    def _called_encoder(self, frame: FrameType) -> None:
        """Give up if an encoder drops padding on a way that cannot be followed."""
        self.codes.add(ENCODER_CODE)
        given = frame.f_locals
        self.reads_fast_path |= given["src_key_padding_mask"] is not None
        is_asked = frame.f_back is not None and frame.f_back.f_code is PADDED_CODE
        is_followed = frame.f_code is PADDED_CODE and follows(given["self"])
        if not is_asked and not is_followed and drops_padding(*_encoder_arguments(given)):
            what = "TransformerEncoder converts its input to a nested tensor"
            remedy = "Make it with enable_nested_tensor=False"
            self.give_up(Reason(what, user_line(), remedy))

    def give_up(self, reason: Reason) -> None:
        """Run the rest of the call as if nobody looked on: observing it would change it."""
        self.obstacles.append(reason)
        suspend_compiler_flag()
        sys.setprofile(None)
        self._operators.leave()

    def _read_variable(self, name: str) -> None:
        # Asking os.environ would be one more read, without end.
        value = _ENVIRONMENT.get(os.fsencode(name))
        self.environment[name] = None if value is None else os.fsdecode(value)

    def _add(self, code: CodeType, frame: FrameType) -> None:
        is_users = is_user_file(code.co_filename)
        if not is_users and not _is_stateful(code.co_filename):
            return
        self.asks_gradients |= "grad" in code.co_names or "grad" in code.co_consts
        if is_users:
            self.user_codes[code] = frame.f_globals
        if not code.co_filename.endswith("/torch/nn/modules/module.py"):
            self.codes.add(code)

    def _asked_logger(self, frame: FrameType, *, is_enabled: bool | None) -> None:
        logger, level = frame.f_locals["self"], frame.f_locals["level"]
        if is_enabled is not None and _blamed(frame.f_back) is not None:
            self.levels.setdefault((logger, level), is_enabled)

    def _called_c(self, frame: FrameType, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, torch.Tensor):
            self._called_tensor_method(frame, owner, function.__name__)
        elif function in CLOCKS and frame.f_code.co_filename == logging.__file__:
            self.effects.append(Change("what the call logs", None, None))
        elif (what := asked_by(function)) is not None:
            self._refuse(what, frame)
        elif is_lookup(function) and _is_users(frame):
            self._refuse(f"what {function.__name__}() tells cannot be watched", frame)
        elif reads_all(function):
            self._reads_all |= _is_own(_blamed(frame))
        elif (what := change_by(function)) is not None and _blamed(frame) is not None:
            self.effects.append(Change(what, None, None))

    def _called_tensor_method(self, frame: FrameType, tensor: torch.Tensor, name: str) -> None:
        if name == "tolist":
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            self._operators.gates.append(Gate(torch.Tensor.tolist, (), tensor.tolist(), where))
        elif name in _TENSOR_METHODS:
            self._refuse(f"{_TENSOR_METHODS[name]} is not an operator", frame)

    def _refuse(self, what: str, caller: FrameType | None) -> None:
        """Note an obstacle, unless a library that knows what it does is to blame."""
        while caller is not None and caller.f_code.co_filename.startswith("<"):
            caller = caller.f_back
        if (blamed := _blamed(caller)) is not None:
            where = f"{blamed.f_code.co_filename}:{blamed.f_lineno}"
            self.obstacles.append(Reason(what, where))


class StrictRecorder(ProfileRecorder):
    """A profile function that stops what no graph can do before it is done.

    Attributes:
        unknown: Code that was about to run, with its globals, which nobody has looked at.
    """

    def __init__(self, operators: OpRecorder, reach: Reach) -> None:
        super().__init__(operators)
        self.unknown: dict[CodeType, dict[str, Any]] = {}
        self._reach = reach

    def __call__(self, frame: FrameType, event: str, function: Any) -> None:
        super().__call__(frame, event, function)
        self.check()

    def check(self) -> None:
        """Raise what stopped it, for code that caught that.

        Raises:
            Unsettled: Code was about to run that nobody has looked at.
            CannotServe: Something else no graph can do.
        """
        if self.unknown:
            raise Unsettled(self.unknown)
        for obstacle in self.obstacles:
            raise CannotServe(f"its backward: {obstacle.what}", where=obstacle.where)
        for change in self.effects:
            raise CannotServe(f"its backward changes {change.path}")
        if self.asks_gradients:
            raise CannotServe("its backward asks tensors for the gradients that they hold")

    def _add(self, code: CodeType, frame: FrameType) -> None:
        if _is_generated(frame) or _is_importing(frame):
            return
        super()._add(code, frame)
        if code not in self.user_codes:
            return
        if code not in self._reach.codes:
            self.unknown[code] = frame.f_globals
        for name in code.co_freevars:
            value = frame.f_locals.get(name)
            if isinstance(value, (list, dict, set)) and id(value) not in self._reach.holders:
                where = f"{code.co_filename}:{code.co_firstlineno}"
                self.obstacles.append(Reason(f"{name} cannot be watched", where))


def _is_importing(frame: FrameType) -> bool:
    """Whether code runs because PyTorch imports something where it is first needed."""
    caller: FrameType | None = frame
    while caller is not None and not caller.f_code.co_filename.startswith("<frozen importlib"):
        caller = caller.f_back
    return caller is not None


def _is_generated(frame: FrameType) -> bool:
    """Whether code was generated for a dataclass or the like of those that compute the fakes."""
    module = str(frame.f_globals.get("__name__", ""))
    is_theirs = module.partition(".")[0] in {"torch", "sympy", "mpmath", "torchbay"}
    is_anyones = module.startswith("namedtuple_")
    return (is_theirs or is_anyones) and frame.f_code.co_filename.startswith("<")


def _is_users(frame: FrameType) -> bool:
    return is_user_file(frame.f_code.co_filename)


def _is_own(frame: FrameType | None) -> bool:
    return frame is not None and not is_library_file(frame.f_code.co_filename)


def _blamed(caller: FrameType | None) -> FrameType | None:
    """Return the innermost frame outside Python's own library, if it is a user's."""
    while caller is not None and _is_standard(caller.f_code.co_filename):
        caller = caller.f_back
    return caller if caller is not None and _is_users(caller) else None


_STDLIB = str(Path(os.__file__).parent) + os.sep


def _is_standard(filename: str) -> bool:
    """Whether a file is Python's own, or one that wraps functions on the way to others."""
    if filename.startswith("<frozen "):
        return "importlib" not in filename
    is_wrapping = "/torch/_dynamo/" in filename or filename.endswith("/torch/_compile.py")
    return is_wrapping or (filename.startswith(_STDLIB) and "-packages" not in filename)


def _is_stateful(filename: str) -> bool:
    """Whether a file of torch defines objects that hold a program's state."""
    return any(part in filename for part in _STATEFUL)


_STATEFUL = ("/torch/nn/", "/torch/optim/", "/torch/amp/", "/torch/cuda/amp/")


@contextmanager
def profiled(recorder: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Profile this thread with a recorder, and give an earlier profiler its place back."""
    before = sys.getprofile()
    sys.setprofile(recorder)
    try:
        yield
    finally:
        if before is None or callable(before):
            sys.setprofile(before)
        else:
            # A profiler written in C, such as cProfile, installs itself.
            before.enable()
