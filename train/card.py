"""The model card and the training curve, from the log of a run and the numbers that `train.evaluate --json` wrote.

    python -m train.card FOLDER --run run --measures run/measures.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train import export
from train.batches import STAGES, WINDOW_TOKENS
from train.corpus import HELD_OUT, SOURCES
from train.evaluate import told
from train.shape import Shape
from train.trainer import LOCAL_STEPS, SEED

WIDTH, HEIGHT, MARGIN = 640, 260, 46
SMOOTH, NUM_POINTS = 0.95, 250
CARD = """# firstlight-nano

A very small model in Kimi K3's architecture, trained from nothing for this engine: caches, kernels and chat formats can be tried on weights
that have learnt something. It is made to recall what stands in its context, to copy, to write K3's chat and tool-call format, and to continue
plain English in the manner of its few books. It knows nothing about the world and is no assistant.

## Architecture

{architecture}

Decoder, router, tokenizer form and layout on disk are K3's; `vision_config` is empty because there is no image tower yet, its names are
reserved. Tokens are bytes; K3's control tokens follow them at K3's offsets.

## Data

| source | licence | share of English windows |
|---|---|---|
{sources}

The last {held_out:,} bytes of each source were never trained on; all language numbers below are over those tails. Beside English stand
synthetic documents from `train/tasks.py`: bound keys asked at many distances (alone and inside English), copying, short arithmetic, JSON, tool
calls and chats of several turns in K3's format. Answers weigh {answer:g} times plain text, their first byte {found:g} times, what cannot be
foreseen {random:g}.

## Training

{steps:,} steps of {processes} processes with {window:,} tokens each ({tokens:.1f} M tokens in all), masters averaged every {local} steps,
seed {seed}, on {processes} shared CPU cores.
Muon for matrices, AdamW for the rest; products in bf16. Documents grow from {shortest} to {longest:,} tokens; memory goes on over the windows of
one document.
The last {decay:,} steps ran with experts rounded to MXFP4 while the rate fell to zero.{course}

![training curve](curve.svg)

## Measured

By `python -m train.evaluate`, on this folder.

{measures}

Bits per byte: memory begins anew every 16 Ki bytes. Kneser-Ney is interpolated, order 5 (four bytes of history), one discount per order.
Recall: English from the tails with 20 keys bound at even depths; each is asked at the end, the whole value and its line end must come out
greedily. Tool calls: greedy messages after unseen requests.

## Limits

{limits}

The text is that of old books and manuals, with their views. Nothing was filtered or aligned.
"""


def architecture(shape: Shape, num_parameters: int) -> str:
    """One paragraph of sizes."""
    full = ", ".join(str(layer + 1) for layer in shape.full_layers)
    return (
        f"{num_parameters:,} parameters. {shape.num_layers} layers of width {shape.dim}: KDA ({shape.kda_heads} heads of {shape.kda_head_dim}, "
        f"gate bounded below, full-rank output gate), and gated NoPE-MLA in layers {full} counted from 1 ({shape.heads} heads, {shape.nope} + "
        f"{shape.rope} query and key channels, {shape.v_dim} value channels, ranks {shape.q_rank} and {shape.kv_rank}). Block Attention Residuals "
        f"with blocks of {shape.block_size}. Layer 1 has a dense SiTU network, the others LatentMoE: {shape.num_experts} experts of inner width "
        f"{shape.inner} in a latent of {shape.latent}, {shape.top_k} per token, chosen by a sigmoid router that a bias keeps balanced, and shared "
        f"experts of width {shape.num_shared * shape.inner}. Experts are MXFP4, the rest bf16.")


def limits(measures: dict[str, Any]) -> str:
    """What the numbers say about where it ends."""
    bits, lines = measures["bits_per_byte"]["all"], []
    margin = bits["kneser_ney"] - bits["model"]
    lines.append(f"- Over all tails it is {abs(margin):.3f} bits per byte {'better' if margin > 0 else 'worse'} than the Kneser-Ney model.")
    for row in measures["recall"]:
        lines.append(f"- Over {row['length']:,} bytes it recalls {row['right'] / row['asked']:.0%} of bound keys.")
    lines.append(f"- It was trained on documents up to {max(form.row_tokens * form.num_windows for form in STAGES[-1].forms):,} tokens.")
    return "\n".join(lines)


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Running mean that forgets."""
    found: list[tuple[float, float]] = []
    for x, y in points:
        found.append((x, y if not found else SMOOTH * found[-1][1] + (1 - SMOOTH) * y))
    return found


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most NUM_POINTS of them, the last one kept."""
    stride = -(-len(points) // NUM_POINTS)
    return list(points[::-1][::stride][::-1])


def curve(log: Sequence[dict[str, Any]]) -> str:
    """An SVG: bits per byte of English on the left axis, share of right answers on the right one."""
    last = max(line["step"] for line in log) or 1
    lines = [("english_bits", "#1f77b4", 8.0, "bits per byte, English"), ("haystack_right", "#d62728", 1.0, "answers right, keys in English"),
             ("tasks_right", "#2ca02c", 1.0, "answers right, small tasks")]
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="11">',
             f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    inner_x, inner_y = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
    for tick in range(5):
        y = HEIGHT - MARGIN - tick / 4 * inner_y
        parts.append(f'<path d="M{MARGIN} {y:.0f}H{WIDTH - MARGIN}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y + 4:.0f}" text-anchor="end">{tick * 2}</text>')
        parts.append(f'<text x="{WIDTH - MARGIN + 6}" y="{y + 4:.0f}">{tick * 25}%</text>')
        parts.append(f'<text x="{MARGIN + tick / 4 * inner_x:.0f}" y="{HEIGHT - MARGIN + 16}" text-anchor="middle">{last * tick // 4:,}</text>')
    for row, (key, colour, top, label) in enumerate(lines):
        points = thinned(smoothed([(line["step"], line[key]) for line in log if key in line]))
        path = " ".join(f"{MARGIN + x / last * inner_x:.1f},{HEIGHT - MARGIN - min(y / top, 1.0) * inner_y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{MARGIN + 180 * row}" y="18" fill="{colour}">{label}</text>')
    parts.append(f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">steps</text></svg>')
    return "\n".join(parts) + "\n"


def write(folder: Path, run: Path, measures: dict[str, Any], processes: int) -> None:
    """README.md and curve.svg beside the checkpoint; what the run owes to chance or change stands in course.md."""
    from train.draft import ANSWER, FOUND, RANDOM

    # Steps after a checkpoint are done again when a run is resumed: the later one counts.
    by_step = {line["step"]: line for line in map(json.loads, (run / "log.jsonl").read_text().splitlines())}
    log = [by_step[step] for step in sorted(by_step)]
    steps, decay = log[-1]["step"] + 1, json.loads((run / "decay.json").read_text())["steps"]
    total = sum(source.weight for source in SOURCES)
    sources = "\n".join(f"| {source.package} | {source.licence} | {source.weight / total:.0%} |" for source in SOURCES)
    notes = run / "course.md"
    course = f" {notes.read_text(encoding='utf-8').strip()}" if notes.exists() else ""
    lengths = [form.row_tokens * form.num_windows for stage in STAGES for form in stage.forms]
    card = CARD.format(
        architecture=architecture(export.shape_of(folder), measures["parameters"]), sources=sources, held_out=HELD_OUT, answer=ANSWER,
        found=FOUND, random=RANDOM, course=course,
        steps=steps, processes=processes, window=WINDOW_TOKENS, tokens=steps * processes * WINDOW_TOKENS / 1e6, local=LOCAL_STEPS, seed=SEED,
        shortest=min(lengths), longest=max(lengths), decay=decay, measures=told(measures), limits=limits(measures))
    (folder / "README.md").write_text(card, encoding="utf-8")
    (folder / "curve.svg").write_text(curve(log), encoding="utf-8")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--measures", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    write(options.folder, options.run, json.loads(options.measures.read_text()), options.processes)


if __name__ == "__main__":
    main()
