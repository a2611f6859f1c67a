"""Whether results on a GPU are right: columns against float64, profiles against those of the CPU, decoding in 16 bits
against its replay, and a profile that was killed and resumed.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import torch
from transformers import AutoModelForCausalLM

from alphaprof.profiling.models.processing import PLAIN, Processing, uniforms, weights_of
from alphaprof.profiling.scoring import dispatch
from alphaprof.profiling.scoring.statistics import ProcessedLogits, processed_logits
from alphaprof.run.journal import read_records
from alphaprof.run.storage import storage_of
from alphaprof.totals.count import TotalsRequest
from scripts.gpu.setting import Line, Setting, perturb

ROOT = Path(__file__).parent.parent.parent
BOUND = 1e-5  # of a column's error, absolute and relative to its value
TIE = 1e-4  # a choice whose alternative is nearer than this may fall otherwise on another device
SAMPLED = Processing(0.8, 0, 0.95)


# --- columns --------------------------------------------------------------------------------------------------------------

WIDTHS = (32_000, 50_257, 151_936, 262_144)
PROCESSINGS = (PLAIN, Processing(0.8), Processing(0.8, 20), SAMPLED)


@dataclass
class Errors:
    """The largest errors of columns against float64 that were seen so far; `breach`: by how much of the probability a
    truncation missed its top_p, infinite for another top_k; `wrong`: what is beyond its bound, in words.
    """

    absolute: dict[str, float] = field(default_factory=dict)
    relative: dict[str, float] = field(default_factory=dict)  # of values above 0.001
    breach: float = 0.0
    rows: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, found: dict[str, float], expected: dict[str, float], where: str) -> None:
        """Take in one row."""
        self.rows += 1
        for name in found.keys() & expected.keys():
            ours, theirs = float(found[name]), float(expected[name])
            error = 0.0 if ours == theirs else abs(ours - theirs)  # infinite values may be equal
            exact = name.split()[0] in dispatch.IDS
            if not error <= (0.0 if exact else BOUND + BOUND * abs(theirs)):  # NaN is wrong
                self.wrong.append(f"{name} {ours:.9g} for {theirs:.9g} ({where})")
            if not exact:
                self.absolute[name] = max(self.absolute.get(name, 0.0), error)
            if not exact and 1e-3 < abs(theirs) < math.inf:
                self.relative[name] = max(self.relative.get(name, 0.0), error / abs(theirs))

    def line(self, what: str) -> Line:
        """What was seen, as a line; right where nothing is beyond its bound."""
        text = f"{what}: {self.rows} rows"
        for word, errors in (("largest error", self.absolute), ("relative", self.relative)):
            worst = max(errors, key=lambda name: errors[name])
            text += f", {word} {errors[worst]:.1e} ({worst})"
        text += f", cuts to {self.breach:.1e}" if self.breach <= BOUND else f", WRONG CUTS by {self.breach:.1e}"
        text += f", {len(self.wrong)} WRONG VALUES: {self.wrong[0]}" if self.wrong else ", ids equal"
        figures = {"absolute": self.absolute, "relative": self.relative, "breach": self.breach, "wrong": self.wrong[:20]}
        return Line(text, figures, ok=not self.wrong and self.breach <= BOUND)


def columns(setting: Setting) -> Iterator[Line]:
    """Compares every column that the kernels write with float64 on the CPU, a line for each vocabulary and dtype."""
    import triton  # noqa: F401  # where it is missing, the check says so

    if reason := dispatch.why_unavailable(setting.device):
        yield Line(f"the kernels do not run, statistics are those of torch: {reason}", ok=False)
    for width in (300,) if setting.tiny else WIDTHS:
        for dtype in (*setting.dtypes, torch.float32):
            errors = Errors()
            rows = kinds_of_rows(width, dtype, 1 if setting.tiny else 2)
            for chosen in PROCESSINGS[:: 3 if setting.tiny else 1]:
                compare_rows(setting, *rows, chosen, errors)
            yield errors.line(f"V {width}, {str(dtype).removeprefix('torch.')}")
    yield far_rows(setting)


def kinds_of_rows(width: int, dtype: torch.dtype, each: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [4 each, width] of a target and of a draft near it: ordinary rows, rows with one likely id, almost flat rows,
    and rows with many equal logits, the largest among them.
    """
    common, noise = torch.randn(2, 4, each, width, generator=torch.Generator().manual_seed(width))
    target = common * torch.tensor([4.0, 1.0, 0.01, 2.0])[:, None, None]
    draft = target + noise * torch.tensor([1.0, 0.5, 0.01, 1.0])[:, None, None]
    for logits in (target, draft):
        logits[1, :, width // 3] += 25.0
        logits[3].round_()
        logits[3][:, [width // 2, width - 1]] = 12.0
    return target.flatten(0, 1).to(dtype), draft.flatten(0, 1).to(dtype)


def compare_rows(setting: Setting, target: torch.Tensor, draft: torch.Tensor, chosen: Processing, errors: Errors) -> None:
    """Add the errors of rows of logits [n, V] that are processed in one way: of the kernels, and of what scoring calls."""
    from alphaprof.profiling.scoring.gpu_statistics import measured

    token, proposal = torch.randint(0, target.shape[1], (2, len(target)), generator=torch.Generator().manual_seed(1))
    token[::2] = target[::2].float().argmax(1)
    pair = [logits.to(setting.device) for logits in (target, draft)]
    sides = [processed_logits(logits, chosen) for logits in pair]
    ids = token.to(setting.device), [proposal.to(setting.device)]
    with np.errstate(all="ignore"):  # Triton's interpreter computes in NumPy
        seen = [measured(sides[0], [sides[1]], *ids), dispatch.measured(pair, [chosen, chosen], *ids)]
    scaled = [logits.float().numpy() / np.float32(chosen.temperature) for logits in (target, draft)]
    cuts = [np.full(len(target), -np.inf) if each.least is None else each.least.cpu().numpy() for each in sides]

    def expected(row: int) -> tuple[dict[str, float], float]:
        z, y = (rows[row].astype(np.float64) for rows in scaled)
        least = [rows[row] for rows in cuts]
        breach = max(breach_of(z, least[0], chosen), breach_of(y, least[1], chosen))
        return float64_columns(z, y, least, int(token[row]), int(proposal[row])), breach

    with ThreadPoolExecutor() as pool:  # NumPy sorts and exponentiates without holding others up
        for row, (values, breach) in enumerate(pool.map(expected, range(len(target)))):
            errors.breach = max(errors.breach, breach)
            for groups in seen:
                # Raw columns are those of the plain softmax: of rows that are processed, others than these.
                found = {
                    name: each[row].item() for name, each in named(groups).items() if chosen == PLAIN or name[:3] != "raw"
                }
                errors.add(found, values, f"row {row}, {chosen}")


def named(groups: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Columns of target, draft and lookup under names of their own."""
    target, draft, lookup = groups
    return target | draft | {f"{name} (lookup)": values for name, values in lookup.items()}


def float64_columns(z: Any, y: Any, least: Sequence[float], token: int, proposal: int) -> dict[str, float]:
    """All columns of scaled logits z and y of one position, of which those from `least` on are kept."""
    from tests import reference

    p, q = (reference.softmax(np.where(x >= cut, x, -np.inf)) for x, cut in zip((z, y), least, strict=True))
    lookup = {"target_prob_of_draft_top": p[proposal], "target_rank_of_draft_top": reference.rank(z, proposal)}
    return reference.compared(z, y, p, q, token) | {f"{name} (lookup)": value for name, value in lookup.items()}


def breach_of(z: Any, least: float, chosen: Processing) -> float:
    """By how much of the probability the cut of one row is off: what lies above it must be less than top_p, and with what is
    equal to it at least that. Infinite where the cut of top_k is another.
    """
    from tests import reference

    if chosen.top_k:
        return 0.0 if np.partition(z, -chosen.top_k)[-chosen.top_k] == least else math.inf
    if chosen.top_p == 1.0:
        return 0.0
    p = reference.softmax(z)
    return max(0.0, p[z > least].sum() - chosen.top_p, chosen.top_p - p[z >= least].sum())


def far_rows(setting: Setting) -> Line:
    """Compares the last of many rows, beyond the 65,535th and 2^31 elements; a row is the target's, the next the draft's."""
    from alphaprof.profiling.scoring.gpu_statistics import measured

    count, width = (9, 300) if setting.tiny else (70_000, 32_000)
    torch.manual_seed(0)
    logits = torch.randn(count + 1, width, dtype=torch.bfloat16, device=setting.device).mul_(3)
    token = torch.arange(count, device=setting.device) % width
    with np.errstate(all="ignore"):
        seen = named(measured(ProcessedLogits(logits[:-1]), [ProcessedLogits(logits[1:])], token, [token]))
    errors, nothing_cut = Errors(), [-math.inf, -math.inf]
    for row in sorted({0, min(65_535, count - 2), min(65_536, count - 2), count - 2, count - 1}):
        z, y = logits[row : row + 2].float().cpu().numpy().astype(np.float64)
        expected = float64_columns(z, y, nothing_cut, row % width, row % width)
        errors.add({name: values[row].item() for name, values in seen.items()}, expected, f"row {row}")
    return errors.line(f"last rows of {count} x {width} logits ({logits.numel() / 2**31:.2f} x 2^31)")


# --- profile --------------------------------------------------------------------------------------------------------------

RULES = ("strict", "lossless", "block", "one_hot")
GAMMAS = (1, 2, 4)
COUNTS = re.compile(r"tokens$|proposals$|accepted|rounds|drafted|tested")  # columns of the totals that are compared
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "then", "some", "more", "of", "it")


@dataclass(frozen=True)
class Seen:
    """What a profile says of its documents: rows of the continuations, and tables of positions and totals by draft."""

    documents: list[dict[str, Any]]
    positions: dict[str, pa.Table]
    totals: dict[str, pa.Table]

    def rows(self, kind: str, draft: str, document: int) -> pa.Table:
        """One document's rows of the `positions` or `totals` of a draft."""
        table: pa.Table = getattr(self, kind)[draft]
        return table.filter(pa.array(table["document"].to_numpy() == document))


@dataclass
class Comparison:
    """Documents of two profiles: how many are equal, which ones part and by what margin, and what no tie explains."""

    equal: int = 0
    parted: dict[int, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def part(self, document: int, what: str, margin: float, allowed: float) -> None:
        """Note a document that is not the same, which is right where another choice was near."""
        self.parted[document] = margin
        if not margin < allowed:
            self.wrong.append(f"document {document}: {what} at a margin of {margin:.2g}")

    def line(self, what: str, figures: dict[str, Any]) -> Line:
        """What was seen, as a line."""
        text = f"{what}: {self.equal} documents with equal text and rounds, {len(self.parted)} part"
        if self.parted:
            text += " at margins of " + ", ".join(f"{margin:.1e}" for margin in self.parted.values())
        text += "".join(f"; {name} {value}" for name, value in figures.items() if value != [])
        if self.wrong:
            text += f"; WRONG {self.wrong[0]}"
        return Line(text, {"parted": self.parted, "wrong": self.wrong, **figures}, ok=not self.wrong)


def compared(ours: Seen, theirs: Seen, network: Any, allowed: float) -> Comparison:
    """Two profiles of the same documents; `network`: the target in float32 on the CPU, which says how near a choice was."""
    found = Comparison()
    if [row["prompt_hash"] for row in ours.documents] != [row["prompt_hash"] for row in theirs.documents]:
        found.wrong.append("the prompts are not the same")
        return found
    for one, other in zip(ours.documents, theirs.documents, strict=True):
        number = one["document"]
        if one["continuation_ids"] != other["continuation_ids"]:
            pairs = enumerate(zip(one["continuation_ids"], other["continuation_ids"], strict=False))
            place = next((at for at, (left, right) in pairs if left != right), -1)
            found.part(number, f"another token at {place}", margin_of_token(network, one, place), allowed)
        elif apart := difference_of_rounds(ours, theirs, number):
            found.part(number, *apart, allowed)
        else:
            found.equal += 1
    return found


@torch.inference_mode()
def margin_of_token(network: Any, row: dict[str, Any], place: int) -> float:
    """Returns how near another token was at a place of a document: the lead of the top logit where the text is greedy, else
    the distance of the number that drew the token from the edge of its share. Infinite where no token differs (-1).
    """
    if place < 0:
        return math.inf
    ids = torch.tensor([*row["prompt_ids"], *row["continuation_ids"][:place]], device=network.device)
    logits = network(input_ids=ids[None]).logits[0, -1:].float()
    if row["temperature"] is None:
        first, second = logits[0].topk(2).values.tolist()
        return float(first - second)
    chosen = Processing(row["temperature"], row["top_k"], row["top_p"], row["min_p"])
    numbers = uniforms(row["seed"], np.array(row["prompt_ids"], dtype=np.int32), row["source_row"], place + 1)
    return float(edges(weights_of(logits, chosen), torch.from_numpy(numbers[-1:])))


def edges(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Distances [n] of numbers in [0, 1) from the nearest edge between the shares of two ids in weights [n, V]."""
    mass = weights.double().cumsum(1)
    return (mass / mass[:, -1:] - numbers[:, None].to(mass.device)).abs().amin(1)


def difference_of_rounds(ours: Seen, theirs: Seen, number: int) -> tuple[str, float] | None:
    """Says what differs of a document with equal text, and how near the draft's choice was there: log q_(1) - log q_(2)."""
    for draft in ours.positions:
        one, other = (seen.rows("positions", draft, number) for seen in (ours, theirs))
        for name in ("draft_top", "proposed", "accepted_run"):
            left, right = (table[name].fill_null(-1).to_numpy() for table in (one, other))
            if len(places := np.flatnonzero(left != right)):
                top, margin = (one[of][int(places[0])].as_py() for of in ("draft_top_prob", "draft_margin"))
                near = math.log(top / (top - margin)) if top and top > margin else math.inf
                return f"another {name} of {draft} at {places[0]}", near
        for left, right in zip(*(seen.rows("totals", draft, number).to_pylist() for seen in (ours, theirs)), strict=True):
            for name in filter(COUNTS.search, left):
                pair = [math.nan if row[name] is None else row[name] for row in (left, right)]
                if not np.isclose(*pair, rtol=TIE, atol=TIE, equal_nan=True):
                    return f"{name} of {draft} by {left['rule']} {pair[0]:g} and {pair[1]:g}", math.inf
    return None


def profile(setting: Setting) -> Iterator[Line]:
    """Profiles the same documents on the device and on the CPU in float32, with reports of both. On a CPU it is the same
    twice, and nothing may part.
    """
    torch.set_float32_matmul_precision("highest")
    allowed = TIE if setting.on_gpu else 0.0
    save_models(setting)
    reference = AutoModelForCausalLM.from_pretrained(setting.folder / "target", dtype=torch.float32).eval()
    import datasets  # noqa: F401  # where it is missing, the check says so

    from alphaprof.report.build import build_report

    write_profile(setting)
    runs = [run_profile(setting, name, device) for name, device in (("device", setting.device), ("cpu", "cpu"))]
    found = compared(*map(seen_of_run, runs), reference, allowed)
    verdicts = [verdicts_of(build_report(run)) for run in runs]
    other = [f"{left} and {right}" for left, right in zip(*verdicts, strict=True) if left != right]
    if other and not found.parted:
        found.wrong.append(f"another verdict: {other[0]}")
    facts = {"verdict": verdicts[0][0][0], "verdicts_equal": len(verdicts[0]) - len(other), "verdicts_other": other}
    yield found.line("alphaprof profile", shares(seen_of_run(runs[0])) | facts)


def save_models(setting: Setting) -> None:
    """Writes a target and a draft near it, with a tokenizer, as safetensors; of the given model where there is one."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from tests import tiny

    logging.disable_progress_bar()
    if (setting.folder / "draft").exists():
        return
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    if setting.model is None:
        words, network = tiny.tokenizer(), tiny.llama(7, **({} if setting.tiny else wide | {"initializer_range": 0.14}))
    else:
        words = AutoTokenizer.from_pretrained(setting.model)
        network = AutoModelForCausalLM.from_pretrained(setting.model, dtype=torch.float32)
    for name in ("target", "draft"):
        if name == "draft":
            perturb(network, 0.02)
        network.save_pretrained(setting.folder / name)
        words.save_pretrained(setting.folder / name)


def shares(seen: Seen) -> dict[str, Any]:
    """How many tokens there are, and which share of each draft's top tokens the text has."""
    alpha = {}
    for draft, table in seen.positions.items():
        proposed = table["proposed"].to_numpy() > 0
        alpha[draft] = round(float((table["draft_top"].to_numpy() == table["token"].to_numpy())[proposed].mean()), 2)
    return {"tokens": sum(len(row["continuation_ids"]) for row in seen.documents), "alpha": alpha}


def write_profile(setting: Setting) -> None:
    """A profile of greedy and sampled text in two domains, with its data; step times do not depend on the machine."""
    generator, most = np.random.default_rng(0), 16 if setting.tiny else 64
    for domain in ("code", "chat"):
        texts = [" ".join(generator.choice(WORDS, int(generator.integers(1, 9)))) for _ in range(4 if setting.tiny else 12)]
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (setting.folder / f"{domain}.jsonl").write_text(rows)
    drawn = {"kind": "sampled", "temperature": 0.8, "top_p": 0.95, "seed": 3, "max_new_tokens": most}
    tree = {
        "target": {"model": "./target", "dtype": "float32"},
        "drafts": {
            "near": {"kind": "model", "model": "./draft"},
            "skip": {"kind": "layer_skip", "drop_layers": [2]},
            "ngram": {"kind": "prompt_lookup", "max_ngram": 2},
        },
        "data": [
            {"domain": "code", "path": "code.jsonl", "prompt": "{text}"},
            {"domain": "chat", "path": "chat.jsonl", "prompt": "{text}", "continuation": drawn},
        ],
        "continuation": {"kind": "greedy", "max_new_tokens": most},
        "rules": list(RULES),
        "gammas": list(GAMMAS),
        "costs": {"source": "roofline", "accelerator": "h100-sxm"},
        "shard_documents": 2,
    }
    (setting.folder / "profile.yaml").write_text(json.dumps(tree))  # JSON is YAML


def run_profile(setting: Setting, name: str, device: Any, resume: bool = False) -> Any:
    """A run of that profile on a device."""
    from alphaprof.config.load import load_profile
    from alphaprof.profiling.profile import profile

    options = load_profile(setting.folder / "profile.yaml", [f"target.device={device}"])
    return profile(options, setting.folder / name, Mock(), resume)  # a progress that says nothing


def seen_of_run(run: Any) -> Seen:
    """What a run directory holds."""
    from alphaprof.totals.files import read_totals

    shards = [shard.index for shard in run.shards]
    return Seen(
        [row for shard in shards for row in run.continuations(shard).to_pylist()],
        {name: pa.concat_tables(run.positions(name, shard) for shard in shards) for name in run.manifest.drafts},
        {name: read_totals(run, name, TotalsRequest(RULES, GAMMAS)) for name in run.manifest.drafts},
    )


def verdicts_of(report: Any) -> list[Any]:
    """The verdict on the traffic, and that on each domain and draft with its length."""
    answer = report.answer
    return [
        (answer.verdict, answer.draft, answer.rule, answer.gamma),
        *((each.domain, each.draft, each.rule, each.verdict, each.gamma) for each in report.results),
    ]


# --- resume ---------------------------------------------------------------------------------------------------------------


def resume(setting: Setting) -> Iterator[Line]:
    """Kills a profile after its first shard and resumes it: the rows are those of a run that nothing interrupted."""
    import datasets  # noqa: F401  # where it is missing, the check says so

    save_models(setting)
    write_profile(setting)
    whole = run_profile(setting, "device", setting.device, resume=True).path  # of the part before, where there is one
    killed = setting.folder / "killed"
    done, code = kill_after_a_shard(setting, killed)
    if code != -signal.SIGKILL or not 0 < done < len(list(whole.glob("continuations/*.parquet"))):
        yield Line(f"the run could not be killed in time: it ended with {code} after {done} shards", ok=False)
        return
    run_profile(setting, killed.name, setting.device, resume=True)
    yield same_tables(f"killed after {done} shard{'s' * (done > 1)} and resumed", whole, killed)


def same_tables(what: str, whole: Path, other: Path) -> Line:
    """Whether two runs hold the same tables, by the names of their files."""
    import pyarrow.parquet as pq

    tables = [
        {str(path.relative_to(run)): pq.ParquetFile(path).read() for path in found}
        for run, found in ((run, sorted(run.rglob("*.parquet"))) for run in (whole, other))
    ]
    same = tables[0].keys() == tables[1].keys()
    odd = [name for name, table in tables[0].items() if same and not table.equals(tables[1][name])]
    rows = sum(table.num_rows for table in tables[0].values())
    text = f"{what}: {rows} rows in {len(tables[0])} files, "
    text += "all equal" if same and not odd else f"other rows in {', '.join(odd)}" if same else "other files"
    return Line(text, {"rows": rows, "other": odd}, ok=same and not odd)


def profiling(setting: Setting, out: Path) -> list[str]:
    """The command that profiles on the device into a directory."""
    command = [sys.executable, "-m", "alphaprof", "profile", str(setting.folder / "profile.yaml"), "--out", str(out)]
    return [*command, "--set", f"target.device={setting.device}"]


def environment() -> dict[str, str]:
    """That of processes which shall find this checkout."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def kill_after_a_shard(setting: Setting, out: Path) -> tuple[int, int | None]:
    """How many shards a run in a process of its own had when it was killed, and how that ended."""
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    with subprocess.Popen(profiling(setting, out), env=environment(), **streams) as run:
        while run.poll() is None and setting.left() > 0 and shards_of(out) == 0:
            time.sleep(0.002)
        run.kill()
    return shards_of(out), run.returncode


def shards_of(out: Path) -> int:
    """How many of the first shards of a run are scored."""
    return len(read_records(storage_of(out), "records/rows-0000.json"))


# --- rounds ---------------------------------------------------------------------------------------------------------------

GAMMA = 4


def rounds(setting: Setting) -> Iterator[Line]:
    """Decodes documents for real, as `alphaprof validate` does, beside their replay. They differ by rounding alone, since
    sums over one token and over a whole text have another order: in float32 at near ties, of which one document is granted;
    in 16 bits a figure.
    """
    import datasets  # noqa: F401  # where it is missing, the check says so

    from alphaprof.commands.validate.measure import validate
    from alphaprof.commands.validate.validation import build_validation
    from alphaprof.config.load import load_profile

    torch.set_float32_matmul_precision("highest")
    save_models(setting)
    write_profile(setting)
    costs = ["costs.source=measured", "costs.repeats=3", "costs.budget=5"]
    for dtype in ("float32", "bfloat16"):
        changes = [f"target.device={setting.device}", f"target.dtype={dtype}", *costs]
        options = load_profile(setting.folder / "profile.yaml", changes, 2 if setting.tiny else 12)
        run, measured = validate(
            options, setting.folder / f"rounds-{dtype}", [GAMMA], 1, Mock(), rules=["lossless", "block"]
        )
        for cell in build_validation(run, measured, tolerance=0.1, kept=False).cells:
            tokens = cell.tokens_per_round
            text = f"{dtype} {cell.rule}, {cell.draft}, {cell.continuation}: {tokens.measured:.3f} tokens a round decoded, "
            text += f"{tokens.predicted:.3f} replayed"
            if cell.same_text is not None:
                text += (
                    f"; of {cell.documents} texts {cell.same_text} are the profiled ones, {cell.same_rounds} round by round"
                )
            bound = dtype == "float32" and cell.same_rounds is not None
            same = min(cell.same_text or 0, cell.same_rounds or 0) >= cell.documents - 1
            yield Line(text, asdict(cell), ok=same if bound else None)
        setting.clean()
