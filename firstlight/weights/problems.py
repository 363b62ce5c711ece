"""What is wrong with a checkpoint: everything is collected, then one error is raised. No torch."""

from __future__ import annotations

from typing import Literal

from firstlight.spec.errors import CheckpointError

Kind = Literal[
    "no weights", "pickled", "pointer", "unreadable", "damaged", "index", "ambiguous", "absent shard", "missing", "unexpected", "duplicated",
    "misshapen", "wrong dtype", "expert gap", "unpaired", "mixed formats", "untied", "padding", "not finite",
]

_AGAIN = "Fetch the files again from the model's release and compare their checksums"
_RULE = "Give config.json and weights of one release, or correct the names in the model file"
_FIXES: dict[Kind, str] = {
    "no weights": "Give the folder that holds the *.safetensors files",
    "pickled": "Convert the weights to safetensors: opening a pickle can run any code, so it is never done here",
    "pointer": "Run `git lfs pull` in the folder: these are pointers, not weights",
    "unreadable": "Check path, permissions and disk",
    "damaged": _AGAIN,
    "index": "Restore model.safetensors.index.json of the same release as the shards",
    "ambiguous": "Keep one of the two checkpoints in the folder",
    "absent shard": "Fetch the shards that are absent",
    "missing": _RULE,
    "unexpected": "Add a Rename, or a Skip with its reason, to the model file, or remove the tensors",
    "duplicated": "Keep one tensor for each parameter",
    "misshapen": "Give config.json and weights of one release",
    "wrong dtype": "Convert these tensors to float32, bfloat16 or float16 (experts: or to MXFP4)",
    "expert gap": "Fetch the shards that hold these experts, or correct the number of experts in config.json",
    "unpaired": "Keep both the packed codes and their scale (MXFP4: one per 32 columns; FP8: one per 128 x 128, `_scale_inv`)",
    "mixed formats": "Store a parameter, and all experts of a bank, in one format",
    "untied": "Set tie_word_embeddings to false in config.json if the two are meant to differ, else take the head away",
    "padding": "Restore the tensor: what lies beyond the model's own heads must be exactly zero",
    "not finite": _AGAIN,
}

SHOWN = 8


class Problems:
    """A list by kind that raises once; at most SHOWN are spelled out, the rest are counted."""

    def __init__(self) -> None:
        self._found: dict[Kind, list[str]] = {}

    def add(self, kind: Kind, what: str) -> None:
        """Note one problem; `what` names the tensor or file."""
        self._found.setdefault(kind, []).append(what)

    def __len__(self) -> int:
        return sum(len(each) for each in self._found.values())

    def raise_if_any(self, where: str) -> None:
        """End the collection. Raises CheckpointError when there is at least one problem."""
        if not self._found:
            return
        kinds = [kind for kind in _FIXES if kind in self._found]
        shown = max(1, SHOWN // len(kinds))
        facts = "; ".join(self._told(kind, shown) for kind in kinds)
        count = f"{len(self)} problems: " if len(self) > 1 else ""
        fixes = dict.fromkeys(_FIXES[kind] for kind in kinds)
        raise CheckpointError(f"{where}: {count}{facts}", ". ".join(fixes) + ".")

    def _told(self, kind: Kind, shown: int) -> str:
        each = self._found[kind]
        rest = f", and {len(each) - shown:,} more" if len(each) > shown else ""
        return f"{kind} ({len(each):,}): " + ", ".join(each[:shown]) + rest
