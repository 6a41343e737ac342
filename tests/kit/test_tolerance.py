"""The one table of the kit accepts rounding and nothing else."""

from __future__ import annotations

import pytest
import torch

from torchbay.testing.tolerance import FACTOR, FLOOR, complaint, precise

inf, nan = torch.inf, torch.nan


def judged(actual, eager=None, truth=None):
    eager = actual if eager is None else eager
    return complaint([actual], [eager], [precise(eager) if truth is None else truth])


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", FLOOR, ids=str)
def test_accepts_a_rounding_and_refuses_ten_of_the_floor(dtype):
    exact = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    eager = exact.to(dtype)
    assert judged(eager, truth=precise(eager)) == ""
    wrong = (exact * (1 + 10 * FLOOR[dtype])).to(dtype)
    assert "wrong in" in judged(wrong, eager)


def test_allows_a_multiple_of_what_eager_is_off_by():
    truth = torch.tensor([1.0], dtype=torch.float64)
    eager = torch.tensor([1.001])
    assert judged(torch.tensor([1 + 0.9e-3 * FACTOR]), eager, truth) == ""
    assert judged(torch.tensor([1 + 1.2e-3 * FACTOR]), eager, truth) != ""


def test_measures_small_values_by_the_largest():
    eager = torch.tensor([1e-6, 2e-6])
    assert judged(eager * 2, eager) != ""
    assert judged(torch.tensor([0.0, 1.0]), torch.tensor([1e-7, 1.0])) == ""


@pytest.mark.parametrize("value", [inf, -inf, nan])
def test_wants_the_same_special_value(value):
    special = torch.tensor([value, 1.0])
    assert judged(special.clone(), special) == ""
    assert judged(torch.tensor([1.0, 1.0]), special) != ""
    assert judged(special, torch.tensor([1.0, 1.0])) != ""
    assert judged(-special if value == value else torch.tensor([inf, 1.0]), special) != ""  # noqa: PLR0124


def test_accepts_the_truth_where_eager_overflows():
    truth = torch.tensor([7.0], dtype=torch.float64)
    assert judged(torch.tensor([7.0]).half(), torch.tensor([inf]).half(), truth) == ""


def test_wants_integers_to_be_equal():
    eager = torch.tensor([2**53, 2**53 + 1])
    assert judged(eager.clone(), eager) == ""
    assert judged(torch.tensor([2**53, 2**53]), eager) != ""


def test_reads_lazy_conjugates_and_negations():
    eager = torch.tensor([1 + 2j])
    assert judged(eager.conj(), eager.conj().resolve_conj()) == ""
    assert judged(eager, eager.conj()) != ""
    assert judged(eager.conj().imag, torch.tensor([-2.0])) == ""


@pytest.mark.parametrize(
    ("actual", "what"),
    [
        (torch.zeros(3, dtype=torch.float64), "dtype"),
        (torch.zeros(1, 3), "shape"),
        (torch.zeros(3, device="meta"), "device"),
        (0.0, "not a tensor"),
    ],
)
def test_wants_the_same_kind_of_value(actual, what):
    assert what in judged(actual, torch.zeros(3))


def test_counts_values():
    assert "0 values instead of 1" in complaint([], [torch.zeros(1)], [torch.zeros(1)])


def test_accepts_what_is_empty():
    assert judged(torch.empty(0, 3)) == ""
