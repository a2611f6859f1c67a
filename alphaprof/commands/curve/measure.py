"""Tests heads that have no record of it: runs the target and each head over the texts of the stop and test parts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from alphaprof.commands.curve.collect import Tester
from alphaprof.config.profile import ProfileOptions
from alphaprof.errors import NotComparable
from alphaprof.log.place import LocalPlace
from alphaprof.log.split import STOP, TEST, SplitBy
from alphaprof.log.store import Run
from alphaprof.log.training import TrainingRecord, TrainingRun, head_digest, split_of, tests_content, texts_digest
from alphaprof.profiling.models.hub import check_references
from alphaprof.profiling.run.pipeline import in_memory
from alphaprof.profiling.training.testing import TestBench
from alphaprof.profiling.training.train import TrainingOptions, opened
from alphaprof.profiling.training.trainer import Saying


def tester_of(options: ProfileOptions, progress: Saying, by: SplitBy) -> Tester:
    """What tests EAGLE-3 heads with the target of a profile; `by`: how texts are split where no record says it. It raises
    `RunMismatch` for another target than the run's, `OptionInvalid` for texts without times, `ModelUnloadable` and
    `OutOfMemory`.
    """

    def test(run: Run, files: Mapping[Path, Path], record: TrainingRecord | None) -> None:
        """`record`: of a head that has one, whose parts are kept; None: the texts are split as training would."""
        asked = TrainingOptions(split=by)
        if record is not None:
            seed = _number(record, "split_seed")
            asked = TrainingOptions(ttt=_number(record, "ttt"), split_seed=seed, split=split_of(record))
        with in_memory():
            check_references(options, data=False, drafts=False)
            shop = opened(options, str(run.path), asked, progress)
            units: Mapping[str, Collection[str]] = shop.split.units
            if record is not None:
                units = {STOP: record.units.stop, TEST: record.units.test}
            texts = {part: [text for text in shop.texts if text.unit in set(units[part])] for part in (STOP, TEST)}
            if not texts[TEST]:
                problem = f"{run.path} holds none of the test texts of the heads that have a record"
                raise NotComparable(problem, "give the run that they were trained from: --from RUN")
            source = TrainingRun(str(run.path), texts_digest(run.manifest))
            bench = TestBench(shop.options, shop.target, shop.tokenizer, source, texts)
            for folder, file in files.items():
                progress.start(f"testing {folder.name}", sum(map(len, texts.values())), "documents")
                tests, _ = bench.tested(folder, head_digest(folder), progress.advance)
                LocalPlace(file.parent).put(file.name, tests_content(tests).to_pybytes())

    return test


def _number(record: TrainingRecord, name: str) -> int:
    """A setting of a training; its default where the record says something else."""
    value = record.settings.get(name)
    return value if isinstance(value, int) else int(getattr(TrainingOptions(), name))
