"""Capture hazards: a capture changes nothing, and bakes nothing that may change.

Each was seen with a plain trace of a program.
"""

from __future__ import annotations

import types

import torch
from torch import nn

from scenarios._scenario import Program, calls, change, normal, scenario

X = normal(4, 3)


@scenario(calls(X), change(lambda net: net.eval()), calls(X), at_most=2)
def moves_the_statistics_of_a_batch_norm_once_per_call():
    return nn.Sequential(nn.BatchNorm1d(3, momentum=0.5), nn.ReLU()).train()


@scenario(calls(X), calls(normal(2, 3)))
def changes_the_callers_tensor_once_per_call():
    def program(x):
        x.add_(1)
        return x * 2

    return program


@scenario(calls(X), calls(normal(2, 3)))
def advances_the_generator_once_per_call():
    return lambda x: x + torch.randn(3)


@scenario(calls(X, 2), calls(X, 3), calls(X, 2))
def never_bakes_an_int_argument():
    return lambda x, n: x * n


@scenario(calls(X), change(lambda world: world.put(3.0, torch.ones(3))), calls(X))
def never_bakes_what_a_closure_holds():
    scale, table = 2.0, torch.zeros(3)

    def program(x):
        return x * scale + table

    def put(number, tensor):
        nonlocal scale, table
        scale, table = number, tensor

    return Program(program, types.SimpleNamespace(program=program, put=put))


@scenario(
    calls(X), change(lambda net: net.train()), calls(X), change(lambda net: net.eval()), calls(X)
)
def never_bakes_the_training_flag():
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).eval()


@scenario(calls(X), change(lambda net: setattr(net, "eps", 0.5)), calls(X))
def never_bakes_an_attribute_of_a_module():
    return nn.LayerNorm(3)
