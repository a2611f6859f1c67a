"""Documents of a profile decoded for real: which ones, at which lengths, and one of them in one way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from alphaprof.errors import OptionInvalid, ProfileInvalid
from alphaprof.profiling.decoding.choices import Choice
from alphaprof.profiling.decoding.speculative import Decoded, Plain, Speculation
from alphaprof.profiling.models.drafts import Draft
from alphaprof.profiling.run.shards import Loaded
from alphaprof.profiling.texts.corpus import Document
from alphaprof.rules import GREEDY, SAMPLED, BoundRule

if TYPE_CHECKING:
    from alphaprof.config.profile import ProfileOptions

USUAL_GAMMAS = (1, 2, 3, 5)


@dataclass(frozen=True)
class Drafting:
    """Who drafts, by which rule drafts are kept, and how many tokens a round drafts."""

    draft: Draft
    rule: BoundRule
    gamma: int


def require_own_text(options: ProfileOptions) -> set[str]:
    """How the target chooses the text that it writes itself: greedy, sampled or both.

    Raises `ProfileInvalid` where it writes none: no decoding would repeat that.
    """
    kinds = {options.continuation_of(index).kind for index in range(len(options.data))}
    written = {GREEDY, SAMPLED} & kinds
    if not written:
        raise ProfileInvalid(
            "the target writes none of this text, so no decoding here would repeat it",
            "decode continuations of kind greedy or sampled, for example --set continuation.kind=greedy",
        )
    return written


def chosen_gammas(known: Sequence[int], wanted: Sequence[int] | None) -> list[int]:
    """The lengths to decode with, ascending. Raises `OptionInvalid` where the profile has none of the usual ones."""
    if wanted:
        return sorted(set(wanted))
    if not (usual := [gamma for gamma in USUAL_GAMMAS if gamma in known]):
        raise OptionInvalid(f"the profile has none of the gammas {USUAL_GAMMAS}", f"name one: --gamma {known[0]}")
    return usual


def own_documents(loaded: Loaded) -> tuple[list[Document], int]:
    """The documents whose text the target writes here, and how many have a text from elsewhere."""
    documents = list(loaded.documents)
    own = [document for document in documents if document.given is None]
    return own, len(documents) - len(own)


def decode(loaded: Loaded, document: Document, drafting: Drafting | None, regret: bool = False) -> Decoded:
    """Write a document's text with a draft, or plainly. `regret`: see `Decoded`."""
    width = min(loaded.scorer.width, loaded.target.vocabulary)
    choice = Choice(document.processing, document.seed or 0, loaded.options.draft_processing, width)
    engine: Plain | Speculation = Plain(loaded.target, choice)
    if drafting is not None:
        engine = Speculation(loaded.target, drafting.draft, drafting.rule, drafting.gamma, choice)
    return engine.decode(document.prompt, document.max_new_tokens or 0, document.source_row, regret)
