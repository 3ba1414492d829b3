"""A plain qkv attention module with the weights of a case, for cases that store a whole layer and its gradients."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mmpos import LayerState, attend
from tests.golden.case import Case


def attention_outputs(case: Case, state: LayerState, num_heads: int, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Output ``y`` of qkv -> encoding -> softmax -> proj, and gradients of ``sum(y * loss_weight)``.

    ``leaves`` names further parameters whose gradient the case may store.
    """
    names = ("qkv.weight", "qkv.bias", "proj.weight", "proj.bias")
    own = {name: case.param(name).clone().requires_grad_() for name in names if case.has(f"param.{name}")}
    x = case.input("x").clone().requires_grad_()
    qkv = F.linear(x, own["qkv.weight"], own.get("qkv.bias")).unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
    out = attend(*qkv.unbind(0), state, x=x).transpose(1, 2).flatten(2)
    y = F.linear(out, own["proj.weight"], own.get("proj.bias"))
    outputs = {"y": y}
    if case.has("in.loss_weight"):
        (y * case.input("loss_weight")).sum().backward()
        every = {"x": x, **own, **leaves}
        outputs |= {f"grad.{name}": leaf.grad for name, leaf in every.items() if leaf.grad is not None}
    return outputs
