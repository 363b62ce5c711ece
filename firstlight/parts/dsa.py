"""DeepSeek sparse attention: latent attention over the rows that an indexer chose, or that an earlier layer's indexer chose.

Source: DeepSeek-V3.2-Exp, deepseek-ai/DeepSeek-V3.2-Exp inference/model.py; shared choices: arXiv 2603.12201.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from firstlight.parts.mla import Mla
from firstlight.parts.rotation import Rotation
from firstlight.spec.model import CacheSpec, OpUse, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Dsa(Mla):
    """Mla whose tokens see `top_k` rows at most; `shared`: they are those that the last layer with an indexer of its own chose.

    `index_interleaved` says how the indexer's pairs lie, whatever the attention does. `exact` names the modules of the indexer whose
    weights and products are fp32 in any dtype of the model; its scores and their sum over heads are fp32 always.

    Note: the Hadamard turn of indexer queries and keys in the official code spreads outliers before eight-bit rounding and changes no
    product; keys are cached in the model's dtype here, so there is none.
    """

    top_k: int
    index_heads: int
    index_dim: int
    index_interleaved: bool = False
    index_eps: float = 1e-6
    shared: bool = False
    exact: tuple[str, ...] = ("k_norm", "weights_proj")
    kind: str = "dsa"

    @property
    def index_rotation(self) -> Rotation:
        """The first channels of an indexer head turn as fast as those of the attention."""
        assert self.rotation is not None, "an indexer without rotation is another part"
        return replace(self.rotation, interleaved=self.index_interleaved)

    def precision(self, module: str) -> str:
        """The dtype of a module of the indexer."""
        return "float32" if module in self.exact else self.dtype

    def index_linears(self) -> Sequence[tuple[str, int, int]]:
        """(name, in, out) of every product of the indexer."""
        assert self.q_rank is not None, "the indexer reads the queries' latent"
        if self.shared:
            return ()
        return (
            ("wq_b", self.q_rank, self.index_heads * self.index_dim), ("wk", self.dim, self.index_dim),
            ("weights_proj", self.dim, self.index_heads),
        )

    def weights(self) -> Sequence[TensorSpec]:
        """Those of latent attention, and the indexer's."""
        found = [TensorSpec(f"{name}.weight", (o, i), self.precision(name)) for name, i, o in self.index_linears()]
        if not self.shared:
            found += [TensorSpec(f"k_norm.{leaf}", (self.index_dim,), self.precision("k_norm")) for leaf in ("weight", "bias")]
        return (*Mla.weights(self), *(weight.under("indexer") for weight in found))

    def cache(self) -> Sequence[CacheSpec]:
        """Latent rows, and in a group of its own the indexer's key of each token as it will be compared."""
        if self.shared:
            return Mla.cache(self)
        key = TensorSpec("index_key", (self.index_dim,), self.dtype)
        return (*Mla.cache(self), CacheSpec("index", "rows", (key,), tokens_per_block=16, layout="K"))

    def ops(self) -> Sequence[OpUse]:
        """Latent attention in full (while no more than `top_k` rows are there) and sparse; the indexer."""
        widths = {"H": self.num_heads, "N": self.nope, "R": self.rope, "V": self.v_dim, "L": self.kv_rank}
        found = (*Mla.ops(self), OpUse.of("sparse_attention", self.dtype, **widths, U=self.top_k))
        return found if self.shared else (*found, *self.index_ops())

    def index_ops(self) -> Sequence[OpUse]:
        """Those of the indexer alone."""
        return (
            *(OpUse.of("linear", self.precision(name), I=i, O=o) for name, i, o in self.index_linears()),
            OpUse.of("layer_norm", self.dtype, D=self.index_dim),
            *(self.index_rotation.use(heads, self.dtype) for heads in (self.index_heads, 1)),
            OpUse.of("index_scores", self.dtype, H=self.index_heads, K=self.index_dim),
            OpUse.of("index_topk", "float32", U=self.top_k),
        )

    def flops(self, num_tokens: int, context: int) -> int:
        """Attention over `top_k` rows per token at most; the indexer's scores over all earlier ones are the part that grows."""
        index = 2 * num_tokens * sum(i * o for _, i, o in self.index_linears())
        if context + num_tokens <= self.top_k:
            return index + Mla.flops(self, num_tokens, context)
        products = 2 * num_tokens * sum(i * o for _, i, o in self.linears())
        growing = max(0, min(num_tokens, self.top_k - context))  # tokens that still see fewer rows than top_k
        pairs = growing * context + growing * (growing + 1) // 2 + (num_tokens - growing) * self.top_k
        expansion = 2 * num_tokens * self.num_heads * (self.nope + self.v_dim) * self.kv_rank
        attention = 2 * pairs * self.num_heads * (self.row_width + self.kv_rank) + expansion
        scored = 0 if self.shared else num_tokens * context + num_tokens * (num_tokens + 1) // 2
        return products + attention + index + 2 * scored * self.index_heads * (self.index_dim + 1)
