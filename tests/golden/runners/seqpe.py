"""SeqPE: the digit transformer, its losses with gradients, and what attention does with the vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos import LayerState, Positions, attend, create_encoding
from mmpos.attention import plain_attention
from mmpos.checkpoints import seqpe_encoder
from mmpos.functional.digits import to_digits
from mmpos.objectives.seqpe import contrastive_loss, transfer_loss
from tests.golden.case import Case, Unknown


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 1e-6 * max(1.0, float(reference.abs().max()))


def run(case: Case) -> dict[str, Tensor]:
    if case.has("in.positions"):
        return _encoder(case)
    if case.has("in.pivot"):
        return _losses(case)
    return _attention(case)


def _encoder(case: Case) -> dict[str, Tensor]:
    axes, digits, dim = case.option("data_dim"), case.option("digits"), case.option("dim")
    direction = case.expect("direction", "causal", "bi")
    options = {
        "layers": case.option("layers"),
        "heads": case.option("heads"),
        "causal": direction != "bi",
        "width": dim,
    }
    options |= {"mask_padding": case.option("mask_padding"), "last_norm": case.option("last_ln")}
    options |= {"temperature": case.option("temp"), "max_index": 10**digits, "apply": "input_add"}
    encoding = create_encoding("seqpe", case.option("out"), 1, axes=axes, **options).double().eval().shared["seqpe"]
    encoding.encoder.load_state_dict(seqpe_encoder(case.params(torch.float64)))
    coords = case.input("positions")
    coords = coords[:, None] if coords.dim() == 1 else coords
    ours, written = to_digits(coords, digits)
    if case.has("in.digits"):
        torch.testing.assert_close(ours, case.input("digits"))
    if case.has("in.pad_mask"):
        torch.testing.assert_close(written.float(), case.input("pad_mask"))
    # through the hook a model calls, and directly
    positions = Positions.points(coords.double())
    added = encoding.add_to_tokens(torch.zeros(1, len(coords), encoding.dim).double(), positions)[0]
    torch.testing.assert_close(added, encoding.vectors(coords))
    return {"pe": added}


def _losses(case: Case) -> dict[str, Tensor]:
    heads, beta, batch = case.option("num_heads"), case.option("beta"), case.option("batch")
    metric = case.expect("metric", "kl_div", "mse") or "kl_div"
    scale, smoothing = case.option("logit_scale"), case.option("label_smoothing", 0.0)
    pivot, labels = case.input("pivot", torch.float64), case.input("labels")
    candidates = case.input("negatives", torch.float64).unflatten(0, (batch, case.option("negatives")))
    cells = case.input("pivot_indices")
    count = case.option("transfer_num")
    outputs = {}
    for name, given in (("single", None), ("multihead", heads)):
        options = {"num_heads": given, "logit_scale": scale}
        outputs[f"contrastive_{name}"] = contrastive_loss(
            pivot, candidates, labels, label_smoothing=smoothing, **options
        )
        main = case.input("main_pe", torch.float64).clone().requires_grad_()
        shifted = case.input("transfer_pe", torch.float64).clone().requires_grad_()
        if main.shape[0] != 1:
            raise Unknown(f"main_pe of shape {tuple(main.shape)}")
        teacher = main[0][cells].unflatten(0, (batch, count))
        loss = transfer_loss(teacher, shifted.unflatten(0, (batch, count)), beta=beta, metric=metric, **options)
        loss.backward()
        outputs[f"transfer_{name}"] = loss
        outputs[f"grad_transfer_{name}"] = shifted.grad
        outputs[f"grad_main_{name}"] = torch.zeros_like(main) if main.grad is None else main.grad
    return outputs


def _attention(case: Case) -> dict[str, Tensor]:
    heads, multi = case.option("num_heads"), case.option("multi_head_pe")
    apply = case.expect("apply", "attn_mul", "attn_add", "attn_scalar", "rotary")
    projected = case.expect("qk_proj", "per layer (pe_qk)", "none", None) == "per layer (pe_qk)"
    x, pe = case.input("x", torch.float64), case.input("pe", torch.float64)
    dim = x.shape[-1]
    head_dim = dim // heads
    if abs(case.option("scale") - head_dim**-0.5) > 1e-9:
        raise Unknown(f"config.scale={case.option('scale')} for heads of {head_dim}")
    options = {"apply": apply, "multi_head": multi, "projection": "layer" if projected else "none", "width": 8}
    encoding = create_encoding("seqpe", dim, heads, **options).double().shared["seqpe"]
    params = case.params(torch.float64)
    if projected:
        weight = params.pop("pe_qk.weight")
        bias = params.pop("pe_qk.bias", torch.zeros(weight.shape[0]).double())
        encoding.sides[0].load_state_dict({"weight": weight, "bias": bias})
    known = {"qkv.weight", "qkv.bias", "proj.weight", "proj.bias"}
    if set(params) - known:
        raise Unknown(f"param {sorted(set(params) - known)}")
    qkv = F.linear(x, params["qkv.weight"], params.get("qkv.bias"))
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    prepared = encoding.at_layer(pe, 0, 1)
    out = attend(q, k, v, LayerState((encoding,), (prepared,), None), x=x).transpose(1, 2).flatten(2)
    wide_q, wide_k, _ = encoding.transform_qkv(q, k, v, prepared)
    identity = torch.eye(x.shape[1]).double().expand(*q.shape[:2], -1, -1)
    attention = plain_attention(wide_q, wide_k, identity, bias=None, scale=head_dim**-0.5)
    return {"y": F.linear(out, params["proj.weight"], params.get("proj.bias")), "attn": attention}
