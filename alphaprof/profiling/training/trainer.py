"""Steps of a training on one device: the loop, which documents make a step, and checkpoints that it goes on from."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from alphaprof.errors import HeadRecordUnreadable, LogitsNotFinite, cut
from alphaprof.profiling.heads.eagle import Eagle3
from alphaprof.profiling.shard import Progress
from alphaprof.profiling.texts.continuations import batches
from alphaprof.profiling.training.features import Features, TargetLaw, TextBatch
from alphaprof.profiling.training.initial import trained_parameters
from alphaprof.run.manifest import typed
from alphaprof.run.storage import LocalStorage
from alphaprof.run.training import TrainingProgress

CHECKPOINT = "training.checkpoint"  # safetensors; the last one, until the training is complete
LOOKS = 20  # times that a training looks at the stop part, and writes a checkpoint
PATIENCE = 0.5  # of the steps so far: without anything better in these a training ends, in its second half
WARM_UP = 0.1  # of the steps
BETAS, CLIP = (0.9, 0.95), 1.0
Flags = np.ndarray[Any, Any]
DECAY = 0.8  # the weight of a depth's loss as a share of that of the depth before it


@dataclass(frozen=True)
class Schedule:
    """How a training goes. `steps`: how many updates at most; `ttt`: drafts of a round that are trained; `batch_tokens`:
    tokens of continuations in a step; `padded_tokens`: padded tokens that are run at a time, gradients of several such
    batches being added up; `seed`: of the order of documents.
    """

    steps: int
    ttt: int
    batch_tokens: int
    padded_tokens: int
    learning_rate: float
    seed: int


@dataclass
class TrainingState:
    """Where a training is. `progress`: of each look at the stop part; `best`: the weights of `best_step`, with `score`
    drafts right a round; `seconds` of steps and of looks, `cpu` of all threads, in this process and those before it.
    """

    step: int = 0
    tokens: int = 0
    best_step: int = 0
    score: float = -1.0
    seconds: dict[str, float] = field(default_factory=lambda: {"training": 0.0, "testing": 0.0, "cpu": 0.0})
    progress: list[TrainingProgress] = field(default_factory=list)
    best: dict[str, torch.Tensor] = field(default_factory=dict)


class Trainer:
    """A training in a folder, which has its checkpoint."""

    def __init__(
        self,
        network: Eagle3,
        law: TargetLaw,
        train: Features,
        stop: Features,
        schedule: Schedule,
        storage: LocalStorage,
        autocast: torch.dtype | None,
    ) -> None:
        self.network, self.law, self.train, self.stop, self.schedule = network, law, train, stop, schedule
        self.storage, self.autocast = storage, autocast
        self.weights = trained_parameters(network)
        for name, weight in network.named_parameters():
            weight.requires_grad_(name in self.weights)
        self.optimizer = torch.optim.AdamW(self.weights.values(), schedule.learning_rate, BETAS, weight_decay=0.0)
        self.state = TrainingState()

    def run(self, progress: Progress) -> TrainingState:
        """Train from where the state is to the end, and return it with the best weights in the network. Raises
        `LogitsNotFinite` where the loss is none; the network then holds the best weights so far, and the last checkpoint
        stays.
        """
        schedule, state = self.schedule, self.state
        progress.start("training", schedule.steps, "steps")
        progress.advance(state.step)
        if not state.progress:
            self._look(progress, [])
        chosen = steps_of([len(text.ids) for text in self.train.texts], schedule.batch_tokens, schedule.seed)
        for _ in range(state.step):
            next(chosen)
        sums, counts = np.zeros(schedule.ttt), np.zeros(schedule.ttt)
        try:
            while not self._ended():
                began, cpu = time.monotonic(), time.process_time()
                added, drafted = self.update(next(chosen))
                sums, counts = sums + added, counts + drafted
                state.step += 1
                state.seconds["training"] += time.monotonic() - began
                state.seconds["cpu"] += time.process_time() - cpu
                progress.advance(1, int(drafted[0]))
                if state.step % max(1, schedule.steps // LOOKS) == 0 or self._ended():
                    self._look(progress, (sums / np.maximum(counts, 1)).tolist())
                    sums, counts = np.zeros(schedule.ttt), np.zeros(schedule.ttt)
        finally:
            self._restore(state.best)
        return state

    def _ended(self) -> bool:
        """Return whether the steps are over, or nothing has become better for long."""
        stale = self.state.best_step < PATIENCE * self.state.step
        return self._share() >= 1.0 or (self._share() >= 0.5 and stale)

    def _share(self) -> float:
        """Return how far the training is, 0 to 1."""
        return self.state.step / self.schedule.steps

    def update(self, chosen: Sequence[int]) -> tuple[Flags, Flags]:
        """Return one update; by depth [depths], the sum of the loss and the number of drafts."""
        schedule, texts = self.schedule, [self.train.texts[index] for index in chosen]
        counts = np.array(
            [
                sum(drafts(len(text.prompt), len(text.tokens), depth) for text in texts)
                for depth in range(1, schedule.ttt + 1)
            ]
        )
        weights = [DECAY**depth / max(1, int(count)) for depth, count in enumerate(counts)]
        warm = min(1.0, (self._share() + 1 / schedule.steps) / WARM_UP)
        rate = schedule.learning_rate * warm * (0.5 + 0.5 * math.cos(math.pi * self._share()))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(schedule.ttt, device=self.network.device)
        for part in batches([len(text.tokens) for text in texts], schedule.padded_tokens):
            batch = self.train.batch([chosen[index] for index in part])
            with self._precision():
                found = losses(self.network, batch, self.law, schedule.ttt)
            sum(loss * weight for loss, weight in zip(found, weights, strict=True)).backward()  # type: ignore[union-attr]
            sums += torch.stack(found).detach()
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), CLIP)
        if not bool(torch.isfinite(sums).all() & torch.isfinite(norm)):
            kept = f"the weights of step {self.state.best_step}, the best so far, are in {self.storage.shown}"
            raise LogitsNotFinite(
                f"the loss of step {self.state.step + 1} is not finite (learning rate {rate:.2g})",
                f"{kept}; use another --out and a lower --learning-rate, from scratch or these weights (--init)",
            )
        self.optimizer.step()
        self.state.tokens += sum(len(text.ids) for text in texts)
        return sums.double().cpu().numpy(), counts

    def _precision(self) -> Any:
        """16 bits where the target has them and the device is a GPU; the target's own states and law are made outside."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.network.device.type, self.autocast)

    def _look(self, progress: Progress, loss: list[float]) -> None:
        """Test on the stop part, keep the weights if they are the best so far, and write a checkpoint."""
        state, schedule = self.state, self.schedule
        began, cpu = time.monotonic(), time.process_time()
        agree, starts, prefix = self.tested(self.stop, schedule.ttt)
        score = float(prefix.sum() / max(1, starts[0]))
        if score > state.score:
            state.score, state.best_step = score, state.step
            state.best = {name: weight.detach().cpu().clone() for name, weight in self.weights.items()}
        shares = tuple((agree / np.maximum(starts, 1)).tolist())
        state.seconds["testing"] += time.monotonic() - began
        spent = sum(state.seconds[name] for name in ("training", "testing"))
        state.progress.append(TrainingProgress(state.step, round(spent, 3), tuple(loss), shares, state.tokens))
        self.save()
        state.seconds["cpu"] += time.process_time() - cpu
        line = f"step {state.step} of {schedule.steps}: "
        line += f"loss by depth {' '.join(f'{each:.2f}' for each in loss)}; " if loss else ""
        line += f"right on stop documents {' '.join(f'{each:.3f}' for each in shares)}"
        progress.say(line)

    @torch.no_grad()
    def tested(self, features: Features, depths: int) -> tuple[Flags, Flags, Flags]:
        """Return what `right` says of all texts of some features, by depth [depths]."""
        total = np.zeros((3, depths), dtype=np.int64)
        for part in batches([len(text.tokens) for text in features.texts], self.schedule.padded_tokens):
            with self._precision():
                total += np.stack(right(self.network, features.batch(part), depths))
        agree, starts, prefix = total
        return agree, starts, prefix

    def save(self) -> None:
        """Write a checkpoint over the one before it. Raises `DiskFull`."""
        state = self.state
        tensors = {f"weights.{name}": weight.detach().cpu().contiguous() for name, weight in self.weights.items()}
        tensors |= {f"best.{name}": weight for name, weight in state.best.items()}
        for name, weight in self.weights.items():
            for moment, value in self.optimizer.state.get(weight, {}).items():
                tensors[f"{moment}.{name}"] = value.detach().cpu().contiguous().clone()
        facts = {key: value for key, value in asdict(replace(state, best={})).items() if key != "best"}
        self.storage.put(CHECKPOINT, save(tensors, metadata={"state": json.dumps(facts)}))

    def resume(self) -> bool:
        """Go on from the checkpoint in the folder; False if there is none. Raises `HeadRecordUnreadable`."""
        if not self.storage.has(CHECKPOINT):
            return False
        path = self.storage.path / CHECKPOINT
        try:
            with safe_open(path, framework="pt") as file:
                facts = json.loads((file.metadata() or {})["state"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it cannot be iterated)
            facts["progress"] = list(typed(facts["progress"], tuple[TrainingProgress, ...]))
            state = TrainingState(**facts)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            hint = "delete it; --resume starts over"
            raise HeadRecordUnreadable(f"{path} cannot be read: {cut(str(error), 100)}", hint) from None
        state.best = {name: tensors[f"best.{name}"] for name in self.weights if f"best.{name}" in tensors}
        self._restore({name: tensors[f"weights.{name}"] for name in self.weights})
        for name, weight in self.weights.items():
            if f"step.{name}" in tensors:
                moments = {moment: tensors[f"{moment}.{name}"].to(weight.device) for moment in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[weight] = {"step": tensors[f"step.{name}"], **moments}
        self.state = state
        return True

    @torch.no_grad()
    def _restore(self, weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            self.weights[name].copy_(weight)


def steps_of(sizes: Sequence[int], batch_tokens: int, seed: int) -> Iterator[list[int]]:
    """Yield without end the texts of each step: all texts in an order of its own for each pass, as many as hold
    `batch_tokens` of `sizes`, one at least. A step may go over the end of a pass.
    """
    step, tokens, number = list[int](), 0, 0
    while True:
        for index in np.random.default_rng([seed, number]).permutation(len(sizes)).tolist():
            step.append(index)
            tokens += sizes[index]
            if tokens >= batch_tokens:
                yield step
                step, tokens = [], 0
        number += 1


def rows_of(batch: TextBatch, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the drafts of a depth, in rounds that begin in the continuation, of its tokens: text and drafted position [n].
    Base b of depth d drafts position b + d + 1, and its round begins at b + 2.
    """
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for number, (prompt, size) in enumerate(zip(batch.prompt.tolist(), batch.size.tolist(), strict=True)):
        places = np.arange(max(prompt + depth - 1, depth + 1), size)
        found.append((np.full(len(places), number), places))
    row, at = (torch.from_numpy(np.concatenate(parts)).to(batch.ids.device) for parts in zip(*found, strict=True))
    return row, at


def drafts(prompt: int, size: int, depth: int) -> int:
    """Return how many drafts of a depth a text has."""
    return max(0, size - max(prompt + depth - 1, depth + 1))


def logits_by_depth(
    network: Eagle3, batch: TextBatch, depths: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield for depth 1, 2, ... `depths` what `rows_of` gives, and logits [n, ids]: by the same pass that scores a head."""
    first = max(0, int(batch.prompt.min()) - 2)
    for depth, states in enumerate(network.states(batch.ids, batch.states, depths, first), 1):
        row, at = rows_of(batch, depth)
        yield row, at, network.logits(states[row, at - depth - 1 - first], depth)


def losses(network: Eagle3, batch: TextBatch, law: TargetLaw, depths: int) -> list[torch.Tensor]:
    """For each depth the sum over its drafts of KL(p || q): p the target's law over the head's ids, q the head's."""
    sums = []
    row, at = rows_of(batch, 1)  # deeper drafts are of some of these positions
    place = torch.full(batch.whole.shape, -1, device=batch.ids.device)
    place[row, at] = torch.arange(len(row), device=batch.ids.device)
    known = law(batch.last[row, at - 1])
    for row, at, logits in logits_by_depth(network, batch, depths):
        p = known[place[row, at]]
        sums.append((p.exp() * (p - logits.float().log_softmax(-1))).sum())
    return sums


@torch.no_grad()
def right(network: Eagle3, batch: TextBatch, depths: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By depth [depths]: how many drafts are the text's token, how many drafts there are, and in how many rounds of those
    that begin anywhere all drafts up to the depth are.
    """
    agree, starts, prefix = (np.zeros(depths, dtype=np.int64) for _ in range(3))
    going = torch.ones(batch.whole.shape, dtype=torch.bool, device=batch.ids.device)
    for depth, (row, at, logits) in enumerate(logits_by_depth(network, batch, depths)):
        top, base = logits.argmax(-1), at - depth - 2
        hit = (top if network.ids is None else network.ids[top]) == batch.whole[row, at]
        agree[depth], starts[depth] = int(hit.sum()), len(hit)
        reached = torch.zeros_like(going)
        reached[row, base] = hit & going[row, base]
        going = reached
        prefix[depth] = int(going.sum())
    return agree, starts, prefix
