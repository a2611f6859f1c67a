"""What the page says in words: a sentence on every section, and of every figure what to see in it and what follows."""

from __future__ import annotations

from dataclasses import dataclass

from alphaprof.render.wording import FEW, timed
from alphaprof.report.build import Report

# By name of the section; those that are not here need none.
INTRODUCTIONS = {
    "drafts": "A draft proposes tokens that the target checks, several in one step. Each row says how often a draft "
    "was right on one kind of traffic, and whether that makes decoding faster.",
    "gammas": "γ (gamma) is the number of tokens that the draft proposes per round. A round ends with one step of "
    "the target, which checks them all and adds one token of its own: a larger γ can bring more tokens per "
    "round, but every round costs more.",
    "rules": "The rule says when a proposed token is kept. The verdict is about one rule; these are others, on the "
    "same text.",
    "causes": "Every token that was not an accepted draft has one cause, and each cause has a remedy. What a remedy "
    "could bring says whether the work is worth it.",
    "load": "A server that decodes many sequences at a time has less idle arithmetic to check drafts with, so the "
    "speedup falls as the load grows. In brackets: the γ that was best there.",
    "requests": "What users notice: the speedup of whole requests, prefill included, and how much single documents "
    "differ. “Slower” is the share of documents that the draft slows down.",
    "certificates": "Where draft and target are close enough (by KL divergence), acceptance is certain before anything is "
    "drawn. The larger the certain part, the less the result depends on luck.",
    "predictability": "What the target alone says about its text. Where it is nearly always sure of its next token, even a "
    "cheap draft can be right; where it is not, no draft can.",
    "difficulty": "Positions are sorted by how sure the target is of its next token, and split into ten parts of equal "
    "size.",
    "times": "Tokens per round become a speedup only with the time that each step takes. If these times are not "
    "those of your engine, neither are the speedups.",
    "wiring": "A draft head reads states of the target, and its files can be read in several ways. If another "
    "reading is accepted more often, the head is served differently from how it was trained.",
    "documents": "By speedup (without step times, by tokens per round) at the γ that was chosen for the domain: at most "
    "five at either end, the slowest first. “Document” is its number in documents/, “row” its place "
    "in the source, counted from 0. Read the worst ones first: they often have something in common.",
}


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
