"""``nn.MultiheadAttention``, written out so that its projections can be seen.

The module of torch hands its weights to one function that projects, attends and projects again, so
that no layer's forward shows what they were applied to. The same computation in separate steps is
all that book-keeping needs: a stacked projection is a linear layer.
"""

# pyright: basic

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn

__all__ = ["Projection", "attend", "refusal"]

Projection = Callable[[Tensor, Tensor, "Tensor | None", slice], Tensor]
"""Applies the given rows of a stacked weight and bias; all of one that has no more."""


def refusal(module: nn.MultiheadAttention) -> str | None:
    """Why an attention module cannot be written out, and what to do; else None."""
    if not module.batch_first:
        return "must have the batch as first dimension: make it with batch_first=True"
    if module.bias_k is not None or module.add_zero_attn:
        return "must be made with add_bias_kv=False and add_zero_attn=False"
    return None


def attend(  # noqa: PLR0917 - the signature is torch's
    module: nn.MultiheadAttention,
    project: Projection,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What ``module(query, key, value, ...)`` computes, with the given way to project."""
    if query.dim() != 3:
        raise ValueError(
            f"query must have shape (batch, positions, width), got {query.dim()} dimensions"
        )
    if is_causal and attn_mask is None:
        raise ValueError("attn_mask must be given with is_causal, as in torch")
    heads = [_split(t, module) for t in _project_inputs(module, project, query, key, value)]
    mask = _merged(module, query, key_padding_mask, attn_mask)
    dropout = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        scores = heads[0] @ heads[1].mT * math.sqrt(1 / module.head_dim)
        weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), dropout)
        mixed = weights @ heads[2]
        weights = weights.mean(dim=1) if average_attn_weights else weights
    else:
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=mask, dropout_p=dropout)
    out, mixed = module.out_proj, mixed.transpose(1, 2).flatten(2)
    return project(mixed, out.weight, out.bias, slice(0, module.embed_dim)), weights


def _project_inputs(
    module: nn.MultiheadAttention, project: Projection, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ...]:
    width, bias, inputs = module.embed_dim, module.in_proj_bias, (query, key, value)
    stacked = module.in_proj_weight
    if stacked is not None and query is key and key is value:
        return project(query, stacked, bias, slice(0, 3 * width)).chunk(3, dim=-1)
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    weights = weights if stacked is None else (stacked, stacked, stacked)
    rows = [slice(i * width, (i + 1) * width) for i in range(3)]
    return tuple(
        project(x, weight, bias, part)
        for x, weight, part in zip(inputs, weights, rows, strict=True)
    )


def _split(projected: Tensor, module: nn.MultiheadAttention) -> Tensor:
    return projected.unflatten(2, (module.num_heads, module.head_dim)).transpose(1, 2)


def _merged(
    module: nn.MultiheadAttention, query: Tensor, padding: Tensor | None, attention: Tensor | None
) -> Tensor | None:
    """Both masks as one that is added to the scores, (batch or 1, heads or 1, targets, sources)."""
    merged = None
    if attention is not None:
        merged = _additive(attention, query)
        if merged.dim() == 3:
            merged = merged.unflatten(0, (query.shape[0], module.num_heads))
    if padding is not None:
        padded = _additive(padding, query)[:, None, None, :]
        merged = padded if merged is None else merged + padded
    return merged


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """True means "not this one"; numbers are added as they are."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)
