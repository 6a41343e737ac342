"""Results have the form, the identity and the aliases that eager gives them."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from torch import nn

import torchbay

Pair = collections.namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - untyped on purpose


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    name: str = "out"


@dataclasses.dataclass(frozen=True)
class FrozenOutput:
    logits: torch.Tensor
    name: str = "out"


class Cache:
    def __init__(self):
        self.keys = []
        self.length = 0

    def update(self, key):
        self.keys.append(key)
        self.length += 1


def served(compiled):
    return dict(torchbay.explain(compiled).calls)


def same(left, right):
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
        assert left.requires_grad == right.requires_grad
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            same(one, other)
    elif hasattr(left, "__dict__"):
        same(vars(left), vars(right))
    else:
        assert left == right


RESULTS = {
    "list": lambda x: [x + 1, x + 2],
    "tuple": lambda x: (x + 1,),
    "empty": lambda x: ([], (), {}, x + 1),
    "dict": lambda x: {"a": x + 1, 2: [x], None: {"b": x * 2}},
    "OrderedDict": lambda x: collections.OrderedDict(a=x + 1),
    "defaultdict": lambda x: collections.defaultdict(list, a=x + 1),
    "namedtuple": lambda x: Pair(x + 1, right=3),
    "dataclass": lambda x: Output(x + 1),
    "frozen": lambda x: FrozenOutput(x + 1, "b"),
    "return_types": lambda x: torch.max(x.reshape(1, -1), dim=0),
    "object": lambda x: Output([Pair(x, {"k": x + 1})]),
    "values": lambda x: (x + 1, None, 1, 1.5, "s", True, 2j, b"b", ..., -0.0, float("inf"), slice(1), range(2)),
    "types": lambda x: (x.dtype, x.device, x.shape, x.layout, len(x), x.numel(), x.stride()),
    "nothing": lambda x: None,
    "constant": lambda x: 7,
    "fresh tensor": lambda x: torch.zeros(2),
    "literal": lambda x: torch.tensor([1.0, 2.0]),
    "frozenset": lambda x: (x + 1, frozenset({1, 2})),
    "function": lambda x: (x + 1, torch.relu),
}  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_serves(name, recording):
    function = RESULTS[name]
    compiled = torchbay.compile(function, backend=recording)
    for value in range(3):
        x = torch.arange(3.0) + value
        same(compiled(x), function(x))
    assert served(compiled) == {"graph": 2, "eager": 1}


def test_serves_the_outputs_of_transformers(recording):
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def call(x):
        return outputs.BaseModelOutput(last_hidden_state=x + 1, attentions=(x, x * 2))

    compiled = torchbay.compile(call, backend=recording)
    for _ in range(3):
        found = compiled(torch.ones(2))
        assert type(found) is outputs.BaseModelOutput
        assert list(found.keys()) == ["last_hidden_state", "attentions"]
        assert torch.equal(found[0], torch.full((2,), 2.0))
        assert torch.equal(found.last_hidden_state, found["last_hidden_state"])
    assert served(compiled) == {"graph": 2, "eager": 1}


def test_serves_objects_made_in_the_call(recording):
    def call(x):
        cache = Cache()
        cache.update(x + 1)
        return x, cache

    compiled = torchbay.compile(call, backend=recording)
    caches = [compiled(torch.full((1,), float(value)))[1] for value in range(3)]
    assert [cache.keys[0].item() for cache in caches] == [1, 2, 3]
    assert [cache.length for cache in caches] == [1, 1, 1]
    assert len({id(cache) for cache in caches}) == 3
    caches[2].update(torch.ones(1))
    assert len(caches[1].keys) == 1
    assert served(compiled) == {"graph": 2, "eager": 1}


def test_makes_containers_anew_on_every_call(recording):
    compiled = torchbay.compile(lambda x: {"list": [x + 1]}, backend=recording)
    first, second, third = (compiled(torch.ones(1)) for _ in range(3))
    second["list"].append(1)
    assert len(first["list"]) == len(third["list"]) == 1


def test_returns_inputs_and_their_containers_themselves(recording):
    weight = nn.Parameter(torch.ones(1))
    compiled = torchbay.compile(lambda x, box: (x, box, weight, box["y"], x + 1), backend=recording)
    for _ in range(3):
        x, box = torch.ones(1), {"y": torch.zeros(1)}
        found = compiled(x, box)
        assert found[0] is x
        assert found[1] is box
        assert found[2] is weight
        assert found[3] is box["y"]
    assert served(compiled) == {"graph": 2, "eager": 1}


@pytest.mark.parametrize(
    "function",
    [torch.Tensor.contiguous, lambda x: x.to(x.dtype), lambda x: x.float(), lambda x: x.cpu()],
)
def test_returns_the_input_where_an_operator_does(function, recording):
    compiled = torchbay.compile(function, backend=recording)
    for _ in range(3):
        x = torch.ones(2)
        assert compiled(x) is x


def test_returns_one_tensor_twice_as_one(recording):
    def call(x):
        y = x + 1
        return y, [y], {"y": y}

    compiled = torchbay.compile(call, backend=recording)
    for _ in range(3):
        first, (second,), third = compiled(torch.ones(1))
        assert first is second is third["y"]


def test_returns_one_container_twice_as_one(recording):
    def call(x):
        shared = [x + 1]
        return shared, {"again": shared}

    compiled = torchbay.compile(call, backend=recording)
    for _ in range(3):
        first, second = compiled(torch.ones(1))
        assert second["again"] is first


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1],
        lambda x: x.view(-1),
        lambda x: x.detach(),
        lambda x: x.t(),
        lambda x: x.expand(2, 2, 2),
        lambda x: x.unbind(0),
        lambda x: x.data,
        lambda x: x.as_strided((2,), (1,)),
        lambda x: x.reshape(4),
    ],
)
def test_returns_views_that_share_memory_with_the_input(view, recording):
    compiled = torchbay.compile(view, backend=recording)
    for _ in range(3):
        x = torch.zeros(2, 2)
        found = compiled(x)
        found = found[0] if isinstance(found, tuple) else found
        assert found is not x
        x.fill_(3)
        assert (found == 3).all()


def test_keeps_aliases_between_outputs(recording):
    def call(x):
        y = x + 1
        return y, y.view(-1), y[0]

    compiled = torchbay.compile(call, backend=recording)
    for _ in range(3):
        whole, flat, row = compiled(torch.zeros(2, 2))
        whole.fill_(5)
        assert (flat == 5).all()
        assert (row == 5).all()


def test_keeps_strides_and_layouts(recording):
    def call(x):
        return x.t() + 1, x.to(
            memory_format=torch.channels_last
        ) if x.dim() == 4 else x.t().contiguous()

    compiled = torchbay.compile(call, backend=recording)
    for _ in range(3):
        x = torch.randn(2, 3)
        assert [t.stride() for t in compiled(x)] == [t.stride() for t in call(x)]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("enable_grad", lambda x, w: (x * w, torch.enable_grad()(torch.mul)(x, w))),
        ("leaf", lambda x, w: torch.zeros(2, requires_grad=True)),
        ("parameter", lambda x, w: nn.Parameter(x * 2)),
        ("frozen parameter", lambda x, w: nn.Parameter(x * 2, requires_grad=False)),
        ("buffer", lambda x, w: nn.Buffer(x * 2)),
        ("requires_grad_", lambda x, w: (x * 2).requires_grad_()),
        ("module", lambda x, w: nn.Linear(2, 2).weight),
    ],
)
@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_never_detaches_a_result(name, function, recording):
    weight = nn.Parameter(torch.ones(2))
    compiled = torchbay.compile(function, backend=recording)
    for _ in range(3):
        torch.manual_seed(0)
        found = compiled(torch.ones(2), weight)
        torch.manual_seed(0)
        same(found, function(torch.ones(2), weight))


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_keeps_attributes_of_tensors(recording):
    def call(x):
        y = x + 1
        y.note = "mine"
        return y

    compiled = torchbay.compile(call, backend=recording)
    for _ in range(3):
        assert compiled(torch.ones(1)).note == "mine"


def test_returns_inference_tensors_where_eager_does(recording):
    compiled = torchbay.compile(lambda x: x * 2, backend=recording)
    for _ in range(3):
        with torch.inference_mode():
            assert compiled(torch.ones(1)).is_inference()
        assert not compiled(torch.ones(1)).is_inference()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + 1 for _ in range(2)),
        lambda x: {x},
        lambda x: lambda: x + 1,
        lambda x: x.numpy(),
        lambda x: iter([x]),
    ],
    ids=["generator", "set", "closure", "numpy", "iterator"],
)
def test_runs_calls_eagerly_whose_result_cannot_be_made_anew(function, recording):
    compiled = torchbay.compile(function, backend=recording)
    with pytest.warns(torchbay.errors.TorchbayWarning):
        first = compiled(torch.ones(1))
    second = compiled(torch.ones(1))
    assert type(first) is type(second) is type(function(torch.ones(1)))
    assert first is not second
    assert served(compiled) == {"graph": 0, "eager": 2}


def test_keeps_dtypes(recording):
    dtypes = [
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
        torch.int8,
        torch.uint8,
        torch.bool,
    ]
    compiled = torchbay.compile(lambda x: [x.to(dtype) for dtype in dtypes], backend=recording)
    for _ in range(2):
        assert [t.dtype for t in compiled(torch.ones(2))] == dtypes


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1)])
def test_serves_scalars_and_empty_tensors(shape, recording):
    compiled = torchbay.compile(lambda x: (x * 2, x.sum()), backend=recording)
    for _ in range(3):
        x = torch.randn(shape)
        same(compiled(x), (x * 2, x.sum()))
    assert served(compiled) == {"graph": 2, "eager": 1}


@pytest.mark.parametrize("is_enabled", [True, False])
def test_makes_inference_tensors_where_the_call_does(is_enabled, recording):
    @torch.inference_mode()
    def call(x):
        return x.mul_(2) + 1, x.t()

    compiled = torchbay.compile(call, backend=recording, fullgraph=True)
    with torch.set_grad_enabled(is_enabled):
        for _ in range(3):
            x = torch.ones(2, 3)
            found = compiled(x)
            assert torch.equal(x, torch.full((2, 3), 2.0))
            assert not x.is_inference()
            expected = call(torch.ones(2, 3))
            for mine, theirs in zip(found, expected, strict=True):
                assert torch.equal(mine, theirs)
                assert mine.is_inference() == theirs.is_inference()
    assert torchbay.explain(compiled).calls == {"graph": 2, "eager": 1}
