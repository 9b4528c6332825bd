"""Replacements in the trace for modules and functions that torch.fx treats as one, such as attention.

Each computes what the original computes in eval mode, by operations whose channels can be traced.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn


def call(function: Callable[..., Any], first: Any, *rest: Any) -> Any:
    """Return function(first, *rest). If `first` is a traced tensor, record this call as one node instead."""
    return first.tracer.create_proxy("call_function", function, (first, *rest), {}) if isinstance(first, fx.Proxy) else (
        function(first, *rest)
    )  # fmt: skip


def _attended(
    query: Tensor, key: Tensor, value: Tensor, heads: int, weights: tuple[Any, ...], biases: tuple[Any, ...], mask: Any
) -> Tensor:
    """Return multi-head attention over [n, length, channels]; weights and biases are those of query, key and value."""
    projections = zip((query, key, value), weights, biases, strict=True)
    q, k, v = (F.linear(x, weight, bias).unflatten(-1, (heads, -1)).transpose(1, 2) for x, weight, bias in projections)
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


def _thirds(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first, second, third = tensor.chunk(3)
    return first, second, third


def _mask(attn_mask: Any, key_padding_mask: Any) -> Any:
    if key_padding_mask is not None:
        raise NotImplementedError("attention with a padding mask")
    if attn_mask is None:
        return None
    if attn_mask.dtype == torch.bool:
        return ~attn_mask
    return attn_mask


def multihead(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Any = None,
    need_weights: bool = True, attn_mask: Any = None, average_attn_weights: bool = True, is_causal: bool = False,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return nn.MultiheadAttention's output, without the attention weights."""
    if module.bias_k is not None or module.add_zero_attn:
        raise NotImplementedError("attention with bias_k or add_zero_attn")
    mask = _mask(attn_mask, key_padding_mask)
    turned = not module.batch_first
    first, second, third = (x.transpose(0, 1) if turned else x for x in (query, key, value))
    if module.in_proj_weight is not None and query is key is value:
        packed = F.linear(first, module.in_proj_weight, module.in_proj_bias)
        parts = packed.unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = parts[0], parts[1], parts[2]
        output = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        if module.in_proj_weight is not None:
            weights = _thirds(module.in_proj_weight)
        biases = (None,) * 3 if module.in_proj_bias is None else _thirds(module.in_proj_bias)
        output = _attended(first, second, third, module.num_heads, weights, biases, mask)
    output = F.linear(output, module.out_proj.weight, module.out_proj.bias)
    return (output.transpose(0, 1) if turned else output), None


def encoder_layer(
    module: nn.TransformerEncoderLayer, src: Tensor, src_mask: Any = None, src_key_padding_mask: Any = None,
    is_causal: bool = False,
) -> Tensor:  # fmt: skip
    """Return nn.TransformerEncoderLayer's output, without its fast path."""

    def attended(x: Tensor) -> Tensor:
        return module.dropout1(module.self_attn(x, x, x, src_key_padding_mask, False, src_mask)[0])

    def fed(x: Tensor) -> Tensor:
        return module.dropout2(module.linear2(module.dropout(module.activation(module.linear1(x)))))

    if module.norm_first:
        x = src + attended(module.norm1(src))
        return x + fed(module.norm2(x))
    x = module.norm1(src + attended(src))
    return module.norm2(x + fed(x))


def encoder(
    module: nn.TransformerEncoder, src: Tensor, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None
) -> Tensor:
    """Return nn.TransformerEncoder's output, without nested tensors."""
    for layer in module.layers:
        src = layer(src, mask, src_key_padding_mask)
    return src if module.norm is None else module.norm(src)


def windows(x: Tensor, window: list[int], shift: list[int]) -> Tensor:
    """Return images [n, h, w, c] as windows [n * windows, positions, c], padded and cyclically shifted (Liu et al. 2021)."""
    n, h, w, c = x.shape
    x = F.pad(x, (0, 0, 0, -w % window[1], 0, -h % window[0]))
    rows, columns = x.shape[1] // window[0], x.shape[2] // window[1]
    x = x.roll(tuple(-s for s in _shifts(h, w, window, shift)), (1, 2))
    x = x.view(n, rows, window[0], columns, window[1], c).transpose(2, 3)
    return x.reshape(n * rows * columns, window[0] * window[1], c)


def unwindowed(x: Tensor, window: list[int], shift: list[int], h: int, w: int) -> Tensor:
    """Return windows as [n, h, w, c], the inverse of `windows`."""
    rows, columns = -(-h // window[0]), -(-w // window[1])
    x = x.reshape(-1, rows, columns, *window, x.shape[-1]).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return x.roll(_shifts(h, w, window, shift), (1, 2))[:, :h, :w].contiguous()


def shift_mask(x: Tensor, window: list[int], shift: list[int], h: int, w: int) -> Tensor:
    """Return a mask [windows, 1, positions, positions] on x's device: -100 between positions that were not neighbours."""
    sizes = [-(-side // step) * step for side, step in zip((h, w), window, strict=True)]
    parts = []
    for size, step, by in zip(sizes, window, _shifts(h, w, window, shift), strict=True):
        index = torch.arange(size, device=x.device)
        parts.append((index >= size - step).long() + (index >= size - by).long() if by else torch.zeros_like(index))
    region = (3 * parts[0][:, None] + parts[1])[None, :, :, None]
    region = windows(region, window, [0, 0]).squeeze(-1)
    return ((region[:, None] != region[:, :, None]) * -100.0)[:, None].to(x)


def _shifts(h: int, w: int, window: list[int], shift: list[int]) -> tuple[int, ...]:
    """Return the shifts; 0 where one window covers a side."""
    return tuple(0 if step >= side else by for side, step, by in zip((h, w), window, shift, strict=True))


def window_attention(
    input: Tensor, qkv_weight: Tensor, proj_weight: Tensor, relative_position_bias: Tensor, window_size: list[int],
    num_heads: int, shift_size: list[int], attention_dropout: float = 0.0, dropout: float = 0.0,
    qkv_bias: Any = None, proj_bias: Any = None, logit_scale: Any = None, training: bool = True,
) -> Tensor:  # fmt: skip
    """Return attention within shifted windows, with cosine similarity if there is a logit scale (Swin, V1 and V2)."""
    h, w = input.size(1), input.size(2)
    x = call(windows, input, window_size, shift_size)
    if logit_scale is not None and qkv_bias is not None:  # keys have no bias
        query, key, value = _thirds(qkv_bias)
        qkv_bias = torch.cat([query, torch.zeros_like(key), value])
    qkv = F.linear(x, qkv_weight, qkv_bias).unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
    q, k, v = qkv[0], qkv[1], qkv[2]
    if logit_scale is None:
        scores = (q * q.size(-1) ** -0.5).matmul(k.transpose(-2, -1))
    else:
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        scores = scores * torch.clamp(logit_scale, max=LARGEST_SCALE).exp()
    scores = scores + relative_position_bias
    if sum(shift_size):
        mask = call(shift_mask, x, window_size, shift_size, h, w)
        scores = (scores.unflatten(0, (-1, mask.size(0))) + mask).flatten(0, 1)
    attended = F.softmax(scores, dim=-1).matmul(v).transpose(1, 2).flatten(2)
    attended = F.linear(attended, proj_weight, proj_bias)
    return call(unwindowed, attended, window_size, shift_size, h, w)


def merged_patches(x: Tensor) -> Tensor:
    """Return images [..., h, w, c] with 2 x 2 positions as one: [..., h / 2, w / 2, 4 c], padded to even sizes."""
    return call(_merged, x)


def _merged(x: Tensor) -> Tensor:
    h, w = x.shape[-3:-1]
    x = F.pad(x, (0, 0, 0, w % 2, 0, h % 2))
    return torch.cat([x[..., i::2, j::2, :] for j in (0, 1) for i in (0, 1)], dim=-1)


def relative_bias(table: Tensor, index: Tensor, window: list[int]) -> Tensor:
    """Return attention's bias [1, heads, positions, positions] from a table [differences, heads], read at `index`."""
    count = window[0] * window[1]
    return table[index].view(count, count, -1).permute(2, 0, 1).contiguous().unsqueeze(0)


LARGEST_SCALE = 4.605170185988092  # log(100), as in Swin V2

MODULES: dict[type[nn.Module], Callable[..., Any]] = {
    nn.MultiheadAttention: multihead,
    nn.TransformerEncoderLayer: encoder_layer,
    nn.TransformerEncoder: encoder,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {  # by module and name
    "torchvision.models.swin_transformer.shifted_window_attention": window_attention,
    "torchvision.models.swin_transformer._patch_merging_pad": merged_patches,
    "torchvision.models.swin_transformer._get_relative_position_bias": relative_bias,
}
