"""The modes that are active while a call runs for real."""

from __future__ import annotations

from types import CodeType, FrameType
from typing import Any

import torch

from torchbay._observe._ops import GATES, HIDDEN_READS, Gate, OpRecord, is_compared, record_of
from torchbay._reason import Reason
from torchbay._source import is_user_file, user_line
from torchbay._torch_compat import ObservingDispatchMode, ObservingFunctionMode, OpOverload

__all__ = ["CodeRecorder", "FunctionRecorder", "OpRecorder"]


class OpRecorder(ObservingDispatchMode):
    """Logs every dispatched operator, and the outcome of every data-dependent read."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[OpRecord] = []
        self.gates: list[Gate] = []
        self.obstacles: list[Reason] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        where = user_line()
        if func in GATES:
            self.gates.append(Gate(str(func), result, where))
        elif not isinstance(func, OpOverload):
            self.obstacles.append(Reason(f"{func} is a higher-order operator", where))
        elif is_compared(func):
            self.ops.append(record_of(func, result, where))
        return result


class FunctionRecorder(ObservingFunctionMode):
    """Sees what reaches tensors without being an operator."""

    def __init__(self, recorder: OpRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.tolist:
            self._recorder.gates.append(Gate("tolist", result, user_line()))
        elif (hidden := HIDDEN_READS.get(func)) is not None:
            self._recorder.obstacles.append(Reason(f"{hidden} is not an operator", user_line()))
        return result


class CodeRecorder:
    """Collects the Python code that ran, where a guard could depend on it."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.user_codes: dict[CodeType, dict[str, Any]] = {}

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event != "call" or code in self.codes or code.co_name == "<module>":
            return
        if is_user_file(code.co_filename):
            self.user_codes[code] = frame.f_globals
            self.codes.add(code)
        elif _is_module_code(code.co_filename):
            self.codes.add(code)

    def names(self) -> frozenset[str]:
        """Return every name the code that ran can use to read an attribute."""
        return frozenset(name for code in self.codes for name in _names_in(code))


def _is_module_code(filename: str) -> bool:
    """Whether a file of torch defines modules whose attributes their code reads."""
    return "/torch/nn/" in filename and not filename.endswith("/nn/modules/module.py")


def _names_in(code: CodeType) -> set[str]:
    strings = {const for const in code.co_consts if isinstance(const, str) and const.isidentifier()}
    return strings.union(code.co_names)
