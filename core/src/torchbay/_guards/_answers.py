"""What tensors answer besides what every tensor guard compares, where the program can ask."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import CodeType

import torch

from torchbay._access import Access
from torchbay._call import Item, Place
from torchbay._guards._kinds import Guard, ObjectGuard, ValueGuard
from torchbay._observe import Observation, named_attributes
from torchbay._source import is_library_file
from torchbay._structure import is_plain
from torchbay._trace import Input

__all__ = ["answer_guards"]

_QUESTIONS = {
    "storage_offset": "{0}.storage_offset()",
    "_base": "({0}._base is None)",
    "is_leaf": "{0}.is_leaf",
    # Of others than leaves, PyTorch warns when their gradient is looked at.
    "grad": "({0}.grad is None if {0}.is_leaf else None)",
}
"""How a fact is asked, by the name that a program has to know."""

_PRESENCE = frozenset({"hasattr", "getattr", "vars", "__dict__"})


def answer_guards(
    inputs: Sequence[Input], observation: Observation, access: Access
) -> Iterator[Guard]:
    """Guard facts about tensors, and their Python attributes, that a user's code can name."""
    asked = [q for name, q in _QUESTIONS.items() if _is_in(name, observation.codes)]
    own = [code for code in observation.codes if not is_library_file(code.co_filename)]
    asks_presence = any(_is_in(name, own) for name in _PRESENCE)
    for entry in inputs:
        place, tensor = entry.places[0], entry.tensor
        source = access.of(place)
        for question in asked:
            answer = eval(question.format("tensor"), {"tensor": tensor})  # noqa: S307 - our own source
            yield ValueGuard(question.format(place.path), question.format(source), answer)
        if asks_presence and isinstance(place, Item):
            yield _presence_guard(place, tensor)
        yield from _attribute_guards(place, tensor, source, observation.names)


def _is_in(name: str, codes: Iterable[CodeType]) -> bool:
    return any(name in code.co_names for code in codes)


def _presence_guard(place: Item, tensor: torch.Tensor) -> Guard:
    """Guard which attributes there are, since code that asks for one goes on without it."""
    path, attributes = f"the attributes of {place.path}", f"{place.access}.__dict__"
    if not vars(tensor):
        return ValueGuard(f"not {path}", f"(not {attributes})", value=True)
    return ValueGuard(path, f"(*{attributes},)", (*vars(tensor),))


def _attribute_guards(
    place: Place, tensor: torch.Tensor, source: str, names: frozenset[str] | None
) -> Iterator[Guard]:
    for name, value in named_attributes(tensor, names):
        path, access = f"{place.path}.{name}", f"{source}.__dict__[{name!r}]"
        guard = ValueGuard(path, access, value) if is_plain(value) else None
        yield guard or ObjectGuard.of(path, access, value)
