"""`alphaprof export --to rates`: rates are read as their readers read them, and say what the report says; schedules of start
options; errors; hostile names.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

from alphaprof.cli.exchange import ExportFormat
from alphaprof.commands.export.engines import WRITERS, Schedule, export, trtllm_schedule
from alphaprof.commands.export.formats import ABOUT, LENGTHS, PROFILE, RATES, STEP_COSTS, TEXTS
from alphaprof.commands.export.rates import export_lengths, export_profile, export_rates
from alphaprof.config.engines import FORMATS
from alphaprof.costs.rounds import free_draft
from alphaprof.costs.speedup import speedup
from alphaprof.errors import OptionInvalid
from alphaprof.report.build import build_report
from alphaprof.report.rates import GammaRates, by_depth, rates_at
from alphaprof.report.result import counted
from alphaprof.report.scope import scope_of
from alphaprof.run.manifest import Trial
from alphaprof.run.reader import Run, RunDraft
from tests.conftest import Runner
from tests.reporting import expected_rounds_of, log_of, only, recounted, rounds_of_head, rows_of
from tests.synthetic import Domain, Recipe, interrupted, write_run

STORY = Domain(documents=8, alpha=0.6, temperature=0.7, continuation="sampled")
RECIPE = Recipe(
    domains={"code": Domain(documents=9, alpha=0.75, bursts=0.4), "chat": Domain(documents=7, alpha=0.4)},
    gammas=(1, 2, 3, 5),
    lookups=("lookup",),
)
CLOSE = 1e-5  # six digits of each rate


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_run(tmp_path_factory.mktemp("export") / "run", RECIPE)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Greedy, sampled and foreign text; the last has no share of the traffic."""
    domains = {"code": Domain(), "story": STORY, "wiki": Domain(on_policy=False, continuation="text")}
    decision = {"weights": {"code": 0.6, "story": 0.4, "wiki": 0.0}}
    recipe = Recipe(domains=domains, rules=("strict", "one_hot", "lossless", "block"), decision=decision)
    return write_run(tmp_path_factory.mktemp("mixed") / "run", recipe)


@pytest.fixture
def alphaprof(console_script: Runner) -> Runner:
    """`alphaprof export`."""
    return partial(console_script, "export")


def rates_of(side: RunDraft, gamma: int, **wanted: Any) -> dict[str, Any]:
    """The rates at one gamma."""
    content = json.loads(export_rates(side, gamma=gamma, **wanted).text, parse_constant=pytest.fail)
    (found,) = content["gammas"]
    assert found["gamma"] == gamma
    return dict(found)


def of_marginals(rates: Sequence[float]) -> float:
    """vLLM and llama.cpp: entry i is the probability that the first i + 1 drafts are all accepted."""
    assert all(0 <= rate <= 1 for rate in rates)
    assert all(after <= before for before, after in pairwise(rates))
    return 1 + sum(rates)


def of_conditionals(rates: Sequence[float]) -> float:
    """Dynamo: one token, and one more for every draft until the first that a coin rejects."""
    assert all(0 <= rate <= 1 for rate in rates)
    return 1 + float(np.cumprod(rates).sum())


# The length of a round that a reader makes of the rates of one gamma.
READERS: dict[str, Callable[[dict[str, Any]], float]] = {
    "acceptance_length_all": lambda rates: float(rates["acceptance_length_all"]["value"]),
    "marginal_all": lambda rates: of_marginals(rates["marginal_all"]),
    "conditional_all": lambda rates: of_conditionals(rates["conditional_all"]),
    "marginal_full": lambda rates: of_marginals(rates["marginal_full"]),
    "conditional": lambda rates: of_conditionals(rates["conditional"]),
}
TESTED = ("marginal_full", "conditional")  # of a full proposal


def proposed(accepted: Any, tested: Any) -> float:
    """Tokens of a proposal of all drafts by the rates of those that were tested."""
    rates = [a / t if t else 0.0 for a, t in zip(accepted, tested, strict=True)]
    return 1 + float(np.cumprod(rates).sum())


def reported_length(item: Any, reader: str) -> float:
    """What a reader makes of one gamma of a report on a draft that always proposes."""
    if reader not in TESTED:
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


def length_of(found: dict[str, Any], reader: str) -> float:
    """What a reader makes of counts."""
    if reader not in TESTED:
        return 1 + float(found["by_depth"].sum() / found["rounds"])
    return proposed(found["by_depth"], found["tested"])


def test_every_format_has_a_choice_on_the_command_line() -> None:
    assert set(WRITERS) == set(FORMATS)
    assert [choice.value for choice in ExportFormat] == list(ABOUT) == [*WRITERS, STEP_COSTS, RATES, LENGTHS, PROFILE, TEXTS]


@pytest.mark.parametrize("reader", READERS)
def test_the_acceptance_length_of_a_domain_is_the_reports(run: Run, reader: str) -> None:
    result = only(build_report(run), "code")
    expected = reported_length(next(item for item in result.gammas if item.gamma == 3), reader)
    read = READERS[reader](rates_of(RunDraft(run, "small"), 3, domain="code"))
    assert read == pytest.approx(expected, abs=CLOSE)


@pytest.mark.parametrize("draft", ["small", "lookup"])
@pytest.mark.parametrize("reader", READERS)
def test_rates_of_the_traffic_are_those_of_all_rounds_counted_together(run: Run, reader: str, draft: str) -> None:
    found = counted_again(run, draft, 3, ["code", "chat"])
    rates = rates_of(RunDraft(run, draft), 3)
    assert READERS[reader](rates) == pytest.approx(length_of(found, reader), abs=CLOSE)
    assert rates["drafting"] == pytest.approx(found["with"] / found["rounds"], abs=CLOSE)
    drafted = sum(depth * rounds for depth, rounds in enumerate(found["of"]))
    assert rates["drafted"] == pytest.approx(drafted / found["rounds"], abs=CLOSE)
    assert rates["acceptance_length"] == pytest.approx(1 + found["by_depth"].sum() / found["with"], abs=CLOSE)
    assert (rates["drafting"] < 1) == (draft == "lookup")


def test_a_length_is_as_uncertain_as_tokens_per_round(run: Run) -> None:
    for item in only(build_report(run), "chat").gammas:
        length = rates_of(RunDraft(run, "small"), item.gamma, domain="chat")["acceptance_length_all"]
        emitted = item.tokens_per_round
        assert 1 < length["low"] < length["value"] < length["high"] < item.gamma + 1
        for end in ("low", "high"):
            assert length[end] / length["value"] == pytest.approx(getattr(emitted, end) / emitted.value, abs=CLOSE)


def test_without_a_gamma_all_of_the_run_have_rates(run: Run) -> None:
    content = json.loads(export_rates(RunDraft(run, "lookup")).text)
    assert (content["format"], content["draft"], content["documents"]) == ("alphaprof-rates", "lookup", 16)
    assert [found["gamma"] for found in content["gammas"]] == [1, 2, 3, 5]
    assert content["gammas"][2] == rates_of(RunDraft(run, "lookup"), 3)


def simulated(rates: Sequence[float], lengths: Sequence[int], seed: int = 0) -> float:
    """The acceptance length of a reader that drafts by itself and accepts by marginal rates, as vLLM and llama.cpp do."""
    conditional = [after / before if before else 0.0 for before, after in pairwise((1.0, *rates))]
    coins = np.random.default_rng(seed).random((len(lengths), len(rates))) < conditional
    within = np.arange(len(rates)) < np.asarray(lengths)[:, None]
    return 1 + float(np.cumprod(coins & within, axis=1).sum()) / len(lengths)


def test_a_reader_that_proposes_as_many_comes_back_to_the_length_of_the_report(run: Run) -> None:
    """Half of the proposals of this draft are shorter than 5, whatever is accepted of them."""
    result = only(build_report(run), "chat", "lookup")
    expected = next(item.acceptance_length for item in result.gammas if item.gamma == 5)
    of = counted_again(run, "lookup", 5, ["chat"])["of"]
    assert of[5] < 0.7 * of[1:].sum()
    lengths = np.repeat(np.arange(1, 6), 400 * of[1:].astype(int))  # so many that chance is less than the tolerance
    rates = rates_of(RunDraft(run, "lookup"), 5, domain="chat")["marginal_full"]
    assert simulated(rates, lengths) == pytest.approx(expected, rel=0.015)  # the ends of texts
    lost = [accepted / of[1:].sum() for accepted in counted_again(run, "lookup", 5, ["chat"])["by_depth"]]
    assert simulated(lost, lengths) < 0.97 * expected  # what shares of all proposals would give


@pytest.mark.parametrize("reader", READERS)
def test_domains_count_by_the_shares_of_tokens_that_the_decision_gives_them(run: Run, reader: str) -> None:
    shares = {"code": 0.2, "chat": 0.8}
    config = run.manifest.config | {"decision": run.manifest.config["decision"] | {"weights": shares}}
    parts = {domain: counted_again(run, "lookup", 2, [domain]) for domain in shares}
    found = {
        name: sum(share * parts[domain][name] / parts[domain]["tokens"] for domain, share in shares.items())
        for name in ("by_depth", "rounds", "tested")
    }
    read = READERS[reader](rates_of(RunDraft(run, "lookup").asked(config), 2))
    assert read == pytest.approx(length_of(found, reader), abs=CLOSE)
    assert read != pytest.approx(READERS[reader](rates_of(RunDraft(run, "lookup"), 2)), abs=1e-3)


# Ten rounds, eight of them with a proposal: four accept a first draft, two a second and one a third. Of the four one had no
# second draft to test, and of the two one was at the end of its text.
def test_rates_by_hand() -> None:
    found = by_depth(10.0, np.array([8.0, 3.0, 1.0]), np.array([4.0, 2.0, 1.0]))
    assert found["marginal_full"] == pytest.approx((1 / 2, 1 / 3, 1 / 3), abs=CLOSE)
    assert found["marginal_all"] == (0.4, 0.2, 0.1)
    assert found["conditional"] == pytest.approx((1 / 2, 2 / 3, 1), abs=CLOSE)
    assert found["conditional_all"] == (0.4, 0.5, 0.5)
    none = by_depth(4.0, np.array([4.0, 2.0, 0.0]), np.array([2.0, 0.0, 0.0]))
    assert none["conditional_all"] == (0.5, 0.0, 0.0)
    assert none["marginal_full"] == (0.5, 0.0, 0.0)


@pytest.mark.parametrize(("own", "other"), [("vLLM", "SGLang"), ("SGLang", "vLLM")])
def test_an_engine_that_reads_a_heads_files_otherwise_is_named(own: str, other: str, tmp_path: Path) -> None:
    """What is exported to it are rounds of another reading; the one whose reading was measured needs no word."""
    trials = (
        Trial("", 1, 0.37, 0.0, 0.0, 500, (own,)),
        Trial("states of the target one layer later", 1, 0.28, -0.09, 0.01, 500, (other,)),
        Trial("the residual taken after the norm", 1, 0.26, -0.11, 0.01, 500),
    )
    run = write_run(tmp_path / "run", Recipe(heads={"head": {"trials": trials}}))
    found = {to: export(RunDraft(run, "head"), to, gamma=3).warnings for to in ("vllm-config", "sglang-args")}
    said = {to for to, lines in found.items() if any("reads the files" in line for line in lines)}
    assert said == {to for to in found if FORMATS[to][0].name == other}


def test_rates_of_a_head_are_those_of_its_rounds(tmp_path: Path) -> None:
    """Replayed by depth, and not powers of the first one."""
    run = write_run(tmp_path / "run", Recipe(heads={"head": {"reference": "synthetic/target", "kind": "mtp"}}))
    rates = rates_of(RunDraft(run, "head"), 4)
    log = pa.concat_tables([run.positions("head", shard.index) for shard in run.shards]).to_pandas()
    _, _, tested, kept = rounds_of_head(log, 4)
    assert rates["marginal_full"] == pytest.approx(np.cumprod(kept / tested), abs=1e-5)


@pytest.mark.parametrize("reader", READERS)
def test_rounds_that_are_expectations_are_the_reports_and_say_so(mixed: Run, reader: str) -> None:
    wanted = {"rule": "lossless", "gamma": 4, "domain": "story"}
    expected = reported_length(only(build_report(mixed), "story", rule="lossless").gammas[-1], reader)
    assert READERS[reader](rates_of(RunDraft(mixed, "small"), **wanted)) == pytest.approx(expected, abs=CLOSE)
    found = export_rates(RunDraft(mixed, "small"), **wanted)
    assert json.loads(found.text)["expected"] is True
    assert any("expectations" in warning for warning in found.warnings)


def test_few_documents_of_expectations_are_those_of_the_dynamic_program_counted_again(mixed: Run) -> None:
    rows = rows_of(log_of(mixed), "story", "small")
    rounds = tokens = 0.0
    for _, text in rows.groupby("document"):
        ratio = text["draft_token_prob"].astype(float) / text["target_token_prob"].astype(float)
        rounds += expected_rounds_of(ratio.clip(upper=1).tolist(), text["proposed"].tolist(), 2)
        tokens += len(text) - 1
    scope = scope_of(RunDraft(mixed, "small"), RATES, "lossless", 2, "story")
    counts = scope.pools["story"].counts(2)
    assert counted(scope.pools["story"], 2, speedup([counts], [1.0], free_draft(2)))[0] == pytest.approx(rounds, abs=1e-3)
    assert 1 < tokens / rounds <= 1 + sum(rates_at(scope, 2).marginal_all)


def test_the_rule_and_the_gamma_are_those_of_the_reports_verdict(run: Run, mixed: Run) -> None:
    config = run.manifest.config | {"decision": run.manifest.config["decision"] | {"draft": "lookup"}}
    report = build_report(run, config=config)
    assert json.loads(written(RunDraft(run, "lookup"), "vllm-config"))["num_speculative_tokens"] == report.answer.gamma
    for domain in ("code", "chat"):
        best = only(report, domain, "lookup").gamma
        found = json.loads(written(RunDraft(run, "lookup"), "vllm-config", domain=domain))
        assert found["num_speculative_tokens"] == best
    scope = scope_of(RunDraft(mixed, "small"), RATES)
    assert (scope.rules, scope.weights) == ("strict and one_hot", {"code": 0.6, "story": 0.4})
    fixed = config | {"decision": config["decision"] | {"gamma": 2}}
    assert json.loads(written(RunDraft(run, "small").asked(fixed), "vllm-config"))["num_speculative_tokens"] == 2


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
    config = table(tmp_path / "times.csv", run, batches=(2, 7))
    config |= {"decision": config["decision"] | {"concurrency": 2}}
    found = export(RunDraft(run, "small").asked(config), "vllm-config", domain="code")
    schedule = json.loads(found.text)["num_speculative_tokens_per_batch_size"]
    assert (schedule[0][0], schedule[-1][1:]) == (1, [7, 1])
    assert any("uses gamma 1 beyond 7 sequences" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("schedule", "lengths"),
    [
        (((1, 3, 5), (4, 16, 3), (17, 32, 0)), {3: 5, 16: 3}),
        (((1, 4, 4), (5, 8, 0), (9, 32, 2)), {4: 4, 8: 0, 32: 2}),
        (((1, 4, 2), (5, 8, 3)), None),  # refused there: the smallest batch has max_draft_len
        (((1, 4, 0), (5, 8, 0)), None),
    ],
)
def test_tensorrt_llm_has_the_same_schedule(schedule: Schedule, lengths: dict[int, int] | None) -> None:
    """By the last batch size of each length, and none beyond: as its `get_draft_len_for_batch_size` reads it."""
    assert trtllm_schedule(schedule) == lengths
    for size in range(1, 40) if lengths else ():
        theirs = next((length for last, length in lengths.items() if size <= last), 0)
        assert theirs == next((gamma for first, last, gamma in schedule if first <= size <= last), 0)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "lossy": ("vllm-config", {"rule": "additive_0p1"}, "additive_0p1 has no rounds"),
    "tree": ("sglang-args", {"rule": "tree_2"}, "tree_2 has no rounds"),
    "other text": ("vllm-config", {"rule": "lossless"}, "rounds of lossless are not defined"),
    "foreign text": ("rates", {"domain": "wiki"}, "text that the target did not produce"),
    "no such domain": ("rates", {"domain": "poem\n\x1b[2J"}, "no domain 'poem\\n\\x1b[2J'"),
    "no such gamma": ("rates", {"gamma": 9}, "gamma 9 was not replayed"),
}


@pytest.mark.parametrize(("to", "wanted", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_defined_is_refused(mixed: Run, to: str, wanted: dict[str, Any], problem: str) -> None:
    with pytest.raises(OptionInvalid, match=problem.replace("\\", "\\\\").replace("[", "\\[")):
        (partial(export, to=to) if to != RATES else export_rates)(RunDraft(mixed, "small"), **wanted)


def test_without_step_times_a_gamma_must_be_named(tmp_path: Path) -> None:
    side = RunDraft(write_run(tmp_path / "run", dataclasses.replace(RECIPE, latency=False)), "small")
    with pytest.raises(OptionInvalid, match="the best gamma for") as caught:
        export(side, "vllm-config")
    assert "--gamma 1 or 2 or 3 or 5" in caught.value.hint
    assert json.loads(written(side, "vllm-config", gamma=2))["num_speculative_tokens"] == 2
    assert len(json.loads(export_rates(side).text)["gammas"]) == 4  # rates need no choice


@pytest.mark.parametrize("exported", [export_rates, partial(export, to="vllm-config")])
def test_a_draft_that_proposes_nothing_has_nothing_to_export(tmp_path: Path, exported: Callable[..., Any]) -> None:
    run = write_run(tmp_path / "run", Recipe(domains={"code": Domain(coverage=0.0)}))
    with pytest.raises(OptionInvalid, match="proposes nothing in domain 'code'"):
        exported(RunDraft(run, "small"), gamma=2, domain="code")


@pytest.mark.parametrize("exported", [export_rates, partial(export, to="vllm-config")])
def test_an_interrupted_run_is_exported_with_a_warning_and_an_empty_one_is_not(
    run: Run, tmp_path: Path, exported: Callable[..., Any]
) -> None:
    half = RunDraft(interrupted(run, tmp_path / "half", shards=2), "small")
    said = exported(half, gamma=2).warnings
    assert any("is not complete: 8 documents so far" in line for line in said)
    with pytest.raises(OptionInvalid, match="no document"):
        exported(RunDraft(interrupted(run, tmp_path / "none", shards=0), "small"), gamma=2)


def test_stdout_is_the_artefact_and_stderr_what_it_assumes(run: Run, alphaprof: Runner, tmp_path: Path) -> None:
    side = RunDraft(run, "small")
    for to, found in (("vllm-config", export(side, "vllm-config", gamma=3)), ("rates", export_rates(side, gamma=3))):
        code, output, errors = alphaprof(f"{run.path}:small", "--to", to, "--gamma", 3)
        assert (code, output) == (0, found.text)
        assert errors.splitlines() == [f"note: {line}" for line in found.notes] + [
            f"warning: {line}" for line in found.warnings
        ]
        code, output, _ = alphaprof(f"{run.path}:small", "--to", to, "--gamma", 3, "--out", tmp_path / "file")
        assert (code, output, (tmp_path / "file").read_text()) == (0, "", found.text)


def test_another_decision_can_be_asked_for(run: Run, alphaprof: Runner) -> None:
    code, output, errors = alphaprof(f"{run.path}:small", "--to", "vllm-config", "--set", "decision.gamma=2")
    assert (code, json.loads(output)["num_speculative_tokens"]) == (0, 2)
    code, _, errors = alphaprof(f"{run.path}:small", "--to", "rates", "--rule", "nonsense")
    assert code == 2
    assert errors.startswith("error: --rule: unknown rule")


def test_golden_lengths_are_those_of_the_rates_by_domain(run: Run) -> None:
    """In InferenceX's layout: one model, and in each of its modes, here domains, a length by number of drafts, in
    [1, K + 1].
    """
    found = export_lengths(RunDraft(run, "small"))
    read = yaml.safe_load(found.text)
    assert read.pop("_metadata") == {"draft-model": run.manifest.drafts["small"].own_model}
    assert list(read) == [run.manifest.target.reference]
    (curves,) = read.values()
    assert len(curves) > 1
    for domain, curve in curves.items():
        rates = {
            each["gamma"]: each for each in json.loads(export_rates(RunDraft(run, "small"), domain=domain).text)["gammas"]
        }
        assert curve == {gamma: pytest.approx(each["acceptance_length"], abs=0.005) for gamma, each in rates.items()}
        assert all(1 <= length <= gamma + 1 for gamma, length in curve.items())
        low, high = (rates[3]["acceptance_length_all"][end] for end in ("low", "high"))
        assert f"    3: {curve[3]:.2f}  # {low:.2f} to {high:.2f}\n" in found.text
    assert "InferenceX reads curves named thinking_on and thinking_off" in found.warnings[-1]
    lookup = export_lengths(RunDraft(run, "lookup"), gamma=3)
    assert "some rounds have no draft" in lookup.warnings[0]
    assert "# over all rounds: " in lookup.text


def test_a_speculation_profile_has_the_identities_of_its_schema(run: Run, mixed: Run) -> None:
    """ModelOpt's own checks: the mean is 1 + the marginals, these never rise, conditionals multiply to them; by block
    verification no vector describes the rounds.
    """
    read = json.loads(export_profile(RunDraft(run, "small")).text)
    marginal, by_gamma = np.array(read["marginal_accept_rates"]), read["accept_length_by_k"]
    assert read["mean_accept_length"] == by_gamma["5"] == pytest.approx(1 + marginal.sum(), abs=CLOSE)
    assert np.cumprod(read["conditional_accept_rates"]) == pytest.approx(marginal, abs=CLOSE)
    assert len(marginal) == read["num_speculative_tokens"] == 5
    assert (np.diff(marginal) <= 0).all()
    assert list(by_gamma) == ["1", "2", "3", "5"]
    low, high = read["accept_length_by_k_intervals"]["2"]
    assert low < by_gamma["2"] < high
    assert set(read["per_category"]) == {"code", "chat"}
    assert read["per_category"]["code"]["mean_accept_length"] > read["per_category"]["chat"]["mean_accept_length"]
    assert (read["accept_length_model"], read["verification_method"]) == ("chain_analytic", "longest_prefix")
    assert json.loads(export_profile(RunDraft(run, "lookup"), gamma=2).text)["accept_length_model"] == "measured_per_k"
    jointly = json.loads(export_profile(RunDraft(mixed, "small"), rule="block", domain="story").text)
    assert jointly["marginal_accept_rates"] is jointly["conditional_accept_rates"] is None
    assert (jointly["verification_method"], jointly["mean_accept_length"] > 1) == ("block", True)


def test_the_page_names_every_format_and_every_rate() -> None:
    page = (Path(__file__).parents[2] / "docs" / "exports.md").read_text()
    named = [field.name for field in dataclasses.fields(GammaRates)]
    assert [name for name in [*WRITERS, STEP_COSTS, RATES, LENGTHS, PROFILE, TEXTS, *named] if f"`{name}`" not in page] == []
