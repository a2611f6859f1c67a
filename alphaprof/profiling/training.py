"""`train`: the texts of a run in, an EAGLE-3 head out, and a run that profiles it on texts that it has not seen. In this
order: the training as a whole, its steps, its loss, and what the head reads.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import pickle
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from alphaprof.config.options import Eagle3Draft
from alphaprof.config.profile import ProfileOptions
from alphaprof.errors import DataEmpty, HeadRecordUnreadable, LogitsNotFinite, RunExists, RunMismatch, cut
from alphaprof.profiling.checks import as_measured
from alphaprof.profiling.heads.eagle import EMBEDDING, Eagle3
from alphaprof.profiling.heads.eagle_new import config_content, is_plain, new_head, require_trainable, weights_content
from alphaprof.profiling.models.identity import eos_of, special_ids, tokenizer_fingerprint
from alphaprof.profiling.models.kinds import load_draft
from alphaprof.profiling.models.load import Model, load_model, load_tokenizer
from alphaprof.profiling.models.memory import free_memory
from alphaprof.profiling.models.teacher_forced import FINAL, TeacherForced, recorded
from alphaprof.profiling.profile import in_memory, profile, set_threads
from alphaprof.profiling.shard import Progress
from alphaprof.profiling.texts.continuations import batches
from alphaprof.run.manifest import MANIFEST
from alphaprof.run.place import TRAINING
from alphaprof.run.reader import Run
from alphaprof.run.split import PARTS, STOP, TEST, TRAIN, RunText, learnable, split, texts_of
from alphaprof.run.storage import LocalStorage, writing
from alphaprof.stats.grouping import filled
from alphaprof.totals.pool import decoded_totals

WEIGHTS, CONFIG = "model.safetensors", "config.json"
CHECKPOINT = "training.checkpoint"  # the last one, until the training is complete
TESTED, HEAD = "tested", "head"  # the run in the folder of a head that tests it, and its draft there
EPOCHS = 10  # unless steps are given
LOOKS = 20  # times that a training looks at the stop part, and writes a checkpoint
WARM_UP = 0.1  # of the steps
BETAS, CLIP = (0.9, 0.95), 1.0
DECAY = 0.8  # the weight of a depth's loss as a share of that of the depth before it
MOST_IDS = 32_000  # that a new head proposes: what published heads have
IN_MEMORY = 0.25  # of the memory that is free: states of more than that are kept on disk
ROWS = 1024  # rows whose whole logits are made at a time


@dataclass(frozen=True)
class TrainingOptions:
    """What `alphaprof train` can be asked for; see `alphaprof train --help`."""

    steps: int | None = None
    ttt: int = 3
    batch_tokens: int = 1536
    learning_rate: float = 2e-3
    loss: str = "kl"
    init: str | None = None
    share: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class TrainingRecord:
    """training.json, beside the weights of a head. `target`: its fingerprint; `tokens`: of continuations in the train part;
    `units`: the independent units of each part; `learned`: those that the head has learned from, as the head that it began
    with had (None: nothing says what that one had); `steps`: None until the training is complete; `progress`: of each look,
    step, loss by depth since the look before, and shares of stop rounds that accept at least 1, 2, ... drafts.
    """

    options: dict[str, Any]
    run: str
    target: str
    tokens: int
    units: dict[str, list[str]]
    learned: list[str] | None
    steps: int | None = None
    best_step: int = 0
    progress: list[dict[str, Any]] = field(default_factory=list)
    schema: str = "alphaprof-training-5"

    def write(self, storage: LocalStorage) -> None:
        """Write it into the folder of the head."""
        storage.put(TRAINING, (json.dumps(asdict(self), indent=1, allow_nan=False) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> TrainingRecord:
        """Return that in the folder of a head. Raises `HeadRecordUnreadable`."""
        try:
            record = cls(**json.loads((folder / TRAINING).read_bytes()))
            if record.schema != cls.schema:
                raise ValueError(f"it has the schema {record.schema}, not {cls.schema}")
        except (OSError, TypeError, ValueError) as error:
            raise HeadRecordUnreadable(
                f"{folder / TRAINING} cannot be read: {cut(str(error), 100)}",
                "train it again; without this file --init takes it as a head of unknown texts",
            ) from None
        return record


def train(
    options: ProfileOptions, run_name: str, out: Path, asked: TrainingOptions, progress: Progress, resume: bool = False
) -> Run:
    """Train a head on the texts of a run into the folder `out`, and return the run there that tests it on the test part.
    `resume`: go on after the last checkpoint in the folder. Raises the errors of `errors.py`.
    """
    storage = LocalStorage(out)
    storage.require_writable()
    names = [name for name in os.listdir(out) if not name.startswith(".")] if out.is_dir() else []
    if names and not (resume and TRAINING in names):
        what = f"a {TRAINING}" if TRAINING in names else f"files but no {TRAINING}"
        raise RunExists(f"{out} holds {what}", "choose a new directory for --out; --resume finishes a training")
    run = Run.open(run_name)
    run.require_complete()
    every = texts_of(run)
    texts = learnable(every, asked.ttt)
    if not texts:
        raise DataEmpty(
            f"{run_name} has no text by the target that is longer than the {asked.ttt} trained depths",
            "profile with continuation kind greedy or sampled and a larger max_new_tokens, or lower --ttt",
        )
    if left := len(every) - len(texts):
        progress.say(f"{left} of {len(every)} documents are left out: too short, or not the target's text")
    before: list[str] | None = []
    if asked.init is not None:
        before = TrainingRecord.read(Path(asked.init)).learned if os.path.exists(Path(asked.init, TRAINING)) else None
        if before is None:
            progress.say(f"warning: nothing says which texts {asked.init} has learned from; test texts may be among them")
    parts = split(texts, before or ())
    for note in parts.notes:
        progress.say(note)
    if not all(parts.units.values()):
        found = ", ".join(f"{len(units)} to {part}" for part, units in parts.units.items())
        hint = "profile more prompts: each part needs one that is not a near-copy of a prompt in another part or of --init"
        raise DataEmpty(f"{run_name} has too few independent units: {found}", hint)
    units = {part: list(parts.units[part]) for part in PARTS}
    units[TRAIN] = units[TRAIN][: max(1, round(asked.share * len(units[TRAIN])))]  # digests: in an order as good as random
    kept = set(units[TRAIN])
    train_on = [text for text in texts if text.unit in kept]
    record = TrainingRecord(
        options=asdict(asked),
        run=run_name,
        target=run.manifest.target.fingerprint,
        tokens=sum(len(text.ids) for text in train_on),
        units=units,
        learned=None if before is None else sorted({*before, *units[TRAIN]}),
    )
    if TRAINING in names:
        begun = TrainingRecord.read(out)
        theirs, ours = ({**vars(each), **each.options} for each in (begun, record))
        same = (*record.options, "target", "tokens", "units", "learned")
        if changed := [name for name in same if theirs.get(name) != ours[name]]:
            raise RunMismatch(
                f"{out} is another training (other {', '.join(changed)})",
                "resume with the options and the run of the first call, or choose another --out",
            )
        record = begun
    if record.steps is None:
        with in_memory():
            fit(as_measured(options, run.manifest), run, train_on, parts.of(texts, STOP), record, storage, progress)
    storage.remove(CHECKPOINT)
    # Profile it on the test part, with the other options of the profile.
    tree = options.model_dump(mode="json") | {name: run.manifest.config[name] for name in ("data", "continuation")}
    update = {
        "drafts": {HEAD: Eagle3Draft(kind="eagle3", model=str(out.absolute()))},
        "decision": options.decision.model_copy(update={"draft": "auto"}),
    }
    options = type(options).model_validate(tree).model_copy(update=update)
    resume = LocalStorage(out / TESTED).has(MANIFEST)
    reuse = None if resume else Path(run_name)
    return profile(options, out / TESTED, progress, resume, reuse, units=frozenset(parts.units[TEST]))


def summary(out: Path, tested: Run) -> str:
    """Return what the head in a folder reaches on the test part, and what to do next, in a line."""
    table, record = tested.documents(), TrainingRecord.read(out)
    totals, _ = decoded_totals(tested, HEAD, table, tested.manifest.profile.decision.rule)
    accepted = totals["accepted"].sum() / max(totals["proposals"].sum(), 1)
    rounds = [f"{totals['tokens'].sum() / max(totals[f'rounds_{gamma}'].sum(), 1):.2f}" for gamma in tested.gammas]
    return (
        f"{out}: {record.steps} steps, best at step {record.best_step}; {len(table)} test documents: {accepted:.1%} of "
        f"first drafts accepted, {', '.join(rounds)} tokens per round at gamma {', '.join(map(str, tested.gammas))}. "
        f"Next: alphaprof report {shlex.quote(str(out / TESTED))}"
    )


def fit(
    options: ProfileOptions,
    run: Run,
    texts: Sequence[RunText],
    stop: Sequence[RunText],
    record: TrainingRecord,
    storage: LocalStorage,
    progress: Progress,
) -> None:
    """Train a head on some texts into a folder, which has its last checkpoint and the weights that are best on the texts
    `stop`. Raises `LogitsNotFinite` if a loss is not finite; the best weights so far are there then.
    """
    asked, threads = TrainingOptions(**record.options), options.execution.threads
    set_threads(run.manifest.environment["torch_threads"] if threads == "auto" else threads)
    progress.say(f"loading {options.target.model}")
    tokenizer = load_tokenizer(options.target)
    target = load_model("target", options.target, options.target.dtype, extra_eos=eos_of(tokenizer))
    if target.digest != record.target or tokenizer_fingerprint(tokenizer) != run.manifest.tokenizer:
        raise RunMismatch(
            f"{record.run} was made with another target, dtype or tokenizer than {options.target.model}",
            "give the run's own profile: a head learns from the target that wrote its texts",
        )
    require_trainable(target)
    network: Any
    if asked.init is None:
        network = new_head(
            target, frequent_ids(texts, {*special_ids(tokenizer), *target.eos}, target.vocabulary), asked.seed
        )
    else:
        where = str(Path(asked.init).absolute()) if os.path.exists(asked.init) else asked.init  # else on the hub
        head: Any = load_draft("init", Eagle3Draft(kind="eagle3", model=where, dtype="float32"), options, target, tokenizer)
        network = head.network
    weights = {name: weight for name, weight in network.named_parameters() if name != EMBEDDING}
    for name, weight in network.named_parameters():
        weight.requires_grad_(name in weights)
    optimizer = torch.optim.AdamW(weights.values(), asked.learning_rate, BETAS, weight_decay=0.0)
    steps, step, looks = asked.steps or -(-EPOCHS * record.tokens // asked.batch_tokens), 0, list[dict[str, Any]]()
    storage.make()
    storage.remove_temporary()
    record.write(storage)
    storage.put(CONFIG, config_content(network, target, asked.ttt))
    if storage.has(CHECKPOINT):
        step, looks = restore(storage.path / CHECKPOINT, weights, optimizer)
        progress.say(f"resuming after step {step}")
    progress.start("states of the target", len(texts) + len(stop), "documents")
    train_on, stop_on = (
        States(target, network.layers, part, storage.path, options.padded_tokens, progress) for part in (texts, stop)
    )
    law, losses = TargetLaw(target, network.ids), list[np.ndarray[Any, Any]]()
    order = itertools.islice(steps_of([len(text.ids) for text in texts], asked.batch_tokens, asked.seed), step, None)
    progress.start("training", steps, "steps")
    progress.advance(step)
    while True:
        if (step % max(1, steps // LOOKS) == 0 or step == steps) and step not in [look["step"] for look in looks]:
            counts = np.zeros((2, asked.ttt))
            for part in batches([len(text.tokens) for text in stop], options.padded_tokens):
                counts += accepted(network, stop_on.batch(part), asked.ttt)
            loss = np.mean(losses, axis=0).tolist() if losses else []
            looks.append({"step": step, "loss": loss, "accepted": (counts[0] / counts[1]).tolist()})
            losses.clear()
            best = max(looks, key=lambda look: sum(look["accepted"]))
            if best is looks[-1]:
                storage.put(WEIGHTS, weights_content(network, target.dtype))
            content = io.BytesIO()
            torch.save({"step": step, "looks": looks, "weights": weights, "optimizer": optimizer.state_dict()}, content)
            storage.put(CHECKPOINT, content.getvalue())
            shown = f"loss {np.mean(loss):.2f}, " if loss else ""
            progress.relabel(
                f"training: {shown}accepted on held-out texts {' '.join(f'{s:.3f}' for s in looks[-1]['accepted'])}"
            )
        if step == steps:
            break
        rate = min(1.0, (step + 1) / (WARM_UP * steps)) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = asked.learning_rate * rate
        optimizer.zero_grad()
        losses.append(backward(network, train_on, next(order), law, asked, options.padded_tokens))
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), CLIP)
        if not (np.isfinite(losses[-1]).all() and torch.isfinite(norm)):
            problem = f"the loss of step {step + 1} is not finite (learning rate {asked.learning_rate * rate:.2g})"
            kept = f"the weights of step {best['step']}, the best so far, are in {storage.shown}"
            raise LogitsNotFinite(
                problem, f"{kept}; use another --out and a lower --learning-rate, from scratch or these weights (--init)"
            )
        optimizer.step()
        step += 1
        progress.advance(1)
    replace(record, steps=steps, best_step=best["step"], progress=looks).write(storage)


def restore(path: Path, weights: dict[str, Any], optimizer: torch.optim.Optimizer) -> tuple[int, list[dict[str, Any]]]:
    """Set weights and optimizer to a checkpoint, and return its step and looks. Raises `HeadRecordUnreadable`."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(state["weights"][name])
        optimizer.load_state_dict(state["optimizer"])
        return state["step"], state["looks"]
    except (OSError, EOFError, KeyError, TypeError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise HeadRecordUnreadable(
            f"{path} cannot be read: {cut(str(error), 100)}", "delete it; --resume starts over"
        ) from None


def steps_of(sizes: Sequence[int], batch_tokens: int, seed: int) -> Iterator[list[int]]:
    """Return without end the texts of each step: all texts in an order of its own for each epoch, as many as hold
    `batch_tokens` of `sizes`, one at least. A step may go over the end of an epoch.
    """
    epochs = (np.random.default_rng([seed, epoch]).permutation(len(sizes)).tolist() for epoch in itertools.count())
    return filled(((index, sizes[index]) for epoch in epochs for index in epoch), batch_tokens)


def backward(
    network: Eagle3, states: States, chosen: Sequence[int], law: TargetLaw, asked: TrainingOptions, budget: int
) -> np.ndarray[Any, Any]:
    """Add the gradients of some texts, as many at a time as `budget` padded tokens hold, and return the loss by depth, the
    mean over drafts [depths].
    """
    texts = [states.texts[index] for index in chosen]
    counts = [max(1, sum(drafts(text, depth) for text in texts)) for depth in range(1, asked.ttt + 1)]
    total = np.zeros(asked.ttt)
    for part in batches([len(text.tokens) for text in texts], budget):
        sums = losses_by_depth(network, states.batch([chosen[index] for index in part]), law, asked)
        means = [each / count for each, count in zip(sums, counts, strict=True)]
        sum(mean * DECAY**index for index, mean in enumerate(means)).backward()  # type: ignore[union-attr]
        total += torch.stack(means).detach().cpu().numpy()
    return total


def drafts(text: RunText, depth: int) -> int:
    """Return how many drafts of a depth a text has: of its last tokens. Base b of depth d drafts token b + d + 1, and its
    round begins at b + 2, in the continuation.
    """
    return max(0, len(text.tokens) - max(len(text.prompt) + depth - 1, depth + 1))


@dataclass(frozen=True)
class TextBatch:
    """Texts, right-padded: `tokens` [batch, length + 1]; of all but the last of them `states` [batch, length, features] of
    the target that a head reads, and `last` [batch, length, hidden] after its final norm.
    """

    texts: list[RunText]
    tokens: torch.Tensor
    states: torch.Tensor
    last: torch.Tensor

    def drafted(self, depth: int) -> torch.Tensor:
        """Whether a token is drafted at a depth [batch, length + 1]."""
        sizes = torch.tensor([[len(text.tokens), drafts(text, depth)] for text in self.texts], device=self.tokens.device)
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (places < sizes[:, :1]) & (places >= sizes[:, :1] - sizes[:, 1:])


def logits_by_depth(network: Eagle3, batch: TextBatch, depths: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield for depth 1, 2, ... `depths` which tokens are drafted [batch, length + 1], and the logits [n, ids] of these
    drafts, by the same pass that scores a head; in 16 bits where the target has them and the device is a GPU.
    """
    first = max(0, min(len(text.prompt) for text in batch.texts) - 2)
    short = network.device.type == "cuda" and batch.states.dtype != torch.float32
    with torch.autocast("cuda", torch.bfloat16) if short else contextlib.nullcontext():
        for depth, states in enumerate(network.states(batch.tokens[:, :-1], batch.states, depths, first), 1):
            drafted = batch.drafted(depth)
            row, at = drafted.nonzero(as_tuple=True)
            yield drafted, network.logits(states[row, at - depth - 1 - first], depth)


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p || q), summed over drafts, of log probabilities [n, ids] of target and head."""
    return (p.exp() * (p - q)).sum()


def lk(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) where little is accepted, and 1 - acceptance where much is, summed over drafts: the adaptive blend of LK
    losses (arXiv:2602.23881), by draft. Acceptance is the sum over ids of min(p, q).
    """
    acceptance = torch.minimum(p, q).exp().sum(-1)
    share = torch.exp(-3 * acceptance.detach())
    return (share * (p.exp() * (p - q)).sum(-1) + (1 - share) * (1 - acceptance)).sum()


LOSSES = {"kl": kl, "lk": lk}


def losses_by_depth(network: Eagle3, batch: TextBatch, law: TargetLaw, asked: TrainingOptions) -> list[torch.Tensor]:
    """Return the loss of each depth, summed over drafts."""
    first = batch.drafted(1)  # deeper drafts are of some of these tokens
    place = first.flatten().cumsum(0).view(first.shape) - 1
    row, at = first.nonzero(as_tuple=True)
    p = law(batch.last[row, at - 1])
    found = logits_by_depth(network, batch, asked.ttt)
    return [LOSSES[asked.loss](p[place[drafted]], logits.float().log_softmax(-1)) for drafted, logits in found]


class TargetLaw:
    """The target's distribution over the ids that a head can propose: its softmax, renormalized over them, as EAGLE-3 and
    speculators do, before any temperature or truncation.
    """

    def __init__(self, target: Model, ids: torch.Tensor | None) -> None:
        self.forced, self.ids = TeacherForced(target), slice(None) if ids is None else ids
        weight: Any = target.network.get_output_embeddings().weight
        self.rows: torch.Tensor | None = weight[self.ids] if is_plain(weight) and ids is not None else None
        if self.rows is not None:  # few rows alone are enough if there is no bias, cap or scale
            probe = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
            full = self.forced.logits(probe)[:, self.ids].float()
            off, most = (probe @ self.rows.T - full).abs().max(), 8 * torch.finfo(weight.dtype).eps
            self.rows = self.rows if off <= most * full.abs().max().clamp(min=1.0) else None

    @torch.no_grad()
    def __call__(self, last: torch.Tensor) -> torch.Tensor:
        """Log probabilities [n, ids], in float32, of states [n, hidden] after the final norm."""
        with torch.autocast(last.device.type, enabled=False):  # in the target's dtype, whatever a head is trained in
            parts = [
                self.forced.logits(part)[:, self.ids] if self.rows is None else part @ self.rows.T
                for part in torch.split(last, ROWS)
            ]
            return torch.cat(parts).float().log_softmax(-1)


@torch.no_grad()
def accepted(network: Eagle3, batch: TextBatch, depths: int) -> np.ndarray[Any, Any]:
    """Return by depth [2, depths] in how many rounds all drafts up to it are the text's tokens, and how many there are; a
    round begins at every token of the continuation.
    """
    counts = np.zeros((2, depths))
    going = torch.ones_like(batch.tokens, dtype=torch.bool)  # by the token that a round begins at
    for index, (drafted, logits) in enumerate(logits_by_depth(network, batch, depths)):
        row, at = drafted.nonzero(as_tuple=True)
        top = logits.argmax(-1)
        hit = (top if network.ids is None else network.ids[top]) == batch.tokens[row, at]
        reached = torch.zeros_like(going)
        reached[row, at - index] = hit & going[row, at - index]
        going = reached
        counts[:, index] = int(going.sum()), len(hit)
    return counts


class States:
    """The target's states on some texts, after the layers that a head reads and after its final norm: in memory if a
    quarter of what is free holds them, else in a file without a name in `folder`, which vanishes with the process. Raises
    `DiskFull`.
    """

    def __init__(
        self, target: Model, layers: Sequence[int], texts: Sequence[RunText], folder: Path, budget: int, progress: Progress
    ) -> None:
        self.texts, self.device = texts, target.device
        self.hidden = int(target.network.config.get_text_config().hidden_size)
        ends = np.cumsum([len(text.tokens) - 1 for text in texts]).tolist()
        self.places = [slice(*pair) for pair in itertools.pairwise([0, *ends])]
        shape = ends[-1], self.hidden * (1 + len(layers))
        size = math.prod(shape) * target.dtype.itemsize
        if size <= IN_MEMORY * free_memory():
            self.kept = torch.empty(shape, dtype=target.dtype)
        else:
            progress.say(f"{size / 2**30:,.1f} GiB of the target's states are kept on disk, in {folder}")
            with writing(folder), tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error now, not a signal later
                mapped = np.memmap(file, dtype=np.uint8, mode="r+", shape=(size,))
            self.kept = torch.from_numpy(mapped).view(target.dtype).view(shape)
        base = target.decoder
        for chosen in batches([len(text.tokens) for text in texts], budget):
            ids = padded([texts[index].tokens[:-1] for index in chosen])
            with torch.no_grad(), recorded(base, (*layers, FINAL)) as states:
                base(input_ids=ids.to(target.device), use_cache=False)
            found = torch.cat([states[count].to(target.device) for count in (*layers, FINAL)], -1).cpu()
            for index, each in zip(chosen, found, strict=True):
                self.kept[self.places[index]] = each[: len(texts[index].tokens) - 1]
            progress.advance(len(chosen))

    def batch(self, chosen: Sequence[int]) -> TextBatch:
        """Return some of the texts, on the target's device."""
        texts = [self.texts[index] for index in chosen]
        states = pad_sequence([self.kept[self.places[index]] for index in chosen], batch_first=True).to(self.device)
        tokens = padded([text.tokens for text in texts]).to(self.device)
        return TextBatch(texts, tokens, states[..., : -self.hidden], states[..., -self.hidden :])


def padded(texts: Sequence[np.ndarray[Any, Any]]) -> torch.Tensor:
    """Return ids [batch, length] of some texts, padded on the right."""
    return pad_sequence([torch.from_numpy(text.astype(np.int64)) for text in texts], batch_first=True)


def frequent_ids(texts: Sequence[RunText], always: set[int], size: int) -> torch.Tensor:
    """Return the ids that a new head proposes for a target with `size` logits, ascending: those of `always`, and those that
    occur in continuations, the most frequent ones if there are too many.
    """
    counts = np.bincount(np.concatenate([text.ids for text in texts]), minlength=size)[:size]
    counts[[token for token in always if token < size]] = counts.sum() + 1
    order = np.argsort(-counts, kind="stable")[:MOST_IDS]
    return torch.from_numpy(np.sort(order[counts[order] > 0]))
