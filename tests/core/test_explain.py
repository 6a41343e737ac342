"""`torchbay.explain` shows what a compiled object holds, and the log says what happens as it does."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import torchbay
from torchbay import errors


def branch(x, k):
    y = x * k
    if y.sum() > 0:
        return y + 1
    return y - 1


@pytest.fixture
def explanation(recording):
    compiled = torchbay.compile(branch, backend=recording)
    compiled(torch.ones(2), 2)
    compiled(torch.ones(2), 2)
    compiled(torch.ones(2), 3)
    compiled(-torch.ones(2), 3)
    return torchbay.explain(compiled)


def test_counts_the_calls_served_each_way(explanation):
    assert explanation.calls == {"graph": 1, "eager": 3}
    assert [*explanation.calls] == ["graph", "eager"]


def test_holds_a_sequence_of_specializations(explanation):
    assert len(explanation.specializations) == 3
    report = explanation.specializations[-1]
    assert report.backend == "recording"
    assert report.calls == 1
    assert report.compile_seconds > 0
    assert explanation.graphs == tuple(r.graph for r in explanation.specializations)
    assert explanation.guards == tuple(r.guards for r in explanation.specializations)


def test_shows_graphs_and_guards_as_source(explanation):
    report = explanation.specializations[-1]
    assert "torch.ops.aten.mul.Tensor" in report.graph
    compile(report.guards, "guards", "exec")
    compile(report.run, "run", "exec")
    assert "def match(args, kwargs):" in report.guards
    assert "args[1] == 2" in report.guards
    assert "float32[2]" in report.guards
    assert __file__ in report.gates[0]


def test_names_every_recompile_with_both_values(explanation):
    assert len(explanation.recompiles) == 2
    assert explanation.recompiles[0] == ("k: compiled for 2, seen 3",)
    assert "branch on data" in explanation.recompiles[1][0]


def test_prints_everything(explanation):
    text = str(explanation)
    for part in (
        "branch",
        "1 graph",
        "3 eager",
        "mul.Tensor",
        "def match",
        "compiled for 2, seen 3",
        "recording",
    ):
        assert part in text


def test_leaves_eager_fallbacks_out_of_the_specializations(recording):
    compiled = torchbay.compile(lambda x: torch.from_numpy(x.numpy()), backend=recording)
    with pytest.warns(errors.TorchbayWarning):
        compiled(torch.ones(1))
    compiled(torch.ones(1))
    explanation = torchbay.explain(compiled)
    assert len(explanation.specializations) == 0
    assert explanation.calls == {"graph": 0, "eager": 2}
    (route,) = explanation.eager
    assert "numpy()" in route.reason
    assert "numpy()" in str(explanation)


def test_explains_what_was_not_called(recording):
    explanation = torchbay.explain(torchbay.compile(branch, backend=recording))
    assert explanation.calls == {"graph": 0, "eager": 0}
    assert str(explanation)


def test_explains_modules_and_methods(recording):
    class Layer:
        @torchbay.compile(backend=recording)
        def apply(self, x):
            return x + 1

    layer, module = Layer(), torchbay.compile(nn.Linear(2, 2), backend=recording)
    for compiled in (layer.apply, module):
        compiled(torch.ones(2))
        compiled(torch.ones(2))
        assert torchbay.explain(compiled).calls == {"graph": 1, "eager": 1}


def test_refuses_what_is_not_compiled():
    with pytest.raises(errors.InvalidArgument, match="not compiled"):
        torchbay.explain(branch)


def test_shows_weights_by_the_users_names(recording):
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    compiled = torchbay.compile(module, backend=recording)
    compiled(torch.ones(2))
    (report,) = torchbay.explain(compiled).specializations
    assert "weight" in report.guards
    assert "training" not in report.guards or "is True" in report.guards


def test_names_what_it_is_called(recording):
    assert torchbay.explain(torchbay.compile(branch, backend=recording)).name == "branch"
    assert torchbay.explain(torchbay.compile(nn.Linear(2, 2), backend=recording)).name == "Linear"
    assert torchbay.explain(torchbay.compile(branch, backend=recording, name="mine")).name == "mine"


def test_tells_every_mismatch_of_a_recompile(recording):
    compiled = torchbay.compile(lambda x, k, mode: x * k, backend=recording)
    compiled(torch.ones(2), 2, "a")
    compiled(torch.ones(3), 3, "b")
    (reasons,) = torchbay.explain(compiled).recompiles
    assert any(reason == "k: compiled for 2, seen 3" for reason in reasons)
    assert any(reason == "mode: compiled for 'a', seen 'b'" for reason in reasons)
    assert any("[2]" in reason and "[3]" in reason for reason in reasons)


RECOMPILES = {
    "size": (lambda: torch.ones(2), lambda: torch.ones(3), ["[2]", "[3]"]),
    "dtype": (lambda: torch.ones(2), lambda: torch.ones(2, dtype=torch.int64), ["float32", "int64"]),
    "stride": (lambda: torch.ones(2, 2), lambda: torch.ones(2, 2).t(), ["[2, 1]", "[1, 2]"]),
    "requires_grad": (lambda: torch.ones(2), lambda: torch.ones(2, requires_grad=True), ["requires_grad"]),
    "value": (lambda: 1, lambda: 1.0, ["1", "1.0"]),
    "kind": (lambda: torch.ones(2), lambda: 3, ["float32[2]", "3"]),
    "length": (lambda: [1, 2], lambda: [1], ["length 2", "length 1"]),
    "keys": (lambda: {"a": 1}, lambda: {"b": 1}, ["'a'", "'b'"]),
    "class": (lambda: [1], lambda: (1,), ["list", "tuple"]),
}  # fmt: skip


@pytest.mark.parametrize("name", RECOMPILES)
def test_gives_a_reason_for_another(name, recording):
    """https://github.com/pytorch/pytorch/issues/164119"""
    before, after, parts = RECOMPILES[name]
    compiled = torchbay.compile(lambda x, given: x + 1, backend=recording)
    compiled(torch.ones(1), before())
    compiled(torch.ones(1), after())
    (reasons,) = torchbay.explain(compiled).recompiles
    text = "; ".join(reasons)
    assert text.startswith("given")
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("around", "parts"),
    [
        (torch.enable_grad, ["grad mode"]),
        (torch.inference_mode, ["inference mode"]),
        (lambda: torch.autocast("cpu", torch.bfloat16), ["autocast", "bfloat16"]),
        (lambda: torch.device("cpu"), ["mode"]),
    ],
)
def test_gives_a_reason_for_other_ambient_state(around, parts, recording):
    compiled = torchbay.compile(lambda x: x + 1, backend=recording)
    compiled(torch.ones(1))
    with around():
        compiled(torch.ones(1))
    (reasons,) = torchbay.explain(compiled).recompiles
    for part in parts:
        assert part in "; ".join(reasons)


def test_logs_recompiles(recording, monkeypatch, capfd):
    monkeypatch.setenv("TORCHBAY_LOG", "recompiles")
    compiled = torchbay.compile(branch, backend=recording)
    compiled(torch.ones(2), 2)
    assert "branch" not in capfd.readouterr().err
    compiled(torch.ones(3), 3)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "branch" in captured.err
    assert "k: compiled for 2, seen 3" in captured.err
    assert "[3]" in captured.err


def test_logs_nothing_unless_asked(recording, monkeypatch, capfd):
    monkeypatch.setenv("TORCHBAY_LOG", "cache")
    compiled = torchbay.compile(branch, backend=recording)
    compiled(torch.ones(2), 2)
    compiled(torch.ones(3), 3)
    assert capfd.readouterr() == ("", "")


def test_shows_emitted_source_in_tracebacks(recording):
    compiled = torchbay.compile(lambda x, i: x[i], backend=recording)
    compiled(torch.ones(3), torch.tensor([0]))
    with pytest.raises(IndexError) as caught:
        compiled(torch.ones(3), torch.tensor([9]))
    frames = [entry.frame for entry in caught.traceback if "torchbay run" in str(entry.path)]
    assert all(inspect.getsource(frame.code.raw) for frame in frames) or not frames
