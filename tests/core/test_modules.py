"""Compiled modules are modules: attributes, containers, wrappers, hooks, and what runs inside them."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import torchbay


class Net(nn.Module):
    """A small network."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)
        self.config = {"layers": 1}
        self.eval()

    def forward(self, x, scale=2.0):
        return self.drop(self.linear(x)) * scale

    def generate(self, x):
        return self(x) + 1


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.original_name = "x"
        self.name = "mine"
        self._dispatch = "theirs"
        self.settings = "theirs"
        self.calls = 3

    def forward(self, x):
        return x + self.calls


def served(compiled):
    return dict(torchbay.explain(compiled).calls)


def check(module, *args, backend, tolerance=0.0, **kwargs):
    compiled = torchbay.compile(module, backend=backend)
    for _ in range(3):
        found, expected = compiled(*args, **kwargs), module(*args, **kwargs)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    return compiled


@pytest.fixture
def compiled(recording):
    return torchbay.compile(Net(), backend=recording)


def test_is_a_module(compiled):
    assert isinstance(compiled, nn.Module)
    assert callable(compiled)
    assert "linear" in repr(compiled)


def test_reads_attributes_of_the_original(compiled):
    module = compiled.original
    assert isinstance(module, Net)
    assert compiled.config is module.config
    assert compiled.linear is module.linear
    assert compiled.training is False
    assert [*compiled.parameters()] == [*module.parameters()]
    assert [*compiled.state_dict()] == ["linear.weight", "linear.bias"]
    assert dict(compiled.named_modules()).keys() == dict(module.named_modules()).keys()
    assert compiled.__doc__ == "A small network."
    assert inspect.signature(compiled.forward) == inspect.signature(module.forward)
    assert "config" in dir(compiled)
    assert not hasattr(compiled, "nothing")
    with pytest.raises(AttributeError, match="nothing"):
        _ = compiled.nothing


def test_keeps_names_of_its_own_out_of_the_way(recording):
    module = Named()
    compiled = torchbay.compile(module, backend=recording)
    for name in ("name", "_dispatch", "settings", "calls", "original_name"):
        assert getattr(compiled, name) == getattr(module, name)
    compiled.calls = 5
    assert compiled(torch.ones(1)).item() == 6
    assert compiled(torch.ones(1)).item() == 6


def test_writes_attributes_of_the_original(compiled):
    module = compiled.original
    compiled.extra = 3
    compiled.weight = nn.Parameter(torch.ones(1))
    compiled.register_buffer("offset", torch.ones(1))
    assert module.extra == 3
    assert "weight" in dict(module.named_parameters())
    assert "offset" in dict(module.named_buffers())
    del compiled.extra
    assert not hasattr(module, "extra")


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.train(),
        lambda m: m.eval(),
        lambda m: m.to(torch.float64),
        lambda m: m.double(),
        lambda m: m.cpu(),
        lambda m: m.requires_grad_(False),
        lambda m: m.apply(lambda part: None),
        lambda m: m.type(torch.float64),
        lambda m: m.bfloat16(),
        lambda m: m.half(),
    ],
)
def test_returns_the_compiled_module_where_the_original_returns_itself(change, compiled):
    assert change(compiled) is compiled


def test_follows_train_and_eval(compiled):
    x = torch.ones(3)
    compiled(x)
    compiled.train()
    assert compiled.original.training
    torch.manual_seed(0)
    found = compiled(x), compiled(x)
    torch.manual_seed(0)
    assert torch.equal(found[0], compiled.original(x))
    assert torch.equal(found[1], compiled.original(x))


def test_runs_other_methods_of_the_original(compiled):
    assert torch.equal(compiled.generate(torch.ones(3)), compiled(torch.ones(3)) + 1)


def test_serves_inside_another_module(compiled):
    outer = nn.Sequential(compiled, nn.ReLU())
    for _ in range(3):
        outer(torch.ones(3))
    assert [*outer.state_dict()] == ["0.linear.weight", "0.linear.bias"]
    assert len([*outer.parameters()]) == 2
    assert served(compiled) == {"graph": 2, "eager": 1}
    outer.train()
    assert compiled.original.training
    outer.load_state_dict(nn.Sequential(Net(), nn.ReLU()).state_dict())
    outer.double()
    assert compiled.original.linear.weight.dtype == torch.float64


def test_indexes_containers(recording):
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    compiled = torchbay.compile(module, backend=recording)
    assert compiled[0] is module[0]
    assert len(compiled) == 2
    assert [*compiled] == [*module]
    assert compiled[1] in compiled
    assert bool(torchbay.compile(nn.Sequential(), backend=recording))


def test_copies(compiled):
    compiled(torch.ones(3))
    shallow, deep = copy.copy(compiled), copy.deepcopy(compiled)
    deep.linear.weight.zero_()
    assert shallow.linear is compiled.linear
    assert compiled.linear.weight.any()
    for other in (shallow, deep):
        assert type(other) is type(compiled)
        assert served(other) == {"graph": 0, "eager": 0}
        for _ in range(2):
            assert torch.equal(other(torch.ones(3)), other.original(torch.ones(3)))


def test_pickles_and_saves():
    compiled = torchbay.compile(Net(), backend="eager")
    compiled(torch.ones(3))
    file = io.BytesIO()
    torch.save(compiled, file)
    file.seek(0)
    for loaded in (
        pickle.loads(pickle.dumps(compiled)),
        torch.load(file, weights_only=False),
    ):
        assert type(loaded) is type(compiled)
        assert torch.equal(loaded(torch.ones(3)), compiled(torch.ones(3)))
        assert torch.equal(loaded(torch.ones(3)), compiled(torch.ones(3)))


def test_saves_a_state_dict_for_the_original(compiled):
    file = io.BytesIO()
    torch.save(compiled.state_dict(), file)
    file.seek(0)
    module = Net()
    module.load_state_dict(torch.load(file))
    assert torch.equal(module(torch.ones(3)), compiled(torch.ones(3)))


@pytest.fixture
def process_group(tmp_path):
    distributed = pytest.importorskip("torch.distributed")
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


def test_serves_under_data_parallel_wrapping(process_group, compiled):
    wrapped = nn.parallel.DistributedDataParallel(compiled)
    for _ in range(3):
        assert torch.equal(wrapped(torch.ones(3)), compiled.original(torch.ones(3)))
    assert served(compiled) == {"graph": 2, "eager": 1}


def test_trains_under_data_parallel_wrapping(process_group, compiled):
    with torch.enable_grad():
        wrapped = nn.parallel.DistributedDataParallel(compiled)
        with pytest.warns(torchbay.errors.TorchbayWarning, match="gradients"):
            wrapped(torch.ones(3)).sum().backward()
        found = compiled.linear.weight.grad.clone()
        compiled.zero_grad()
        compiled.original(torch.ones(3)).sum().backward()
    assert torch.equal(found, compiled.linear.weight.grad)


@pytest.mark.filterwarnings("ignore")
def test_is_right_around_data_parallel(process_group, recording):
    wrapped = nn.parallel.DistributedDataParallel(Net())
    check(wrapped, torch.ones(3), backend=recording)


@pytest.mark.filterwarnings("ignore")
def test_serves_under_fully_sharded_wrapping(process_group, compiled):
    from torch.distributed.fsdp import FullyShardedDataParallel

    expected = compiled.original(torch.ones(3))
    wrapped = FullyShardedDataParallel(compiled, device_id=torch.device("cpu"))
    for _ in range(3):
        assert torch.equal(wrapped(torch.ones(3)), expected)


@pytest.mark.filterwarnings("ignore")
def test_is_right_around_sharded_parameters(process_group, recording):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = Net()
    expected = module(torch.ones(3))
    # Without a mesh, parameters move to an accelerator where there is one.
    sharded = fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    compiled = torchbay.compile(sharded, backend=recording)
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(3)), expected)


def test_registers_hooks_on_the_original(compiled):
    x = torch.ones(3)
    expected = compiled.original(x) * 7
    handle = compiled.register_forward_hook(lambda module, args, out: out * 7)
    for _ in range(3):
        assert torch.equal(compiled(x), expected)
    handle.remove()
    for _ in range(2):
        assert torch.equal(compiled(x) * 7, expected)


def test_runs_hooks_with_keywords(recording):
    module = Net()
    module.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "scale": 5.0}), with_kwargs=True
    )
    check(module, torch.ones(3), scale=3.0, backend=recording)


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).T


def test_serves_parametrizations(recording):
    module = nn.Linear(3, 3)
    parametrize.register_parametrization(module, "weight", Symmetric())
    compiled = check(module, torch.randn(2, 3), backend=recording)
    assert served(compiled) == {"graph": 2, "eager": 1}
    module.parametrizations.weight.original.fill_(2)
    assert torch.equal(compiled(torch.ones(3)), module(torch.ones(3)))
    parametrize.remove_parametrizations(module, "weight")
    module.weight.fill_(3)
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(3)), module(torch.ones(3)))


def test_sees_a_parametrization_that_comes_later(recording):
    module = nn.Linear(3, 3)
    compiled = check(module, torch.randn(2, 3), backend=recording)
    parametrize.register_parametrization(module, "weight", Symmetric())
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(3)), module(torch.ones(3)))


def norms():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "weight_norm": parametrizations.weight_norm(nn.Linear(3, 3)),
            "orthogonal": parametrizations.orthogonal(nn.Linear(3, 3)),
            "spectral_norm": parametrizations.spectral_norm(nn.Linear(3, 3)).eval(),
            "old spectral_norm": nn.utils.spectral_norm(nn.Linear(3, 3)).eval(),
            "old weight_norm": nn.utils.weight_norm(nn.Linear(3, 3)),
        }


@pytest.mark.parametrize("name", norms())
@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_is_right_under(name, recording):
    check(norms()[name], torch.randn(2, 3), backend=recording)


def test_serves_lazy_modules_once_they_are_built(recording):
    lazy = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torchbay.compile(lazy, backend=recording)
        for _ in range(4):
            found = compiled(torch.ones(2, 3))
    assert torch.equal(found, lazy(torch.ones(2, 3)))
    assert type(lazy[0]) is nn.Linear
    assert served(compiled)["graph"] >= 1


X = torch.randn(2, 4, 8)
MODULES = {
    "GRU": lambda: (nn.GRU(8, 8, batch_first=True), (X,)),
    "RNN": lambda: (nn.RNN(8, 8), (X,)),
    "LSTM": lambda: (nn.LSTM(8, 8, 2, bidirectional=True), (X,)),
    "LSTMCell": lambda: (nn.LSTMCell(8, 8), (X[0],)),
    "attention": lambda: (nn.MultiheadAttention(8, 2, batch_first=True), (X, X, X)),
    "transformer": lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (X,)),
    "decoder": lambda: (nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), (X, X)),
    "conv": lambda: (nn.Sequential(nn.Conv1d(4, 3, 3, padding=1), nn.BatchNorm1d(3), nn.MaxPool1d(2)), (X,)),
    "conv transpose": lambda: (nn.ConvTranspose1d(4, 3, 3), (X,)),
    "norms": lambda: (nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4)), (X,)),
    "embedding": lambda: (nn.EmbeddingBag(10, 4), (torch.tensor([[1, 2], [3, 4]]),)),
    "embedding with max_norm": lambda: (nn.Embedding(10, 4, max_norm=1.0), (torch.tensor([1, 2]),)),
    "bilinear": lambda: (nn.Bilinear(8, 8, 3), (X, X)),
    "upsample": lambda: (nn.Upsample(scale_factor=2), (X,)),
    "prelu": lambda: (nn.Sequential(nn.PReLU(), nn.GLU(), nn.Softmax(-1), nn.Hardswish()), (X,)),
    "loss": lambda: (nn.CrossEntropyLoss(), (X[0], torch.tensor([1, 2, 3, 4]))),
    "flatten": lambda: (nn.Sequential(nn.Flatten(), nn.Unflatten(1, (4, 8))), (X,)),
    "in place": lambda: (nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.SiLU(inplace=True)), (X,)),
    "pixel shuffle": lambda: (nn.PixelShuffle(2), (X.view(1, 4, 4, 4),)),
    "adaptive": lambda: (nn.AdaptiveAvgPool1d(3), (X,)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_serves(name, recording):
    torch.manual_seed(0)
    module, args = MODULES[name]()
    # Transformer layers leave their fused path while a compiler looks on.
    compiled = check(module.eval(), *args, backend=recording, tolerance=1e-5)
    assert served(compiled) == {"graph": 2, "eager": 1}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_serves_in_train_mode(name, recording):
    torch.manual_seed(0)
    module, args = MODULES[name]()
    expected, compiled = copy.deepcopy(module), torchbay.compile(module, backend=recording)
    for seed in range(3):
        torch.manual_seed(seed)
        found = compiled(*args)
        torch.manual_seed(seed)
        torch.testing.assert_close(found, expected(*args), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("nested", [True, False])
def test_is_right_with_a_padding_mask(nested, recording):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    mask = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0]]).bool()
    compiled = torchbay.compile(module, backend=recording)
    expected = module(X, src_key_padding_mask=mask)
    for _ in range(3):
        torch.testing.assert_close(compiled(X, src_key_padding_mask=mask), expected)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


LAYER = nn.Linear(3, 3)


def checkpointed(x):
    return torch.utils.checkpoint.checkpoint(LAYER, x, use_reentrant=False)


def autocast_block(x):
    with torch.autocast("cpu", torch.bfloat16):
        y = LAYER(x)
    return y, LAYER(x)


def grad_blocks(x):
    with torch.enable_grad():
        y = LAYER(x)
    with torch.no_grad():
        z = LAYER(x)
    return y.detach(), z


def inference_block(x):
    with torch.inference_mode():
        return (x + 1).sum().item() * x


def default_dtype(x):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return x + torch.ones(3)
    finally:
        torch.set_default_dtype(before)


INSIDE = {
    "vmap": lambda x: torch.func.vmap(lambda v: v.sin() * 2)(x),
    "vmap of vmap": lambda x: torch.vmap(torch.vmap(torch.sin))(x),
    "grad": lambda x: torch.func.grad(lambda v: (v**3).sum())(x),
    "jacrev": lambda x: torch.func.jacrev(lambda v: v**2)(x),
    "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (x,)),
    "hessian": lambda x: torch.func.hessian(lambda v: (v**3).sum())(x[0]),
    "functional_call": lambda x: torch.func.functional_call(LAYER, {"weight": torch.ones(3, 3)}, x),
    "per-sample grad": lambda x: torch.func.vmap(torch.func.grad(lambda v: (LAYER(v) ** 2).sum()))(x),
    "autograd.Function": Cube.apply,
    "checkpoint": checkpointed,
    "autocast": autocast_block,
    "grad modes": grad_blocks,
    "inference mode": inference_block,
    "default dtype": default_dtype,
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "linalg": lambda x: torch.linalg.svd(x @ x.T + torch.eye(2))[1],
    "complex": lambda x: torch.view_as_real(torch.complex(x, x) * 1j),
    "sort": lambda x: torch.sort(x)[1],
    "index_add": lambda x: torch.zeros(2, 3).index_add(0, torch.tensor([0, 1]), x),
    "scatter": lambda x: torch.zeros(2, 3).scatter_(1, torch.tensor([[0], [1]]), x),
    "new tensors": lambda x: x + torch.arange(3) + torch.tensor([1.0, 2.0, 3.0]) + torch.eye(3)[0],
    "like": lambda x: torch.zeros_like(x) + x.new_full((2, 3), 7),
    "cond": lambda x: torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (x,)),
    "while_loop": lambda x: torch.while_loop(lambda v: v.sum() < 100, lambda v: (v * 2,), (x.abs() + 1,))
    if hasattr(torch, "while_loop")
    else x,
    "nested compile": lambda x: torchbay.compile(torch.relu, backend="eager")(x),
}  # fmt: skip


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.filterwarnings("ignore")
def test_is_right_with_inside(name, recording):
    function, x = INSIDE[name], torch.randn(2, 3)
    compiled = torchbay.compile(function, backend=recording)
    for sign in (1, -1, 1):
        torch.testing.assert_close(compiled(x * sign), function(x * sign), rtol=0, atol=0)


@pytest.mark.parametrize(
    "name",
    [
        "vmap",
        "grad",
        "jacrev",
        "jvp",
        "hessian",
        "autograd.Function",
        "checkpoint",
        "autocast",
        "per-sample grad",
    ],
)
def test_serves_with_inside(name, recording):
    compiled = torchbay.compile(INSIDE[name], backend=recording)
    for _ in range(3):
        compiled(torch.randn(2, 3))
    assert served(compiled) == {"graph": 2, "eager": 1}


@torch.library.custom_op("torchbay_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("torchbay_tests::increment", mutates_args=("x",))
def increment(x: torch.Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("torchbay_tests::no_fake", mutates_args=())
def no_fake(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_serves_custom_operators(recording):
    compiled = check_function(lambda x: double(x) + 1, recording)
    assert served(compiled) == {"graph": 2, "eager": 1}
    targets = [str(node.target) for node in recording.requests[0].graph.graph.nodes]
    assert any("torchbay_tests.double" in target for target in targets)


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_is_right_with_custom_operators_that_write(recording):
    def call(x):
        y = x.clone()
        increment(y)
        increment(x)
        return y * 2

    compiled = torchbay.compile(call, backend=recording)
    for _ in range(3):
        x = torch.zeros(2)
        assert torch.equal(compiled(x), torch.full((2,), 2.0))
        assert torch.equal(x, torch.ones(2))


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_is_right_with_custom_operators_without_a_fake(recording):
    check_function(lambda x: no_fake(x) + 1, recording)


def check_function(function, backend):
    compiled = torchbay.compile(function, backend=backend)
    for _ in range(3):
        x = torch.randn(3)
        assert torch.equal(compiled(x), function(x))
    return compiled


class Tagged(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_runs_tensor_subclasses_eagerly(recording):
    compiled = torchbay.compile(lambda x: x + 1, backend=recording)
    for _ in range(3):
        found = compiled(torch.ones(2).as_subclass(Tagged))
        assert type(found) is Tagged
        assert type(compiled(torch.ones(2))) is torch.Tensor
    assert served(compiled) == {"graph": 2, "eager": 4}


def test_compiles_modules_from_transformers(recording):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=32, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval()
    compiled = torchbay.compile(model, backend=recording)
    ids = torch.tensor([[1, 2, 3, 4]])
    expected = model(ids)
    for _ in range(3):
        found = compiled(ids)
        assert type(found) is type(expected)
        assert torch.equal(found.logits, expected.logits)
    assert compiled.config is config
    assert served(compiled) == {"graph": 2, "eager": 1}


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_generates_with_a_compiled_model(recording):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=32, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.tensor([[1, 2, 3, 4]])
    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **settings)
    compiled = torchbay.compile(model, backend=recording)
    assert torch.equal(compiled.generate(ids, **settings), expected)
    model.forward = torchbay.compile(model.forward, backend=recording)
    for _ in range(2):
        assert torch.equal(model.generate(ids, **settings), expected)
