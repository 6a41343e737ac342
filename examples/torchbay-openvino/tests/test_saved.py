"""A compiled model survives being saved, and is refused where it cannot run."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
import torch
from torchbay_openvino._backend import OpenVinoBackend

import torchbay


@attrs.frozen
class Recording(OpenVinoBackend):
    """The backend, with the requests it was given."""

    requests: list = attrs.field(factory=list)

    def compile(self, request):
        self.requests.append(request)
        return super().compile(request)


@pytest.fixture(scope="module")
def request_of_a_layer():
    backend = Recording()
    layer = torch.nn.Linear(300, 200).requires_grad_(requires_grad=False)
    torchbay.compile(layer, backend=backend)(torch.ones(2, 300))
    (request,) = backend.requests
    return request


@pytest.fixture
def payload(request_of_a_layer):
    backend = OpenVinoBackend()
    return backend.save(backend.compile(request_of_a_layer))


def test_loads_what_it_saved(request_of_a_layer, payload):
    backend = OpenVinoBackend()
    assert backend.check(payload).state == "usable"
    inputs = [torch.randn(fake.shape) for fake in request_of_a_layer.example_inputs]
    expected = backend.compile(request_of_a_layer).run(list(inputs))
    torch.testing.assert_close(backend.load(payload, request_of_a_layer).run(inputs), expected)


def test_saves_neither_weights_nor_paths(payload):
    everything = b"".join(payload.values())
    assert len(everything) < 300 * 200
    assert str(Path.cwd()).encode() not in everything
    assert str(Path.home()).encode() + b"/" not in everything


@pytest.mark.parametrize("name", ["openvino", "machine", "abilities"])
def test_refuses_what_another_machine_made(payload, name):
    made_with = json.loads(payload["made_with.json"]) | {name: "another"}
    verdict = OpenVinoBackend().check({**payload, "made_with.json": json.dumps(made_with).encode()})
    assert verdict.state == "refused"
    assert name in verdict.reason
    assert "another" in verdict.reason


@pytest.mark.parametrize(
    "other", [{}, {"model.blob": b""}, {"model.blob": b"", "made_with.json": b"{"}]
)
def test_refuses_what_it_did_not_save(other):
    assert OpenVinoBackend().check(other).state == "refused"
