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
    x = case.input("x")
    weight = case.param("qkv.weight").clone().requires_grad_()
    bias = case.param("qkv.bias") if case.has("param.qkv.bias") else None
    qkv = F.linear(x, weight, bias).unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
    out = attend(*qkv.unbind(0), state, x=x).transpose(1, 2).flatten(2)
    y = F.linear(out, case.param("proj.weight"), case.param("proj.bias") if case.has("param.proj.bias") else None)
    outputs = {"y": y}
    if case.has("in.loss_weight"):
        (y * case.input("loss_weight")).sum().backward()
        outputs |= {f"grad.{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        if weight.grad is not None:
            outputs["grad.qkv.weight"] = weight.grad
    return outputs
