"""The decoder with gradients and with memory that goes on from one window of a document to the next.

Letters: B rows, T tokens of a row, N = B * T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from train import delta, layers
from train.quantise import FakeMxfp4
from train.shape import CONV_WIDTH, Shape

Carry = list[tuple[Tensor, ...]]
"""Per layer what the past left: (state, convolution window) of KDA, (rows,) of MLA."""


@dataclass(slots=True)
class Pass:
    """Logits [N, V], memory for the next window, and tokens per expert [layers with experts, E]."""

    logits: Tensor
    carry: Carry
    loads: Tensor


class Network:
    """`weights` are masters in fp32 by K3's names; products run in `dtype`. `fast`: compiled loops for KDA."""

    def __init__(self, shape: Shape, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16, *, fast: bool = True) -> None:
        self.shape, self.weights, self.dtype = shape, weights, dtype
        self.conv = delta.FastConv.apply if fast else delta.slow_conv
        self.delta = delta.FastDelta.apply if fast else delta.slow_delta
        self.quantised = False

    def forward(self, tokens_BT: Tensor, carry: Carry | None = None) -> Pass:
        """One window; without `carry` the documents begin here."""
        shape, rows = self.shape, tokens_BT.shape[0]
        prefix = self._get("model.embed_tokens.weight")[tokens_BT.flatten()]
        bank: list[Tensor] = []
        after: Carry = []
        loads = []
        for layer in range(shape.num_layers):
            at = f"model.layers.{layer}."
            x = layers.mix_norm([*bank, prefix], self._score(f"{at}self_attention_res"), self.weights[f"{at}input_layernorm.weight"])
            mixer = self._mla if layer in shape.full_layers else self._kda
            y, left = mixer(f"{at}self_attn.", x, rows, carry[layer] if carry else None)
            after.append(left)
            if layer % shape.block_size == 0:
                bank.append(prefix)
                prefix = y
            else:
                prefix = prefix + y
            x = layers.mix_norm([*bank, prefix], self._score(f"{at}mlp_res"), self.weights[f"{at}post_attention_layernorm.weight"])
            if layer == 0:
                y = self._glu(f"{at}mlp.", x)
            else:
                y, load = self._moe(f"{at}block_sparse_moe.", x)
                loads.append(load)
            prefix = prefix + y
        x = layers.mix_norm([*bank, prefix], self._score("model.output_attn_res"), self.weights["model.norm.weight"])
        return Pass(x @ self._get("lm_head.weight").T, after, torch.stack(loads))

    def _get(self, name: str) -> Tensor:
        return self.weights[name].to(self.dtype)

    def _stack(self, at: str, *names: str) -> Tensor:
        return torch.cat([self.weights[f"{at}{name}.weight"] for name in names]).to(self.dtype)

    def _score(self, at: str) -> Tensor:
        return self.weights[f"{at}_norm.weight"] * self.weights[f"{at}_proj.weight"][0]

    def _kda(self, at: str, x: Tensor, rows: int, past: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        shape, w = self.shape, self.weights
        heads, dim, width = shape.kda_heads, shape.kda_head_dim, shape.kda_width
        wide = self._stack(at, "q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")
        qkv, decay, beta, gate = layers.kda_in(x, wide, self._get(f"{at}f_b_proj.weight"), w[f"{at}A_log"], w[f"{at}dt_bias"], width)
        qkv = qkv.view(rows, -1, 3 * width)
        state, window = past or (x.new_zeros(rows, heads, dim, dim, dtype=torch.float32), qkv.new_zeros(rows, CONV_WIDTH - 1, 3 * width))
        taps = torch.cat([w[f"{at}{name}_conv1d.weight"] for name in "qkv"]).T.contiguous()
        mixed = self.conv(qkv, taps, window).to(self.dtype).float()
        out, state = self.delta(
            mixed.view(rows, -1, 3, heads, dim), decay.view(rows, -1, heads, dim), beta.view(rows, -1, heads), state, dim**-0.5)
        y = layers.kda_out(out.view(-1, heads, dim), gate, w[f"{at}o_norm.weight"], self._get(f"{at}o_proj.weight"))
        window = torch.cat((window, qkv.detach()), 1)[:, 1 - CONV_WIDTH :].contiguous()
        return y, (state, window)

    def _mla(self, at: str, x: Tensor, rows: int, past: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        shape, w = self.shape, self.weights
        wide = self._stack(at, "q_a_proj", "kv_a_proj_with_mqa", "g_proj")
        sizes = (shape.q_rank, shape.kv_rank, shape.rope)
        q, latent, key, gate = layers.mla_in(
            x, wide, w[f"{at}q_a_layernorm.weight"], self._get(f"{at}q_b_proj.weight"), w[f"{at}kv_a_layernorm.weight"], sizes)
        kept = torch.cat((latent, key), 1).view(rows, -1, shape.kv_rank + shape.rope)
        kv_b = self._get(f"{at}kv_b_proj.weight")
        k, v = self._expand(kept, kv_b)
        old_k, old_v = self._expand(past[0], kv_b) if past else (None, None)
        q = q.view(rows, -1, shape.heads, shape.head_q).transpose(1, 2)
        out = layers.Attention.apply(q, k, v, old_k, old_v, shape.head_q**-0.5)
        y = layers.mla_out(out.transpose(1, 2).reshape(len(x), -1), gate, self._get(f"{at}o_proj.weight"))
        kept = kept.detach()
        return y, (torch.cat((past[0], kept), 1) if past else kept,)

    def _expand(self, rows_BTC: Tensor, kv_b: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, T, K] of latent rows."""
        shape = self.shape
        latent, key = rows_BTC.split((shape.kv_rank, shape.rope), dim=-1)
        k, v = (latent @ kv_b.T).view(*rows_BTC.shape[:2], shape.heads, -1).transpose(1, 2).split((shape.nope, shape.v_dim), dim=-1)
        return torch.cat((k, key[:, None].expand(-1, shape.heads, -1, -1)), -1), v

    def _glu(self, at: str, x: Tensor) -> Tensor:
        return layers.glu(x, self._stack(at, "gate_proj", "up_proj"), self._get(f"{at}down_proj.weight"))

    def _moe(self, at: str, x: Tensor) -> tuple[Tensor, Tensor]:
        shape, w = self.shape, self.weights
        weights, ids = layers.route(x, w[f"{at}gate.weight"], w[f"{at}gate.e_score_correction_bias"], shape.top_k)
        z = x @ self._get(f"{at}routed_expert_down_proj.weight").T
        w13, w2 = (self._experts(f"{at}experts.{name}") for name in ("w13", "w2"))
        y = layers.RoutedExperts.apply(z, weights, w13, w2, ids)
        shared = self._glu(f"{at}shared_experts.", x)
        y = layers.latent_out(y, w[f"{at}routed_expert_norm.weight"], self._get(f"{at}routed_expert_up_proj.weight"), shared)
        return y, torch.bincount(ids.flatten(), minlength=shape.num_experts)

    def _experts(self, name: str) -> Tensor:
        weight = self.weights[name]
        return (FakeMxfp4.apply(weight) if self.quantised else weight).to(self.dtype)
