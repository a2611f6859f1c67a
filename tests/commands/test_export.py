"""`alphaprof export`: artefacts are read as their readers read them, and say what the report says; errors; hostile names."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from alphaprof.cli.exchange import ExportFormat
from alphaprof.commands.export.engines import export, pooled_depths, scope_of
from alphaprof.commands.export.formats import ABOUT, EXPORTS, Acceptance, Depths
from alphaprof.costs.roofline import ModelShape
from alphaprof.errors import OptionInvalid
from alphaprof.report.build import build_report
from alphaprof.report.inputs import ReportInputs
from alphaprof.report.serving import PASTED
from alphaprof.run.manifest import Trial
from alphaprof.run.reader import Run, RunDraft
from tests.conftest import Runner
from tests.costs.test_roofline import LLAMA
from tests.reporting import expected_rounds_of, log_of, only, recounted, rows_of
from tests.synthetic import Domain, Recipe, draft_facts, interrupted, lookup_facts, write_run

STORY = Domain(documents=8, alpha=0.6, temperature=0.7, continuation="sampled")
RECIPE = Recipe(
    domains={"code": Domain(documents=9, alpha=0.75, bursts=0.4), "chat": Domain(documents=7, alpha=0.4)},
    gammas=(1, 2, 3, 5),
    lookups=("lookup",),
)
CHAINS = [name for name, form in EXPORTS.items() if not form.serves]
CONVENTIONS = {
    "vllm-config": "proposing",
    "sglang-args": "all",
    "llamacpp-args": "proposing",
    "vllm-synthetic": "proposing",
    "llamacpp-synthetic": "proposing",
    "sglang-synthetic": "all",
    "aiconfigurator": "all",
    "dynamo": "all",
}
CLOSE = 1e-5  # six digits of each rate


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_run(tmp_path_factory.mktemp("export") / "run", RECIPE)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Greedy, sampled and foreign text; the last has no share of the traffic."""
    domains = {"code": Domain(), "story": STORY, "wiki": Domain(on_policy=False, continuation="text")}
    decision = {"weights": {"code": 0.6, "story": 0.4, "wiki": 0.0}}
    recipe = Recipe(domains=domains, rules=("strict", "one_hot", "lossless"), decision=decision)
    return write_run(tmp_path_factory.mktemp("mixed") / "run", recipe)


@pytest.fixture
def alphaprof(console_script: Runner) -> Runner:
    """`alphaprof export`."""
    return partial(console_script, "export")


def options_of(text: str) -> dict[str, str]:
    """Arguments as a shell hands them on."""
    words = shlex.split(text)
    return dict(zip(words[::2], words[1::2], strict=True))


def rates_of(text: str) -> list[float]:
    return [float(rate) for rate in text.split(",")]


def of_marginals(rates: Sequence[float]) -> float:
    """vLLM and llama.cpp: entry i is the probability that the first i + 1 drafts are all accepted."""
    assert all(0 <= rate <= 1 for rate in rates)
    assert all(after <= before for before, after in pairwise(rates))
    return 1 + sum(rates)


def of_conditionals(rates: Sequence[float]) -> float:
    """Dynamo: one token, and one more for every draft until the first that a coin rejects."""
    assert all(0 <= rate <= 1 for rate in rates)
    return 1 + float(np.cumprod(rates).sum())


def of_vllm(text: str) -> float:
    config = json.loads(text, parse_constant=pytest.fail)
    assert config["rejection_sample_method"] == "synthetic"
    assert len(config["synthetic_acceptance_rates"]) == config["num_speculative_tokens"]
    return of_marginals(config["synthetic_acceptance_rates"])


def of_llamacpp(text: str) -> float:
    options = options_of(text)
    longest = options.get("--spec-draft-n-max") or options["--spec-ngram-simple-size-m"]
    rates = rates_of(options["--spec-synth-rates"])
    assert len(rates) == int(longest)
    return of_marginals(rates)


def of_sglang(text: str) -> float:
    variables = dict(line.split("=") for line in text.splitlines())
    assert variables.pop("SGLANG_SIMULATE_ACC_METHOD") == "match-expected"  # the other one rounds a normal deviate
    assert variables.pop("SGLANG_SIMULATE_ACC_TOKEN_MODE") == "real-draft-token"
    return float(variables.pop("SGLANG_SIMULATE_ACC_LEN"))


def of_dynamo(text: str) -> float:
    options = options_of(text)
    rates = rates_of(options["--aic-nextn-accept-rates"])
    assert len(rates) == int(options["--aic-nextn"]) <= 5
    return of_conditionals(rates)


def of_aiconfigurator(text: str) -> float:
    options = options_of(text)
    assert 0 <= float(options["--nextn-accepted"]) <= int(options["--nextn"])
    return 1 + float(options["--nextn-accepted"])


READERS = {
    "aiconfigurator": of_aiconfigurator,
    "vllm-synthetic": of_vllm,
    "llamacpp-synthetic": of_llamacpp,
    "sglang-synthetic": of_sglang,
    "dynamo": of_dynamo,
}


def proposed(accepted: Any, tested: Any) -> float:
    """Tokens of a proposal of all drafts by the rates of those that were tested."""
    rates = [a / t if t else 0.0 for a, t in zip(accepted, tested, strict=True)]
    return 1 + float(np.cumprod(rates).sum())


def reported_length(item: Any, to: str) -> float:
    """What a reader makes of one gamma of a report on a draft that always proposes."""
    if CONVENTIONS[to] == "all":
        return float(item.acceptance_length)
    return proposed([rate or 0.0 for rate in item.conditional], [1.0] * item.gamma)


def written(side: RunDraft, to: str, **wanted: Any) -> str:
    return export(side, to, **wanted).text


def counted_again(run: Run, draft: str, gamma: int, domains: Sequence[str]) -> dict[str, Any]:
    """Rounds of domains from the log: all, those with a proposal, tokens, and by depth accepted and tested drafts."""
    log = log_of(run)
    total: dict[str, Any] = dict.fromkeys(("rounds", "with", "tokens", "by_depth", "tested", "of"), 0.0)
    for domain in domains:
        found = recounted(rows_of(log, domain, draft), gamma, looked_up=draft == "lookup")
        total = {name: total[name] + found[name] for name in total}
    return total


def length_of(found: dict[str, Any], to: str) -> float:
    """What a reader makes of counts."""
    if CONVENTIONS[to] == "all":
        return 1 + float(found["by_depth"].sum() / found["rounds"])
    return proposed(found["by_depth"], found["tested"])


def test_every_format_has_a_reader_here_and_a_choice_on_the_command_line() -> None:
    assert set(READERS) == set(CHAINS)
    assert {name for name, form in EXPORTS.items() if form.serves} == set(PASTED)
    assert {name: form.over for name, form in EXPORTS.items()} == CONVENTIONS
    assert [choice.value for choice in ExportFormat] == list(ABOUT)


@pytest.mark.parametrize("to", CHAINS)
def test_the_acceptance_length_of_a_domain_is_the_reports(run: Run, to: str) -> None:
    result = only(build_report(run), "code")
    expected = reported_length(next(item for item in result.gammas if item.gamma == 3), to)
    read = READERS[to](written(RunDraft(run, "small"), to, gamma=3, domain="code"))
    assert read == pytest.approx(expected, abs=CLOSE)


@pytest.mark.parametrize("draft", ["small", "lookup"])
@pytest.mark.parametrize("to", CHAINS)
def test_the_acceptance_length_of_the_traffic_is_that_of_all_rounds_counted_together(run: Run, to: str, draft: str) -> None:
    found = counted_again(run, draft, 3, ["code", "chat"])
    assert READERS[to](written(RunDraft(run, draft), to, gamma=3)) == pytest.approx(length_of(found, to), abs=CLOSE)
    assert found["with"] < found["rounds"] or draft == "small"


def simulated(rates: Sequence[float], lengths: Sequence[int], seed: int = 0) -> float:
    """The acceptance length of a reader that drafts by itself and accepts by marginal rates, as vLLM and llama.cpp do."""
    conditional = [after / before if before else 0.0 for before, after in pairwise((1.0, *rates))]
    coins = np.random.default_rng(seed).random((len(lengths), len(rates))) < conditional
    within = np.arange(len(rates)) < np.asarray(lengths)[:, None]
    return 1 + float(np.cumprod(coins & within, axis=1).sum()) / len(lengths)


RATES: dict[str, Callable[[str], list[float]]] = {
    "vllm-synthetic": lambda text: json.loads(text)["synthetic_acceptance_rates"],
    "llamacpp-synthetic": lambda text: rates_of(options_of(text)["--spec-synth-rates"]),
}


@pytest.mark.parametrize("to", [name for name in CHAINS if CONVENTIONS[name] == "proposing"])
def test_a_reader_that_proposes_as_many_comes_back_to_the_length_of_the_report(run: Run, to: str) -> None:
    """Half of the proposals of this draft are shorter than 5, whatever is accepted of them."""
    result = only(build_report(run), "chat", "lookup")
    expected = next(item.acceptance_length for item in result.gammas if item.gamma == 5)
    of = counted_again(run, "lookup", 5, ["chat"])["of"]
    assert of[5] < 0.7 * of[1:].sum()
    lengths = np.repeat(np.arange(1, 6), 400 * of[1:].astype(int))  # so many that chance is less than the tolerance
    rates = RATES[to](written(RunDraft(run, "lookup"), to, gamma=5, domain="chat"))
    assert simulated(rates, lengths) == pytest.approx(expected, rel=0.015)  # the ends of texts
    lost = [accepted / of[1:].sum() for accepted in counted_again(run, "lookup", 5, ["chat"])["by_depth"]]
    assert simulated(lost, lengths) < 0.97 * expected  # what shares of all proposals would give


@pytest.mark.parametrize("to", CHAINS)
def test_domains_count_by_the_shares_of_tokens_that_the_decision_gives_them(run: Run, to: str) -> None:
    shares = {"code": 0.2, "chat": 0.8}
    config = run.manifest.config | {"decision": run.manifest.config["decision"] | {"weights": shares}}
    parts = {domain: counted_again(run, "lookup", 2, [domain]) for domain in shares}
    found = {
        name: sum(share * parts[domain][name] / parts[domain]["tokens"] for domain, share in shares.items())
        for name in ("by_depth", "rounds", "tested")
    }
    text = written(RunDraft(run, "lookup").asked(config), to, gamma=2)
    assert READERS[to](text) == pytest.approx(length_of(found, to), abs=CLOSE)
    assert READERS[to](text) != pytest.approx(READERS[to](written(RunDraft(run, "lookup"), to, gamma=2)), abs=1e-3)


# Ten rounds, eight of them with a proposal: four accept a first draft, two a second and one a third. Of the four one had no
# second draft to test, and of the two one was at the end of its text.
HAND = Acceptance(
    target="my models/target",
    draft=draft_facts("draft"),
    model="synthetic/draft",
    revision=None,
    served=False,
    drawn=False,
    blocks=False,
    gamma=3,
    depths=Depths(10.0, 8.0, 7.0, (8.0, 3.0, 1.0), (4.0, 2.0, 1.0)),
    schedule=((1, 8, 3), (9, 32, 0)),
)
UNNAMED = dataclasses.replace(HAND.draft, kind="layer_skip", engine_method=None, settings={})  # by engines


def test_rates_and_lengths_by_hand() -> None:
    depths = HAND.depths
    assert depths.marginal("proposing") == pytest.approx((1 / 2, 1 / 3, 1 / 3))
    assert depths.marginal("all") == (0.4, 0.2, 0.1)
    assert depths.conditional("proposing") == pytest.approx((1 / 2, 2 / 3, 1))
    assert depths.conditional("all") == (0.4, 0.5, 0.5)
    assert (depths.length("proposing"), depths.length("all")) == (1.875, 1.7)
    assert Depths(4.0, 4.0, 4.0, (4.0, 2.0, 0.0), (2.0, 0.0, 0.0)).conditional("all") == (0.5, 0.0, 0.0)
    assert Depths(4.0, 4.0, 4.0, (4.0, 2.0, 0.0), (2.0, 0.0, 0.0)).marginal("proposing") == (0.5, 0.0, 0.0)


def test_arguments_and_environments_by_hand() -> None:
    lookup_draft = dataclasses.replace(lookup_facts("lookup"), engine_method="ngram", settings={"max_ngram": 4})
    looked_up = dataclasses.replace(HAND, draft=lookup_draft)
    write = {name: form.write for name, form in EXPORTS.items()}
    assert write["llamacpp-synthetic"](HAND) == "--spec-draft-n-max 3 --spec-synth-rates 0.500000,0.333333,0.333333\n"
    assert write["llamacpp-synthetic"](looked_up).startswith(
        "--spec-type ngram-simple --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 3 --spec-synth-rates 0.5"
    )
    assert write["dynamo"](HAND) == "--aic-nextn 3 --aic-nextn-accept-rates 0.400000,0.500000,0.500000\n"
    assert write["aiconfigurator"](HAND) == "--nextn 3 --nextn-accepted 0.700000\n"
    assert write["sglang-synthetic"](HAND).splitlines()[0] == "SGLANG_SIMULATE_ACC_LEN=1.700000"
    assert json.loads(write["vllm-synthetic"](HAND)) == {
        "method": "draft_model",
        "model": "synthetic/draft",
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.5, 0.333333, 0.333333],
        "num_speculative_tokens_per_batch_size": [[1, 8, 3], [9, 32, 0]],
    }
    lookup = json.loads(write["vllm-synthetic"](looked_up))
    assert (lookup["method"], lookup["prompt_lookup_max"], lookup["prompt_lookup_min"]) == ("ngram", 4, 1)
    skip = dataclasses.replace(HAND, draft=UNNAMED)
    assert "method" not in json.loads(write["vllm-synthetic"](skip))
    assert "no method" in EXPORTS["vllm-synthetic"].beside(skip)


@pytest.mark.parametrize(("own", "other"), [("vLLM", "SGLang"), ("SGLang", "vLLM")])
def test_an_engine_that_reads_a_heads_files_otherwise_is_named(own: str, other: str, tmp_path: Path) -> None:
    """What is exported to it are rounds of another reading; the one whose reading was measured needs no word."""
    trials = (
        Trial("", 1, 0.37, 0.0, 0.0, 500, (own,)),
        Trial("states of the target one layer later", 1, 0.28, -0.09, 0.01, 500, (other,)),
        Trial("the residual taken after the norm", 1, 0.26, -0.11, 0.01, 500),
    )
    run = write_run(tmp_path / "run", Recipe(heads={"head": {"trials": trials}}))
    warnings = {to: export(RunDraft(run, "head"), to, gamma=3).warnings for to in [*CHAINS, "vllm-config", "sglang-args"]}
    said = {to for to, lines in warnings.items() if any("reads the files" in line for line in lines)}
    assert said == {f"{other.lower()}-{kind}" for kind in ("synthetic", "config", "args")} & set(EXPORTS)


def test_rates_of_a_head_are_those_of_its_rounds(tmp_path: Path) -> None:
    """Replayed by depth, and not powers of the first one."""
    run = write_run(tmp_path / "run", Recipe(heads={"head": {"reference": "synthetic/target", "engine_method": "mtp"}}))
    side = RunDraft(run, "head")
    config = json.loads(written(side, "vllm-synthetic", gamma=4))
    log = pa.concat_tables([run.positions("head", shard.index) for shard in run.shards]).to_pandas()
    tested = accepted = np.zeros(4)
    for _, text in log.groupby("document"):
        rows, at = text.to_dict("records"), 1
        while at < len(rows):
            depth, most = 0, min(4, rows[at]["proposed"], len(rows) - at)
            while depth < most:
                row = rows[at + depth]
                tested = tested + np.eye(4)[depth]
                if not (row[f"agrees_{depth + 1}"] if depth else row["draft_top"] == row["token"]):
                    break
                accepted = accepted + np.eye(4)[depth]
                depth += 1
            at += depth + 1
    assert config["synthetic_acceptance_rates"] == pytest.approx(np.cumprod(accepted / tested), abs=1e-5)
    assert "model" not in config


@pytest.mark.parametrize("to", CHAINS)
def test_rounds_that_are_expectations_are_the_reports_and_say_so(mixed: Run, to: str) -> None:
    found = export(RunDraft(mixed, "small"), to, rule="lossless", gamma=4, domain="story")
    expected = reported_length(only(build_report(mixed), "story", rule="lossless").gammas[-1], to)
    assert READERS[to](found.text) == pytest.approx(expected, abs=CLOSE)
    assert any("expectations" in warning for warning in found.warnings)


def test_few_documents_of_expectations_are_those_of_the_dynamic_program_counted_again(mixed: Run) -> None:
    rows = rows_of(log_of(mixed), "story", "small")
    rounds = tokens = 0.0
    for _, text in rows.groupby("document"):
        ratio = text["draft_token_prob"].astype(float) / text["target_token_prob"].astype(float)
        rounds += expected_rounds_of(ratio.clip(upper=1).tolist(), text["proposed"].tolist(), 2)
        tokens += len(text) - 1
    found = pooled_depths(scope_of(RunDraft(mixed, "small"), "sglang-synthetic", "lossless", 2, "story"))
    assert found.rounds == pytest.approx(rounds, abs=1e-3)
    assert 1 < tokens / rounds <= found.length("all")


def test_the_rule_and_the_gamma_are_those_of_the_reports_verdict(run: Run, mixed: Run) -> None:
    config = run.manifest.config | {"decision": run.manifest.config["decision"] | {"draft": "lookup"}}
    report = build_report(run, config=config)
    assert json.loads(written(RunDraft(run, "lookup"), "vllm-synthetic"))["num_speculative_tokens"] == report.answer.gamma
    for domain in ("code", "chat"):
        best = only(report, domain, "lookup").gamma
        found = json.loads(written(RunDraft(run, "lookup"), "vllm-synthetic", domain=domain))
        assert found["num_speculative_tokens"] == best
    scope = scope_of(RunDraft(mixed, "small"), "vllm-synthetic")
    assert (scope.rules, scope.weights) == ("strict and one_hot", {"code": 0.6, "story": 0.4})
    fixed = config | {"decision": config["decision"] | {"gamma": 2}}
    assert json.loads(written(RunDraft(run, "small").asked(fixed), "vllm-synthetic"))["num_speculative_tokens"] == 2


def test_a_reader_of_few_drafts_gets_the_best_of_those_it_takes(tmp_path: Path) -> None:
    recipe = Recipe(domains={"code": Domain(alpha=0.97, spread=0.01)}, gammas=(2, 4, 8), draft_ms=0.1, extra_ms=0.1)
    side = RunDraft(write_run(tmp_path / "run", recipe), "small")
    assert json.loads(written(side, "vllm-synthetic"))["num_speculative_tokens"] == 8
    found = export(side, "dynamo")
    assert options_of(found.text)["--aic-nextn"] == "4"


def test_what_prices_drafts_as_layers_of_the_target_is_told_what_a_round_costs(run: Run) -> None:
    """By hand: verification, times the layers and drafts over the layers; of a lookup, which has no model, nothing."""
    target = dataclasses.replace(run.manifest.target, shape=vars(ModelShape.from_config(LLAMA)))
    shaped = Run(run.path, dataclasses.replace(run.manifest, target=target))
    (said,) = [line for line in export(RunDraft(shaped, "small"), "aiconfigurator", gamma=3).warnings if "charges" in line]
    times = ReportInputs.of(shaped, shaped.manifest.profile).costs.times(1)["small"]
    theirs = times.target[4].ms / times.target[1].ms * 35 / 32
    ours = (times.target[4].ms + 3 * times.draft.ms + times.bookkeeping.ms) / times.target[1].ms
    assert f"about {theirs:.2f} decode steps" in said
    assert f"it costs {ours:.2f}:" in said
    (unknown,) = [line for line in export(RunDraft(run, "small"), "aiconfigurator", gamma=3).warnings if "charges" in line]
    assert "not this draft's steps" in unknown
    assert not any("charges" in line for line in export(RunDraft(shaped, "lookup"), "aiconfigurator", gamma=3).warnings)


def table(path: Path, run: Run, batches: Sequence[int] = (1, 4, 16)) -> dict[str, Any]:
    """The profile with step times by which verification gets dear with the number of sequences."""
    rows = ["model,step,tokens,batch,context,ms"]
    for batch in batches:
        rows += [f"target,{'decode' if n == 1 else 'verify'},{n},{batch},256,{10 + batch * n}" for n in range(1, 7)]
        rows += [f"small,draft,1,{batch},256,{0.6 * batch}", f"lookup,lookup,1,{batch},256,0.01"]
    path.write_text("\n".join(rows))
    return run.manifest.config | {"costs": {"source": "table", "path": str(path), "overhead_ms": 0.0}}


def by_batch(schedule: list[list[int]]) -> dict[int, int]:
    """The gamma of every batch size, by vLLM's rules: from 1 on, sorted, inclusive, none twice."""
    assert schedule[0][0] == 1
    assert all(0 < first <= last and gamma >= 0 for first, last, gamma in schedule)
    assert all(later[0] == earlier[1] + 1 for earlier, later in pairwise(schedule))
    return {size: gamma for first, last, gamma in schedule for size in range(first, last + 1)}


def test_the_schedule_is_nearly_the_best_gamma_of_the_report_at_every_batch_size(tmp_path: Path) -> None:
    """With many documents and step times without an error; what is told apart from what holds for fewer sequences."""
    domains = {"code": dataclasses.replace(RECIPE.domains["code"], documents=150)}
    run = write_run(tmp_path / "run", dataclasses.replace(RECIPE, domains=domains))
    config = table(tmp_path / "times.csv", run)
    schedule = by_batch(
        json.loads(written(RunDraft(run, "small").asked(config), "vllm-config"))["num_speculative_tokens_per_batch_size"]
    )
    for size in (1, 8, 16):
        asked = config | {"decision": config["decision"] | {"concurrency": size}}
        result = only(build_report(run, config=asked), "code")
        speeds = {item.gamma: item.speedup.value for item in result.gammas if item.speedup}
        assert (speeds | {0: 1.0})[schedule[size]] > 0.95 * max(1.0, *speeds.values())
    assert list(schedule.values()) == sorted(schedule.values(), reverse=True)
    assert len(set(schedule.values())) > 2
    assert 0 in schedule.values()


def test_a_gamma_that_is_named_has_no_schedule_beside_it(run: Run, tmp_path: Path) -> None:
    side = RunDraft(run, "small").asked(table(tmp_path / "times.csv", run))
    assert "num_speculative_tokens_per_batch_size" in json.loads(written(side, "vllm-config", domain="code"))
    named = json.loads(written(side, "vllm-config", domain="code", gamma=3))
    assert named["num_speculative_tokens"] == 3
    assert "num_speculative_tokens_per_batch_size" not in named


def test_a_schedule_begins_at_one_sequence_and_warns_where_it_goes_on_untimed(run: Run, tmp_path: Path) -> None:
    config = table(tmp_path / "times.csv", run, batches=(2, 8))
    config |= {"decision": config["decision"] | {"concurrency": 2}}
    found = export(RunDraft(run, "small").asked(config), "vllm-synthetic", domain="code")
    schedule = json.loads(found.text)["num_speculative_tokens_per_batch_size"]
    assert (schedule[0][0], schedule[-1][1:]) == (1, [8, 1])
    assert any("uses gamma 1 beyond 8 sequences" in warning for warning in found.warnings)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "lossy": ("vllm-config", {"rule": "additive_0p1"}, "additive_0p1 has no rounds"),
    "tree": ("sglang-args", {"rule": "tree_2"}, "tree_2 has no rounds"),
    "other text": ("vllm-synthetic", {"rule": "lossless"}, "rounds of lossless are not defined"),
    "foreign text": ("sglang-synthetic", {"domain": "wiki"}, "text that the target did not produce"),
    "no such domain": ("dynamo", {"domain": "poem\n\x1b[2J"}, "no domain 'poem\\n\\x1b[2J'"),
    "no such gamma": ("llamacpp-synthetic", {"gamma": 9}, "gamma 9 of .* cannot be exported"),
}


@pytest.mark.parametrize(("to", "wanted", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_defined_is_refused(mixed: Run, to: str, wanted: dict[str, Any], problem: str) -> None:
    with pytest.raises(OptionInvalid, match=problem.replace("\\", "\\\\").replace("[", "\\[")):
        export(RunDraft(mixed, "small"), to, **wanted)


def test_a_reader_has_its_limit(run: Run) -> None:
    deep = dataclasses.replace(run.manifest, config=run.manifest.config | {"gammas": [6]})
    with pytest.raises(OptionInvalid, match="dynamo takes at most 5 drafts"):
        export(RunDraft(Run(run.path, deep), "small"), "dynamo")


def test_without_step_times_a_gamma_must_be_named(tmp_path: Path) -> None:
    side = RunDraft(write_run(tmp_path / "run", dataclasses.replace(RECIPE, latency=False)), "small")
    with pytest.raises(OptionInvalid, match="the best gamma for") as caught:
        export(side, "vllm-synthetic")
    assert "--gamma 1 or 2 or 3 or 5" in caught.value.hint
    assert of_vllm(written(side, "vllm-synthetic", gamma=2)) > 1


def test_a_draft_that_proposes_nothing_has_nothing_to_export(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Recipe(domains={"code": Domain(coverage=0.0)}))
    with pytest.raises(OptionInvalid, match="proposes nothing in domain 'code'"):
        export(RunDraft(run, "small"), "vllm-synthetic", gamma=2, domain="code")


def test_an_interrupted_run_is_exported_with_a_warning_and_an_empty_one_is_not(run: Run, tmp_path: Path) -> None:
    half = RunDraft(interrupted(run, tmp_path / "half", shards=2), "small")
    said = export(half, "vllm-synthetic", gamma=2).warnings
    assert any("is not complete: 8 documents so far" in line for line in said)
    with pytest.raises(OptionInvalid, match="no document"):
        export(RunDraft(interrupted(run, tmp_path / "none", shards=0), "small"), "vllm-synthetic", gamma=2)


def test_stdout_is_the_artefact_and_stderr_what_it_assumes(run: Run, alphaprof: Runner, tmp_path: Path) -> None:
    for to in ("vllm-config", "dynamo"):
        found = export(RunDraft(run, "small"), to, gamma=3)
        code, output, errors = alphaprof(f"{run.path}:small", "--to", to, "--gamma", 3)
        assert (code, output) == (0, found.text)
        said = errors.splitlines()
        assert said == [f"note: {line}" for line in found.notes] + [f"warning: {line}" for line in found.warnings]
        assert EXPORTS[to].convention in said[0]
        code, output, _ = alphaprof(f"{run.path}:small", "--to", to, "--gamma", 3, "--out", tmp_path / "file")
        assert (code, output, (tmp_path / "file").read_text()) == (0, "", found.text)


def test_another_decision_can_be_asked_for(run: Run, alphaprof: Runner) -> None:
    code, output, errors = alphaprof(f"{run.path}:small", "--to", "vllm-synthetic", "--set", "decision.gamma=2")
    assert (code, json.loads(output)["num_speculative_tokens"]) == (0, 2)
    code, _, errors = alphaprof(f"{run.path}:small", "--to", "vllm-synthetic", "--rule", "nonsense")
    assert code == 2
    assert errors.startswith("error: --rule: unknown rule")


def test_a_draft_that_does_not_pay_is_exported_with_a_warning(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Recipe(domains={"code": Domain(alpha=0.2)}, draft_ms=9.0))
    (warning,) = export(RunDraft(run, "small"), "vllm-synthetic", gamma=4).warnings
    assert "makes decoding slower at gamma 4" in warning


def test_the_page_names_every_format_and_its_convention() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "exports.md").read_text().split())
    assert [name for name, form in EXPORTS.items() if f"--to {name}" not in page or form.convention not in page] == []
