"""Files of what engines counted: which kind a file is, and what the lines of logs, answers and results add up to.

Names are those of the engines' sources (`FORMATS`).
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from alphaprof.errors import DataUnreadable

Labels = tuple[tuple[str, str], ...]
Key = tuple[str, str, Labels]  # engine (a key of SERVERS), name (a value of NAMES) and labels
Page = dict[Key, float]
GZIP = b"\x1f\x8b"  # how a compressed file begins
ADDRESS = ("http://", "https://")
GAUGES = ("steps", "length", "slots", "used", "hit_rate")


@dataclass(frozen=True)
class Format:
    """A kind of file. `sign` matches a line that counts; its groups are names of pages, and `rates` (accepted at each depth,
    as shares of rounds), `rejected` and `answered` (tokens of one answer, whose first is of no round). `next`: what
    to do with a kind whose lines are not added up; `reader`: what `alphaprof import` reads it as.
    """

    engine: str
    about: str
    sign: str
    next: str = ""
    reader: str = ""


NUMBER = r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
NUMBERS = rf"{NUMBER}(?:, *{NUMBER})*"


def _fields(**names: str) -> str:
    """Match JSON fields, or those of a dictionary as Python prints it, in any order."""
    return "".join(f"(?=.*[\"']{name}[\"']: *(?P<{group}>{NUMBER}))" for group, name in names.items())


BENCH = _fields(rounds="spec_decode_num_drafts", drafted="spec_decode_draft_tokens", accepted="spec_decode_accepted_tokens")
LLAMA = _fields(drafted="draft_n", accepted="draft_n_accepted", emitted="predicted_n")
TABLE = r"Drafts: +(?P<rounds>\d+)|Draft tokens: +(?P<drafted>\d+)|Accepted tokens: +(?P<accepted>\d+)"
USAGE = _fields(accepted="accepted_prediction_tokens", rejected="rejected_prediction_tokens", answered="completion_tokens")
RUNNING = "the log of a vLLM server (engine V0)"  # whose lines count from the start of the server
IMPORT = "import it, and diagnose that run: alphaprof import FILE"
AVERAGES = (
    "averages have no sums: start SGLang with --enable-metrics and give its address (alphaprof diagnose http://HOST:30000),"
    " or import answers that were asked for with return_meta_info: true (docs/import.md)"
)
NOT_READ = "take the counts where they come from: a metrics page, or logged answers (docs/import.md)"
FORMATS = (
    Format(
        "vllm",
        "the log of a vLLM server",
        r"(?>.*?SpecDecoding metrics: )(?>.*?Accepted: )(?P<accepted>\d+) tokens, Drafted: (?P<drafted>\d+) tokens"
        rf"(?:, Per-position acceptance rate: (?P<rates>{NUMBERS}))?",
    ),
    Format(
        "vllm",
        RUNNING,
        r"(?>.*?speculative tokens: )(?P<steps>\d+), (?>.*?accepted tokens: )(?P<accepted>\d+), (?>.*?draft tokens: )"
        r"(?P<drafted>\d+), (?>.*?emitted tokens: )(?P<emitted>\d+)",
    ),
    Format(
        "vllm",
        "a result of vllm bench serve",
        BENCH + rf'(?:.*"spec_decode_per_position_acceptance_rates": *\[(?P<rates>{NUMBERS})\])?',
    ),
    Format("vllm", "an answer of vLLM", '.*"(?:acceptance_histogram|num_spec_steps)"', IMPORT, "vllm"),
    Format(
        "llamacpp",
        "the log of a llama.cpp server",
        r"(?>.*?draft acceptance(?: rate)? = )[\d.]+ \( *(?P<accepted>\d+) accepted / *(?P<drafted>\d+) generated\)"
        rf"(?:.*acceptance rate per position = \((?P<rates>{NUMBERS})\))?",
    ),
    Format("llamacpp", "an answer with timings of llama.cpp", LLAMA + r'(?:.*"draft_rounds": *(?P<rounds>\d+))?'),
    Format(
        "sglang",
        "an answer of SGLang",
        ".*[\"']spec_(?:correct_drafts_histogram|accept_histogram|num_correct_drafts)[\"']",
        f"{IMPORT}; of a server's log, give its metrics page",
        "sglang",
    ),
    Format(
        "sglang",
        "an answer of an older SGLang, or its server's log",
        _fields(rounds="spec_verify_ct", written="completion_tokens"),
    ),
    Format(
        "sglang",
        "the log of an SGLang server, whose lines are averages",
        ".*accept len: ",
        AVERAGES,
    ),
    Format("sglang", "what an SGLang server says of itself", '.*"avg_spec_accept_length"', AVERAGES),
    Format("sglang", "a result of SGLang's bench_serving", '(?=.*"backend": *"sglang)(?=.*"accept_length")', AVERAGES),
    Format("vllm", "what vllm bench serve prints", rf"(?:{TABLE}) *\r?\n?$"),
    Format(
        "trtllm",
        "iterations of TensorRT-LLM",
        '(?=.*"specDecodingStats")'
        + _fields(rounds="numRequestsWithDraftTokens", drafted="numDraftTokens", accepted="numAcceptedTokens"),
    ),
    Format(
        "lmstudio",
        "an answer of LM Studio",
        _fields(drafted="total_draft_tokens_count", accepted="accepted_draft_tokens_count", answered="completion_tokens"),
    ),
    Format("", "an answer of Prometheus' own API", '(?=.*"resultType")(?=.*"__name__")'),
    Format(
        "trtllm",
        "a performance record of TensorRT-LLM",
        _fields(drafted="total_draft_tokens", accepted="total_accepted_draft_tokens"),
    ),
    Format(
        "openai",
        "an answer with counts of predicted tokens, as of tabbyAPI",
        r'(?=.*"(?:accepted|rejected)_prediction_tokens": *[1-9])' + USAGE,
    ),
    Format("", "a report of guidellm", '.*"guidellm_version"', NOT_READ),
    Format("", "an export of aiperf", '.*"output_sequence_length"', NOT_READ),
    Format("", "an acceptance table of speculators", ".*num_drafts,num_draft_tokens,num_accepted_tokens", NOT_READ),
)


PAGE = Format("", "a metrics page", r"(?:# (?:HELP|TYPE) )?(?:ray_)?(?:vllm|sglang|llamacpp|lmdeploy)[:_]\w")
# Part of every sign, and of few lines of a log.
COUNTS = re.compile("[Aa]ccept|[Dd]raft|spec_|guidellm|output_sequence|resultType")


def format_of(text: str) -> Format | None:
    """Return the kind of file that a line is of; None: none that is known."""
    if re.match(PAGE.sign, text):
        return PAGE
    return next((each for each in FORMATS if re.match(each.sign, text)), None) if COUNTS.search(text) else None


def as_utf8(content: bytes) -> bytes:
    """Return a text as UTF-8 without a mark of its byte order; also one in UTF-16, as PowerShell writes it."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        content = content.decode("utf-16", errors="replace").encode()
    return content.removeprefix(codecs.BOM_UTF8)


def page_of_api(content: bytes) -> bytes:
    """Return an answer of Prometheus' own API as a metrics page: the last value of each series; anything else as it is."""
    lines = []
    with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError, AttributeError):
        for series in json.loads(content)["data"]["result"]:
            labels, value = dict(series["metric"]), (series.get("value") or series["values"][-1])[1]
            name = labels.pop("__name__")
            told = ",".join(f"{label}={json.dumps(str(said))}" for label, said in labels.items())
            lines.append(f"{name}{{{told}}} {float(value)}\n")
    return "".join(lines).encode() or content


def sums_in(content: bytes, where: str) -> Page | None:
    """Return what the lines of a log, of answers or of a result add up to; None if none is of a known kind. Raises
    `DataUnreadable` for a kind that is not read.
    """
    lines: Iterable[str] = (line.decode(errors="replace") for line in io.BytesIO(content))  # a log may be large
    if content.lstrip()[:1] in (b"{", b"["):
        with contextlib.suppress(ValueError, RecursionError):  # one text, over several lines
            whole = json.loads(content)
            lines = [json.dumps(each) for each in (whole if isinstance(whole, list) else [whole])]
    page: Page = {}
    named: Format | None = None
    for line in lines:
        found = format_of(line)
        if found is None or found is PAGE:
            continue
        if found.next:
            named = named or found
            continue
        for (name, position), count in _counted(re.match(found.sign, line)).items():
            key = (found.engine, name, (("position", str(position)),) if name == "position" else ())
            page[key] = count if found.about == RUNNING or name in GAUGES else page.get(key, 0.0) + count
    if named is not None and not page:
        raise DataUnreadable(f"{where}: this is {named.about}", named.next.replace("FILE", where))
    return page or None


def _counted(match: re.Match[str] | None) -> dict[tuple[str, int], float]:
    """Return what a line counts, by name and position. Rounds follow from the shares that are rounded to three digits, and
    are those that drafted all tokens where that agrees.
    """
    named = {name: part for name, part in match.groupdict().items() if part} if match else {}
    counts = {name: float(part) for name, part in named.items() if name != "rates"}
    if "rejected" in counts:
        counts["drafted"] = counts["accepted"] + counts.pop("rejected")
    if "answered" in counts:
        counts["emitted"] = counts.pop("answered") - 1
    if "written" in counts:
        counts["requests"] = 1.0
    rates = [float(each) for each in named["rates"].split(",")] if "rates" in named else []
    if rates:
        full = counts["drafted"] / len(rates)
        near = counts["accepted"] / sum(rates) if any(rates) else full
        alike = full.is_integer() and abs(full - near) < 1 + 0.01 * near
        counts.setdefault("rounds", full if alike else float(max(round(near), math.ceil(full))))
    shares = [rate / sum(rates) if any(rates) else 0.0 for rate in rates]
    placed = {("position", place): counts["accepted"] * share for place, share in enumerate(shares)}
    return {(name, 0): count for name, count in counts.items()} | placed
