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
from typing import Any

import numpy as np

from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, OfOneText, table_of
from alphaprof.report.build import RunReport
from alphaprof.report.wording import judged
from alphaprof.rules import GREEDY, SAMPLED, BoundRule, rules_of
from alphaprof.run.manifest import DraftFacts, ModelFacts
from alphaprof.run.reader import Run
from alphaprof.stats.estimate import Interval, pooled_share
from alphaprof.theory.certificates import strict_thresholds
from alphaprof.totals.count import SHAPED, Shape, TotalsRequest, columns_of
from alphaprof.totals.documents import TextGroup
from alphaprof.totals.log_sample import columns_at
from alphaprof.totals.lookup import first_proposals, joined_texts

Array = np.ndarray[Any, Any]
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
    if not part.run.has_log or not part.run.shards:
        return ()

    def wanted(rule: BoundRule, text: TextGroup) -> bool:
        own = text.policy in rule.rule.policies and rule.rule.chained
        return own or question.rule_for(text.policy) == rule.id

    drafts, rules = part.run.manifest.drafts, rules_of([*report.asked.deciding, *report.others])
    jobs = [
        (draft, rule, texts)
        for draft in drafts
        for rule in rules
        if (texts := [text for text in part.documents.groups if wanted(rule, text)])
    ]
    each = _all_losses(part.run, [(draft, rule) for draft, rule, _ in jobs])
    return tuple(
        _attribution(text, draft, rule, lost, drafts[draft], report.confidence)
        for (draft, rule, texts), lost in zip(jobs, each, strict=True)
        for text in texts
    )


def _attribution(
    text: TextGroup, draft: str, rule: BoundRule, losses: Losses, facts: DraftFacts, confidence: float
) -> Attribution:
    cluster, rows, causes = text.cluster, text.rows, list[Cause]()
    positions, own = losses.positions[rows], text.policy in rule.rule.policies
    for name, lost in zip(CAUSES, _scaled_losses(losses.split[rows], losses.lost[rows], rule).T, strict=True):
        share = pooled_share(cluster, lost, positions, confidence)
        if share is not None and share.value > 0:
            causes.append(Cause(name, share, _remedy_of(name, facts, own and text.policy == SAMPLED)))
    return Attribution(
        **text.named | {"on_policy": own},
        draft=draft,
        rule=rule.id,
        documents=len(rows),
        positions=int(positions.sum()),
        lost=pooled_share(cluster, losses.lost[rows], positions, confidence) or Interval(1.0, 0.0, 1.0),
        ceiling=float(losses.top[rows].sum() / positions.sum()) if rule.rule.at_most_top else None,
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


@dataclass(frozen=True)
class Losses:
    """What a draft loses under a rule, summed per document of the run.

    `lost` [documents]: positions less what the rule accepts, as alpha counts it; `split` [documents, causes]: what
    happened to the emitted tokens, by cause: the same on average over texts; `top` [documents]: the target's largest
    probabilities.
    """

    positions: Array
    lost: Array
    split: Array
    top: Array


def _all_losses(run: Run, jobs: Sequence[tuple[str, BoundRule]]) -> list[Losses]:
    """Return what each of some drafts loses under a rule, [jobs], in one pass over the log."""
    parts: list[list[Losses]] = [[] for _ in jobs]
    for shard in run.shards:
        texts = ShardTexts.of(run, shard.index)
        for (draft, rule), shards in zip(jobs, parts, strict=True):
            shards.append(_losses(run, draft, rule, texts))
    columns = (zip(*(vars(shard).values() for shard in shards), strict=True) for shards in parts)
    return [Losses(*map(np.concatenate, each)) for each in columns]


@dataclass(frozen=True)
class ShardTexts:
    """One shard's documents: `reach` [positions]: tokens that a draft has to read to propose there; `looked_up` [positions]:
    what prompt lookup with its default settings proposes first.
    """

    index: int
    shape: Shape
    reach: Array
    looked_up: Array

    @classmethod
    def of(cls, run: Run, index: int) -> ShardTexts:
        """Read the texts of a complete shard."""
        table = run.continuations(index, [*SHAPED, "prompt_tokens", "prompt_ids"])
        emitted = columns_at(run, next(iter(run.manifest.drafts)), index, ["token"])["token"]  # rules read it too
        shape = Shape.of(table)
        prompts, lengths = table["prompt_tokens"].to_numpy(), shape.stop - shape.start
        tokens, start, continued = joined_texts(table["prompt_ids"].combine_chunks(), prompts, emitted, lengths)
        reach = np.arange(lengths.sum()) + shape.each(prompts - shape.start) - 1
        return cls(index, shape, reach, first_proposals(tokens, start)[continued])


def _losses(run: Run, draft: str, rule: BoundRule, texts: ShardTexts) -> Losses:
    """Return the losses of one shard."""
    shape, facts = texts.shape, run.manifest.drafts[draft]
    names = columns_of(TotalsRequest([rule.id], ()), facts)
    names += ["in_draft_vocabulary"] if facts.reduced_vocabulary else []
    columns = columns_at(run, draft, texts.index, names)  # nulls become -1, NaN or False
    columns["greedy"] = shape.each(shape.policy == GREEDY)
    ready = columns["proposed"] > 0
    beta = np.where(ready, rule.accept(columns), 0.0).astype(np.float64)
    own = shape.each(np.isin(shape.policy, rule.rule.policies)) & (not rule.rule.lossy)
    emitted = rule.emitted(columns)
    kept = beta if emitted is None else np.where(ready, emitted, 0.0)
    mass = np.maximum(0.0, 1.0 - np.where(own, kept, beta))
    cause = _causes(rule, columns, texts, own, run.manifest.target, facts)
    return Losses(
        positions=(shape.stop - shape.start).astype(np.float64),
        lost=shape.sums(1.0 - beta),
        split=np.stack([shape.sums(np.where(cause == number, mass, 0.0)) for number in range(len(CAUSES))], axis=1),
        top=shape.sums(columns["target_top_prob"]),
    )


def _causes(
    rule: BoundRule, columns: dict[str, Array], texts: ShardTexts, own: Array, target: ModelFacts, draft: DraftFacts
) -> Array:
    """Return the cause [positions] that a loss at each position has, as its number in CAUSES.

    `own` [positions]: the rule's own decoding would emit the text, and acceptance depends on the emitted token.
    """
    shape, token, guess = texts.shape, columns["token"], columns["draft_top"]
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
        BEYOND: silent & (draft.context is not None) & (texts.reach >= (draft.context or 0)),
        NO_PROPOSAL: silent,
        TIE: wrong & shape.each(shape.plain) & ordered & (gap <= target.measured_noise * (1 + 1e-3)),
        VOCABULARY: (wrong | own) & (token == wanted) & ~columns.get("in_draft_vocabulary", np.ones(len(token), dtype=bool)),
        SPECIAL: (wrong | own) & np.isin(wanted, (*target.eos, *(target.special or ()))),
        LOOKUP: (wrong | own) & draft.has_steps & (texts.looked_up == wanted),
        RANK: (wrong | own) & (token == wanted) & (rank >= 2) & (rank <= WIDTH),
        UNCERTAIN: _uncertain(rule, columns, shape, own, wrong),
    }
    numbers = [CAUSES.index(name) for name in where]
    return np.asarray(np.select(list(where.values()), numbers, default=CAUSES.index(DRAFT)))


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
        largest: dict[tuple[str, str], list[str]] = {}  # domains by the cause that they lose most to
        for item in items:
            if item.causes:
                cause = max(item.causes, key=lambda cause: cause.share.value)
                largest.setdefault((cause.name, cause.remedy), []).append(fmt.short(item.domain))
        below = [
            f"  {', '.join(dict.fromkeys(domains))} most to {name}; what would help: {remedy}"
            for (name, remedy), domains in largest.items()
        ]
        yield from table_of(f"{title}: share of positions lost, by cause", items, columns, below=below)


def _share_of(item: Attribution, name: str) -> str:
    return next((fmt.share_with_interval(cause.share) for cause in item.causes if cause.name == name), "")
