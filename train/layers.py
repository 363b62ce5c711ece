"""The layers of the engine once more, in a form that has gradients: forward passes agree with firstlight/ops.

Letters: N tokens of all rows, D model width, H heads, K head width, L latent width, E experts, I inner width, M sources.
Small steps between products are fused by torch.compile; torch.compiler.set_stance("force_eager") runs them as they stand.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from train.shape import LATENT_NORM_EPS, LOWER_BOUND, NORM_EPS, SITU_BETA, SITU_LINEAR_BETA

fused = torch.compile(dynamic=False)
ROWS = 64


def rms(x: Tensor, eps: float) -> Tensor:
    """Fp32, without weight."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def weighted_rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rounded to the dtype of x before the weight, as K3 does."""
    return weight.to(x.dtype) * rms(x, eps).to(x.dtype)


def tanh(x: Tensor) -> Tensor:
    """By a sigmoid, which compiled code computes several times faster."""
    return 2 * torch.sigmoid(2 * x) - 1


def situ(gate: Tensor, up: Tensor) -> Tensor:
    """Both factors bounded by a tanh."""
    gate32, up32 = gate.float(), up.float()
    opened = SITU_BETA * tanh(gate32 / SITU_BETA) * torch.sigmoid(gate32)
    return (opened * (SITU_LINEAR_BETA * tanh(up32 / SITU_LINEAR_BETA))).to(gate.dtype)


@fused
def mix_norm(sources: Sequence[Tensor], score_D: Tensor, weight_D: Tensor) -> Tensor:
    """Attention Residuals over M sources, then the norm of the sublayer."""
    return weighted_rms(mix(sources, score_D), weight_D, NORM_EPS)


def mix(sources: Sequence[Tensor], score_D: Tensor) -> Tensor:
    """Softmax over depth of one learned direction's product with the normed sources."""
    if len(sources) == 1:
        return sources[0]
    wide = [source.float() for source in sources]
    scores = [(source * score_D).sum(-1) * torch.rsqrt(source.square().mean(-1) + NORM_EPS) for source in wide]
    top = scores[0]
    for score in scores[1:]:
        top = torch.maximum(top, score)
    shares = [torch.exp(score - top.detach()) for score in scores]
    total = shares[0]
    for share in shares[1:]:
        total = total + share
    mixed = (shares[0] / total)[:, None] * wide[0]
    for share, source in zip(shares[1:], wide[1:], strict=True):
        mixed = mixed + (share / total)[:, None] * source
    return mixed.to(sources[0].dtype)


@fused
def kda_in(
    x_ND: Tensor, wide: Tensor, f_b: Tensor, a_log_H: Tensor, dt_bias: Tensor, width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, k, v before the convolution fp32, decay fp32, beta fp32, output gate); `wide` stacks q, k, v, g, f_a and b."""
    num_heads = a_log_H.shape[0]
    head_dim = width // num_heads
    y = x_ND @ wide.T
    qkv, gate, low, beta = y.split((3 * width, width, head_dim, num_heads), dim=1)
    shifted = ((low @ f_b.T).float() + dt_bias).view(-1, num_heads, head_dim)
    decay = torch.exp(LOWER_BOUND * torch.sigmoid(a_log_H.exp()[:, None] * shifted))
    return qkv.float().contiguous(), decay.contiguous(), torch.sigmoid(beta.float()).contiguous(), gate


@fused
def kda_out(o_NHK: Tensor, gate: Tensor, norm_K: Tensor, o_proj: Tensor) -> Tensor:
    """Gated norm per head in fp32, way back to the model width."""
    y = rms(o_NHK.to(gate.dtype), NORM_EPS) * norm_K * torch.sigmoid(gate.float()).view(o_NHK.shape)
    return y.to(gate.dtype).flatten(1) @ o_proj.T


@fused
def mla_in(
    x_ND: Tensor, wide: Tensor, q_norm: Tensor, q_b: Tensor, kv_norm: Tensor, sizes: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(queries, normed latent, shared key, output gate); `wide` stacks q_a, kv_a and g, `sizes` are the ranks and the shared width."""
    y = x_ND @ wide.T
    q, latent, key, gate = y.split((*sizes, y.shape[1] - sum(sizes)), dim=1)
    return weighted_rms(q, q_norm, LATENT_NORM_EPS) @ q_b.T, weighted_rms(latent, kv_norm, LATENT_NORM_EPS), key.contiguous(), gate


@fused
def mla_out(o: Tensor, gate: Tensor, o_proj: Tensor) -> Tensor:
    """Output gate, way back to the model width."""
    return (o * torch.sigmoid(gate)) @ o_proj.T


@fused
def glu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """A dense gated feed-forward."""
    gate, up = (x @ gate_up.T).chunk(2, dim=1)
    return situ(gate, up) @ down.T


@fused
def latent_out(y: Tensor, norm: Tensor, up: Tensor, shared: Tensor) -> Tensor:
    """Norm of the combined experts, way up, plus the shared expert."""
    return weighted_rms(y, norm, NORM_EPS) @ up.T + shared


@fused
def situ_rows(gate_up: Tensor) -> Tensor:
    """SiTU of rows that hold gate and up side by side."""
    gate, up = gate_up.chunk(2, dim=1)
    return situ(gate, up)


@fused
def situ_back(gate_up: Tensor, d_hidden: Tensor) -> Tensor:
    """Gradient of `situ_rows`."""
    gate, up = (part.float() for part in gate_up.chunk(2, dim=1))
    d = d_hidden.float()
    t, s, u = tanh(gate / SITU_BETA), torch.sigmoid(gate), tanh(up / SITU_LINEAR_BETA)
    d_gate = d * (SITU_LINEAR_BETA * u) * ((1 - t * t) * s + SITU_BETA * t * s * (1 - s))
    return torch.cat((d_gate, d * (SITU_BETA * t * s) * (1 - u * u)), dim=1).to(gate_up.dtype)


class RoutedExperts(torch.autograd.Function):
    """Weighted sum of the chosen experts, one product per expert over its tokens, which are sorted by expert.

    Every expert's rows are rounded up to a multiple of ROWS: products of few different shapes are compiled once and found again.
    """

    @staticmethod
    def forward(ctx, z_NL: Tensor, weights_NX: Tensor, w13: Tensor, w2: Tensor, ids_NX: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        """Output, and what the way back needs."""
        source, place, rows = _sorted(ids_NX, len(w13))
        z = z_NL[source]
        gate_up, y = z.new_zeros(len(z), w13.shape[1]), torch.zeros_like(z)
        for expert, part in enumerate(rows):
            torch.mm(z[part], w13[expert].T, out=gate_up[part])
        hidden = situ_rows(gate_up)
        for expert, part in enumerate(rows):
            torch.mm(hidden[part], w2[expert].T, out=y[part])
        ctx.rows = rows
        ctx.save_for_backward(z, gate_up, hidden, y, weights_NX, w13, w2, source, place)
        return _combine(y, place, weights_NX)

    @staticmethod
    def backward(ctx, d: Tensor):  # type: ignore[no-untyped-def]
        """Gradients of the inputs."""
        z, gate_up, hidden, y, weights_NX, w13, w2, source, place = ctx.saved_tensors
        d_y, d_weights = _combine_back(d, y, weights_NX, source, place)
        d_hidden, d_z = torch.zeros_like(hidden), torch.empty_like(z)
        d_w13, d_w2 = torch.empty_like(w13), torch.empty_like(w2)
        for expert, part in enumerate(ctx.rows):
            torch.mm(d_y[part], w2[expert], out=d_hidden[part])
            torch.mm(d_y[part].T, hidden[part], out=d_w2[expert])
        d_gate_up = situ_back(gate_up, d_hidden)
        for expert, part in enumerate(ctx.rows):
            torch.mm(d_gate_up[part], w13[expert], out=d_z[part])
            torch.mm(d_gate_up[part].T, z[part], out=d_w13[expert])
        return d_z[place].view(*weights_NX.shape, -1).sum(1), d_weights, d_w13, d_w2, None


def _sorted(ids_NX: Tensor, num_experts: int) -> tuple[Tensor, Tensor, list[slice]]:
    """(token of each row, row of each choice, rows of each expert); rows that only fill up hold token 0, and no choice points at them."""
    flat = ids_NX.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    sizes = (counts + ROWS - 1) // ROWS * ROWS
    first = sizes.cumsum(0) - sizes
    shift = first - (counts.cumsum(0) - counts)
    row = torch.arange(len(flat)) + shift[flat[order]]
    source = torch.zeros(len(flat) + num_experts * ROWS, dtype=torch.long)
    source[row] = order // ids_NX.shape[1]
    place = torch.empty_like(order)
    place[order] = row
    return source, place, [slice(at, at + size) for at, size in zip(first.tolist(), sizes.tolist(), strict=True)]


@fused
def _combine(y: Tensor, place: Tensor, weights_NX: Tensor) -> Tensor:
    rows = y[place].view(*weights_NX.shape, -1).float()
    return (rows * weights_NX[..., None]).sum(1).to(y.dtype)


def _combine_back(d: Tensor, y: Tensor, weights_NX: Tensor, source: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    share = weights_NX.new_zeros(len(source))
    share[place] = weights_NX.flatten()
    d_rows, along = _weigh(d, y, source, share)
    return d_rows, along[place].view(weights_NX.shape)


@fused
def _weigh(d: Tensor, y: Tensor, source: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    d_rows = d[source].float()
    return (d_rows * share[:, None]).to(y.dtype), (d_rows * y.float()).sum(1)


def route(x_ND: Tensor, weight_ED: Tensor, bias_E: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Weights and ids of the chosen experts; the bias takes part in the choice only."""
    score_NE = torch.sigmoid(x_ND.float() @ weight_ED.T)
    ids_NX = (score_NE.detach() + bias_E).topk(top_k, dim=1).indices
    weights_NX = score_NE.gather(1, ids_NX)
    return weights_NX / (weights_NX.sum(1, keepdim=True) + 1e-20), ids_NX


class Attention(torch.autograd.Function):
    """Causal attention of new tokens over rows of the past and over each other, exact by merging two softmaxes.

    Shapes: q [B, H, T, K], past k and v [B, H, P, K], new k and v [B, H, T, K]; keys and values are equally wide.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, old_k: Tensor | None, old_v: Tensor | None, scale: float) -> Tensor:  # type: ignore[no-untyped-def]
        """Output, and what the way back needs."""
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = attend(q, k, v, 0.0, True, scale=scale)
        if old_k is not None and old_v is not None:
            old_out, old_lse = attend(q, old_k, old_v, 0.0, False, scale=scale)
            both = torch.logaddexp(lse, old_lse)
            share = torch.exp(old_lse - both)[..., None]
            out, lse = torch.lerp(out.float(), old_out.float(), share).to(out.dtype), both
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, old_k, old_v, out, lse)
        return out

    @staticmethod
    def backward(ctx, d: Tensor):  # type: ignore[no-untyped-def]
        """Gradients of the inputs."""
        q, k, v, old_k, old_v, out, lse = ctx.saved_tensors
        back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        d_q, d_k, d_v = back(d, q, k, v, out, lse, 0.0, True, scale=ctx.scale)
        if old_k is None:
            return d_q, d_k, d_v, None, None, None
        more_q, d_old_k, d_old_v = back(d, q, old_k, old_v, out, lse, 0.0, False, scale=ctx.scale)
        return d_q + more_q, d_k, d_v, d_old_k, d_old_v, None


def cross_entropy(logits_NV: Tensor, targets_N: Tensor, weights_N: Tensor) -> tuple[Tensor, Tensor]:
    """(weighted mean, loss of each token in nats)."""
    each = F.cross_entropy(logits_NV.float(), targets_N, reduction="none")
    return (each * weights_N).sum() / weights_N.sum(), each.detach()
