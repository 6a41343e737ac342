"""The containers among a call's arguments, as holders of what they were passed with."""

from __future__ import annotations

import attrs

from torchbay._call import Call, Item
from torchbay._observe._effects import is_writable
from torchbay._observe._reach import Holder
from torchbay._observe._snapshot import Change, is_same
from torchbay._structure import Container, take_apart

__all__ = ["argument_holders", "hidden_argument_changes"]


def argument_holders(call: Call) -> list[Holder]:
    """Return the containers among the arguments that can be written, in the order of the call."""
    return [holder for holder in map(_holder, call.holders) if is_writable(holder)]


def _holder(item: Item) -> Holder:
    holder = Holder(item.path, item.value, item.value, is_pinned=False, access=item.access)
    if isinstance(item.value, (list, dict, tuple, set)):
        return holder
    return attrs.evolve(holder, container=vars(item.value), suffix="{}.__dict__")


def hidden_argument_changes(call: Call) -> list[Change]:
    """Return the other containers among the arguments that no longer hold what they did."""
    return [
        Change(item.path, None, None)
        for item, before in call.containers
        if not is_writable(_holder(item)) and not _holds_still(before)
    ]


def _holds_still(before: Container) -> bool:
    after = take_apart(before.value)
    return (
        after is not None
        and after.form.is_same(before.form)
        and all(map(is_same, before.children, after.children))
    )
