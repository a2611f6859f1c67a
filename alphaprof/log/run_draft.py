"""A run and one of its drafts, as commands name them: RUN or RUN:DRAFT."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphaprof.errors import OptionInvalid, shown
from alphaprof.log.store import Run


@dataclass(frozen=True)
class RunDraft:
    """A run and one of its drafts."""

    run: Run
    draft: str

    @property
    def label(self) -> str:
        """How it is named on the command line."""
        return f"{self.run.path}:{self.draft}"

    def asked(self, config: dict[str, Any]) -> RunDraft:
        """The same with another decision or other costs than the run's own; nothing is written."""
        return RunDraft(self.run.view(dataclasses.replace(self.run.manifest, config=config)), self.draft)


def side_of(text: str) -> RunDraft:
    """Reads RUN or RUN:DRAFT. Raises `RunUnreadable`, and `OptionInvalid` where a draft is missing or not named."""
    path, colon, draft = text, "", ""
    if not os.path.exists(text) and ":" in text:
        path, colon, draft = text.rpartition(":")
    run = Run.open(Path(path))
    names = list(run.manifest.drafts)
    require_drafts(run)
    if not colon and len(names) == 1:
        draft = names[0]
    if draft not in names:
        what = f"{path} has no draft {shown(draft)}" if colon else f"{path} has {len(names)} drafts"
        raise OptionInvalid(what, "name one of them: " + ", ".join(f"{path}:{name}" for name in names))
    return RunDraft(run, draft)


def require_drafts(run: Run) -> None:
    """Raise `OptionInvalid` for a run without any draft."""
    if not run.manifest.drafts:
        raise OptionInvalid(f"{run.path} has no draft", "profile the target with one: the profile's drafts name them")
