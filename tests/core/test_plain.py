"""A function with torch.compile's backend signature works as a backend."""

from __future__ import annotations

import pytest
import torch
from torch.fx import symbolic_trace

from torchbay import errors
from torchbay._options import read
from torchbay._plain import PlainBackend
from torchbay.plugin import Backend, CompileRequest, Executable


def double_and_sum(x):
    return x * 2, x.sum()


def interpret(graph_module, example_inputs):
    return graph_module.forward


def request(options=None, backend=None):
    graph = symbolic_trace(double_and_sum)
    return CompileRequest(
        graph=graph,
        example_inputs=[torch.ones(3)],
        options=read(backend or PlainBackend(interpret), None, options),
    )


def compiled_to(callable_):
    return PlainBackend(lambda graph_module, example_inputs: callable_).compile(request())


def test_satisfies_the_contract():
    backend = PlainBackend(interpret)
    assert isinstance(backend, Backend)
    assert isinstance(backend.compile(request()), Executable)
    assert backend.name == "interpret"
    assert "interpret" in backend.fingerprint()["function"]


def test_claims_static_graphs_on_every_device():
    claims = PlainBackend(interpret).capabilities
    assert {"cpu", "cuda"} <= claims.devices
    assert claims.training
    assert not claims.dynamic_shapes
    assert not claims.mutation


def test_runs_what_the_function_returns():
    doubled, total = PlainBackend(interpret).compile(request()).run([torch.ones(3)])
    assert torch.equal(doubled, torch.full((3,), 2.0))
    assert total == 3


def test_hands_options_to_the_function():
    seen = {}

    def tuned(graph_module, example_inputs, **options):
        seen.update(options)
        return graph_module.forward

    backend = PlainBackend(tuned)
    backend.compile(request({"level": 3}, backend))
    assert seen == {"level": 3}


def test_refuses_options_the_function_does_not_take():
    with pytest.raises(errors.UnknownOption, match="level"):
        read(PlainBackend(interpret), None, {"level": 3})


def test_gives_a_name_to_what_has_none():
    class Compiler:
        def __call__(self, graph_module, example_inputs):
            return graph_module.forward

    assert PlainBackend(Compiler()).name == "Compiler"


def test_leaves_the_graph_of_the_request_alone():
    def erase(graph_module, example_inputs):
        for node in reversed(graph_module.graph.nodes):
            graph_module.graph.erase_node(node)
        return lambda x: (x, x)

    asked = request()
    before = str(asked.graph.graph)
    PlainBackend(erase).compile(asked)
    assert str(asked.graph.graph) == before


def test_refuses_a_result_that_is_not_callable():
    with pytest.raises(
        errors.BackendFailed, match="it returned 3, which is not callable"
    ) as caught:
        compiled_to(3)
    assert "interpret" not in caught.value.account
    assert "backend '<lambda>'" in caught.value.account
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (torch.ones(2), "Tensor"),
        (None, "NoneType"),
        ((torch.ones(2),), "tuple of 1"),
        ([1, 2, 3], "list of 3"),
    ],
)
def test_refuses_outputs_of_another_form(returned, found):
    with pytest.raises(errors.BackendFailed, match=f"returned a {found} instead of .* of 2"):
        compiled_to(lambda x: returned).run([torch.ones(3)])


@pytest.mark.parametrize("kind", [list, tuple])
def test_takes_a_list_or_a_tuple(kind):
    outputs = compiled_to(lambda x: kind([x, x])).run([torch.ones(3)])
    assert len(outputs) == 2
