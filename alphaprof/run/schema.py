"""The columns of a run's tables, declared once: name, type, unit, range, meaning; and what in a table contradicts that."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from alphaprof.rules import parse_rule, rules_of
from alphaprof.run.manifest import DraftFacts

SCHEMA_VERSION = 1
PROPOSED_LIMIT = 256  # `proposed` is capped here: nobody drafts more in one round, and small numbers compress
CATEGORY = pa.dictionary(pa.int32(), pa.string())
# What a column needs that not every log has: a draft with a distribution; a draft whose proposals depend on where a round
# starts; spans of texts; several depths of a round at each row; a head that read its own drafts. a_t and beta_t: rules.py.
NEEDS = DISTRIBUTION, STARTS, SPANS, DEPTHS, OWN_PATH = "distribution", "starts", "spans", "depths", "own path"
THINKING, ANSWER = "thinking", "answer"  # spans that have a meaning here; others have any name
UNKNOWN_TO_ENGINES = ("proposals", "accepted", "impossible", "mismatches", "clear_mismatches", "near_ties")
PAIR_COUNTS = {  # what the lag-1 autocorrelation of acceptance is computed from; null for a lossy rule
    "pairs": "Neighboring positions that both have a proposal.",
    "pairs_first": "Sum of a_t over the first positions of these pairs.",
    "pairs_second": "Sum of a_t over the second positions of these pairs.",
    "pairs_both": "Sum of the products of both a_t of a pair.",
}
DEPTH_COUNTS = {
    "drafted": "Rounds that drafted {} tokens or more.",
    "tested": "Rounds that reached draft {}: all before it were accepted, the document had not ended.",
    "accepted": "Rounds whose drafts were all accepted up to draft {}.",
}
# float32, as the probabilities that they are summed from: a report on sampled text reads 8% less; no verdict uses them.
IN_FLOAT32 = {"tested": pa.float32()}
AGREES = (
    "Whether draft {} of a round is the token x_t; null: no such round. The head read its own drafts of the round on text "
    "that was not sampled, else (and MTP chains always) the text's tokens: the same where all before were accepted."
)
ODDS = (
    "Log-odds log(q/(1 - q)) of draft {} in the round that starts here, whose own drafts were read also behind a wrong one; "
    "null: none is drafted, or the text's tokens were read (sampled text)."
)
CONFIDENCE = (
    "Confidence head's probability that draft {} of the round that starts here is accepted if all before it are; null: none "
    "is drafted, or, beyond the first draft, the text's tokens were read (sampled text)."
)
ACCEPTS = "Probability that {0} keeps draft {1} of a round here, if reached; null: never reached, or greedy text."
RATIOS = "q(x_t)/p(x_t) if x_t is a round's draft {} (block rules multiply it); null if accept_<rule> is."
EMITTED = "a_t at this depth: probability that the token was draft {1}, kept by {0}; null if accept_<rule> is."
CONTROL = "Sum of P(tested)(a_t - beta_t) with gamma {}; expected 0."


@dataclass(frozen=True)
class Column:
    """One column of a table. `low` and `high` are inclusive; None: unbounded. In the log a `nullable` one is null if the
    draft proposes nothing, and everywhere if the draft lacks what it `needs`, one of NEEDS (None: every draft has it).
    """

    name: str
    type: pa.DataType
    doc: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    nullable: bool = False
    needs: str | None = None

    @property
    def type_name(self) -> str:
        """The type in a word."""
        return "dictionary<string>" if self.type == CATEGORY else str(self.type).replace("item: ", "")

    def field(self) -> pa.Field:
        """Return the Arrow field, with unit and meaning in its metadata."""
        return pa.field(self.name, self.type, self.nullable, metadata={"unit": self.unit, "doc": self.doc})


def _probability(name: str, doc: str, nullable: bool = False) -> Column:
    return Column(name, pa.float32(), doc, "probability", 0, 1, nullable)


def _nats(name: str, doc: str) -> Column:
    return Column(name, pa.float32(), doc, "nats", 0)


def _needing(needs: str, *columns: Column) -> Iterator[Column]:
    """Yield columns that are null if the log does not have what they need."""
    yield from (replace(column, nullable=True, needs=needs) for column in columns)


_RANK = "in the untruncated {} distribution: 1 + number larger + ties with a lower id."
POSITION_COLUMNS = (
    Column("domain", CATEGORY, "Domain of the document."),
    Column("document", pa.int64(), "Number of the document in corpus order.", low=0),
    Column("position", pa.int32(), "0-based index in the continuation, EOS included.", low=0),
    Column("token", pa.int32(), "The token of the continuation at this position, x_t.", "token id", 0),
    *_needing(
        SPANS, Column("span", CATEGORY, "Span of the continuation, such as thinking or answer; null: none configured.")
    ),
    Column("target_top", pa.int32(), "Most probable token of the target; the first index of the maximum.", "token id", 0),
    Column(
        "draft_top",
        pa.int32(),
        "Most probable token of the draft; the first index of the maximum.",
        "token id",
        0,
        None,
        True,
    ),
    _probability("target_top_prob", "Target probability of target_top; all probabilities are those after processing."),
    _probability("target_second_prob", "Second largest target probability (equal to the largest at a tie)."),
    _probability(
        "target_margin",
        "target_top_prob - target_second_prob. On sampled text it is that of the truncated distribution, so questions about "
        "the model's own margins belong on greedy text.",
    ),
    _nats("target_entropy", "Entropy of the target's distribution."),
    _probability("target_token_prob", "Target probability of the token, p(x_t)."),
    *_needing(
        DISTRIBUTION,
        _probability("draft_top_prob", "Draft probability of draft_top."),
        _probability("draft_margin", "Draft's largest minus second largest probability."),
        _nats("draft_entropy", "Entropy of the draft's distribution."),
        _probability("draft_token_prob", "Draft probability of the token, q(x_t)."),
    ),
    _probability("target_prob_of_draft_top", "Target probability of draft_top.", nullable=True),
    Column("target_rank_of_draft_top", pa.int32(), f"Rank of draft_top {_RANK.format('target')}", low=1, nullable=True),
    *_needing(
        DISTRIBUTION,
        Column("draft_rank_of_token", pa.int32(), f"Rank of the token {_RANK.format('draft')}", low=1),
        _probability("overlap", "Sum over the vocabulary of min(p, q): 1 - total variation."),
        _nats("kl_target_draft", "KL(p || q); infinite if q gives 0 to a token that p can emit."),
        _nats("kl_draft_target", "KL(q || p)."),
    ),
    Column(
        "proposed",
        pa.int16(),
        f"The most tokens a round starting here can propose (0: none), including any after an EOS; capped at "
        f"{PROPOSED_LIMIT}.",
        "tokens",
        0,
        PROPOSED_LIMIT,
    ),
    *_needing(
        STARTS,
        Column(
            "accepted_run",
            pa.int16(),
            "Drafts accepted by a round from here that proposes `proposed` tokens; null unless drafts depend on the "
            "round's start (prompt lookup, heads). A shorter round accepts min(its proposals, this).",
            "tokens",
            0,
        ),
    ),
)
DOCUMENT_COLUMNS = (
    Column("document", pa.int64(), "Number of the document in corpus order.", low=0),
    Column("domain", CATEGORY, "Domain of the document."),
    Column("cluster", pa.string(), "Group of dependent documents; null: the document is independent.", nullable=True),
    Column("source", pa.int32(), "Index of the source in the profile's data.", low=0),
    Column(
        "source_row",
        pa.int64(),
        "Row number in the source, from 0, before any shuffle. In a shuffled source of several files: row number "
        "in its file + 2^32 x file number.",
        low=0,
    ),
    Column(
        "prompt_hash",
        pa.string(),
        "SHA-256 in hex of the prompt's token ids (little-endian int32); in imported runs, of the prompt's key.",
    ),
    Column("prompt_tokens", pa.int32(), "Length of the prompt.", "tokens", 1),
    Column("continuation_tokens", pa.int32(), "Length of the continuation, EOS included.", "tokens", 1),
    Column(
        "finish", CATEGORY, "eos: ended by itself; length: cut, or a given text without EOS; unknown: an engine did not say."
    ),
    Column("continuation", CATEGORY, "Kind of the continuation: greedy, sampled, given or text."),
    Column("on_policy", pa.bool_(), "Whether the target wrote this text: greedy, or sampled with these settings."),
    Column("max_new_tokens", pa.int32(), "Limit on the continuation; null: none.", "tokens", 1, nullable=True),
    Column(
        "temperature",
        pa.float64(),
        "Temperature that p and q were processed with; null: the plain softmax (greedy text).",
        low=0,
        nullable=True,
    ),
    Column("top_k", pa.int32(), "Number of top tokens kept in p and q; 0: all.", "tokens", 0, None, True),
    Column("top_p", pa.float64(), "Probability mass kept in p and q; 1: all.", "probability", 0, 1, True),
    Column("min_p", pa.float64(), "Smallest share of the top probability kept in p and q; 0: any.", "ratio", 0, 1, True),
    Column("seed", pa.int64(), "Seed of the sampling; null: not sampled by this run.", low=0, nullable=True),
)
MADE = ("prompt_hash", "prompt_tokens", "continuation_tokens", "finish")  # what a document has once it is measured
CONTINUATION_COLUMNS = (
    *DOCUMENT_COLUMNS,
    Column("prompt_ids", pa.list_(pa.int32()), "Token ids of the prompt.", "token id", 0),
    Column("continuation_ids", pa.list_(pa.int32()), "Token ids of the continuation.", "token id", 0),
)
PROMPT_COLUMNS = (
    *(column for column in DOCUMENT_COLUMNS if column.name not in MADE),
    Column("cut", pa.bool_(), "Whether the given text was cut to max_new_tokens."),
    Column("prompt_ids", pa.list_(pa.int32()), "Token ids of the prompt.", "token id", 0),
    Column("given_ids", pa.list_(pa.int32()), "Token ids of a given text; null: none.", "token id", 0, None, True),
)
LATENCY_COLUMNS = (
    Column("model", pa.string(), "target, or the name of the draft."),
    Column(
        "step",
        CATEGORY,
        "decode: one token; verify: several tokens at once; draft: a step of the draft, over two tokens if the round "
        "before was accepted in full; draft_first: a draft head's first step of a round, over the tokens that the target "
        "has just verified (its later steps are draft); prefill: a prompt into an empty cache; lookup: a search of each "
        "text, once a round, for a draft without a model; bookkeeping: removing rejected tokens from the model's "
        "cache, once a round.",
    ),
    Column("tokens", pa.int32(), "New tokens per sequence in the timed step.", "tokens", 1),
    Column("batch", pa.int32(), "Sequences in the batch.", "sequences", 1),
    Column("context", pa.int32(), "Tokens in the KV cache of each sequence before the step.", "tokens", 0),
    Column(
        "median_ms",
        pa.float64(),
        "Time of the step: its median ratio to the decode step of the same round, times the median decode step; for a "
        "prefill, the median.",
        "ms",
        0,
    ),
    Column("p10_ms", pa.float64(), "Tenth percentile.", "ms", 0),
    Column("p90_ms", pa.float64(), "Ninetieth percentile.", "ms", 0),
    Column(
        "relative_error",
        pa.float64(),
        "Standard error of this time alone, as a share of the time (x 1.96: half of a 95% interval); 0: unknown.",
        "ratio",
        0,
    ),
    Column("repeats", pa.int32(), "Timed rounds.", low=1),
    Column(
        "rounds_ms",
        pa.list_(pa.float32()),
        "Time in each round. Round i times all steps of one batch and context together, so a slowdown cancels in ratios.",
        "ms",
        0,
    ),
)

ENGINE_COLUMNS = (
    Column("start", pa.int32(), "Which start of the command timed it: plain decoding is timed anew by each.", low=0),
    Column("engine", pa.string(), "plain, forced (verifies given tokens), path (plain on a draft's path), or the draft."),
    Column("gamma", pa.int32(), "Speculative tokens that the engine was started with; of a path, its number.", low=0),
    Column("asynchronous", pa.bool_(), "Whether the engine schedules asynchronously."),
    Column("runner", pa.int32(), "Version of vLLM's model runner.", low=1),
    Column("step", CATEGORY, "decode, verify, draft (a round with its verification), lookup (the same) or prefill."),
    Column("tokens", pa.int32(), "Tokens that are verified, drafted or read; 1 of a lookup.", "tokens", 1),
    Column("batch", pa.int32(), "Sequences in the batch.", "sequences", 1),
    Column("context", pa.int32(), "Tokens in the KV cache of each sequence before the step.", "tokens", 0),
    Column("rounds_ms", pa.list_(pa.float64()), "Time in each round.", "ms", 0),
    Column(
        "plain_ms", pa.list_(pa.float64()), "Of plain decoding in the same rounds; null: it ran apart.", "ms", 0, None, True
    ),
    Column("proposed", pa.list_(pa.float64()), "Tokens that a lookup found in each round.", "tokens", 0, None, True),
    Column("waiting", pa.float64(), "Share of its time in which the engine waited for a CPU.", "ratio", 0, 1, True),
)


CERTIFICATE_COLUMNS = (
    _probability("target_top_10_prob", "Sum of the 10 largest target probabilities."),
    Column(
        "thresholds_exact",
        pa.bool_(),
        "False: a rule accepts more tokens here than the log checked, so its threshold is only a lower bound.",
    ),
)


@dataclass(frozen=True)
class LogRules:
    """Ids of rules, by what a position log holds of them: `accepted`, their acceptance; `certified`, thresholds. Of the log
    of a head: see `DraftFacts`.
    """

    accepted: tuple[str, ...]
    certified: tuple[str, ...] = ()
    depths: int = 1
    reduced_vocabulary: bool = False
    own_path: bool = False
    has_confidence: bool = False

    def of(self, draft: DraftFacts) -> LogRules:
        """Return the same for the log of one draft."""
        depths, reduced, confidence = draft.depths or 1, draft.reduced_vocabulary, draft.has_confidence
        return replace(self, depths=depths, reduced_vocabulary=reduced, own_path=draft.own_path, has_confidence=confidence)

    @property
    def drawn(self) -> tuple[str, ...]:
        """The rules among them whose acceptance and a_t the log of a head holds by depth."""
        return tuple(rule.id for rule in rules_of(self.accepted) if rule.rule.drawn and rule.rule.chained)

    @property
    def columns(self) -> tuple[Column, ...]:
        """All columns of the position log, in order."""
        accept = "Probability that {} keeps the draft's proposal; null: no proposal."
        threshold = "Least KL(p || q) at which {} can reject; infinite: it never can."
        return (
            *POSITION_COLUMNS,
            *(_probability(f"accept_{rule}", accept.format(rule), nullable=True) for rule in self.accepted),
            *(CERTIFICATE_COLUMNS if self.certified else ()),
            *(_nats(f"threshold_{rule}", threshold.format(rule)) for rule in self.certified),
            *self._of_heads(),
        )

    def _of_heads(self) -> Iterator[Column]:
        """Yield the columns that the log of a head has beside those of every log. Row t holds what is proposed for position
        t as the d-th draft of a round, which began at t - d + 1; depth 1 is in the columns of every log.
        """
        if self.reduced_vocabulary:
            yield Column("in_draft_vocabulary", pa.bool_(), "Whether the draft can propose the token x_t at all.")
        depths = range(2, self.depths + 1)
        yield from _needing(DEPTHS, *(Column(f"agrees_{d}", pa.bool_(), AGREES.format(d)) for d in depths))
        if self.own_path:
            odds = (Column(f"draft_log_odds_{d}", pa.float16(), ODDS.format(d), "nats") for d in depths)
            yield from _needing(OWN_PATH, *odds)
        for d in range(1, self.depths + 1) if self.has_confidence else ():
            yield from _needing(DEPTHS, _probability(f"draft_confidence_{d}", CONFIDENCE.format(d)))
        for rule in self.drawn if depths else ():
            yield from _needing(DEPTHS, *(_probability(f"accept_{rule}_{d}", ACCEPTS.format(rule, d)) for d in depths))
            blocks, kept = parse_rule(rule).rule.blocks, [f"emitted_{rule}_{d}" for d in depths]
            ratios = (Column(name, pa.float32(), RATIOS.format(d), "", 0) for name, d in zip(kept, depths, strict=True))
            chances = (_probability(name, EMITTED.format(rule, d)) for name, d in zip(kept, depths, strict=True))
            yield from _needing(DEPTHS, *(ratios if blocks else chances))


# What the log of a head has beside the columns of every log, at depth 2; `lossless` is one of the rules that draw.
OF_HEADS = LogRules(("lossless",), depths=2, reduced_vocabulary=True, own_path=True, has_confidence=True)
HEAD_COLUMNS = OF_HEADS.columns[len(LogRules(("lossless",)).columns) :]


def totals_columns(gammas: Iterable[int]) -> tuple[Column, ...]:
    """Return columns of the totals: a row per document and rule. Counts are expectations if acceptance is random."""
    count, lengths = pa.float64(), tuple(gammas)
    return (
        Column("document", pa.int64(), "Number of the document in corpus order.", low=0),
        Column("rule", CATEGORY, "Id of the acceptance rule."),
        Column("positions", pa.int64(), "Positions that are counted.", "positions", 1),
        Column(
            "proposals", pa.int64(), "Positions where the draft has a proposal: alpha is a mean over these.", "positions", 0
        ),
        Column("accepted", count, "Sum of accept_<rule> over the proposals; accepted / proposals is alpha.", "positions", 0),
        Column(
            "emitted",
            count,
            "Sum of a_t over the proposals; on average equal to `accepted` in texts decoded with this rule; "
            "null: a lossy rule.",
            "positions",
            0,
            nullable=True,
        ),
        *(Column(name, count, doc, "positions", 0, nullable=True) for name, doc in PAIR_COUNTS.items()),
        Column("impossible", pa.int64(), "Sampled positions whose token has probability 0 in the scoring pass.", low=0),
        Column("mismatches", pa.int64(), "Greedy positions whose token is not target_top of the scoring pass.", low=0),
        Column("clear_mismatches", pa.int64(), "Mismatches that are not near-ties.", low=0),
        Column("near_ties", pa.int64(), "Positions whose two top logits differ by at most the dtype's noise.", low=0),
        Column(
            "tokens",
            count,
            "Tokens emitted by rounds; null: the rule's rounds are not defined here.",
            "",
            0,
            None,
            True,
        ),
        *(Column(f"rounds_{g}", count, f"Rounds with gamma {g}.", "rounds", 0, nullable=True) for g in lengths),
        *(Column(f"drafted_{g}", count, f"Tokens drafted with gamma {g}.", "tokens", 0, nullable=True) for g in lengths),
        *(Column(f"control_{g}", count, CONTROL.format(g), nullable=True) for g in lengths),
        *(
            Column(column, IN_FLOAT32.get(name, count), doc.format(d) + f" With gamma {g}.", "rounds", low=0, nullable=True)
            for g in lengths
            for name, doc in DEPTH_COUNTS.items()
            for d, column in enumerate(depth_names(name, g), start=1)
        ),
    )


def hybrid_totals_columns(gammas: Iterable[int]) -> tuple[Column, ...]:
    """Return the same of a hybrid, which are never stored: only some of its rounds run draft steps."""
    count, lengths = pa.float64(), tuple(gammas)
    read = "Tokens beyond one that first draft steps read if the draft is {}, gamma {}."
    kinds = {"read_by_head": "a head", "read_by_model": "a model"}
    return (
        *totals_columns(lengths),
        *(Column(f"steps_{g}", count, f"Draft steps with gamma {g}.", "steps", 0, nullable=True) for g in lengths),
        *(Column(f"started_{g}", count, f"Rounds with draft steps, gamma {g}.", "rounds", 0, None, True) for g in lengths),
        *(
            Column(f"{name}_{g}", count, read.format(kind, g), "tokens", 0, nullable=True)
            for name, kind in kinds.items()
            for g in lengths
        ),
    )


def imported_totals_columns(gammas: Iterable[int]) -> tuple[Column, ...]:
    """Return the same of a run that was imported from an engine's metrics, which leave `UNKNOWN_TO_ENGINES` null."""
    columns = totals_columns(gammas)
    return tuple(replace(column, nullable=column.nullable or column.name in UNKNOWN_TO_ENGINES) for column in columns)


def depth_names(name: str, gamma: int) -> list[str]:
    """Return the columns of one of `DEPTH_COUNTS` at a gamma, by depth from 1 to gamma: accepted_4_1 to accepted_4_4."""
    return [f"{name}_{gamma}_{depth}" for depth in range(1, gamma + 1)]


def deeper_names(name: str, depths: int | None) -> list[str]:
    """Return the columns of a head's log that are `name` at depths 2 to `depths`: agrees_2, agrees_3."""
    return [f"{name}_{depth}" for depth in range(2, (depths or 1) + 1)]


def arrow_schema(columns: Iterable[Column], **metadata: object) -> pa.Schema:
    """Return the Arrow schema of columns; `metadata` goes into it as JSON beside the schema's version."""
    notes = {"alphaprof_schema": json.dumps(SCHEMA_VERSION)} | {key: json.dumps(value) for key, value in metadata.items()}
    return pa.schema([column.field() for column in columns], metadata=notes)


def violations(table: pa.Table, columns: Iterable[Column]) -> list[str]:
    """Return what in `table` contradicts the declaration of its columns: other columns, types, nulls, NaN and values out of
    range.

    The values inside a list obey the unit and range of its column, and are never null.
    """
    declared = {column.name: column for column in columns}
    if table.column_names != list(declared):
        return [f"columns {table.column_names} instead of {list(declared)}"]
    return [problem for name, column in declared.items() for problem in _column_violations(column, table[name])]


def _column_violations(column: Column, values: pa.ChunkedArray) -> Iterator[str]:
    if values.type != column.type:
        yield f"{column.name} has type {values.type} instead of {column.type}"
        return
    if not column.nullable and values.null_count:
        yield f"{column.name} has {values.null_count} nulls"
    if pa.types.is_nested(column.type):
        values = pc.list_flatten(values)
        if values.null_count:
            yield f"{column.name} has {values.null_count} nulls inside lists"
    if pa.types.is_floating(values.type) and pc.any(pc.is_nan(values)).as_py():
        yield f"{column.name} holds NaN"
    if column.low is not None or column.high is not None:
        low, high = pc.min_max(values).as_py().values()
        if column.low is not None and low is not None and low < column.low:
            yield f"{column.name} holds {low}, below {column.low}"
        if column.high is not None and high is not None and high > column.high * (1 + 1e-6):
            yield f"{column.name} holds {high}, above {column.high}"
