"""PyTorch's operators, each as its own database of them describes it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from torchbay.testing._groups import Case, Groups, Unavailable, quietly, selected
from torchbay.testing._subject import Subject, tensors_in
from torchbay.testing._torch_compat import operator_database

__all__ = ["EXCLUDED", "INTEGER_SAMPLE", "SAMPLE", "OperatorTests"]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SAMPLE = _words("""
    abs acos asin atan atan2 ceil clamp cos cosh deg2rad erf erfc exp exp2 expm1 floor frac log
    log10 log1p log2 logit neg reciprocal round rsqrt sigmoid sign sin sinh sqrt square tan tanh
    trunc add sub mul div.no_rounding_mode div.floor_rounding div.trunc_rounding remainder fmod pow
    maximum minimum hypot lerp addcmul addcdiv where nan_to_num isnan isfinite eq ne lt le gt ge
    logical_and logical_not heaviside xlogy logaddexp copysign masked_fill
    sum mean prod amax amin argmax argmin std var var_mean logsumexp norm all any cumsum cumprod
    sort topk median max.reduction_with_dim min.reduction_with_dim count_nonzero
    mm bmm matmul addmm baddbmm mv outer dot einsum linalg.vector_norm linalg.inv linalg.det
    linalg.cholesky linalg.solve kron cross tril triu trace diagonal
    cat stack split chunk unbind reshape permute transpose squeeze unsqueeze expand flip roll
    repeat tile narrow select gather scatter scatter_add index_select index_add index_put
    take_along_dim constant_pad_nd unfold repeat_interleave meshgrid.variadic_tensors rot90
    softmax log_softmax
    nn.functional.relu nn.functional.gelu nn.functional.silu nn.functional.elu
    nn.functional.leaky_relu nn.functional.softplus nn.functional.hardswish nn.functional.mish
    nn.functional.glu nn.functional.prelu nn.functional.linear nn.functional.conv1d
    nn.functional.conv2d nn.functional.conv_transpose2d nn.functional.max_pool2d
    nn.functional.avg_pool2d nn.functional.adaptive_avg_pool2d nn.functional.batch_norm
    nn.functional.layer_norm nn.functional.group_norm nn.functional.instance_norm
    nn.functional.rms_norm nn.functional.embedding nn.functional.scaled_dot_product_attention
    nn.functional.interpolate.bilinear nn.functional.interpolate.nearest
    nn.functional.pad.reflect nn.functional.pixel_shuffle nn.functional.grid_sample
    nn.functional.cross_entropy nn.functional.mse_loss nn.functional.nll_loss
    nn.functional.binary_cross_entropy_with_logits nn.functional.kl_div
    nn.functional.cosine_similarity nn.functional.normalize nn.functional.one_hot
""")
"""The operators of the default run, in float32: those that models are made of."""

INTEGER_SAMPLE = _words("""
    add sub mul div.floor_rounding div.trunc_rounding remainder pow maximum minimum bitwise_and
    bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift eq lt where sum prod
    cumsum amax argmax sort gather index_select scatter_add masked_fill cat flip clamp abs sign
""")
"""The operators that ``--torchbay-full`` runs in int64 and bool as well, where they take those."""

_BOTH_SIGNS = "its result is unique only up to signs or an order"
_RANDOM = "it draws random numbers; the claims family tests those"
_MEMORY = "it returns memory as it finds it"
_SYMBOLIC = "the size of its result depends on data"

EXCLUDED = {
    **dict.fromkeys(("linalg.eig", "linalg.eigh", "linalg.qr", "linalg.svd", "qr"), _BOTH_SIGNS),
    **dict.fromkeys(("svd", "svd_lowrank", "pca_lowrank", "geqrf", "ormqr"), _BOTH_SIGNS),
    **dict.fromkeys(
        ("linalg.ldl_factor", "linalg.ldl_factor_ex", "linalg.householder_product"), _BOTH_SIGNS
    ),
    **dict.fromkeys(("empty", "empty_like", "empty_permuted", "empty_strided"), _MEMORY),
    **dict.fromkeys(("new_empty", "new_empty_strided", "resize_", "resize_as_"), _MEMORY),
    **dict.fromkeys(("bernoulli", "cauchy", "exponential", "geometric", "log_normal"), _RANDOM),
    **dict.fromkeys(("multinomial", "normal", "normal.in_place", "normal.number_mean"), _RANDOM),
    **dict.fromkeys(("rand_like", "randint", "randint_like", "randn", "randn_like"), _RANDOM),
    **dict.fromkeys(("uniform", "nn.functional.dropout", "nn.functional.dropout2d"), _RANDOM),
    **dict.fromkeys(("nn.functional.dropout3d", "nn.functional.alpha_dropout"), _RANDOM),
    **dict.fromkeys(("nn.functional.feature_alpha_dropout.with_train",), _RANDOM),
    **dict.fromkeys(("nn.functional.fractional_max_pool2d",), _RANDOM),
    **dict.fromkeys(("nn.functional.fractional_max_pool3d", "nn.functional.rrelu"), _RANDOM),
    **dict.fromkeys(("nonzero", "argwhere", "masked_select", "unique"), _SYMBOLIC),
    **dict.fromkeys(("unique_consecutive",), _SYMBOLIC),
}
"""Operators that have no one right answer, or no sizes before they ran, and why."""

_NOT_EVERYWHERE = ("jiterator", "sparse.", "to_sparse", "torch._scaled", "torch.ops.")


def names(*, full: bool) -> list[str]:
    """Return the operators to run, with their dtype where it is not float32."""
    if not full:
        return list(SAMPLE)
    known = operator_database()
    floats = [name for name, info in known.items() if torch.float32 in info.dtypes]
    ints = [name for name in INTEGER_SAMPLE if name in known and torch.int64 in known[name].dtypes]
    bools = [name for name in INTEGER_SAMPLE if name in known and torch.bool in known[name].dtypes]
    runs = [*floats, *(f"{name}:int64" for name in ints), *(f"{name}:bool" for name in bools)]
    return [name for name in runs if name not in EXCLUDED and not name.startswith(_NOT_EVERYWHERE)]


def _case(name: str, device: torch.device) -> Case:
    """Return an operator's first sample input as a case."""
    operator, _, dtype = name.partition(":")
    sample = _sample(operator, getattr(torch, dtype or "float32"), device)
    template = (sample.input, sample.args, sample.kwargs)
    inputs = tuple(tensors_in(template))
    truth = functools.partial(_call, operator_database()[operator], template)
    # Its import takes a second.
    from torch.fx.experimental.proxy_tensor import make_fx

    with quietly():
        try:
            module = make_fx(truth)(*(tensor.clone() for tensor in inputs))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise Unavailable(f"{operator} cannot be traced: {reason}") from error
    return Case(module=module, inputs=inputs, truth=truth)


def _sample(operator: str, dtype: torch.dtype, device: torch.device) -> Any:
    info = operator_database().get(operator)
    if info is None:
        raise Unavailable(f"this PyTorch has no {operator} in its database")
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), quietly():
        torch.manual_seed(0)
        samples = info.sample_inputs(device, dtype, requires_grad=False)
        first = next(itertools.islice(samples, 1), None)
    if first is None:
        raise Unavailable(f"{operator} has no sample input in {dtype}")
    return first


def _call(info: Any, template: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, args, kwargs = _filled(template, iter(tensors))
    return tuple(tensors_in(info.op(first, *args, **kwargs)))


def _filled(template: Any, tensors: Any) -> Any:
    """Put tensors, in order, where a nested value has some."""
    if isinstance(template, torch.Tensor):
        return next(tensors)
    if isinstance(template, Mapping):
        return {key: _filled(part, tensors) for key, part in template.items()}
    if type(template) in (tuple, list):
        return type(template)(_filled(part, tensors) for part in template)
    return template


class OperatorTests:
    """One test for each operator; many share a graph."""

    family = "operators"

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Choose the operators: a stated sample, or all of them."""
        if "operator" in metafunc.fixturenames:
            full = metafunc.config.getoption("torchbay_full", default=False)
            metafunc.parametrize("operator", names(full=full))

    @pytest.fixture(scope="class")
    def operator_results(self, request: pytest.FixtureRequest, subject: Subject) -> Groups:
        """Return what the backend makes of the operators that are to run."""
        makers: dict[str, Callable[[], Case]] = {
            name: functools.partial(_case, name, subject.device)
            for name in selected(request, "operator")
        }
        return Groups(subject, makers)

    def test_operator(self, operator_results: Groups, operator: str) -> None:
        """Computes an operator as PyTorch does.

        `Backend.compile`: "Compile ``request.graph``."
        """
        operator_results.check(operator)
