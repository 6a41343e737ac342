"""What every plugin's executables do: eager's values, strides, aliases and side effects."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points

import attrs
import pytest
import torch
from torch.nn import functional

from torchbay.errors import UnsupportedGraph
from torchbay.plugin import Backend, CompileRequest, Executable

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
COMPILED = ["inductor_triton", "aoti"]
STATE, MUTATED = 3, frozenset({1, 2})

pytestmark = [
    pytest.mark.slow,
    # Advice about speed on the GPU at hand, not about the code.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:\\s*Online softmax is disabled:UserWarning"),
]


def load(name: str) -> Backend:
    [entry] = entry_points(group="torchbay.backends", name=name)
    return entry.load().torchbay_make_backend()


def step(*inputs):
    """Touch what is easy to get wrong, in one graph, because compiling is slow."""
    weight, running, count, x, expanded, transposed, empty, half, image = inputs
    count.add_(1)
    running.lerp_(x.mean(0), 0.5)
    activated = torch.relu(x @ weight)
    literal = torch.tensor([1.5, 2.5, 3.5, 4.5], device=x.device)
    return (
        activated + literal,
        activated.view(-1),
        x.t(),
        x.t(),
        x[1:],
        x + 0,
        x.clone(),
        running * 2,
        count + torch.tensor(3, device=x.device),
        expanded * 2,
        transposed.exp(),
        transposed.transpose(0, 1),
        empty + 1,
        empty.sum(),
        half.softmax(-1),
        half.to(torch.float64),
        functional.conv2d(image, torch.ones(2, 3, 3, 3, device=x.device)),
        functional.max_pool2d(image, 2),
        functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
        torch.arange(6, device=x.device) % 4,
        x > 0,
        (x > 0) & (x < 1),
        x.argmax(),
        torch.topk(x, 2)[1],
        torch.cumsum(x, 0),
    )


def step_inputs(device: str) -> list[torch.Tensor]:
    draw = torch.Generator(device).manual_seed(7)

    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=draw, device=device)

    return [
        randn(4, 4),
        randn(4),
        torch.tensor(0, device=device),
        randn(4, 4),
        randn(3, 1).expand(3, 5),
        randn(5, 6).t(),
        torch.empty(0, 4, device=device),
        randn(4, 4).half(),
        randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
    ]


def noise(x):
    return (
        torch.rand_like(x),
        torch.rand_like(x),
        functional.dropout(x, 0.5),
        functional.dropout(x, 0.5),
    )


def compiled(make_request, name, function, inputs, mode="default", **fields) -> Executable:
    backend = load(name)
    table = backend.capabilities.decompositions
    request = make_request(
        function,
        inputs,
        decompositions=table and table(),
        device=inputs[0].device,
        options=backend.options(**({} if mode == "default" else {"mode": mode})),
        **fields,
    )
    return backend.compile(request)


@attrs.frozen
class Run:
    """One call of an executable beside the same call of the function."""

    executable: Executable
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    eager_inputs: list[torch.Tensor]
    eager_outputs: list[torch.Tensor]


@pytest.fixture(
    scope="module",
    params=[(name, "cpu", "default") for name in ["eager", *COMPILED]]
    + [pytest.param((name, "cuda", "default"), marks=GPU) for name in ["eager", *COMPILED]]
    + [pytest.param(("inductor_triton", "cuda", "reduce-overhead"), marks=GPU)],
    ids="-".join,
)
def run(request, make_request: Callable[..., CompileRequest]) -> Iterator[Run]:
    name, device, mode = request.param
    state = {"state_count": STATE, "mutated": MUTATED}
    executable = compiled(make_request, name, step, step_inputs(device), mode, **state)
    # CUDA graphs are recorded by the second call and replayed from the third.
    for _ in range(2 if mode == "reduce-overhead" else 0):
        executable.run(step_inputs(device))
    inputs, eager_inputs = step_inputs(device), step_inputs(device)
    with torch.no_grad():
        outputs = list(executable.run(list(inputs)))
        yield Run(executable, inputs, outputs, eager_inputs, list(step(*eager_inputs)))


def test_computes_what_eager_computes(run: Run):
    for actual, expected in zip(run.outputs, run.eager_outputs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)


def test_gives_outputs_the_strides_of_eager(run: Run):
    assert [t.stride() for t in run.outputs] == [t.stride() for t in run.eager_outputs]


def test_writes_mutated_inputs_in_place_and_no_other(run: Run):
    for actual, expected in zip(run.inputs, run.eager_inputs, strict=True):
        torch.testing.assert_close(actual, expected)


def test_aliases_what_eager_aliases(run: Run):
    actual = shared_storages(run.inputs + run.outputs)
    assert actual == shared_storages(run.eager_inputs + run.eager_outputs)


def shared_storages(tensors: list[torch.Tensor]) -> list[int]:
    """Return for each tensor the first position whose storage it shares."""
    keys = [t.untyped_storage().data_ptr() or id(t) for t in tensors]
    return [keys.index(key) for key in keys]


def test_empties_the_list_and_keeps_no_tensor_alive(run: Run):
    inputs = step_inputs(run.inputs[0].device.type)
    given = list(inputs)
    outputs = run.executable.run(given)
    assert given == []
    alive = [weakref.ref(tensor) for tensor in [*inputs, *outputs] if tensor.numel()]
    del inputs, outputs
    gc.collect()
    assert [reference() for reference in alive] == [None] * len(alive)


def test_sees_state_that_was_replaced(run: Run):
    inputs = step_inputs(run.inputs[0].device.type)
    inputs[0] = torch.zeros_like(inputs[0])
    [first, *_] = run.executable.run(inputs)
    assert first[0].tolist() == [1.5, 2.5, 3.5, 4.5]


def test_leaves_the_results_of_earlier_calls_alone(run: Run):
    device = run.inputs[0].device.type
    earlier = run.executable.run(step_inputs(device))
    expected = [tensor.clone() for tensor in earlier]
    others = step_inputs(device)
    for tensor in others[:4]:
        tensor.zero_()
    run.executable.run(others)
    assert all(map(torch.equal, earlier, expected))


@pytest.mark.parametrize("name", ["eager", *COMPILED])
def test_draws_each_random_number_once(make_request, name: str):
    x = torch.ones(4000)
    before = torch.get_rng_state()
    executable = compiled(make_request, name, noise, [x])
    assert torch.equal(before, torch.get_rng_state()), "building moved the generator"
    torch.manual_seed(0)
    first, again = executable.run([x]), executable.run([x])
    assert distinct([*first, *again])
    for uniform, dropped in zip(first[:2], first[2:], strict=True):
        assert abs(uniform.mean() - 0.5) < 0.05
        assert set(dropped.tolist()) == {0.0, 2.0}
    torch.manual_seed(0)
    assert all(map(torch.equal, executable.run([x]), first))


def distinct(tensors: list[torch.Tensor]) -> bool:
    return len({tuple(tensor.tolist()) for tensor in tensors}) == len(tensors)


def test_eager_draws_the_stream_of_eager(make_request):
    x = torch.ones(100)
    executable = compiled(make_request, "eager", noise, [x])
    torch.manual_seed(0)
    expected = noise(x)
    torch.manual_seed(0)
    assert all(map(torch.equal, executable.run([x]), expected))


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("name", COMPILED)
def test_computes_with_complex_numbers(make_request, name: str):
    def function(c):
        return c * c, c @ c, c.conj(), c.abs(), c.real, c.conj().imag * 2, torch.fft.fft(c)

    c = torch.randn(3, 3, dtype=torch.complex64)
    outputs = compiled(make_request, name, function, [c]).run([c])
    for actual, expected in zip(outputs, function(c), strict=True):
        torch.testing.assert_close(actual, expected)
        assert actual.is_conj() == expected.is_conj()


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.ones(3, dtype=torch.complex64).conj().imag, "negation"),
    ],
)
def test_declines_memory_it_cannot_read(make_request, name: str, x: torch.Tensor, said: str):
    with pytest.raises(UnsupportedGraph, match=said):
        compiled(make_request, name, lambda x: (x * 2,), [x])


@pytest.mark.parametrize("name", ["eager", *COMPILED])
def test_leaves_the_request_and_the_ambient_state_alone(make_request, name: str):
    backend = load(name)
    request = make_request(lambda x: (x + 1,), [torch.ones(3)], options=backend.options())
    before = [(str(node), dict(node.meta)) for node in request.graph.graph.nodes]
    ambient = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    backend.compile(request)
    assert [(str(node), dict(node.meta)) for node in request.graph.graph.nodes] == before
    now = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    assert now == ambient
