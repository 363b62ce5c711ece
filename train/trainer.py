"""The loop of training: windows in, steps, averaged masters, log and checkpoints."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train import layers
from train.batches import Episode, Sampler
from train.corpus import load
from train.draft import ANSWER
from train.network import Network
from train.optimiser import Optimiser, Rates
from train.shape import Shape
from train.start import initial

SEED = 20260727
WARM_UP, CLIP, BALANCE, SAVE_S = 40, 1.0, 0.01, 300
LOCAL_STEPS = 8
"""Steps that each process takes on its own before all take the mean of their masters."""
SHAPE = Shape(
    dim=160, dense_inner=448, full_layers=(3, 4), num_layers=5, block_size=2, kda_heads=5, heads=3, nope=48, rope=16, v_dim=64,
    q_rank=96, kv_rank=96, num_experts=16, inner=128, latent=96)


class Trainer:
    """One of the processes; all take steps of their own and average their masters now and then."""

    def __init__(self, folder: Path, rank: int, num_ranks: int) -> None:
        self.folder, self.rank, self.num_ranks = folder, rank, num_ranks
        self.weights = initial(SHAPE, SEED)
        self.optimiser = Optimiser(self.weights, Rates())
        self.step, self.averaged, self.saved_s = 0, 0, time.time()
        self.state = folder / "state.pt"
        if self.state.exists():
            self._restore()
        for name in self.optimiser.weights:
            self.weights[name].requires_grad_()
        self.network = Network(SHAPE, self.weights)
        self.sampler = Sampler({name: text for name, (text, _) in load(folder / "corpus").items()}, SEED, rank)
        self.decay = self._decay()

    def _restore(self) -> None:
        found = torch.load(self.state, weights_only=True)
        self.step = self.averaged = found["step"]
        for name, weight in self.weights.items():
            weight.copy_(found["weights"][name])
        self.optimiser.restore(found["optimiser"])

    def save(self, name: str = "state.pt") -> None:
        """Masters, moments and step, in one move."""
        if self.rank == 0:
            state = {"step": self.step, "weights": {n: w.detach() for n, w in self.weights.items()}, "optimiser": self.optimiser.state()}
            torch.save(state, self.folder / f"{name}.new")
            (self.folder / f"{name}.new").rename(self.folder / name)
        self.saved_s = time.time()

    def _decay(self) -> tuple[int, int] | None:
        path = self.folder / "decay.json"
        if not path.exists():
            return None
        found = json.loads(path.read_text())
        return found["from"], found["steps"]

    def factor(self) -> float:
        """Warm-up, steady, and the fall at the end."""
        warm = min(1.0, (self.step + 1) / WARM_UP)
        if self.decay is None or self.step < self.decay[0]:
            return warm
        return max(0.0, 1 - (self.step - self.decay[0]) / self.decay[1])

    def run(self) -> None:
        """Episodes until the decay is over."""
        while self.decay is None or self.step < sum(self.decay):
            episode, carry = self.sampler.episode(self.step), None
            for index in range(episode.form.num_windows):
                carry = self._window(episode, index, carry)
            if self.step // LOCAL_STEPS != self.averaged // LOCAL_STEPS:
                self._meet()
        self._meet()
        self.save()

    def _meet(self) -> None:
        """Take the mean of all masters; save when it is time."""
        flat = torch.cat([weight.detach().flatten() for weight in self.weights.values()])
        dist.all_reduce(flat)
        flat /= self.num_ranks
        with torch.no_grad():
            for weight, mean in zip(self.weights.values(), flat.split([weight.numel() for weight in self.weights.values()]), strict=True):
                weight.copy_(mean.view_as(weight))
        self.averaged = self.step
        flags = torch.tensor([time.time() - self.saved_s > SAVE_S, (self.folder / "decay.json").exists()], dtype=torch.int64)
        dist.broadcast(flags, 0)
        if flags[0]:
            self.save()
        if flags[1] and self.decay is None:
            self.decay = self._decay()

    def _window(self, episode: Episode, index: int, carry: Any) -> Any:
        begun_s, begun_cpu_s = time.time(), time.process_time()
        tokens, targets, weights = episode.window(index)
        self.network.quantised = self.decay is not None and self.step >= self.decay[0]
        found = self.network.forward(tokens, carry)
        loss, each = layers.cross_entropy(found.logits, targets.flatten(), weights.flatten())
        loss.backward()
        norm, factor = self._clip(), self.factor()
        self.optimiser.step(factor)
        self._balance(found.loads, factor)
        if self.rank == 0:
            self._log(episode, targets, weights, found, each, {
                "step": self.step, "form": episode.form.name, "window": index, "loss": round(loss.item(), 4), "norm": round(norm, 3),
                "factor": round(factor, 4), "at_s": round(begun_s), "wall_s": round(time.time() - begun_s, 3),
                "cpu_s": round(time.process_time() - begun_cpu_s, 3)})
        self.step += 1
        return found.carry

    def _clip(self) -> float:
        """Scale gradients that are too long. Returns the norm before."""
        for weight in self.optimiser.weights.values():
            if weight.grad is None:  # the mix before layer 0 has one source: its weights stand in the checkpoint and do nothing
                weight.grad = torch.zeros_like(weight)
        return torch.nn.utils.clip_grad_norm_(list(self.optimiser.weights.values()), CLIP).item()

    def _balance(self, loads: torch.Tensor, factor: float) -> None:
        """Raise the bias of experts that got less than the mean, lower that of others."""
        for weight in self.optimiser.weights.values():
            weight.grad = None
        for counts, layer in zip(loads.float(), range(1, SHAPE.num_layers), strict=True):
            bias = self.weights[f"model.layers.{layer}.block_sparse_moe.gate.e_score_correction_bias"]
            bias += BALANCE * max(factor, 0.1) * torch.sign(counts.mean() - counts)

    def _log(self, episode: Episode, targets: Any, weights: Any, found: Any, each: Any, line: dict[str, Any]) -> None:
        each = each.view(targets.shape)
        right = (found.logits.detach().argmax(1).view(targets.shape) == targets).float()
        for kind in set(episode.kinds):
            rows = torch.tensor([mine == kind for mine in episode.kinds])
            asked = weights[rows] >= ANSWER
            if kind == "english":
                line["english_bits"] = round(each[rows].mean().item() / 0.6931471805599453, 4)
            elif asked.any():
                line[f"{kind}_right"] = round(right[rows][asked].mean().item(), 4)
        loads = found.loads.float()
        line["load"] = round((loads.max(1).values / loads.mean(1)).mean().item(), 3)
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def work(rank: int, num_ranks: int, folder: Path, port: int) -> None:
    """One process."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    Trainer(folder, rank, num_ranks).run()
    dist.destroy_process_group()
