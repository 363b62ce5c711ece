"""Forms in plain PyTorch that run on any device: faster than the references, exact in fp32. Described here without torch."""

from __future__ import annotations

from firstlight.ops import declared as _declared  # noqa: F401  (fills the registry)
from firstlight.ops.registry import OPERATORS, Refusal, Refuse, never_refuse

FORMS: dict[str, Refuse] = {
    "experts": never_refuse,
    "fp8_unpack": never_refuse,
    "gated_delta": never_refuse,
    "grouped_attention": never_refuse,
    "index_scores": never_refuse,
    "index_topk": never_refuse,
    "latent_attention": never_refuse,
    "mxfp4_unpack": never_refuse,
    "short_conv": never_refuse,
    "sparse_attention": never_refuse,
}


class PortableBackend:
    """The column 'portable' of the grid."""

    name = "portable"
    device = "any"

    def refuse(self) -> Refusal | None:
        """Ready wherever torch is; torch is a dependency of the package."""
        return None

    def load(self) -> None:
        """Register every form by import path."""
        for operator, refuse in FORMS.items():
            OPERATORS[operator].on(self.name, f"{__name__}.{operator}:{operator}", refuse=refuse)


backend = PortableBackend()
