"""Is it the same, module by module? Record what the modules of any torch model put out, and keep it in one file.

Needs torch and safetensors only, so that this file can be copied beside any reference code; the format is docs/trace-format.md.
As a script: python record.py --model FOLDER --ids 1,2,3 --out trace.safetensors (through transformers).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

FORMAT = "firstlight-trace"
VERSION = "1"
PREFIX = "trace."

Pick = Callable[[str, object], torch.Tensor | None]
"""Chooses the tensor to keep of a module's output, by the module's name; None leaves the module out."""


class TraceError(ValueError):
    """A trace that cannot be recorded, written or read: the fact, then the fix. Own to this file, which stands alone."""

    def __init__(self, fact: str, fix: str) -> None:
        super().__init__(f"{fact}. {fix}")
        self.fact = fact
        self.fix = fix


@dataclass
class Trace:
    """Module outputs by name, in the order in which the modules finished, so a module follows those inside it.

    `ordered` is False where a file keeps no order; `extra` holds what was given beside (ids, logits); `skipped` says why a
    matched module that ran left no output.
    """

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    ordered: bool = True
    dtype: str = "as computed"

    def save(self, path: str | Path, **extra: torch.Tensor | Sequence[int]) -> None:
        """Write one safetensors file; `extra` tensors (ids=..., logits=...) stand beside the outputs under their own names."""
        beside = self.extra | {name: torch.as_tensor(value) for name, value in extra.items()}
        clash = [name for name in beside if name.startswith(PREFIX)]
        if clash:
            raise TraceError(f"extra tensors {clash} begin with `{PREFIX}`, which is kept for module outputs", "Rename them.")
        tensors = {**beside, **{PREFIX + name: tensor for name, tensor in self.outputs.items()}}
        header = {"format": FORMAT, "version": VERSION, "torch": str(torch.__version__), "dtype": self.dtype, "skipped": json.dumps(self.skipped)}
        if self.ordered:
            header["order"] = json.dumps(list(self.outputs))
        try:
            save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}, path, metadata=header)
        except (OSError, SafetensorError) as error:
            raise TraceError(f"{path} cannot be written: {error}", "Choose a folder that exists and has room.") from None

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace, also one without metadata, which then has no order. Raises TraceError when the file is not one."""
        try:
            with safe_open(path, "pt") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise TraceError(f"{path} cannot be read as safetensors: {error}", "Record it again.") from None
        if header.get("format") == FORMAT and header.get("version") != VERSION:
            raise TraceError(f"{path} has trace version {header.get('version')}, this code reads {VERSION}", "Use the record.py that wrote it.")
        found = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
        if not found:
            raise TraceError(f"{path} holds no tensor named {PREFIX}<module>", "Record it with record.py, or see docs/trace-format.md.")
        order = json.loads(header.get("order", "null"))
        names = sorted(found, key=natural) if order is None else order
        if set(names) != set(found):
            raise TraceError(f"{path} orders {len(names)} modules and holds {len(found)}; it is damaged", "Record it again.")
        extra = {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}
        outputs = {name: found[name] for name in names}
        return cls(outputs, extra, json.loads(header.get("skipped", "{}")), order is not None, header.get("dtype", "as computed"))


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key under which layers.2 comes before layers.10."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"\.", name)]


def first_tensor(output: object) -> torch.Tensor | None:
    """The output itself, or the first tensor of a tuple, mapping or dataclass, depth first."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        parts = list(output.values())
    elif isinstance(output, (tuple, list)):
        parts = list(output)
    elif dataclasses.is_dataclass(output):
        parts = [getattr(output, item.name) for item in dataclasses.fields(output)]
    else:
        return None
    return next((found for found in map(first_tensor, parts) if found is not None), None)


def join(pieces: Sequence[torch.Tensor]) -> torch.Tensor | str:
    """One output from several calls (chunks), along the token dim, or the reason why not.

    The token dim is the one in which the pieces differ. When they are all alike it is dim 1 behind a batch of one in front
    of two dims or more, else dim 0. Single tokens [1, H, D] without a batch dim become [1, T * H, D], numbers in order.
    """
    shapes = [piece.shape for piece in pieces]
    if len(pieces) == 1:
        return pieces[0]
    if len({len(shape) for shape in shapes}) > 1 or not shapes[0]:
        return f"its {len(pieces)} calls gave shapes {[list(shape) for shape in shapes]}, which have no token dim in common"
    differ = [dim for dim in range(len(shapes[0])) if len({shape[dim] for shape in shapes}) > 1]
    if len(differ) > 1:
        return f"its {len(pieces)} calls gave shapes {[list(shape) for shape in shapes]}, which differ in dims {differ}"
    batched = len(shapes[0]) > 2 and shapes[0][0] == 1
    return torch.cat(list(pieces), differ[0] if differ else int(batched))


@contextmanager
def record(
    model: torch.nn.Module,
    where: str | Sequence[str] = "*",
    *,
    dtype: torch.dtype | None = None,
    pick: Pick | None = None,
) -> Iterator[Trace]:
    """Keep the outputs of the modules whose name fits a glob, for the forwards inside the block; the trace is filled when it ends.

    `*` also crosses dots; the root itself is not recorded. Outputs are copied to the CPU, floating ones cast to `dtype`;
    `pick(name, output)` chooses the tensor, the first one when not given. No hook is left behind, whatever happens inside.
    Raises TraceError when no module fits.
    """
    globs = [where] if isinstance(where, str) else list(where)
    chosen = {name: module for name, module in model.named_modules() if name and any(fnmatchcase(name, glob) for glob in globs)}
    if not chosen:
        raise TraceError(f"none of {sum(1 for _ in model.named_modules())} modules fits {globs}", f"Names look like {_samples(model)}.")
    pieces: dict[str, list[torch.Tensor]] = {}
    trace = Trace(dtype="as computed" if dtype is None else str(dtype).removeprefix("torch."))

    hooks = [module.register_forward_hook(_keeper(name, pieces, trace, dtype, pick)) for name, module in chosen.items()]
    try:
        yield trace
    finally:
        for handle in hooks:
            handle.remove()
        for name, parts in pieces.items():
            joined = join(parts)
            if isinstance(joined, str):
                trace.skipped[name] = joined
            else:
                trace.outputs[name] = joined


def _keeper(name: str, pieces: dict[str, list[torch.Tensor]], trace: Trace, dtype: torch.dtype | None, pick: Pick | None) -> Callable[..., None]:
    def keep(module: torch.nn.Module, inputs: object, output: object) -> None:
        tensor = first_tensor(output) if pick is None else pick(name, output)
        if tensor is None:
            trace.skipped[name] = f"no tensor in its output, a {type(output).__name__}" if pick is None else "not picked"
            return
        target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        # A copy: reference code may add to this tensor in place afterwards.
        pieces.setdefault(name, []).append(tensor.detach().to("cpu", target, copy=True))

    return keep


def _samples(model: torch.nn.Module) -> list[str]:
    names = [name for name, _ in model.named_modules() if name]
    return names[:: max(1, len(names) // 4)][:4]


def record_folder(
    folder: str, ids: Sequence[int], where: Sequence[str] = ("*",), *, dtype: torch.dtype | None = None, trust_remote_code: bool = False
) -> Trace:
    """Run one forward of a checkpoint through transformers; ids [1, T] and logits [1, T, V] are in `extra`.

    Raises TraceError when transformers is absent, too old for the model, or cannot read the folder.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise TraceError("transformers cannot be imported here", "Install it, or call record() around the reference code itself.") from None
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto", trust_remote_code=trust_remote_code).eval()
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise TraceError(f"transformers {transformers.__version__} cannot load {folder}: {error}", "Install a version that knows it.") from None
    num_rows = model.get_input_embeddings().weight.shape[0]
    if max(ids) >= num_rows:
        raise TraceError(f"--ids holds {max(ids)}, the embedding has {num_rows} rows", "Use ids below that.")
    tokens = torch.tensor([list(ids)])
    with torch.no_grad(), record(model, where) as trace:
        logits = model(tokens, use_cache=False).logits
    trace.extra = {"ids": tokens, "logits": logits}
    return trace


def main(arguments: Sequence[str] | None = None) -> int:
    """The script; 0 when the file was written, 2 when the input is wrong."""
    parser = argparse.ArgumentParser(description="Record the module outputs of a checkpoint that transformers can run.")
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument("--ids", required=True, help="token ids, 1,2,3 or @FILE")
    parser.add_argument("--out", required=True, help="file to write")
    parser.add_argument("--dtype", help="load the weights in this dtype, e.g. float32; the checkpoint's own when left out")
    parser.add_argument("--where", action="append", help="glob on module names, may be repeated; everything when left out")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the model code that the folder brings along")
    options = parser.parse_args(arguments)
    try:
        trace = record_folder(
            options.model, _ids(options.ids), options.where or ["*"], dtype=_dtype(options.dtype), trust_remote_code=options.trust_remote_code
        )
        trace.save(options.out)
    except (TraceError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{options.out}: {len(trace.outputs)} module outputs, {trace.extra['ids'].shape[1]} tokens, {len(trace.skipped)} skipped\n")
    return 0


def _ids(text: str) -> list[int]:
    if text.startswith("@"):
        text = Path(text[1:]).read_text(encoding="utf-8")
    pieces = [piece for piece in re.split(r"[\s,]+", text) if piece]
    if not pieces or not all(piece.isdigit() for piece in pieces):
        raise TraceError(f"--ids is {text[:60]!r}, not a list of token ids", "Write 1,2,3 or @FILE.")
    return [int(piece) for piece in pieces]


def _dtype(name: str | None) -> torch.dtype | None:
    found = getattr(torch, name, None) if name else None
    if name and not isinstance(found, torch.dtype):
        raise TraceError(f"--dtype is {name!r}, not a torch dtype", "Write float32 or bfloat16.")
    return found


if __name__ == "__main__":
    sys.exit(main())
