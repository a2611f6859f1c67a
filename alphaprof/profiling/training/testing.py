"""How trained heads do on texts that they were not trained on: a run of its own, over documents that were held out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from alphaprof.config.options import Eagle3Draft
from alphaprof.log.manifest import MANIFEST
from alphaprof.log.place import place_of
from alphaprof.log.store import Run
from alphaprof.log.training import TrainingRecord
from alphaprof.profiling.run.pipeline import profile
from alphaprof.profiling.run.shards import Progress

if TYPE_CHECKING:
    from alphaprof.config.profile import ProfileOptions

HELD_OUT = ("data", "continuation")  # what the run of the texts decides, whatever the profile says


def tested(
    options: ProfileOptions, source: str, heads: Mapping[str, Path], record: TrainingRecord, out: Path, progress: Progress
) -> Run:
    """Profile heads, by the names of their drafts, on the stop and test documents of the run `source` that they were trained
    from, with the other options of a profile. The run lies in `out`; one that is there is finished. Raises the errors of
    `errors.py`.
    """
    texts = Run.open(source).manifest.config
    drafts = {name: Eagle3Draft(kind="eagle3", model=str(folder.absolute())) for name, folder in heads.items()}
    tree = options.model_dump(mode="json") | {name: texts[name] for name in HELD_OUT}
    decision = options.decision.model_copy(update={"draft": "auto"})
    asked = type(options).model_validate(tree).model_copy(update={"drafts": drafts, "decision": decision})
    resume = place_of(out).has(MANIFEST)
    units = frozenset((*record.units.stop, *record.units.test))
    return profile(asked, out, progress, resume, None if resume else Path(source), units=units)
