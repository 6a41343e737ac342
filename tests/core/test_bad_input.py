"""Bad input is refused before any work, with what happened, on whose account, and what to do."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import torchbay
from torchbay import errors


def identity(x):
    return x


def three_parts(error):
    assert isinstance(error, errors.TorchbayError)
    assert error.what
    assert error.remedy
    assert str(error).startswith(error.what)
    assert error.remedy in str(error)
    return str(error)


@pytest.mark.parametrize(
    ("settings", "kind", "parts"),
    [
        ({"mode": "x", "options": {}}, errors.InvalidArgument, ["mode", "options"]),
        ({"options": [1]}, errors.InvalidArgument, ["options", "[1]", "mapping"]),
        ({"options": "fast"}, errors.InvalidArgument, ["options", "'fast'"]),
        ({"recompile_limit": 0}, errors.InvalidArgument, ["recompile_limit", "0"]),
        ({"recompile_limit": -1}, errors.InvalidArgument, ["recompile_limit", "-1"]),
        ({"recompile_limit": True}, errors.InvalidArgument, ["recompile_limit", "True"]),
        ({"recompile_limit": 2.5}, errors.InvalidArgument, ["recompile_limit", "2.5"]),
        ({"recompile_limit": None}, errors.InvalidArgument, ["recompile_limit", "None"]),
        ({"dynamic": "yes"}, errors.InvalidArgument, ["dynamic", "'yes'"]),
        ({"dynamic": 1}, errors.InvalidArgument, ["dynamic", "1"]),
        ({"tracer": "magic"}, errors.InvalidArgument, ["tracer", "'magic'", "auto", "make_fx"]),
        ({"tracer": None}, errors.InvalidArgument, ["tracer", "None"]),
        ({"name": 3}, errors.InvalidArgument, ["name", "3"]),
        ({"fullgraph": "yes"}, errors.InvalidArgument, ["fullgraph", "'yes'"]),
        ({"fail_on_recompile_limit": 1}, errors.InvalidArgument, ["fail_on_recompile_limit", "1"]),
        ({"backend": "no_such"}, errors.UnknownBackend, ["'no_such'", "installed", "eager"]),
        ({"backend": "eagre"}, errors.UnknownBackend, ["'eagre'", "Did you mean 'eager'"]),
        ({"backend": ""}, errors.UnknownBackend, ["''"]),
        ({"backend": 3}, errors.InvalidArgument, ["3"]),
        ({"backend": "eager", "options": {"speed": 9}}, errors.UnknownOption, ["speed", "eager"]),
        ({"backend": "eager", "mode": "fast"}, errors.UnknownOption, ["eager", "mode"]),
        ({"fallback": "no_such"}, errors.UnknownBackend, ["'no_such'", "installed"]),
        ({"fallback": 3}, errors.InvalidArgument, ["3"]),
    ],
    ids=str,
)
def test_refuses(settings, kind, parts):
    for work in (
        lambda: torchbay.compile(identity, **settings),
        lambda: torchbay.compile(**settings)(identity),
    ):
        with pytest.raises(kind) as caught:
            work()
        text = three_parts(caught.value)
        for part in parts:
            assert part in text


def test_refuses_settings_even_where_it_is_disabled(monkeypatch):
    with pytest.raises(errors.InvalidArgument):
        torchbay.compile(identity, recompile_limit=0, disable=True)


def test_refuses_unknown_arguments():
    with pytest.raises(TypeError, match="unknown"):
        torchbay.compile(identity, unknown=1)


async def coroutine(x):
    return x


def generator(x):
    yield x


@pytest.mark.parametrize(
    ("thing", "part"),
    [
        (3, "not callable"),
        ("model", "not callable"),
        (torch.ones(2), "not callable"),
        (nn.Linear, "class"),
        (int, "class"),
        (coroutine, "coroutine"),
        (generator, "generator"),
        (classmethod(identity), "not callable"),
    ],
    ids=["int", "str", "tensor", "module class", "type", "coroutine", "generator", "classmethod"],
)
def test_refuses_what_is_no_function(thing, part):
    with pytest.raises(errors.InvalidArgument, match=part) as caught:
        torchbay.compile(thing, backend="eager")
    three_parts(caught.value)


def refused_tensors():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "meta": torch.ones(2, device="meta"),
            "sparse_coo": torch.eye(2).to_sparse(),
            "sparse_csr": torch.eye(2).to_sparse_csr(),
            "quantized": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "jagged": torch.nested.nested_tensor(
                [torch.ones(2), torch.ones(3)], layout=torch.jagged
            ),
            "mkldnn": torch.ones(2).to_mkldnn(),
        }


@pytest.mark.parametrize("name", refused_tensors())
@pytest.mark.parametrize("place", ["argument", "nested argument", "closure", "buffer"])
def test_refuses_tensors_no_graph_can_take(name, place, recording):
    tensor, runs = refused_tensors()[name], []

    def call(x):
        runs.append(tensor if place == "closure" else x)
        return 1

    class Holder(nn.Module):
        def forward(self, x):
            return self.held

    if place == "buffer":
        module = Holder()
        module.register_buffer("held", tensor)
        compiled, given = torchbay.compile(module, backend=recording), torch.ones(1)
    else:
        compiled = torchbay.compile(call, backend=recording)
        given = {
            "argument": tensor,
            "nested argument": {"deep": [tensor]},
            "closure": torch.ones(1),
        }[place]
    with pytest.raises(errors.InvalidArgument) as caught:
        compiled(given)
    text = three_parts(caught.value)
    assert __file__ in caught.value.account
    assert {
        "argument": "x",
        "nested argument": "x['deep'][0]",
        "closure": "tensor",
        "buffer": "held",
    }[place] in text
    assert runs == []
    assert recording.requests == []


def test_refuses_a_model_on_the_meta_device(recording):
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(
        errors.InvalidArgument, match="self.0.weight is on the meta device"
    ) as caught:
        torchbay.compile(module, backend=recording)(torch.ones(2))
    assert "to_empty" in three_parts(caught.value)


def test_refuses_a_backend_whose_result_is_not_callable():
    with pytest.raises(errors.BackendFailed, match="not callable") as caught:
        torchbay.compile(lambda x: x + 1, backend=lambda graph, inputs: 3)(torch.ones(1))
    three_parts(caught.value)
    assert caught.value.account


def test_refuses_an_object_that_is_no_backend():
    class Half:
        name = "half"

    with pytest.raises(errors.InvalidArgument, match="capabilities") as caught:
        torchbay.compile(identity, backend=Half())
    three_parts(caught.value)


def test_declines_a_device_or_dtype_the_backend_does_not_claim(recording):
    from torchbay.plugin import Capabilities

    recording.capabilities = Capabilities(dtypes=frozenset({torch.float32}))
    compiled = torchbay.compile(lambda x: x.double() + 1, backend=recording)
    with pytest.warns(errors.TorchbayWarning, match="float64"):
        assert compiled(torch.ones(1)).item() == 2
    assert recording.requests == []


def test_does_no_work_in_a_call_for_a_backend_that_is_gone(monkeypatch, recording):
    runs = []
    monkeypatch.setenv("TORCHBAY_BACKEND", "no_such")
    compiled = torchbay.compile(runs.append)
    with pytest.raises(errors.UnknownBackend, match="no_such"):
        compiled(torch.ones(1))
    assert runs == []


@pytest.mark.parametrize(
    "kind", [errors.NotServed, errors.RecompileLimit, errors.BackendFailed, errors.InvalidArgument]
)
def test_pickles_errors(kind):
    import pickle

    error = pickle.loads(pickle.dumps(kind("what", account="whose", remedy="do")))
    assert (error.what, error.account, error.remedy) == ("what", "whose", "do")
    assert type(error) is kind


def test_lets_unusable_tensors_be_that_no_module_registers(recording):
    kept = {"sparse": torch.eye(2).to_sparse(), "meta": torch.ones(2, device="meta")}

    def call(x):
        return x + len(kept)

    compiled = torchbay.compile(call, backend=recording)
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
