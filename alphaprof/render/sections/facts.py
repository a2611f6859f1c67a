"""What stands behind the numbers: step times, how a head's files were read, single documents, and notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from alphaprof.render import wording
from alphaprof.render.sections.blocks import Block, Table
from alphaprof.report import format as fmt
from alphaprof.report.build import Report
from alphaprof.report.sections.difficulty import SHORTEST, DocumentResult


def times(report: Report) -> Iterator[Block]:
    """Yields where step times come from, and what they are."""
    if report.times is not None:
        first, *rest = wording.times_lines(report.times, report.run.mean_context)
        yield first
        yield from (f"  {line}" for line in rest)


def why_no_times(report: Report) -> str:
    """Why there are no step times; empty where there are."""
    reasons = [note for note in report.notes if note.code == "no_step_times"]
    if report.times is not None:
        return ""
    return f"{reasons[0].message}: {reasons[0].remedy}" if reasons else "there are no step times"


def wiring(report: Report) -> Iterator[Block]:
    """Yields how each head's files were read."""
    for draft, facts in report.run.draft_models.items():
        if lines := list(wording.wiring_lines(facts)):
            yield f"draft {draft}: how its files were read"
            yield from (f"  {line}" for line in lines)
            yield ""


def why_no_wiring(report: Report) -> str:
    """Why nothing is said of a head's files; empty where something is."""
    if next(wiring(report), None) is not None:
        return ""
    heads = ", ".join(draft for draft, facts in report.run.draft_models.items() if facts.by_depth)
    return f"the run does not say how the files of {heads} were read" if heads else "there is no draft head in this run"


def documents(report: Report) -> Iterator[Block]:
    """Yields the documents that each draft serves worst and best, the slowest first."""
    columns: Mapping[str, Callable[[DocumentResult], str]] = {
        "document": lambda item: str(item.document),
        "source": lambda item: str(item.source),
        "row": lambda item: str(item.source_row),
        "tokens": lambda item: fmt.count(item.tokens),
        "gamma": lambda item: str(item.gamma),
        "alpha": lambda item: fmt.share(item.alpha),
        "tokens/round": lambda item: fmt.number(item.tokens_per_round),
        "speedup": lambda item: fmt.number(item.speedup, unit="x"),
    }
    for draft, rule in dict.fromkeys((item.draft, item.rule) for item in report.documents):
        mine = [item for item in report.documents if (item.draft, item.rule) == (draft, rule)]
        rows = [(fmt.short(item.domain), {name: cell(item) for name, cell in columns.items()}) for item in mine]
        title = f"draft {draft}, rule {rule}: worst and best documents, the slowest first"
        yield Table(title, tuple(columns), rows, below=[f"  sources: {_files(report, mine)}"], draft=draft)


def _files(report: Report, documents: Sequence[DocumentResult]) -> str:
    """Names the files of the sources that documents came from."""
    paths = [str(source["path"]).rstrip("/") for source in report.run.profile.get("data", [])]
    known = {item.source for item in documents}
    return ", ".join(
        f"{number} {fmt.short(path.rsplit('/', 1)[-1])}" for number, path in enumerate(paths) if number in known
    )


def why_no_documents(report: Report) -> str:
    """Why no document is shown; empty where one is."""
    said = f"no gamma was chosen on any text, or none has a document of {SHORTEST} tokens or more (see --show drafts)"
    return "" if report.documents else said


def notes(report: Report) -> Iterator[Block]:
    """Yields what is to know, and what to do about it."""
    for note in report.notes:
        yield f"note: {note.message}"
        yield f"      {note.remedy}"


def why_no_notes(report: Report) -> str:
    """Why there is no note; empty where there is one."""
    return "" if report.notes else "nothing about this run calls for a note"
