"""train(): texts of a run in, a head out. Read it from top to bottom."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from alphaprof.config.options import Eagle3Draft
from alphaprof.errors import DataEmpty, LogitsNotFinite, PartsOverlap, RunExists, RunMismatch
from alphaprof.profiling.heads.eagle import Eagle3
from alphaprof.profiling.models.kinds import load_draft
from alphaprof.profiling.models.load import Model, eos_of, load_model, load_tokenizer, special_ids, tokenizer_fingerprint
from alphaprof.profiling.profile import as_measured, in_memory, profile, set_threads
from alphaprof.profiling.shard import Progress
from alphaprof.profiling.training.features import Features, TargetLaw
from alphaprof.profiling.training.initial import (
    CONFIG,
    WEIGHTS,
    Vocabulary,
    chosen_vocabulary,
    config_content,
    new_head,
    outside,
    prepared,
    require_trainable,
    trained_parameters,
    vocabulary_digest,
    weights_content,
)
from alphaprof.profiling.training.trainer import CHECKPOINT, Schedule, Trainer, TrainingState
from alphaprof.run.manifest import MANIFEST, require_one_scheme
from alphaprof.run.reader import Run
from alphaprof.run.split import (
    PARTS,
    RANDOM,
    STOP,
    TEST,
    TIME,
    TRAIN,
    RunText,
    Split,
    SplitBy,
    learnable,
    of_units,
    split,
    texts_of,
)
from alphaprof.run.storage import LocalStorage, storage_of
from alphaprof.run.training import (
    BEGINS,
    LEARNT,
    TESTED,
    TRAINING,
    DraftVocabulary,
    PartUnits,
    TrainingRecord,
    TrainingRun,
    TrainingSeconds,
    TrainingSize,
    TrainingTarget,
    learnt,
    read_training,
    split_words,
    texts_digest,
)
from alphaprof.totals.pool import decoded_totals
from alphaprof.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.profile import ProfileOptions

CARD = "README.md"
HEAD = "head"  # the draft in the run that tests it
PASSES = 10  # over the training texts, unless steps are given
HELD_OUT = ("data", "continuation")  # what the run of the texts decides, whatever the profile says
USE = """
## Use

As a draft of a profile:

```yaml
drafts:
  head: {{kind: eagle3, model: {name}}}
```

With vLLM, which reads these files as they are:

```bash
{command}
```

## License

The license of the texts is unknown to alphaprof. A head is made from its target and these texts: the licenses of both
apply. training.json holds every setting and the units of each part.
"""


@dataclass(frozen=True)
class TrainingOptions:
    """What `alphaprof train` can be asked for; see `alphaprof train --help`."""

    steps: int | None = None
    ttt: int = 3
    batch_tokens: int = 1536
    learning_rate: float = 2e-3
    draft_vocab: float | None = None
    init: str | None = None
    seed: int = 0
    split_seed: int = 0
    split: SplitBy = RANDOM


@dataclass(frozen=True)
class Workshop:
    """What a head is trained with: the profile, the target, and the texts of a run in three parts."""

    options: ProfileOptions
    asked: TrainingOptions
    run: Run
    run_name: str
    target: Model
    tokenizer: PreTrainedTokenizerBase
    texts: list[RunText]
    split: Split
    progress: Progress


def train(
    options: ProfileOptions, run: str, out: Path, asked: TrainingOptions, progress: Progress, resume: bool = False
) -> TrainingRecord:
    """Train a head on the texts of a run into the folder `out`, and test it in a run there. Raises the errors of
    `errors.py`.
    """
    require_free(out, resume)
    with in_memory():
        record = _trained(opened(options, run, asked, progress), out, resume)
    results = tested(options, run, out, record, progress)
    LocalStorage(out).put(CARD, card(record, results, out).encode())
    return record


def done(record: TrainingRecord, out: Path) -> str:
    """Return what was trained, and what to do next, in a line."""
    done = f"{out}: {record.steps} steps; best on stop documents: step {record.best_step}"
    return f"{done}. Next: name it as a draft, kind eagle3 (see {out / CARD})"


def require_free(out: Path, resume: bool) -> None:
    """Raise `RunExists` if a folder holds anything but a training to resume."""
    LocalStorage(out).require_writable()
    names = [name for name in os.listdir(out) if not name.startswith(".")] if out.is_dir() else []
    if names and (TRAINING not in names or not resume):
        what = f"a {TRAINING}" if TRAINING in names else f"files but no {TRAINING}"
        raise RunExists(f"{out} holds {what}", "choose a new directory for --out; --resume finishes a training")


def tested(options: ProfileOptions, source: str, head: Path, record: TrainingRecord, progress: Progress) -> Run:
    """Profile the head in a folder on the stop and test documents of the run `source` that it was trained from, with the
    other options of a profile. The run lies in this folder; one that is there is finished. Raises the errors of `errors.py`.
    """
    texts = Run.open(source).manifest.config
    drafts = {HEAD: Eagle3Draft(kind="eagle3", model=str(head.absolute()))}
    out = head / TESTED
    tree = options.model_dump(mode="json") | {name: texts[name] for name in HELD_OUT}
    decision = options.decision.model_copy(update={"draft": "auto"})
    asked = type(options).model_validate(tree).model_copy(update={"drafts": drafts, "decision": decision})
    resume = storage_of(out).has(MANIFEST)
    units = frozenset((*record.units.stop, *record.units.test))
    return profile(asked, out, progress, resume, None if resume else Path(source), units=units)


def opened(options: ProfileOptions, run_name: str, asked: TrainingOptions, progress: Progress) -> Workshop:
    """Load the target and the texts, and split these. Raises `RunMismatch` for a run that is not complete or has another
    target, `DataEmpty` if a part has no text that a head can be trained or tested on.
    """
    run = Run.open(run_name)
    run.require_complete()
    texts = texts_of(run)
    own = learnable(texts, asked.ttt)
    if not own:
        raise DataEmpty(
            f"{run_name} has no text by the target that is longer than the {asked.ttt} trained depths",
            "profile with continuation kind greedy or sampled and a larger max_new_tokens, or lower --ttt",
        )
    if len(own) < len(texts):
        progress.say(f"{len(texts) - len(own)} of {len(texts)} documents are left out: too short, or not the target's text")
    parts = split(own, asked.split_seed, by=asked.split)
    for note in parts.notes:
        progress.say(note)
    groups = {part: len({parts.groups[unit] for unit in parts.units[part]}) for part in PARTS}
    if not all(groups.values()):
        needs = "from different times" if asked.split == TIME else "that are not near-copies of each other"
        raise DataEmpty(
            f"{run_name} has too few independent units: {', '.join(f'{count} to {part}' for part, count in groups.items())}",
            f"profile more prompts: a head needs at least three {needs}",
        )
    threads = options.execution.threads
    set_threads(run.manifest.environment["torch_threads"] if threads == "auto" else threads)
    options = as_measured(options, run.manifest)
    progress.say(f"loading {options.target.model}")
    tokenizer = load_tokenizer(options.target)
    target = load_model("target", options.target, options.target.dtype, extra_eos=eos_of(tokenizer))
    before = run.manifest
    require_one_scheme(RunMismatch, f"no head can be trained on {run_name}", before.target.fingerprint, target.digest)
    if target.digest != before.target.fingerprint or tokenizer_fingerprint(tokenizer) != before.tokenizer:
        raise RunMismatch(
            f"{run_name} was made with another target, dtype or tokenizer than {options.target.model}",
            "give the run's own profile: a head learns from the target that wrote its texts",
        )
    require_trainable(target)
    return Workshop(options, asked, run, run_name, target, tokenizer, own, parts, progress)


def _trained(shop: Workshop, out: Path, resume: bool) -> TrainingRecord:
    """Train the head in the folder `out` and return its record."""
    network, ids = _beginning(shop)
    schedule, storage = _schedule(shop), LocalStorage(out)
    record = _record(shop, network, ids, schedule)
    begun = _begun_training(storage, record)
    if begun is not None and begun.status == "complete":
        shop.progress.say(f"{out} is complete already")
        storage.remove(CHECKPOINT)
        return begun
    storage.make()
    storage.remove_temporary()
    storage.put(TRAINING, record.to_json().encode())
    train_on, stop_on = (_features(shop, network.layers, out, part) for part in (TRAIN, STOP))
    law = TargetLaw(shop.target, None if ids is None else torch.from_numpy(ids))
    trainer = Trainer(network, law, train_on, stop_on, schedule, storage, _autocast(shop.target))
    if resume and trainer.resume():
        shop.progress.say(f"resuming after step {trainer.state.step}")
    try:
        state = trainer.run(shop.progress)
    except LogitsNotFinite:
        _write_head(storage, network, shop)
        raise
    _write_head(storage, network, shop)
    record = _finished(record, state, (train_on, stop_on))
    storage.put(TRAINING, record.to_json().encode())
    storage.remove(CHECKPOINT)
    return record


def _write_head(storage: LocalStorage, network: Eagle3, shop: Workshop) -> None:
    storage.put(WEIGHTS, weights_content(network, shop.target.dtype))
    storage.put(CONFIG, config_content(network, shop.target, shop.asked.ttt))


def _beginning(shop: Workshop) -> tuple[Eagle3, Vocabulary | None]:
    """Return the network to train and the ids that it proposes (None: all)."""
    asked, target = shop.asked, shop.target
    texts = shop.split.of(shop.texts, TRAIN)
    always = {*special_ids(shop.tokenizer), *target.eos}
    if asked.init is None or asked.draft_vocab is not None:
        ids = chosen_vocabulary(texts, asked.draft_vocab, always, target.vocabulary)
    if asked.init is None:
        return new_head(target, torch.from_numpy(ids), asked.seed), ids
    where = str(Path(asked.init).absolute()) if os.path.exists(asked.init) else asked.init  # else on the hub
    given = Eagle3Draft(kind="eagle3", model=where, dtype="float32")
    draft: Any = load_draft("init", given, shop.options, target, shop.tokenizer)
    network = prepared(draft, target, torch.from_numpy(ids) if asked.draft_vocab is not None else None)
    return network, None if network.ids is None else network.ids.cpu().numpy()


def _learnt_before(shop: Workshop, init: Path) -> list[str] | None:
    """Return the units that a head to begin with has learnt from; None if nothing says it. Raises `PartsOverlap` if units
    of the stop or test part are among them.
    """
    if not (init / TRAINING).is_file():
        return None
    seen = learnt(record := read_training(init))
    if both := (seen or frozenset(record.units.train)) & {*shop.split.units[STOP], *shop.split.units[TEST]}:
        raise PartsOverlap(
            f"{init} was trained on {len(both)} of the stop and test units",
            "split the texts as that training did (--split, --split-seed), or begin with another head",
        )
    return None if seen is None else sorted(seen)


def _settings(shop: Workshop, network: Eagle3, schedule: Schedule) -> dict[str, Any]:
    """Return all settings that fix the result."""
    target = shop.target
    settings = {
        **asdict(shop.asked),
        "steps": schedule.steps,
        "passes": None if shop.asked.steps else PASSES,
        "layers": list(network.layers),
        "gammas": list(shop.options.gammas),
        "padded_tokens": schedule.padded_tokens,
        "device": target.device.type,
        "dtype": target.dtype_name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "target": target.digest,
    }
    if shop.split.begins:
        settings[BEGINS] = {part: time.isoformat() for part, time in shop.split.begins.items()}
    if shop.asked.init is not None:
        settings[LEARNT] = _learnt_before(shop, Path(shop.asked.init))
    return settings


def _identity(settings: dict[str, Any], parts: dict[str, list[RunText]], network: Eagle3) -> str:
    """Return the digest over the settings, the texts of the parts and the first weights."""
    total = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for part in PARTS:
        for text in parts[part]:
            total.update(f"{part} {text.unit} {len(text.prompt)} {len(text.ids)} ".encode())
            total.update(text.tokens.tobytes())
    for name, weight in sorted(network.state_dict().items()):
        total.update(f"{name} {list(weight.shape)}".encode())
        total.update(weight.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


def _begun_training(storage: LocalStorage, record: TrainingRecord) -> TrainingRecord | None:
    """Return the record of the training in a folder. Raises `RunMismatch` if it is not the one that `record` begins."""
    if not storage.has(TRAINING):
        return None
    begun = read_training(storage.path)
    if begun.identity != record.identity:
        names = record.settings.keys() | begun.settings.keys()
        changed = sorted(name for name in names if begun.settings.get(name) != record.settings.get(name))
        what = f"{', '.join(changed)} changed" if changed else "other texts, or another head to begin with"
        hint = "resume with the options and the run of the first call, or choose another --out"
        raise RunMismatch(f"{storage.shown} is another training ({what})", hint)
    return begun


def _record(shop: Workshop, network: Eagle3, ids: Vocabulary | None, schedule: Schedule) -> TrainingRecord:
    """Return the record of a training that begins."""
    parts = {part: shop.split.of(shop.texts, part) for part in PARTS}
    texts, held_out, target = parts[TRAIN], parts[TEST], shop.target
    missed = sum(outside(ids, text) for text in held_out) / max(1, sum(len(text.ids) - 1 for text in held_out))
    every = np.arange(target.vocabulary) if ids is None else ids
    config = target.network.config.get_text_config()
    sizes = config.hidden_size, config.num_hidden_layers, target.vocabulary
    settings = _settings(shop, network, schedule)
    return TrainingRecord(
        alphaprof=__version__,
        status="running",
        run=TrainingRun(shop.run_name, texts_digest(shop.run.manifest)),
        target=TrainingTarget(target.reference, target.digest, *sizes),
        settings=settings,
        identity=_identity(settings, parts, network),
        size=TrainingSize(
            units=len(shop.split.units[TRAIN]),
            documents=len(texts),
            tokens=sum(len(text.ids) for text in texts),
            prompt_tokens=sum(len(text.prompt) for text in texts),
        ),
        units=PartUnits(**shop.split.units),
        vocabulary=DraftVocabulary(len(every), vocabulary_digest(every), 1 - missed),
        progress=(),
        best_step=0,
        steps=0,
        seconds=TrainingSeconds(0.0, 0.0, 0.0, 0.0),
        parameters=sum(weight.numel() for weight in trained_parameters(network).values()),
        device=torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "cpu",
    )


def _finished(record: TrainingRecord, state: TrainingState, features: Sequence[Features]) -> TrainingRecord:
    """Return the record of a training that has ended, and of what `features` of the training and the stop part took."""
    return replace(
        record,
        status="complete",
        progress=tuple(state.progress),
        best_step=state.best_step,
        steps=state.step,
        seconds=TrainingSeconds(
            sum(each.seconds for each in features),
            state.seconds["training"],
            state.seconds["testing"],
            sum(each.cpu for each in features) + state.seconds["cpu"],
        ),
    )


def _features(shop: Workshop, layers: tuple[int, ...], out: Path, part: str) -> Features:
    """Return the target's states on the texts of a part."""
    texts = shop.split.of(shop.texts, part)
    features = Features(shop.target, layers, texts, out, shop.options.padded_tokens)
    where = f"on disk, in {out}" if features.on_disk else "in memory"
    shop.progress.say(f"states of the target, {part}: {features.bytes / 2**20:,.0f} MiB, {where}")
    shop.progress.start("states of the target", len(texts), "documents")
    features.fill(shop.progress.advance)
    return features


def _schedule(shop: Workshop) -> Schedule:
    asked, tokens = shop.asked, sum(len(text.ids) for text in shop.split.of(shop.texts, TRAIN))
    steps = asked.steps or max(1, -(-PASSES * tokens // asked.batch_tokens))
    return Schedule(steps, asked.ttt, asked.batch_tokens, shop.options.padded_tokens, asked.learning_rate, asked.seed)


def _autocast(target: Model) -> torch.dtype | None:
    """Return the dtype that the head computes in beside float32: 16 bits on a GPU whose target has them."""
    return torch.bfloat16 if target.device.type == "cuda" and target.dtype != torch.float32 else None


def card(record: TrainingRecord, run: Run, folder: Path) -> str:
    """Return the text of README.md in the folder of a head; `run` tested it, as the draft `HEAD`."""
    size, target = record.size, record.target
    trained = "fine-tuned" if record.settings.get("init") else "trained from the target's last layer"
    facts = {
        "target": f"{target.model} (fingerprint {target.fingerprint[:16]}, width {target.hidden_size})",
        "trained on": f"{size.tokens:,} tokens of {size.documents} documents ({size.units} independent units), "
        f"plus {size.prompt_tokens:,} prompt tokens",
        "split": split_words(record),
        "steps": f"{record.steps}; the weights are those of step {record.best_step}, the best on the stop part",
        "parameters": f"{record.parameters:,}, {trained}",
        "proposes": f"{record.vocabulary.size:,} ids; {record.vocabulary.ceiling_test:.1%} of test tokens are among them",
        "device": f"{record.device}; {record.seconds.training:.0f} s of steps, {record.seconds.cpu:.0f} s of CPU time",
        "loss": "KL(target || head), the target renormalized over the ids that the head proposes",
    }
    lines = ["# An EAGLE-3 draft head", "", "Written by `alphaprof train`.", ""]
    lines += ["| | |", "|---|---|", *(_row(name, _card_cell(value)) for name, value in facts.items())]
    lines += ["", "## What was measured", "", *_measured(record, run), ""]
    if learnt(record) is None:
        lines += ["The training data of the initial head is unknown: it may include test texts.", ""]
    served = json.dumps({"method": "eagle3", "model": str(folder), "num_speculative_tokens": record.settings["ttt"]})
    command = shlex.join(["vllm", "serve", target.model, "--speculative-config", served])
    return "\n".join(lines) + USE.format(name=json.dumps(str(folder)), command=command)


def _measured(record: TrainingRecord, run: Run) -> list[str]:
    """Return acceptance and tokens a round on the test part; the stop part chose the step, and is left out."""
    table = of_units(run.documents(), record.units.test)
    totals, rules = decoded_totals(run, HEAD, table, run.manifest.profile.decision.rule)
    kinds = np.array(table["continuation"].to_pylist())
    shown = [f"By replay of {len(table)} test documents (`alphaprof report {TESTED}` in this folder says more):", ""]
    gammas = run.gammas
    shown.append(_row("text", "rule", "tokens", "accept@1", *(f"tokens/round, gamma {each}" for each in gammas)))
    shown.append("|" + "---|" * (4 + len(gammas)))
    for kind, rule in sorted(set(zip(kinds.tolist(), rules.tolist(), strict=True))):
        of = totals.rows((kinds == kind) & (rules == rule))
        tokens, right = of["tokens"].sum(), of["accepted"].sum() / max(of["proposals"].sum(), 1)
        rounds = [tokens / max(of[f"rounds_{gamma}"].sum(), 1e-9) for gamma in gammas]
        shown.append(_row(kind, rule, f"{int(tokens):,}", *(f"{each:.3f}" for each in (right, *rounds))))
    return [*shown, "", "accept@1: share of positions whose first draft is accepted."]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _card_cell(text: str) -> str:
    """Return text for a table: names of models and folders may hold anything."""
    plain = "".join(each if each.isprintable() else " " for each in text)
    return "".join(f"\\{each}" if each in "|`<*_[" else each for each in plain)
