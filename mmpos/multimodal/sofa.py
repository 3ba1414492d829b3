"""SoFA: soft attention between the images of a prompt (arXiv 2503.13792), so that their order matters less.

``M = (1 - sigma) causal + sigma bidirectional`` between tokens of different images; text and the inside of an image
stay causal. The paper's equation interpolates indicator masks and no code is public, so both readings are here.
Earlier images then depend on later ones: a prefix cache cannot be shared between requests, and chunked prefill is not
valid.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sofa_attention", "sofa_bias", "sofa_mask"]


def sofa_mask(image: Tensor, sigma: float) -> Tensor:
    """The soft mask: 1 where causal, ``sigma`` from a token to a later token of another image, else 0.

    Args:
        image: number of the image a token belongs to, -1 for text.
        sigma: softness between 0 (causal) and 1 (bidirectional between images).

    Shape:
        image ``(..., L)``; returns ``(..., L, L)`` float64, queries in rows.
    """
    if not 0 <= sigma <= 1:
        raise ValueError(f"sigma: expected a number in [0, 1], got {sigma}")
    length = image.shape[-1]
    causal = torch.ones(length, length, dtype=torch.float64, device=image.device).tril()
    q, k = image[..., :, None], image[..., None, :]
    between = (q >= 0) & (k >= 0) & (q != k)
    return torch.where(between & (causal == 0), sigma, causal)


def sofa_bias(image: Tensor, sigma: float) -> Tensor:
    """The soft mask as an additive bias ``log M``; pass it as the float mask of SDPA. Shape: ``(..., L, L)``."""
    return sofa_mask(image, sigma).log()


def sofa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    image: Tensor,
    sigma: float,
    *,
    reading: str = "softmask",
    scale: float | None = None,
) -> Tensor:
    """Attention under the soft mask.

    Args:
        q: rotated queries.
        k: rotated keys.
        v: values.
        image: image of each token, -1 for text; of a batch ``(B, L)``.
        sigma: softness.
        reading: ``softmask`` weighs the exponentials by M (one call with a bias, the default); ``blend`` mixes the
            outputs of a causal and a bidirectional call.
        scale: factor on the logits, default ``d ** -0.5``.

    Shape:
        q, k, v ``(..., heads, L, d)``, image ``(L,)``, or ``(B, L)`` where q is ``(B, heads, L, d)``; returns
        ``(..., heads, L, d)``.
    """
    of_rows = q.dim() == 4 and image.shape == (q.shape[0], q.shape[-2])
    if not of_rows and image.shape != (q.shape[-2],):
        raise ValueError(
            f"q, image: expected (..., heads, L, d) with (L,), or (B, heads, L, d) with (B, L), got {tuple(q.shape)} "
            f"with {tuple(image.shape)}"
        )
    image = image[:, None] if of_rows else image  # one pattern for all heads
    attention = torch.nn.functional.scaled_dot_product_attention
    if reading == "softmask":
        return attention(q, k, v, attn_mask=sofa_bias(image, sigma).to(q.dtype), scale=scale)
    if reading != "blend":
        raise ValueError(f"reading: expected 'softmask' or 'blend', got {reading!r}")
    causal = attention(q, k, v, attn_mask=sofa_mask(image, 0.0) > 0, scale=scale)
    both = attention(q, k, v, attn_mask=sofa_mask(image, 1.0) > 0, scale=scale)
    return (1 - sigma) * causal + sigma * both
