"""What the page says of every figure: what to see in it, and what follows."""

from __future__ import annotations

from dataclasses import dataclass

from alphaprof.render.wording import FEW, timed
from alphaprof.report.build import Report


@dataclass(frozen=True)
class Caption:
    """What the page says of a figure: where it stands, its heading, what to see and what follows from it, what its marks
    are, and the glossary's word for it.
    """

    section: str
    heading: str
    text: str
    marks: str
    word: str


CAPTIONS = {
    "acceptance": Caption(
        "drafts",
        "Acceptance by domain",
        "Acceptance (α) is the share of proposed tokens that the target keeps: the further right a point, the more "
        "often the draft is right. Where the bars of two drafts overlap, they may be equally good.",
        "Bars: intervals over documents. Hollow: that rule would write another text.",
        "alpha",
    ),
    "speedups": Caption(
        "gammas",
        "Speedup against γ",
        "How many times faster decoding gets as the draft proposes more tokens per round (γ): a curve rises while further "
        "tokens are kept, and falls once checking them costs more than they bring. Serve with the γ at its top; below the "
        "dashed line the draft slows decoding down.",
        "Shaded: intervals; an open point without one: too few documents. Dashed: 1x; dotted: the speedup that is wanted. "
        "Large points: the γ that was chosen; where half of the documents chose it, another can look better on all of "
        "them.",
        "speedup",
    ),
    "depths": Caption(
        "gammas",
        "Acceptance by depth",
        "The solid line says whether the draft stays right further into a round. The dotted line is the share of rounds "
        "that were right all the way: where it nears 0, a larger γ brings nothing.",
        f"At the largest γ. Solid: kept of the drafts that were reached; dotted: of all rounds. Open: fewer than {FEW} "
        "drafts.",
        "depth",
    ),
    "difficulty": Caption(
        "difficulty",
        "Where the draft is right",
        "From left to right the target gets surer of its next token. A draft that is low even where the target is sure is a "
        "poor match for it. One that is low only where the target is unsure is about as good as a draft can be.",
        "Solid: share of the drafts that were kept, shaded: its interval. Dotted, where the log holds certificates: share "
        "that the rule could not reject; what lies between was right, but not certain to be.",
        "margin",
    ),
}
LENGTHS = Caption(
    "gammas",
    "Tokens per round against γ",
    "Tokens per round are all tokens that one round emits, the target's own included: they grow with γ until the draft "
    "is rarely right that deep. Decoding is faster where a round costs less than that many plain decode steps; the step "
    "times that would tell are missing here.",
    "Shaded: intervals; an open point without one: too few documents.",
    "tokens",
)


def captions(report: Report) -> dict[str, Caption]:
    """Return the caption of every figure, by its name."""
    return CAPTIONS if timed(report) else CAPTIONS | {"speedups": LENGTHS}
