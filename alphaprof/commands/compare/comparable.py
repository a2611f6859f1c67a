"""May two runs be compared: would a difference between them be the draft's?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from alphaprof.errors import NotComparable
from alphaprof.log.manifest import KINDS, LOG_PROMPTS, NO_PROMPT

if TYPE_CHECKING:
    from alphaprof.log.run_draft import Side


def require_comparable(first: Side, second: Side, other_target: bool = False) -> None:
    """Raise `NotComparable` where target, dtype, tokenizer or processing differ: a difference would not be the draft's.

    `other_target`: a fine-tuned or quantised target is what is asked about.
    """
    if first.label == second.label:
        raise NotComparable(f"{first.label} is compared with itself", "name two drafts, or two runs")
    _require_same_origin(first, second)
    one, two = first.run.manifest, second.run.manifest
    if one.config.get("draft_processing") != two.config.get("draft_processing"):
        raise NotComparable(
            f"{first.run.path} and {second.run.path} have another draft_processing",
            "profile one of them again with the other's; --reuse-continuations keeps the text",
        )
    told = () if other_target else ("fingerprint", "dtype")
    odd = [name for name in told if getattr(one.target, name) != getattr(two.target, name)]
    odd += ["tokenizer"] if one.tokenizer != two.tokenizer else []
    if odd and first.run.imported:
        raise NotComparable(
            f"{first.run.path} was served by {one.target.reference}, and {second.run.path} by {two.target.reference}",
            "compare drafts of one target; if it is the same under another name, import both with the same --target",
        )
    if odd:
        raise NotComparable(
            f"{first.run.path} and {second.run.path} have another target ({', '.join(odd)} differ)",
            "compare drafts of one target, profiled in one dtype",
        )


def _require_same_origin(first: Side, second: Side) -> None:
    """The same for runs of which one was imported from an engine's metrics, or both."""
    one, two = first.run.manifest, second.run.manifest
    if first.run.imported != second.run.imported:
        imported, profiled = (first, second) if first.run.imported else (second, first)
        raise NotComparable(
            f"{imported.run.path} was imported from an engine's metrics, and {profiled.run.path} was profiled: nothing "
            "shows that both have the same target and text",
            "import both, or profile both",
        )
    if one.imported is None or two.imported is None:
        return
    for name in ("drafting", "gamma", "rule"):
        served = [getattr(found, name) for found in (one.imported, two.imported)]
        if served[0] != served[1]:
            raise NotComparable(
                f"{first.run.path} was served with {name} {served[0]}, and {second.run.path} with {name} {served[1]}",
                "serve both with the same number of speculative tokens, and the same rule",
            )
    if one.imported.prompts_known_by != two.imported.prompts_known_by:
        kinds = [found.prompts_known_by or "nothing" for found in (one.imported, two.imported)]
        raise NotComparable(
            f"prompts of {first.run.path} are known by {kinds[0]}, and those of {second.run.path} by {kinds[1]}",
            f"{LOG_PROMPTS}, of both runs, and import them again",
        )


def no_imported_pair(first: Side, second: Side, tables: Sequence[pa.Table]) -> NotComparable:
    """Why no request of two imported runs, whose documents are `tables`, has a partner in the other."""
    runs = f"{first.run.path} and {second.run.path}"
    told = first.run.manifest.imported
    known_by = told.prompts_known_by if told else None  # the same of both: see `_require_same_origin`
    if known_by in NO_PROMPT:
        fresh = ", which an engine makes anew for every request" if known_by else ""
        return NotComparable(
            f"no request of {runs} can be paired: their prompts are known by {known_by or 'nothing'}{fresh}",
            f"{LOG_PROMPTS}, or a custom_id of your own, in both runs, and import them again",
        )
    shared = len(set.intersection(*(set(table["prompt_hash"].to_pylist()) for table in tables)))
    if shared:
        names = [", ".join(sorted(set(table["domain"].cast(pa.string()).to_pylist()))) for table in tables]
        return NotComparable(
            f"{runs} share {shared} prompts, but none in one domain with the same sampling settings (domains {names[0]} / "
            f"{names[1]})",
            "import both with the same --domain or --domain-key, and with the same --temperature, --top-k and --top-p",
        )
    other = ", or made other token ids of them (another tokenizer or chat template)" if known_by == KINDS[0] else ""
    return NotComparable(
        f"{runs} have no prompt in common: they were sent other prompts{other}", "log answers to the same prompts in both"
    )
