"""`alphaprof diagnose`: what a run predicts beside what a server counted, whether they agree, and what may be the cause."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from alphaprof.config.engines import ENGINES
from alphaprof.costs.rounds import free_draft
from alphaprof.costs.speedup import speedup
from alphaprof.errors import (
    AlphaprofError,
    CheckUndecided,
    ColumnMissing,
    DataEmpty,
    NotComparable,
    OptionInvalid,
    OutsideTolerance,
    cut,
    shown,
)
from alphaprof.profiling.engine.server import arguments_of
from alphaprof.profiling.texts.cells import BadRow, LeftOut, render
from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, OfOneText, Small, Verdict, table_of_rows, text_name
from alphaprof.report.pairing import TextPair, matches, pools_of_pairs, side_pools
from alphaprof.report.scope import scope_of
from alphaprof.report.speeds import length_interval, speedup_interval, tokens_interval
from alphaprof.run.manifest import CHAIN, PROMPTS_KNOWN_BY
from alphaprof.run.reader import Run, RunDraft, side_of
from alphaprof.servers.client import answer_of
from alphaprof.servers.files import ADDRESS, Page
from alphaprof.servers.pages import GAP, counted, read_pages, rounds_of, times_of
from alphaprof.stats.estimate import Array, Interval, by_cluster, influences, nearest_mixture, present, small_sample
from alphaprof.stats.student import quantile
from alphaprof.totals.count import policies
from alphaprof.totals.documents import SETTINGS, Documents

Outcome = Literal["as_predicted", "differs", "too_few", "too_few_documents"]
WORDS = {
    "as_predicted": "AS PREDICTED",
    "differs": "DIFFERS",
    "too_few": "TOO FEW ROUNDS",
    "too_few_documents": "TOO FEW DOCUMENTS",
}
ERROR = 0.01  # probability that a server that does as predicted is said to differ, over all depths and the length
CONFIDENCE = 0.95  # of intervals that stand alone
VISIBLE = 0.25  # a server is as predicted only if the loss of this share of accepted drafts would have shown
ASSUMED = 1000  # rounds behind shares of which nobody says how many there were
OWN = 20  # requests from which a server's own variation between requests is used, and not the run's
FULL = 0.98  # share of gamma drafts from which on rounds count as complete: the last one of a text may be shorter
EXACT = 1e-6  # tokens: means over the same prompts are equal
PROMPTS = 4  # prompts of the run that the server renders
CAUSES = {  # in words, and what separates it from the others
    "template": ("chat template, BOS or prefix", "compare /tokenize of a request with prompt_ids of the run"),
    "thinking": ("thinking mode", "compare chat_template_kwargs of requests with chat_options of the profile"),
    "draft": ("another draft or target", "compare the served files and quantization with those that were profiled"),
    "traffic": ("other requests", "send the run's prompts, or profile logged requests"),
    "context": ("truncated prompts or a context window", "import logged requests: they show it by prompt length"),
    "rule": ("another rule or temperature", "compare temperature, top_p and speculative config with the profile"),
    "feedback": ("KV or hidden states between drafts", "serve with kv_cache_dtype auto; see report --show wiring"),
    "window": ("a drafting window", "check sliding_window and block size of the draft; serve with a smaller gamma"),
    "gamma": ("another number of drafts", "serve num_speculative_tokens as it was decided"),
    "lookup": ("another runner of prompt lookup", "compare tokens per round: padded rounds lower only the rate"),
}
FIRST = ("template", "thinking", "draft", "traffic", "context", "rule")  # causes that lower the first draft


@dataclass(frozen=True)
class Depth:
    """One depth of a round. Of the drafts at this depth whose predecessors were accepted, the share that was accepted, with
    95% intervals.
    """

    depth: int
    predicted: Interval | None  # None: no round of the run came that far
    measured: Interval | None  # None: no round of the server did
    difference: Interval | None  # measured less predicted; the intervals of all depths hold together at 99%
    sign: int  # -1: lower than predicted, 1: higher, 0: no clear difference
    marginal_predicted: float  # share of rounds with a draft whose first d drafts were all accepted
    marginal_measured: float  # the same of the server


@dataclass(frozen=True)
class Cause:
    """What may be the cause of a difference."""

    name: str  # as docs/diagnose.md lists them
    about: str  # in words
    state: Literal["found", "possible", "no"]  # found or ruled out by a check, or possible by the shape alone
    evidence: str  # what was found; of a possible cause, what separates it from the others


@dataclass(frozen=True)
class Speed:
    """A number of the server with and without speculation, and how the run predicts it to change."""

    name: str
    plain: float | None  # None: the page does not tell
    speculative: float | None
    speedup: float | None  # of the server; None: not a time
    predicted: Interval | None  # None: the run has no step times, or predicts no such time


@dataclass(frozen=True)
class ServedDomain(OfOneText):
    """Tokens per round on one domain and kind of text: as the run predicts them under the rule that was served, and as
    imported requests had them. Rounds without a draft count too.
    """

    documents: int  # of the run; if paired, those with a request of the same prompt
    requests: int  # of the server
    predicted: float
    measured: float
    difference: Interval  # measured less predicted; the intervals of all domains hold together at 99%

    @property
    def sign(self) -> int:
        """-1: fewer tokens than predicted, 1: more, 0: no clear difference."""
        return 1 if self.difference.low > 0 else -1 if self.difference.high < 0 else 0


@dataclass(frozen=True)
class Diagnosis:
    """Whether a server does what a run predicts; if not, all causes that the shape of the difference and checks allow."""

    format: ClassVar[str] = "alphaprof-diagnose"
    version: ClassVar[str] = "1.1"

    run: str  # run and draft
    server: str  # what was read
    rule: str  # of the prediction
    gamma: int  # that the server drafts by, and the prediction is for
    documents: int  # of the run
    rounds: int | None  # of the server that drafted something; None: nobody says how many
    requests: int | None  # of the server; None: it is not known, and they are taken to be as long as the run's documents
    outcome: Outcome
    reason: str
    visible: float  # smallest loss of accepted drafts per round that would have shown, as a share of them
    documents_needed: int | None  # of a run that would show VISIBLE; None: requests are what is too few, or nothing is
    predicted_length: Interval  # acceptance length: 1 + accepted drafts / rounds with a draft
    measured_length: Interval
    depths: tuple[Depth, ...]  # empty: the server does not count by depth
    causes: tuple[Cause, ...]  # found, possible, ruled out, in this order
    speeds: tuple[Speed, ...]  # empty without --plain
    domains: tuple[ServedDomain, ...] = ()  # that run and imported requests both have; empty for counters
    paired: bool = False  # domains are compared on the same prompts, request by request; False: as two samples
    notes: tuple[str, ...] = ()  # in what the server drafts otherwise than the rounds of the run

    def blocks(self) -> Iterator[Block]:
        """Yield the outcome, its causes, and both sides by depth."""
        yield Verdict(WORDS[self.outcome], f": {self.reason}")
        if names := [cause.about for cause in self.causes if cause.state != "no"]:
            listed = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
            yield f"{'possible cause' if self.causes[0].state == 'possible' else 'cause'}: {listed}"
        yield f"next: {next_step(self)}"
        yield ""
        lengths = map(fmt.interval, (self.predicted_length, self.measured_length))
        yield "acceptance length: predicted {}, measured {}".format(*lengths)
        yield f"{self.run}: rule {self.rule}, gamma {self.gamma}, {fmt.many(self.documents, 'document')}"
        of = "" if self.requests is None else f" in {fmt.many(self.requests, 'request')}"
        rounds = "an unknown number of rounds" if self.rounds is None else fmt.many(self.rounds, "round")
        yield f"{self.server}: {rounds} with a draft{of}"
        yield from (Verdict("note", f": {unlike}") for unlike in self.notes)
        yield ""
        words = {-1: "lower", 0: "as predicted" if self.outcome == "as_predicted" else "no clear difference", 1: "higher"}
        if self.depths:
            sides = ("predicted", "measured", "difference", "", "all rounds: predicted", "all rounds: measured")
            rows = (
                (
                    *(str(item.depth), *map(fmt.share_with_interval, (item.predicted, item.measured))),
                    *(fmt.difference(item.difference, 2), words[item.sign] if item.difference else ""),
                    *map(fmt.share, (item.marginal_predicted, item.marginal_measured)),
                )
                for item in self.depths
            )
            yield table_of_rows("accepted, of the drafts that were reached", ("depth", *sides), rows, left=("",))
            together = fmt.level(1 - ERROR)
            yield Small(f"[{fmt.level(CONFIDENCE)} intervals]; those of differences hold together at {together}.")
        if self.domains:
            cells_of = (
                (
                    *(text_name(item, self.domains), f"{fmt.count(item.documents)} / {fmt.count(item.requests)}"),
                    *(fmt.number(item.predicted), fmt.number(item.measured), fmt.difference(item.difference, 2)),
                    words[item.sign],
                )
                for item in self.domains
            )
            columns = ("domain", "docs / requests", "predicted", "measured", "difference", "")
            yield table_of_rows("tokens per round", columns, cells_of, left=("",))
            pairs = "the same prompts, paired" if self.paired else "two samples"
            yield Small(f"{pairs}; intervals of differences hold together at {fmt.level(1 - ERROR)}.")
        if self.causes:
            cells = ((cause.about, cause.state, cause.evidence) for cause in self.causes)
            about = ("state", "evidence, or what separates it")
            yield table_of_rows("causes", ("cause", *about), cells, left=about, wrapped=about[1:])
        if self.speeds:
            values = (
                (
                    *(item.name, fmt.number(item.plain, 1), fmt.number(item.speculative, 1)),
                    *(fmt.number(item.speedup, unit="x"), fmt.interval(item.predicted, "x")),
                )
                for item in self.speeds
            )
            yield table_of_rows(
                "the server with and without speculation", ("", "plain", "speculative", "speedup", "predicted"), values
            )


def next_step(answer: Diagnosis) -> str:
    """Return what to do about an outcome."""
    if answer.outcome == "differs":
        return CAUSES[answer.causes[0].name][1]
    if answer.outcome == "too_few_documents":
        return f"profile about {fmt.many(answer.documents_needed or 0, 'document')}: more requests alone would not tell"
    more = "read the counters again after more requests"
    return more if answer.outcome == "too_few" else "alphaprof report says what this acceptance is worth"


def require_as_predicted(answer: Diagnosis, undecided_fails: bool) -> None:
    """Raise `OutsideTolerance` if the server differs, and `CheckUndecided` if rounds or documents are too few and that is
    asked for.
    """
    if answer.outcome == "differs":
        raise OutsideTolerance(f"the server differs from the prediction: {answer.reason}", next_step(answer))
    if answer.outcome in ("too_few", "too_few_documents") and undecided_fails:
        raise CheckUndecided(f"{WORDS[answer.outcome].lower()} to tell: {answer.reason}", next_step(answer))


def require_run(given: Mapping[str, object]) -> None:
    """Raise `OptionInvalid` if one of these options is given without a run."""
    if named := [name for name, value in given.items() if value]:
        raise OptionInvalid(f"{named[0]} needs a run that predicts the server", "name it first: alphaprof diagnose RUN PAGE")


@dataclass(frozen=True)
class Served:
    """What a server counted, or what a run predicts of one. By independent unit [units], and depth [units, gamma]: `rounds`
    that drafted something, those that `tested` the d-th draft, and that `accepted` the first d (NaN: not counted by depth).
    Counters are one unit. None is what is not known.
    """

    about: str
    rounds: Array
    tested: Array
    accepted: Array
    kept: float  # accepted drafts
    every: float | None = None  # rounds, those without a draft too
    drafted: float | None = None  # tokens
    requests: int | None = None
    prompts: Array | None = None  # tokens of the prompts of a unit, on average, [units]
    rule: str = ""  # empty: counters do not tell
    speedup: Interval | None = None
    exact: bool = True  # rounds are facts, and not expectations
    domains: Mapping[str, Array] = field(default_factory=dict)  # of a run: which units are of each, [units]
    tokens: Interval | None = None  # per round, as a report has it; of a run
    times: Mapping[str, float | None] = field(default_factory=dict)  # ms, by name; of counters

    @property
    def gamma(self) -> int:
        """Drafts of a round, at most."""
        return int(self.accepted.shape[1])

    @property
    def full(self) -> bool:
        """Whether every round that drafts anything drafts gamma tokens."""
        return self.drafted is not None and self.drafted >= FULL * self.gamma * self.rounds.sum()

    def rows(self, chosen: Array) -> Served:
        """Return some of its units."""
        parts = {name: getattr(self, name)[chosen] for name in ("rounds", "tested", "accepted")}
        return replace(self, **parts, kept=float(parts["accepted"].sum()), requests=None)

    @property
    def first(self) -> Served:
        """The first drafts alone."""
        accepted = self.accepted[:, :1]
        return replace(self, tested=self.tested[:, :1], accepted=accepted, kept=float(accepted.sum()))

    @property
    def shape(self) -> Array:
        """Shares of the rounds that accepted the first d = 0..gamma drafts, [gamma + 1]."""
        return np.concatenate([[1.0], self.accepted.sum(0) / self.rounds.sum()])

    def estimates(self) -> Array:
        """Return, for the share accepted at each depth and, last, the mean of accepted drafts, [4, gamma + 1]: the value,
        its squared standard error over units, how many tests or rounds it is the mean of, and the variance of one of these.
        """
        tested, rounds = self.tested.sum(0), float(self.rounds.sum())
        with np.errstate(invalid="ignore", divide="ignore"):
            shares = np.minimum(self.accepted.sum(0) / tested, 1.0)
        reached = np.cumprod(np.nan_to_num(shares))
        by_depth = not np.isnan(shares[0])
        # Products, since the last round of a text tests fewer drafts in a run than in an engine.
        mean = float(reached.sum()) if by_depth else self.kept / rounds
        spread = float(reached @ (2 * np.arange(1, self.gamma + 1) - 1)) - mean**2 if by_depth else np.nan
        pairs = [*zip(self.accepted.T, self.tested.T, strict=True), (self.accepted.sum(1), self.rounds)]
        squares = [float(np.square(influences(*pair)).sum()) if (pair[1] > 0).sum() > 1 else np.nan for pair in pairs]
        return np.array([[*shares, mean], squares, [*tested, rounds], [*(shares * (1 - shares)), spread]])


def diagnose(
    side: RunDraft,
    pages: Sequence[str] = (),
    plain: Sequence[str] = (),
    shares: Sequence[float] = (),
    rounds: int | None = None,
    gamma: int | None = None,
    domain: str | None = None,
    labels: Sequence[str] = (),
    seconds: float | None = None,
    tick: Callable[[float], object] = float,
) -> Diagnosis:
    """Hold what a run predicts of one draft against what a server counted: `pages` (an address or a page, which count since
    the server started; two pages, whose difference counts; or a run that was imported of its requests), or `shares` of
    `rounds` that accepted the first 1, 2, ... drafts. `plain`: pages without speculation; `gamma`: what was decided;
    `labels`, `seconds` and `tick`: as `counted` and `read_pages` have them. Raises `OptionInvalid`, `NotComparable`,
    and what unreadable pages do.
    """
    if bool(pages) == bool(shares):
        raise OptionInvalid("name what a server counted, once", "give an address, pages, an imported run, or --acceptance")
    served = side_of(pages[0]) if len(pages) == 1 and Path(pages[0]).is_dir() else None
    if served is not None:
        known = rounds_alone(served) if served.run.manifest.drafting != CHAIN else served_run(served, None, None)
    elif pages:
        known = served_counts(read_pages(pages, seconds, tick), cut(pages[-1]), labels, gamma)
    else:
        chain = float(rounds or ASSUMED) * np.array([[1.0, *shares]])
        known = Served("--acceptance", chain[:, 0], chain[:, :-1], chain[:, 1:], float(chain[:, 1:].sum()))
    decided = gamma or side.run.manifest.profile.decision.gamma
    if known.gamma not in side.gammas:
        asked = "" if decided in ("auto", known.gamma) else f" ({decided} were decided)"
        raise NotComparable(
            f"the server drafts {known.gamma} tokens a round{asked}; {side.label} was not replayed at this gamma",
            f"profile with gammas that include {known.gamma}; --reuse-continuations keeps the text",
        )
    texts, paired = served_texts(side, served, domain) if served is not None else ([], False)
    run = served_run(side, known.gamma, domain)
    found: dict[str, str] = {}
    if decided not in ("auto", known.gamma):
        found["gamma"] = f"the server drafts {known.gamma} tokens a round; {decided} were decided"
    if known.rule not in ("", run.rule):
        found["rule"] = f"the run predicts rule {run.rule}; the requests were served with {known.rule}"
    if known.full and not run.full and run.every:
        found["lookup"] = "every round drafts gamma tokens: those without a match are padded"
        wider = run.rounds * (run.every / run.rounds.sum())
        run = replace(run, rounds=wider, tested=np.hstack([wider[:, None], run.tested[:, 1:]]))
    trimmed, shorter = "", False
    if run.full and bool(known.drafted) and not known.full:  # adaptive verification, or a schedule by load
        mean = fmt.number(float(known.drafted or 0) / float(known.rounds.sum()))
        trimmed = f"the server drafts {mean} tokens a round on average, the run {run.gamma}: only first drafts are compared"
    lengths = compared(run, known).lengths
    if trimmed and not np.isnan(known.shape).any():
        run, known = run.first, known.first
    elif trimmed:  # nothing tells how many rounds drafted the later tokens
        found["gamma"], trimmed, shorter = trimmed.partition(":")[0], "", True
    depths, _, sign, missed, own, documents = compared(run, known)
    shape, possible = shape_of(depths, sign, float(known.rounds.sum()))
    if possible and known.rule:
        shape, possible = by_context(run, known) or (shape, possible)
    if possible and not paired and (mixed := as_mixture(run, known)):
        shape, possible = f"{shape}; {mixed[0]}", ("traffic", *(name for name in possible if name != "traffic" and mixed[1]))
    domains = tuple(served_domains(texts, known.gamma, paired))
    if (odd := [item for item in domains if item.sign]) and not shape:
        fewer = [item for item in odd if item.sign < 0]
        listed = ", ".join(text_name(item, domains) for item in fewer or odd)
        shape = f"{'fewer' if fewer else 'more'} tokens per round than predicted: {listed}"
        possible = (*FIRST, "feedback") if fewer else FIRST
    if paired:  # on the same prompts a smaller loss would have shown
        losses = [(each.difference.value - each.difference.low) / max(each.predicted - 1, 1e-9) for each in domains]
        missed = min(missed, max(losses))
    likely, out, sure = compare_prompts(run, known)
    if possible and pages and pages[-1].startswith(ADDRESS):
        more, less = ask_server(side, run.rule, pages[-1])
        found |= {name: text for name, text in more.items() if name in possible}
        out |= {name: text for name, text in less.items() if name not in likely}  # clients may render prompts themselves
    explained = shorter or any(name in possible for name in found)
    kept = [name for name in possible if name not in out and not explained]
    kept = [name for name in kept if name in likely] if sure and any(name in likely for name in kept) else kept
    causes = [Cause(name, CAUSES[name][0], "found", text) for name, text in found.items()]
    causes += [Cause(name, CAUSES[name][0], "possible", likely.get(name, CAUSES[name][1])) for name in kept]
    causes += [Cause(name, CAUSES[name][0], "no", out[name]) for name in possible if name in out and name not in found]
    told = not shares or rounds is not None
    outcome: Outcome = "differs" if shape or found else "as_predicted" if told and missed <= VISIBLE else "too_few"
    needed = documents if outcome == "too_few" and told and not paired and own > VISIBLE else None
    outcome = "too_few_documents" if needed else outcome
    if outcome == "differs":
        reason = shape or f"{next(iter(found.values()))}; at this gamma acceptance is as predicted"
    else:
        loss = f"a loss of {fmt.percent(missed)}" if missed < 1 else "not even the loss of all"
        reason = f"{loss} of the accepted drafts would have shown"
        reason += "".join(f"; but {text}" for text in [*likely.values()][:1])
    reason += f"; {trimmed}" if trimmed else ""
    reason += "" if told else f", if these are shares of {ASSUMED:,} rounds: give --rounds"
    return Diagnosis(
        run=side.label,
        server=known.about,
        rule=run.rule,
        gamma=known.gamma,
        documents=run.requests or 0,
        rounds=round(known.rounds.sum()) if told else None,
        requests=known.requests,
        outcome=outcome,
        reason=reason,
        visible=missed,
        documents_needed=needed,
        predicted_length=length_interval(lengths[0].value, run.tokens, run.gamma) if run.tokens else lengths[0],
        measured_length=lengths[1],
        depths=depths,
        causes=tuple(causes),
        speeds=tuple(speeds_of(run, known, plain_times(plain, labels))) if plain else (),
        domains=domains,
        paired=paired,
        notes=tuple(unlike_the_server(side, served)) if served is not None else (),
    )


class Compared(NamedTuple):
    """Both sides by `depths` (empty if one does not count by depth), the acceptance `lengths` of both, whether that differs
    (`sign`: -1, 0, 1), and the smallest loss that would have shown, as a share of accepted drafts, here (`missed`) and if
    the server had counted without end (`own`). `documents`: of how many a run shows a loss of VISIBLE, or, if requests are
    too few as well, has no more than half a part in what hides it.
    """

    depths: tuple[Depth, ...]
    lengths: tuple[Interval, Interval]
    sign: int
    missed: float
    own: float
    documents: int | None


def compared(run: Served, known: Served) -> Compared:
    """Return how what a run predicts compares with what a server counted.

    Each depth and the length are tested at an equal part of `ERROR` (Bonferroni): t of the difference, with the variance of
    one common rate times design effects, the variance over units in units of that of independent rounds. They are those of
    the run, and of the server if it has requests enough; else the run's, grown if its requests are longer than documents.
    """
    (ours, squares, tests, spread), (theirs, others, trials, spreads) = run.estimates(), known.estimates()
    spreads = np.where(np.isnan(spreads), spread, spreads)
    with np.errstate(invalid="ignore", divide="ignore"):
        effect, seen = squares * tests / spread, others * trials / spreads
        effect = np.where(np.isfinite(effect), effect, 1.0)
        effect = np.maximum(effect, 1.0) if run.exact else effect
        if len(known.rounds) < OWN:
            usual = float(np.square(run.rounds).sum() / run.rounds.sum())  # rounds of the document of a typical round
            longer = trials[-1] / known.requests / usual if known.requests else 1.0
            seen = 1 + (effect - run.exact) * max(1.0, longer)  # of expectations, rounds vary beside them
        seen = np.where(np.isfinite(seen), np.maximum(seen, 1.0), 1.0)
        rate = (ours * tests + theirs * trials) / (tests + trials)
        common = np.append((rate * (1 - rate))[:-1], (spread * tests + spreads * trials)[-1] / (tests + trials)[-1])
        freedom = [small_sample(n[n > 0])[1] if (n > 0).sum() > 1 else 0.0 for n in (*run.tested.T, run.rounds)]
        error = np.sqrt(common * (effect / tests + seen / trials))
        number = max(1, int(np.isfinite(error).sum()))
        times = np.array([quantile(1 - ERROR / 2 / number, each) for each in freedom])
        far, own = times * error + (1 / tests + 1 / trials) / 2, times * np.sqrt(common * effect / tests) + 1 / tests / 2
        alone = np.array([quantile((1 + CONFIDENCE) / 2, each) for each in freedom])
        ends = [
            alone * np.sqrt(np.where(own > 0, own, common) * each / n)
            for own, each, n in ((spread, effect, tests), (spreads, seen, trials))
        ]
    signs = np.where(np.abs(theirs - ours) > far, np.sign(theirs - ours), 0).astype(int)

    def interval(value: float, half: float, least: float, most: float) -> Interval | None:
        ends = (value, max(least, value - half), min(most, value + half))
        return Interval(*map(float, ends)) if all(map(math.isfinite, ends)) else None

    products = [np.cumprod(np.nan_to_num(values[:-1])).tolist() for values in (ours, theirs)]
    depths = tuple(
        Depth(
            depth=place + 1,
            predicted=interval(ours[place], ends[0][place], 0.0, 1.0),
            measured=interval(theirs[place], ends[1][place], 0.0, 1.0),
            difference=interval(theirs[place] - ours[place], far[place], -math.inf, math.inf),
            sign=int(signs[place]),
            marginal_predicted=products[0][place],
            marginal_measured=products[1][place],
        )
        for place in range(0 if np.isnan(theirs[0]) else run.gamma)
    )
    means = zip((ours, theirs), ends, strict=True)
    lengths = [*filter(None, (interval(1 + mean[-1], half[-1], 1.0, 1.0 + run.gamma) for mean, half in means))]
    losses, needed = [float(each[-1] / ours[-1]) if ours[-1] > 0 else math.inf for each in (far, own)], None
    if run.requests and ours[-1] > 0:
        enough = float(run.requests)
        for more in (math.inf, 1.0):  # quantiles of the normal distribution, then of t for that many documents
            t = quantile(1 - ERROR / 2 / number, more * freedom[-1] * max(1.0, enough / run.requests))
            once = (t / ours[-1]) ** 2 * common[-1]
            mine, rest = once * effect[-1] / tests[-1], VISIBLE**2 - once * seen[-1] / trials[-1]
            enough = run.requests * mine / (rest if rest > 0 else VISIBLE**2 / 2)
        needed = math.ceil(enough) if math.isfinite(enough) else None
    return Compared(depths, (lengths[0], lengths[1]), int(signs[-1]), losses[0], losses[1], needed)


def as_mixture(run: Served, known: Served) -> tuple[str, bool] | None:
    """Return in which shares of its rounds the run's own domains do what the server did, in words, and whether fewer first
    drafts, all later ones as predicted, would do the same; None if no mixture of its domains does, or it has one.
    """
    if len(run.domains) < 2 or np.isnan(known.shape).any():
        return None
    parts = {name: run.rows(units) for name, units in run.domains.items()}
    shapes = np.array([part.shape for part in parts.values()]).T  # [gamma + 1, domains]
    shares = nearest_mixture(shapes, known.shape)
    factors = np.ones(len(run.rounds))
    for share, part, units in zip(shares, parts.values(), run.domains.values(), strict=True):
        factors[units] = share * run.rounds.sum() / part.rounds.sum()
    fewer = np.full(len(run.rounds), known.shape[1] / run.shape[1])
    mixture, uniform = (
        not shape_of(found.depths, found.sign, float(known.rounds.sum()))[0]
        for found in (compared(scaled(run, *each), known) for each in ((factors, factors), (np.ones_like(fewer), fewer)))
    )
    if not mixture:
        return None
    listed = ", ".join(f"{fmt.short(name)} {fmt.percent(share)}" for name, share in zip(parts, shares, strict=True))
    too = ", and so does the same loss of first drafts in all of them" if uniform else ""
    return f"its own domains in other shares of the rounds do the same ({listed}){too}", uniform


def scaled(run: Served, rounds: Array, accepted: Array) -> Served:
    """Return a run whose rounds, and those that accepted drafts, are as many times as many, [units] each."""
    kept = run.accepted * accepted[:, None]
    tested = np.hstack([run.tested[:, :1] * rounds[:, None], run.tested[:, 1:] * accepted[:, None]])
    return replace(run, rounds=run.rounds * rounds, tested=tested, accepted=kept, kept=float(kept.sum()))


def shape_of(depths: Sequence[Depth], sign: int, rounds: float) -> tuple[str, tuple[str, ...]]:
    """Return what differs, in words, and the causes that have this shape; `sign`: of the acceptance length; `rounds`: of
    the server.
    """
    low = [item for item in depths if item.sign < 0]
    for item in low:  # not one accepted, where even a quarter of the rate would have shown
        reached = rounds * (depths[item.depth - 2].marginal_measured if item.depth > 1 else 1.0)
        if item.predicted and not item.marginal_measured and (1 - item.predicted.value / 4) ** reached < ERROR / 10:
            return f"no draft is accepted at depth {item.depth}", ("draft", "feedback") if item.depth == 1 else ("window",)
    if low and low[0].depth > 1:
        shape = f"first drafts are accepted as predicted, fewer from depth {low[0].depth} on"
        return shape, ("feedback", "draft", "window")
    if low:
        rates = map(fmt.share, (low[0].marginal_measured, low[0].marginal_predicted))
        first = "fewer first drafts are accepted: {}, predicted {}".format(*rates)
        return f"{first}; later ones {'too' if low[1:] else 'as predicted'}", (*FIRST, "feedback") if low[1:] else FIRST
    if sign < 0:
        return "fewer drafts are accepted, and no depth stands out", (*FIRST, "feedback")
    return ("more drafts are accepted than predicted", FIRST) if sign or any(item.sign for item in depths) else ("", ())


def served_run(side: RunDraft, gamma: int | None, domain: str | None) -> Served:
    """Return the rounds of a run at one gamma (None: those of an imported run), on one domain, or on the whole traffic by
    the weights of its decision. Raises `OptionInvalid` and `NotComparable`.
    """
    run, imported = side.run, side.run.manifest.imported
    if gamma is None and imported is None:
        raise OptionInvalid(f"{run.path} was not imported from an engine", "give an address, a page or an imported run")
    gamma = gamma or run.gammas[0]
    scope = scope_of(side, "diagnose", gamma=gamma, domain=domain)
    pools = list(scope.pools.values())
    units = np.concatenate([pool.cluster for pool in pools])

    def whole(name: str) -> Array:
        parts = [scale * np.atleast_2d(pool[name].T) for scale, pool in zip(scope.scales.values(), pools, strict=True)]
        return np.stack(by_cluster(units, *np.concatenate(parts, axis=1)), axis=-1)

    drafted, tested, accepted = (whole(f"{name}_depths_{gamma}") for name in ("drafted", "tested", "accepted"))
    if not drafted.any():
        raise NotComparable(
            f"draft {side.draft} proposes nothing in {scope.label}", "name another draft or domain of the run"
        )
    if (drafted[:, -1] < drafted[:, 0]).any():  # counters do not tell which drafts were missing
        tested = np.hstack([drafted[:, :1], accepted[:, :-1]])
    prompts = np.concatenate([pool["prompt_tokens"] for pool in pools])
    total, number = by_cluster(units, prompts, np.ones(len(prompts)))
    times = scope.costs.times(scope.question.concurrency).get(side.draft) if scope.costs else None
    counts = [pool.counts(gamma) for pool in pools]
    faster = scope.mix.speedup(counts, times) if times and times.covers(gamma) else None
    return Served(
        about=f"{run.path} ({imported.engine if imported else 'profiled'})",
        rounds=drafted[:, 0],
        tested=tested,
        accepted=np.minimum(accepted, tested),
        kept=float(accepted.sum()),
        every=float(whole(f"rounds_{gamma}").sum()),
        drafted=float(drafted.sum()),
        requests=len(prompts),
        prompts=total / number,
        rule=scope.rules,
        speedup=speedup_interval(faster, CONFIDENCE),
        exact=scope.exact,
        tokens=tokens_interval(scope.mix.speedup(counts, free_draft(gamma)), gamma, scope.question.confidence),
        domains={name: np.flatnonzero(np.isin(present(units), pool.cluster)) for name, pool in scope.pools.items()},
    )


def rounds_alone(served: RunDraft) -> Served:
    """Return the rounds of imported requests that drafted no chains: as counters, since nothing is known by depth."""
    run, (gamma,), (rule,) = served.run, served.run.gammas, served.run.rules
    pools = [pool for pool in side_pools(served, Documents.of(run.documents()), [rule]).values() if pool.defined]
    rounds, tokens = (sum(float(pool[name].sum()) for pool in pools) for name in (f"rounds_{gamma}", "tokens"))
    unknown, imported = np.full((1, gamma), np.nan), run.manifest.imported
    return Served(
        about=f"{run.path} ({imported.engine if imported else 'profiled'})",
        rounds=np.array([rounds]),
        tested=unknown,
        accepted=unknown,
        kept=tokens - rounds,
        requests=run.manifest.documents,
        rule=rule,
    )


def served_texts(side: RunDraft, served: RunDraft, domain: str | None) -> tuple[list[TextPair], bool]:
    """Return the texts that a run and imported requests have in common under the rule that was served (of `domain`, if it is
    named), and whether they are paired: if most prompts of one are known to be the other's. Raises `NotComparable` for
    another draft, and for text or a rule that the run does not have.
    """
    if served.draft != side.draft and served.draft in side.run.manifest.drafts:
        raise NotComparable(
            f"{served.run.path} was served with draft {served.draft}, not {side.label}",
            f"diagnose {side.run.path}:{served.draft}, or import with the served draft as --draft",
        )
    (rule,), imported, sides = served.run.rules, served.run.manifest.imported, (side, served)
    tables = [each.run.documents() for each in sides]
    for number, documents in enumerate(tables):  # on-policy text as one kind, generated or given: imports hold it as given
        place, kinds = documents.schema.get_field_index("continuation"), policies(documents).tolist()
        tables[number] = documents.set_column(place, "continuation", pa.array(kinds, pa.string()))
    one, two = (
        {key: pool for key, pool in side_pools(each, Documents.of(table), [rule]).items() if pool.defined}
        for each, table in zip(sides, tables, strict=True)
    )
    if {key[1:] for key in one}.isdisjoint(key[1:] for key in two):
        here, there = (
            " and ".join(sorted({fmt.text_kind(key[1], pool.sampling) for key, pool in pools.items()})) or "none"
            for pools in (one, two)
        )
        raise NotComparable(
            f"{side.label} and {served.run.path} share no text with rounds under {rule}: {here}; {there}",
            "profile text of the served temperature, or import with the settings that were served",
        )
    rows = matches(tables, SETTINGS)
    by_ids = imported is not None and imported.prompts_known_by == PROMPTS_KNOWN_BY[0]
    paired = by_ids and 2 * len(rows[0]) > min(map(len, tables))  # of fewer, two samples say more
    if paired:
        one, two = pools_of_pairs(sides, tables, rows, [rule])
    texts = [text for text in TextPair.of(one, two) if text.has_rounds and domain in (None, text.domain)]
    return texts, bool(paired and texts)


def served_domains(texts: Sequence[TextPair], gamma: int, paired: bool) -> Iterator[ServedDomain]:
    """Yield tokens per round of both sides. Of two samples, the interval is made of both (Zou and Donner 2008,
    doi:10.1002/sim.3095).
    """
    for text in texts:
        confidence = 1 - ERROR / len(texts)
        (spent, base), (spent_there, base_there) = text.totals(gamma)
        predicted, measured = float(base.sum() / spent.sum()), float(base_there.sum() / spent_there.sum())
        if paired:
            difference = text.difference(gamma, confidence)
        else:
            free = [speedup([pool.counts(gamma)], [1.0], free_draft(gamma)) for pool in text.sides]
            ours, theirs = (tokens_interval(each, gamma, confidence) for each in free)
            assert ours is not None and theirs is not None  # noqa: S101, PT018  both have rounds
            off = theirs.value - ours.value
            low = math.hypot(theirs.value - theirs.low, ours.high - ours.value)
            difference = Interval(off, off - low, off + math.hypot(theirs.high - theirs.value, ours.value - ours.low))
        yield ServedDomain(
            domain=text.domain,
            continuation=text.first.continuation,
            sampling=text.first.sampling,
            on_policy=True,
            documents=len(text.first.cluster),
            requests=len(text.second.cluster),
            predicted=predicted,
            measured=measured,
            difference=difference,
        )


def unlike_the_server(side: RunDraft, served: RunDraft) -> Iterator[str]:
    """Yield in what an engine drafts or verifies otherwise than the rounds of a run."""
    drafting = served.run.manifest.drafting
    if served.draft != side.draft:
        yield f"the metrics of {served.run.path} do not show which draft was served: the prediction is for {side.label} only"
    if not any(side.run.manifest.drafts[side.draft].method_in(engine) for engine in ENGINES):
        yield f"no known engine drafts like {side.label}: name the draft that was served"
    if drafting != CHAIN:
        yield f"{served.run.path} used {drafting} drafting, but rounds of {side.run.path} are chains: a tree accepts more"


def served_counts(pages: Sequence[Page], where: str, labels: Sequence[str], gamma: int | None) -> Served:
    """Return what an address or a page has counted since the server started, or two pages since the first; `gamma`: drafts
    of a round, if the page does not tell. Raises what `counted` and `rounds_of` do, and `DataEmpty`.
    """
    found = counted(pages, where, labels)
    rounds, sums = rounds_of(found, where, gamma), found.sums
    if rounds is None and not {"rounds", "emitted"} & sums.keys():
        raise ColumnMissing(
            f"{where} counts no speculative decoding: {found.server} has it off", "start the server with speculation"
        )
    if rounds is None:
        raise DataEmpty(f"{where}: no round was counted", "send requests first; a second page has to be the later one")
    if not rounds.drafts:
        raise ColumnMissing(f"{where} does not count rounds", "import logged requests, or give --acceptance")
    if rounds.gamma is None:
        raise OptionInvalid(f"{where} does not tell how many tokens a round drafts", "name the served gamma: --gamma N")
    shares = np.array([rounds.marginal or [np.nan] * rounds.gamma])
    requests = int(sums.get("requests", 0.0)) or None
    return Served(
        about=f"{found.server}, {where}{', reset between the pages' if found.reset else ''}",
        rounds=np.array([float(rounds.drafts)]),
        tested=rounds.drafts * np.hstack([[[1.0]], shares[:, :-1]]),
        accepted=rounds.drafts * shares,
        kept=float(rounds.accepted),
        drafted=rounds.drafted,
        requests=requests,
        prompts=np.array([sums["prompt"] / requests]) if requests and "prompt" in sums else None,
        times=times_of(sums),
    )


def by_context(run: Served, known: Served) -> tuple[str, tuple[str, ...]] | None:
    """Return shape and causes of a difference that only requests with longer prompts have; None if they do not. Each half
    stands beside documents with such prompts, or all if the run has none.
    """
    ours, theirs = (np.zeros(len(each.rounds)) if each.prompts is None else each.prompts for each in (run, known))
    middle, signs = float(np.median(theirs)), []
    for longer in (False, True):
        rows, half = (np.flatnonzero((prompts > middle) == longer) for prompts in (ours, theirs))
        if not known.rounds[half].sum():
            return None
        signs.append(compared(run.rows(rows) if run.rounds[rows].sum() else run, known.rows(half))[2])
    shape = f"fewer drafts are accepted, but only after prompts of more than {middle:.0f} tokens"
    return (shape, ("context", "traffic", "window")) if signs == [0, -1] else None


def compare_prompts(run: Served, known: Served) -> tuple[dict[str, str], dict[str, str], bool]:
    """Return the causes for which the lengths of prompts speak, and those that they rule out, with evidence, and whether the
    former are sure: requests that are the run's own prompts, each as often, tell to the token.
    """
    if run.prompts is None or known.prompts is None or not run.requests or not known.requests:
        return {}, {}, False
    own, theirs = float(run.prompts.mean()), float(known.prompts.mean())
    text = f"prompts have {theirs:.2f} tokens on average, the run's {own:.2f}"
    noise = float(run.prompts.std()) * math.sqrt(1 / len(run.prompts) + 1 / known.requests)
    whole = known.requests % run.requests == 0 and run.requests == len(run.prompts)
    whole &= len(known.prompts) == 1 or math.isclose(run.prompts.std(), known.prompts.std())
    if whole and abs(theirs - own) < EXACT:
        return {}, dict.fromkeys(("template", "thinking", "traffic", "context"), text), False
    if whole and abs(theirs - own - round(theirs - own)) < EXACT:
        return dict.fromkeys(("template", "thinking"), f"{text}: each {theirs - own:+.0f}"), {}, True
    differs = abs(theirs - own) > 4 * noise
    return dict.fromkeys(("template", "thinking", "traffic", "context"), text) if differs else {}, {}, False


def ask_server(side: RunDraft, rule: str, url: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the causes that a running server shows and those that it rules out, with evidence: how it renders prompts of
    the run, and, if it runs here, its arguments and files. What it does not answer is left open.
    """
    found: dict[str, str] = {}
    out: dict[str, str] = {}
    profile = side.run.manifest.profile
    with contextlib.suppress(AlphaprofError, BadRow, LeftOut, LookupError, TypeError, StopIteration):
        if otherwise := rendered_otherwise(side.run, url):
            found["template"] = otherwise
        else:
            out["template"] = "the server renders the run's first prompts (with chat_options) to the same tokens"
    options = arguments_of(url)
    with contextlib.suppress(ValueError, OSError):
        speculative = json.loads(options.get("speculative-config", "{}"))
        methods = [speculative.get(f"{name}_sample_method") for name in ("draft", "rejection")]
        drawn = "block" if methods[1] == "block" else "lossless" if methods[0] == "probabilistic" else "one_hot"
        if speculative and rule not in ("strict", drawn):
            found["rule"] = f"the run predicts rule {rule}; the server decodes by {drawn}"
        named, served = profile.drafts.get(side.draft), speculative.get("model")
        pairs = [(served, named.own_model.model)] if named is not None and named.own_model and served else []
        pairs += [(options["model"], profile.target.model)] if "model" in options else []
        here = [pair for pair in pairs if all(map(os.path.exists, pair))]
        for one, other in here:
            if digests_of(one) != digests_of(other):
                found["draft"] = f"{cut(one)} holds other weights or another config.json than {cut(other)}"
        if len(here) == 2 and "draft" not in found:
            out["draft"] = "target and draft have the files that were profiled"
        if (cache := options.get("kv-cache-dtype", "auto")) != "auto":
            found["feedback"] = f"the server keeps KV in {cache}"
    return found, out


def rendered_otherwise(run: Run, url: str) -> str:
    """Return where a server's rendering of the run's first prompts differs from theirs; empty if nowhere. Raises the errors
    of data and server, and `LookupError` if no prompt is rendered.
    """
    from alphaprof.profiling.texts.requests import as_sent, chat_of, roots_of, set_variables, tools_of
    from alphaprof.profiling.texts.rows import rows

    model = answer_of(url, "/v1/models")["data"][0]["id"]
    texts = run.continuations(0, ["source", "source_row", "prompt_ids"]).slice(0, PROMPTS).to_pylist()
    texts = [text for text in texts if run.manifest.profile.data[text["source"]].prompt_ids is None]
    for text in texts or [{}]:
        source, mine = run.manifest.profile.data[text["source"]], text["prompt_ids"]
        row = next(each for number, _, each in rows(source, roots_of(source)) if number == text["source_row"])
        if isinstance(row, BadRow):
            raise row
        asked: dict[str, Any] = {"model": model}
        if source.messages is not None or source.chat:
            chat = chat_of(source, row)
            more = {"tools": chat.tools and tools_of(chat.tools), "chat_template_kwargs": set_variables(chat.variables)}
            more |= {"continue_final_message": chat.begun}
            asked |= {"messages": as_sent(chat.turns), **{name: value for name, value in more.items() if value}}
            asked |= {"add_generation_prompt": False} if chat.begun or chat.closed else {}
        else:
            asked |= {"prompt": render(str(source.prompt), row)}
        if (ids := answer_of(url, "/tokenize", asked)["tokens"]) != mine:
            pairs = enumerate(zip(ids, mine, strict=False))
            at = next((place for place, (one, two) in pairs if one != two), min(len(ids), len(mine)))
            spans = [{"model": model, "tokens": each[at : at + 8]} for each in (ids, mine)]
            here = [shown(answer_of(url, "/detokenize", each)["prompt"]) for each in spans]
            return f"from token {at} of a prompt on the server writes {here[0]}, the run {here[1]}"
    return ""


def digests_of(place: str) -> list[str]:
    """Return the SHA-256 of the weights and config.json of a folder, or of a file, whose names and order do not matter."""
    from alphaprof.profiling.models.hashes import sha256_of

    paths = [path for path in Path(place).glob("*") if path.suffix in (".safetensors", ".bin", ".gguf")]
    return sorted(sha256_of([*paths, Path(place, "config.json")] if os.path.isdir(place) else [Path(place)]))


def plain_times(pages: Sequence[str], labels: Sequence[str]) -> dict[str, float | None]:
    """Return the times of a server without speculation. Raises `OptionInvalid` if it speculates."""
    sums = counted(read_pages(pages), cut(pages[-1]), labels).sums
    if any(sums.get(name) for name in ("rounds", "emitted", "drafted")):
        raise OptionInvalid(f"--plain {cut(pages[-1])} counts speculative decoding", "give a page of the server without it")
    return times_of(sums)


def speeds_of(run: Served, known: Served, plain: Mapping[str, float | None]) -> Iterator[Speed]:
    """Yield the times that users of a server feel and what fills its KV cache, without (`plain`) and with speculation."""
    each = {name: (before, known.times.get(name)) for name, before in plain.items()}
    for name, (before, after) in each.items():
        if before is None and after is None:
            continue
        ratio = before / after if before and after and name.startswith("ms") else None
        if name == GAP:
            rates = [1e3 / ms if ms else None for ms in (before, after)]
            yield Speed("tokens/s of a request", rates[0], rates[1], ratio, run.speedup)
        yield Speed(name, before, after, ratio, None)
