"""Marks that ``torch._dynamo.mark_dynamic`` and its kin leave on tensors.

They are attributes of the tensor, read when a call misses. Nothing of torch is imported for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchbay._call import Place
from torchbay._symbolic import Declarations, Declared
from torchbay.errors import InvalidArgument

__all__ = ["marked"]

_MARKS = {
    "mark_static": "_dynamo_static_indices",
    "maybe_mark_dynamic": "_dynamo_weak_dynamic_indices",
    "mark_unbacked": "_dynamo_unbacked_indices",
    "mark_unbacked(strict=True)": "_dynamo_strict_unbacked_indices",
    "mark_dynamic": "_dynamo_dynamic_indices",
}
"""Who leaves a mark, and the attribute: the later one counts where a dimension has several."""


def marked(places: Iterable[Place], where: str) -> Declarations:
    """Return what the marks on these tensors declare.

    Raises:
        InvalidArgument: A mark is about a dimension that is not there, or asks for something that
            cannot be had.
    """
    found: dict[tuple[str, int], Declared] = {}
    for place in places:
        marks = vars(place.value)
        for by, attribute in _MARKS.items() if marks else ():
            for dim in marks.get(attribute, ()):
                found[place.path, dim] = _declared(place, dim, by, marks, where)
    return found


def _declared(place: Place, dim: int, by: str, marks: dict[str, Any], where: str) -> Declared:
    if not 0 <= dim < place.value.dim():
        rank = place.value.dim()
        raise InvalidArgument(
            f"{by} is about dimension {dim} of {place.path}, which has {rank}",
            account=where,
            remedy="Name a dimension from 0 up",
        )
    if marks.get("_specialize_on", {}).get(dim):
        raise InvalidArgument(
            f"{by} of dimension {dim} of {place.path} has specialize_on, which is not available",
            account=where,
            remedy="Leave it out, or compile one object for each of those sizes",
        )
    is_unbacked = by.startswith("mark_unbacked")
    low, high = _bounds(dim, marks, is_unbacked)
    return Declared(
        is_open=by != "mark_static",
        by=by,
        is_demanded=by in {"mark_dynamic", "mark_unbacked(strict=True)"},
        low=low,
        high=high,
        same=marks.get("_dynamo_shape_ids", {}).get(dim) or "" if is_unbacked else "",
        serves_all=is_unbacked,
        hint=marks.get("_dynamo_hint_overrides", {}).get(dim),
    )


def _bounds(dim: int, marks: dict[str, Any], is_unbacked: bool) -> tuple[Any, Any]:  # noqa: FBT001
    """Return the least and the greatest size that are meant, None where any is."""
    if is_unbacked:
        bounds: tuple[Any, Any] = marks.get("_dynamo_unbacked_bounds", {}).get(dim, (None, None))
        return bounds
    ranges = [given for given in marks.get("_dynamo_dynamic_range", ()) if given.dim == dim]
    lows = [given.min for given in ranges if given.min is not None]
    highs = [given.max for given in ranges if given.max is not None]
    return max(lows, default=None), min(highs, default=None)
