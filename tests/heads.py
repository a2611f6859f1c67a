"""Records of heads that nobody trained."""

from __future__ import annotations

import hashlib
from pathlib import Path

from alphaprof.run.storage import LocalStorage
from alphaprof.run.training import (
    TRAINING,
    DraftVocabulary,
    PartUnits,
    TrainingProgress,
    TrainingRecord,
    TrainingRun,
    TrainingSeconds,
    TrainingSize,
    TrainingTarget,
)


def write_training(folder: Path, record: TrainingRecord) -> None:
    """Writes training.json into the folder of a head."""
    LocalStorage(folder).put(TRAINING, record.to_json().encode())


def training_record() -> TrainingRecord:
    """The record of a head that was trained on 80 units of 120 tokens each."""
    units = {
        part: tuple(hashlib.sha256(f"{part} {index}".encode()).hexdigest()[:16] for index in range(number))
        for part, number in (("train", 80), ("stop", 40), ("test", 40))
    }
    return TrainingRecord(
        alphaprof="0.1.0",
        status="complete",
        run=TrainingRun("runs/a", "a" * 16),
        target=TrainingTarget("target", "f" * 64, 64, 6, 1000),
        settings={"ttt": 3, "steps": 40},
        identity="b" * 64,
        size=TrainingSize(units=80, documents=80, tokens=9600, prompt_tokens=3200),
        units=PartUnits(**units),
        vocabulary=DraftVocabulary(500, "c" * 64, 0.95),
        progress=(TrainingProgress(40, 51.0, (1.7, 2.3, 2.8), (0.34, 0.25, 0.2), 11_040),),
        best_step=40,
        steps=40,
        seconds=TrainingSeconds(5.0, 51.0, 3.0, 59.0),
        parameters=1_840_000,
        device="cpu",
    )
