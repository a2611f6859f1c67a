"""Draft heads on a GPU: whether all depths of one pass are those of the head at work, and what they cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from unittest.mock import Mock

import numpy as np
import torch

from alphaprof.config.options import MeasuredCosts
from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.heads.eagle_new import new_head
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.scoring.scorer import Scorer
from alphaprof.profiling.timing.latency import Subjects, measure
from alphaprof.profiling.timing.steppers import read, seconds
from alphaprof.profiling.training import BETAS, CLIP, States, TargetLaw, TrainingOptions, backward
from alphaprof.run.split import RunText
from scripts.gpu.memory import GIB, most_allocated
from scripts.gpu.setting import Line, Setting, random_head
from scripts.gpu.speed import DRAFT, TARGET, against_bare, judged, scored_batches, spread, within

DEPTHS, GAMMA = 8, 5
STEPS = 8  # updates of a training
BOUND = 1e-4  # of a logit in float32, as a share of the largest
MOST_COST = 1.15  # scoring with a head of one layer / bare passes of target and depths


def on(setting: Setting, target: Model) -> HeadDraft:
    """A random head of one layer on a target, of a reduced vocabulary."""
    layers = len(target.network.base_model.layers)
    return random_head(target, (1, layers // 2, layers - 1), min(32_000, target.vocabulary // 2), DEPTHS)


def depths(setting: Setting) -> Iterator[Line]:
    """Logits of one pass over a text against those of the cache, which is given the same text a few tokens at a time: equal
    up to rounding in float32, and a share of equal top tokens in 16 bits.
    """
    torch.set_float32_matmul_precision("highest")
    for dtype in (torch.float32, setting.dtypes[0]):
        target = setting.loaded(DRAFT, dtype)
        head = on(setting, target)
        text = np.random.default_rng(5).integers(1, target.vocabulary, 40 if setting.tiny else 600).astype(np.int32)
        seen = compared(head, target, text)
        name = str(dtype).removeprefix("torch.")
        words = f"{name}: {seen.rounds} rounds of {DEPTHS} depths, logits of one pass and of steps apart by at most "
        words += f"{seen.apart:.2g} of the largest; top tokens equal {100 * seen.equal:.2f} %"
        ok = seen.apart < BOUND and seen.equal > 0.99 if dtype == torch.float32 else None
        yield Line(words, {"dtype": name, "apart": seen.apart, "equal": seen.equal, "rounds": seen.rounds}, ok)
        del target, head
        setting.clean()


@dataclass(frozen=True)
class Compared:
    """Rounds in which logits were compared, how far these were apart at most, and the share of equal top tokens."""

    rounds: int
    apart: float
    equal: float


@torch.inference_mode()
def compared(head: HeadDraft, target: Model, text: np.ndarray) -> Compared:
    """Rounds that begin 1 to 6 tokens after each other, each with the tokens of the text as drafts."""
    network = head.network
    ids, features = read(target, network, text)
    padded = torch.cat([features, features[-1:]])[None]
    whole = [
        network.logits(states[0], depth) for depth, states in enumerate(network.states(ids[None], padded, DEPTHS, 0), 1)
    ]
    cache, begin, rounds, equal = network.cache(), 0, 0, 0
    apart = torch.zeros((), device=network.device)
    while begin < len(ids) - DEPTHS - 7:
        base = begin + 1 + rounds % 6
        state = cache.extend(ids[None, begin + 1 : base + 2], features[None, begin : base + 1])
        for depth in range(1, DEPTHS + 1):
            if depth > 1:
                state = cache.deepen(ids[base + depth][None], state, depth)
            logits, other = network.logits(state, depth)[0].float(), whole[depth - 1][base].float()
            apart = torch.maximum(apart, (logits - other).abs().max() / other.abs().max())
            equal += int(logits.argmax() == other.argmax())
        begin, rounds = base + 1, rounds + 1
    return Compared(rounds, float(apart), equal / (rounds * DEPTHS))


def cost(setting: Setting) -> Iterator[Line]:
    """Scoring against bare passes of the target and of every depth; steps against the target's decode step, both eager."""
    setting = within(setting, 45)
    target = setting.loaded(TARGET, setting.dtypes[0])
    head = on(setting, target)
    batches = scored_batches(setting, target)
    found = against_bare(setting, Scorer(target, [head], target.vocabulary), batches, 5)
    ok = judged(setting, found[0] <= MOST_COST)
    yield Line(f"scoring / bare passes, {TARGET} with a head, {DEPTHS} depths: {spread(found)}", {"ratio": found}, ok)
    context, batch = (16, 2) if setting.tiny else (2048, 8)
    costs = MeasuredCosts(source="measured", concurrency=[batch], context=[context], repeats=9, budget=20.0)
    text = np.random.default_rng(0).integers(0, target.vocabulary, context).astype(np.int32)
    table = measure(Subjects(target, [head], text, GAMMA), costs, lambda _: None).table.to_pylist()
    ms = {(row["model"], row["step"], row["tokens"]): row["median_ms"] for row in table}
    decode, later = ms["target", "decode", 1], ms["head", "draft", 1]
    first = [ms["head", "draft_first", tokens] for tokens in range(1, GAMMA + 2)]
    words = f"a head's steps, batch {batch}, context {context:,}, in decode steps ({decode:.2f} ms): a later one "
    words += f"{later / decode:.3f}, the first over 1 to {GAMMA + 1} tokens " + ", ".join(f"{t / decode:.3f}" for t in first)
    yield Line(words, {"decode_ms": decode, "later_ms": later, "first_ms": first})


def training(setting: Setting) -> Iterator[Line]:
    """Updates of a head of 32,000 ids on texts of random tokens, again and again the same ones: the loss of each, the time
    of an update, the most memory, and the states of the target, which are made once.
    """
    setting = within(setting, 45)
    target = setting.loaded(TARGET, setting.dtypes[0])
    size, count = (24, 4) if setting.tiny else (1024, 16)
    tokens = np.random.default_rng(1).integers(0, target.vocabulary, (count, size)).astype(np.int32)
    texts = [
        RunText(number, "a", str(number), True, row[: size // 4], row[size // 4 :]) for number, row in enumerate(tokens)
    ]
    ids = torch.linspace(0, target.vocabulary - 1, min(32_000, target.vocabulary // 2)).long()
    network = new_head(target, ids, seed=0)
    began = time.monotonic()
    states = States(target, network.layers, texts, setting.folder, 8192, Mock())
    states_s = time.monotonic() - began
    law, asked = TargetLaw(target, ids.to(target.device)), TrainingOptions()
    weights = [weight.requires_grad_(True) for weight in network.parameters()]
    optimizer = torch.optim.AdamW(weights, 1e-3, BETAS, weight_decay=0.0)
    losses: list[float] = []
    times: list[float] = []

    def work() -> None:
        optimizer.zero_grad()
        losses.append(float(backward(network, states, range(count), law, asked, 8192)[0]))
        torch.nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()

    def update() -> None:
        times.append(seconds(target.device, work))

    update()  # what kernels need once is not in the figures
    memory = most_allocated(target.device, update)
    while len(losses) < STEPS and setting.left() > 0:
        update()
    ok = all(np.isfinite(losses)) and losses[-1] < losses[0]
    drafts = size * 3 // 4 * count
    words = f"{drafts:,} tokens an update, {TARGET}, three depths, {len(ids):,} ids: {min(times[1:]):.3f} s, "
    words += f"{memory / GIB:.2f} GiB beside target and head; states made at {count * size / states_s:,.0f} tokens/s, "
    words += f"{states.kept.nbytes / 2**20:,.0f} MiB; loss {losses[0]:.2f} to {losses[-1]:.2f} in {len(losses)} updates"
    figures = {"seconds": times, "losses": losses, "bytes": memory, "states_s": states_s}
    yield Line(words, figures, bool(ok))
