"""Why drafts are rejected: the share of positions that a draft loses to each cause, and what would mend it.

Each position that is lost has one cause. A position without a proposal loses all; any other loses 1 - a_t, the
probability that its token was not an accepted draft (1 - beta_t if the rule's own decoding would not emit the text, and
for lossy rules). The whole of it goes to the first of CAUSES that applies to the token that the draft should have
proposed: the emitted one, or the target's top token if acceptance does not depend on the emitted one. What costs least to
mend comes first, so that the last holds what nothing but a better draft mends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, OfOneText, table_of
from alphaprof.report.build import RunReport
from alphaprof.report.wording import judged
from alphaprof.rules import GREEDY, SAMPLED, BoundRule, rules_of
from alphaprof.run.manifest import DraftFacts, ModelFacts
from alphaprof.run.reader import Run
from alphaprof.stats.estimate import Array, Interval, pooled_share
from alphaprof.stats.grouping import grouped
from alphaprof.theory.certificates import strict_thresholds
from alphaprof.totals.count import Shape, TotalsRequest, array_of, columns_of
from alphaprof.totals.documents import TextGroup
from alphaprof.totals.log_sample import gathered, shards, tables
from alphaprof.totals.lookup import first_proposals, joined_texts

TITLE = "why drafted tokens are rejected, and what would help"
EMPTY = "it needs the position log (positions/), and text under a rule of the verdict"
READS_LOG = True
WIDTH = 4  # of the tree that a cause speaks of
UNSURE = 0.1  # nats: if a smaller KL(p||q) allows a rejection, even good drafts are not safe
NO_PROPOSAL, BEYOND, TIE, VOCABULARY, SPECIAL, LOOKUP, RANK, UNCERTAIN, DRAFT = CAUSES = (
    "no proposal",
    "beyond context",
    "numerical tie",
    "draft vocabulary",
    "special tokens",
    "prompt lookup",
    f"rank 2 to {WIDTH}",
    "target uncertain",
    "draft",
)
SILENT = 2  # causes, the first ones, whose positions have no proposal
REMEDIES = {
    NO_PROPOSAL: "a draft with the target's vocabulary, which proposes there",
    BEYOND: "a draft with a longer context",
    TIE: "no draft helps: the target itself may choose either token; profile in the served dtype",
    VOCABULARY: "the draft cannot propose this token: rebuild its draft vocabulary's mapping (d2t) on this traffic, or "
    "train a head on it (alphaprof train)",
    SPECIAL: "a draft that knows the target's chat template and where texts end",
    LOOKUP: "prompt lookup beside this draft",
    RANK: f"a tree that holds the draft's {WIDTH} most probable tokens; its rounds cost more than a chain's",
    UNCERTAIN: "no draft helps: the target itself is undecided there",
    DRAFT: "another draft, or a head trained on this traffic (alphaprof train)",
}
WITHOUT_MODEL = {  # of drafts that run none, and so can but copy
    NO_PROPOSAL: "a draft model if the text so far holds nothing to copy",
    SPECIAL: "none: a copying draft never proposes the end of a text, and copies other markers from earlier text",
    DRAFT: "a draft model: this text does not continue like the copied one",
}
BY_CHANCE = "no draft helps: the target samples a token other than its top token"


@dataclass(frozen=True)
class Cause:
    """One cause of what is lost."""

    name: str  # see the table of causes in docs/report.md
    share: Interval  # of all positions
    remedy: str  # what would remove it, or why nothing would


@dataclass(frozen=True)
class Attribution(OfOneText):
    """What one draft loses in a domain under a rule, split into causes that exclude each other and add up to it."""

    draft: str
    rule: str
    documents: int
    positions: int
    lost: Interval  # share of all positions whose token is not an accepted draft: 1 - alpha times coverage
    ceiling: float | None  # the largest alpha of any draft that proposes one token; None: a perfect draft loses nothing
    causes: tuple[Cause, ...]  # those that something is lost to, in the order in which they are looked for


def compute(report: RunReport) -> tuple[Attribution, ...]:
    """Attribute what is lost under the rules that verdicts concern, and under chains that keep the text if it is theirs; not
    for hybrids, which lose what their parts lose. Returns nothing without a position log.
    """
    part, question = report.part, report.asked.question
    run, confidence = part.run, report.confidence
    if not run.has_log or not run.shards:
        return ()

    def wanted(rule: BoundRule, text: TextGroup) -> bool:
        return (text.policy in rule.rule.policies and rule.rule.chained) or question.rule_for(text.policy) == rule.id

    rules = rules_of([*report.asked.deciding, *report.others])
    read = tables(run, next(iter(run.manifest.drafts)), ["token"], ["prompt_tokens", "prompt_ids"])
    texts = [_of_texts(array_of(positions["token"]), documents) for positions, documents in read]
    return tuple(
        _attribution(text, draft, rule, losses, run.manifest.drafts[draft], confidence)
        for draft in run.manifest.drafts
        for rule in rules
        if (chosen := [text for text in part.documents.groups if wanted(rule, text)])
        for losses in [_losses(run, draft, rule, texts)]
        for text in chosen
    )


def _attribution(
    text: TextGroup, draft: str, rule: BoundRule, losses: dict[str, Array], facts: DraftFacts, confidence: float
) -> Attribution:
    positions, lost, top, split = (losses[name][text.rows] for name in ("positions", "lost", "top", "split"))
    cluster, own, causes = text.cluster, text.policy in rule.rule.policies, list[Cause]()
    for name, each in zip(CAUSES, _scaled_losses(split, lost, rule).T, strict=True):
        share = pooled_share(cluster, each, positions, confidence)
        if share is not None and share.value > 0:
            causes.append(Cause(name, share, _remedy_of(name, facts, own and text.policy == SAMPLED)))
    return Attribution(
        **text.named | {"on_policy": own},
        draft=draft,
        rule=rule.id,
        documents=len(text.rows),
        positions=int(positions.sum()),
        lost=pooled_share(cluster, lost, positions, confidence) or Interval(1.0, 0.0, 1.0),
        ceiling=float(top.sum() / positions.sum()) if rule.rule.at_most_top else None,
        causes=tuple(causes),
    )


def _scaled_losses(split: Array, lost: Array, rule: BoundRule) -> Array:
    """Return what is lost by cause [documents, causes], adding up to what alpha says is lost.

    Positions without a proposal are facts. Of the others alpha counts the probability of a rejection before the token is
    known, and causes are those of the tokens that came: all are scaled alike, by a factor that is 1 on average over texts
    (and always 1 if acceptance is a fact).
    """
    happened, expected = split[:, SILENT:].sum(), max(0.0, float(lost.sum() - split[:, :SILENT].sum()))
    result = np.array(split, dtype=np.float64)
    if happened > 0:
        result[:, SILENT:] *= expected / happened
    elif expected > 0:  # no token of these texts was rejected, and some could have been
        result[:, CAUSES.index(DRAFT if rule.rule.drawn else UNCERTAIN)] += lost - split[:, :SILENT].sum(1)
    return result


def _remedy_of(name: str, draft: DraftFacts, drawn: bool) -> str:
    if name == UNCERTAIN and drawn:
        return BY_CHANCE
    return REMEDIES[name] if draft.has_steps else WITHOUT_MODEL.get(name, REMEDIES[name])


def _of_texts(emitted: Array, documents: pa.Table) -> dict[str, Array]:
    """Return of a shard, [positions], the tokens that a draft has to read to propose there (`reach`), and what prompt lookup
    with its default settings proposes first (`looked_up`). `emitted` [positions]: the tokens of its documents.
    """
    shape, prompts = Shape.of(documents), documents["prompt_tokens"].to_numpy()
    ids, lengths = documents["prompt_ids"].combine_chunks(), shape.stop - shape.start
    tokens, start, continued = joined_texts(ids, prompts, emitted, lengths)
    reach = np.arange(len(emitted)) + shape.each(prompts - shape.start) - 1
    return {"reach": reach, "looked_up": first_proposals(tokens, start)[continued]}


def _losses(run: Run, draft: str, rule: BoundRule, texts: Sequence[dict[str, Array]]) -> dict[str, Array]:
    """Return what a draft loses under a rule, summed per document. `texts`: `_of_texts` of each shard.

    `lost` [documents]: positions less what the rule accepts, as alpha counts it; `split` [documents, causes]: what
    happened to the emitted tokens, by cause: the same on average over texts; `top` [documents]: the target's largest
    probabilities.
    """
    facts = run.manifest.drafts[draft]
    names = columns_of(TotalsRequest([rule.id], ()), facts)
    names += ["in_draft_vocabulary"] if facts.reduced_vocabulary else []

    def of_shard(columns: dict[str, Array], shape: Shape) -> dict[str, Array]:
        columns["greedy"] = shape.each(shape.policy == GREEDY)
        ready = columns["proposed"] > 0
        beta = np.where(ready, rule.accept(columns), 0.0).astype(np.float64)
        own = shape.each(np.isin(shape.policy, rule.rule.policies)) & (not rule.rule.lossy)
        emitted = rule.emitted(columns)
        kept = beta if emitted is None else np.where(ready, emitted, 0.0)
        mass = np.maximum(0.0, 1.0 - np.where(own, kept, beta))
        cause = _causes(rule, columns, shape, own, run.manifest.target, facts)
        return {
            "positions": (shape.stop - shape.start).astype(np.float64),
            "lost": shape.sums(1.0 - beta),
            "split": np.stack([shape.sums(np.where(cause == number, mass, 0.0)) for number in range(len(CAUSES))], axis=1),
            "top": shape.sums(columns["target_top_prob"]),
        }

    read = zip(shards(run, draft, names), texts, strict=True)
    return gathered(of_shard(columns | own, shape) for (columns, shape), own in read)


def _causes(
    rule: BoundRule, columns: dict[str, Array], shape: Shape, own: Array, target: ModelFacts, draft: DraftFacts
) -> Array:
    """Return the cause [positions] that a loss at each position has, as its number in CAUSES.

    `own` [positions]: the rule's own decoding would emit the text, and acceptance depends on the emitted token.
    """
    token, guess = columns["token"], columns["draft_top"]
    wanted = np.where(own, token, columns["target_top"])
    wanted_prob = np.where(own, columns["target_token_prob"], columns["target_top_prob"])
    wrong = guess != wanted
    with np.errstate(divide="ignore", invalid="ignore"):
        top = np.log(columns["target_top_prob"])
        gap = np.maximum(top - np.log(columns["target_prob_of_draft_top"]), top - np.log(wanted_prob))
    ordered = GREEDY in rule.rule.policies  # the target takes its top token; a tie of drawn tokens is not numerical noise
    rank = columns["draft_rank_of_token"]
    silent = columns["proposed"] == 0
    where = {
        BEYOND: silent & (draft.context is not None) & (columns["reach"] >= (draft.context or 0)),
        NO_PROPOSAL: silent,
        TIE: wrong & shape.each(shape.plain) & ordered & (gap <= target.measured_noise * (1 + 1e-3)),
        VOCABULARY: (wrong | own) & (token == wanted) & ~columns.get("in_draft_vocabulary", np.ones(len(token), dtype=bool)),
        SPECIAL: (wrong | own) & np.isin(wanted, (*target.eos, *(target.special or ()))),
        LOOKUP: (wrong | own) & draft.has_steps & (columns["looked_up"] == wanted),
        RANK: (wrong | own) & (token == wanted) & (rank >= 2) & (rank <= WIDTH),
        UNCERTAIN: _uncertain(rule, columns, shape, own, wrong),
    }
    return np.asarray(np.select(list(where.values()), [CAUSES.index(name) for name in where], default=CAUSES.index(DRAFT)))


def _uncertain(rule: BoundRule, columns: dict[str, Array], shape: Shape, own: Array, wrong: Array) -> Array:
    """Return where no draft could count on the token that was wanted, [positions]."""
    if rule.rule.drawn:
        return np.zeros(len(own), dtype=bool)
    close = strict_thresholds(columns["target_top_prob"], columns["target_second_prob"]) < UNSURE
    drawn = own & shape.each(shape.policy == SAMPLED)
    # Not wrong and yet lost: the rule draws what it keeps, for any proposal.
    return np.asarray(np.where(drawn, columns["token"] != columns["target_top"], close | ~wrong))


def draw(report: RunReport) -> Iterator[Block]:
    """Yield what each draft loses: a row a domain, a column a cause, and the remedy of each domain's largest cause."""
    for title, results in judged(report):
        key = (results[0].draft, results[0].rule)
        items = [item for item in report.section("causes") if (item.draft, item.rule) == key]
        names = [name for name in CAUSES if any(cause.name == name for item in items for cause in item.causes)]
        columns: dict[str, Callable[[Attribution], str]] = {"lost": lambda item: fmt.share_with_interval(item.lost)}
        if any(item.ceiling is not None for item in items):
            columns["alpha\nat most"] = lambda item: fmt.share(item.ceiling)
        columns |= {name.replace(" ", "\n", 1): partial(_share_of, name=name) for name in names}
        most = [(max(item.causes, key=lambda cause: cause.share.value), item.domain) for item in items if item.causes]
        largest = grouped(((cause.name, cause.remedy), fmt.short(domain)) for cause, domain in most)
        below = [
            f"  {', '.join(dict.fromkeys(domains))} most to {name}; what would help: {remedy}"
            for (name, remedy), domains in largest.items()
        ]
        yield from table_of(f"{title}: share of positions lost, by cause", items, columns, below=below)


def _share_of(item: Attribution, name: str) -> str:
    return next((fmt.share_with_interval(cause.share) for cause in item.causes if cause.name == name), "")
