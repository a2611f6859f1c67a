"""The texts of a run for trainers of draft heads elsewhere, in the three parts that `alphaprof train` makes of them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from alphaprof.commands.export.formats import TEXTS, Artefact
from alphaprof.errors import OptionInvalid
from alphaprof.render.format import count, many
from alphaprof.run.place import require_new
from alphaprof.run.reader import Run
from alphaprof.run.split import STOP, TEST, TRAIN, learnable, split, texts_of
from alphaprof.run.storage import LocalStorage

# A trainer that is given the folder reads every .json and .jsonl file below it (speculators): the other parts are neither.
FILES = {TEST: "test.ndjson", STOP: "stop.ndjson", TRAIN: "train.jsonl"}  # the last one is written last
TRAINERS = (  # commands that read `train`, with texts of at most `longest` tokens of the target `model`
    "speculators prepare-data --model {model} --data {train} --seq-length {longest} --no-skip-token-freq --output DATA",
    "specforge train --config MY.yaml data.train_data_path= data.prompts_path={train} data.max_length={longest}",
)


def export_texts(where: str, out: Path | None, *, narrowed: bool = False) -> Artefact:
    """Write the texts of the run in `where` into the new folder `out`, a file a part. Returns what was written, in words.

    The texts are those that `alphaprof train` would use; of a run that has none, all. `narrowed`: an option was given that
    is about acceptance. Raises `OptionInvalid`, `RunExists` for a folder that holds something, `DiskFull`, `RunUnreadable`,
    and `NoPositionLog` and `DataEmpty` for a run without texts.
    """
    if narrowed or out is None:
        raise OptionInvalid(
            f"{TEXTS} exports all texts of a run, as a folder with one file per part",
            f"alphaprof export {shlex.quote(where)} --to {TEXTS} --out FOLDER",
        )
    run, storage = Run.open(where), LocalStorage(out)
    require_new(storage, "choose another --out")
    every = texts_of(run)
    texts = learnable(every) or every
    parts = split(texts)
    storage.make()
    rows = {part: parts.of(texts, part) for part in FILES}
    for part, name in FILES.items():
        lines = []
        for text in rows[part]:  # as both trainers read it; `document` is its key in the run's tables
            ids, mask = text.tokens.tolist(), [0] * len(text.prompt) + [1] * len(text.ids)
            line = {"document": text.document, "input_ids": ids, "loss_mask": mask}
            lines.append(json.dumps(line, separators=(",", ":")) + "\n")
        storage.put(name, "".join(lines).encode())
    written = ""
    for part in (TRAIN, STOP, TEST):
        documents, units = many(len(rows[part]), "document"), many(len(parts.units[part]), "unit")
        tokens = sum(len(text.ids) for text in rows[part])
        written += f"{out / FILES[part]}: {documents}, {units}, {count(tokens)} tokens to learn\n"
    doubts = []
    if left := len(every) - len(texts):
        doubts.append(f"{many(left, 'document')} of {count(len(every))} left out: too short, or not the target's own text")
    elif not any(text.on_policy for text in texts):
        doubts.append("all texts were given, and their writer is unknown: trainers expect the target's own answers")
    if run.manifest.status != "complete":
        doubts.append(f"{run.path} is not complete: {many(run.manifest.documents, 'document')} so far")
    model, path = shlex.quote(run.manifest.target.reference), shlex.quote(str(out / FILES[TRAIN]))
    longest = max(len(text.tokens) for text in texts)
    notes = (
        "token ids as the target read and wrote them; loss_mask is 1 on the continuation",
        *parts.notes,
        "trainers validate on near-copies of their training rows, or not at all: profile the heads on other prompts and "
        "compare them",
        *(f"next: {command.format(model=model, train=path, longest=longest)}" for command in TRAINERS),
    )
    return Artefact(written, notes, tuple(doubts))
