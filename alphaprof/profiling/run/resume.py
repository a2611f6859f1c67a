"""What is compared before work begins or goes on, and the documents of an earlier run with their continuations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from alphaprof.config.options import RooflineCosts, SampledContinuation, TableCosts, TextContinuation
from alphaprof.config.profile import ProfileOptions
from alphaprof.costs.cost_model import shape_of
from alphaprof.costs.engine_table import read_engine_table
from alphaprof.costs.steps import TARGET
from alphaprof.errors import RunMismatch
from alphaprof.log.joining import FREE
from alphaprof.log.manifest import DraftFacts, Manifest, ModelFacts, Worker
from alphaprof.log.notes import note
from alphaprof.log.split import unit_of
from alphaprof.log.store import Run
from alphaprof.profiling.models.dtype import settled
from alphaprof.profiling.models.processing import not_modelled
from alphaprof.profiling.models.teacher_forced import TeacherForced
from alphaprof.profiling.scoring.dispatch import why_unavailable
from alphaprof.profiling.scoring.scorer import Scorer
from alphaprof.profiling.texts.corpus import Document, document_of, policy
from alphaprof.rules import parse_rule


def early_warnings(options: ProfileOptions, scorer: Scorer, has_template: bool) -> Iterator[dict[str, str]]:
    """What is known to be odd before any work, as notes."""
    kinds = [options.continuation_of(index) for index in range(len(options.data))]
    raw = [
        Path(source.path).name
        for source, kind in zip(options.data, kinds, strict=True)
        if source.prompt is not None and not source.chat and not isinstance(kind, TextContinuation)
    ]
    if raw and has_template:
        yield note("raw_prompts", files=", ".join(raw))
    if options.decision.rule != "auto" and not _has_verdict(options, options.decision.rule):
        yield note("no_verdict", rule=options.decision.rule)
    choice = scorer.target.model.choice
    if choice is not None and choice.chosen != choice.stored:
        yield note("other_dtype", reason=choice.reason)
    if reason := why_unavailable(scorer.target.model.device):
        yield note("slow_statistics", reason=reason)
    if options.certificates and not scorer.extras.certified:
        yield note("no_thresholds", rules=", ".join(options.rules))
    if any(isinstance(kind, SampledContinuation) and kind.generation_config for kind in kinds):
        yield from (note("not_modelled", setting=setting) for setting in not_modelled(scorer.target.model.served))
    for forced in (scorer.target, *scorer.drafts):
        if isinstance(forced, TeacherForced) and not forced.chunked:
            yield note("full_logits", model=forced.model.name)


def _has_verdict(options: ProfileOptions, named: str) -> bool:
    """Whether a rule has rounds on some of the text, without which no verdict can come out of the run."""
    rule = parse_rule(named).rule
    policies = [policy(options.continuation_of(index), {}) for index in range(len(options.data))]
    texts = {"sampled" if fields["processing"] else "greedy" for fields in policies if fields["on_policy"]}
    return rule.chained and bool(texts & set(rule.policies))


def require_costs(options: ProfileOptions, target: ModelFacts, drafts: Mapping[str, DraftFacts]) -> None:
    """Raise `CostsUnreadable` where step times from elsewhere cannot be had: known before any work."""
    costs = options.costs
    lookups = [name for name, facts in drafts.items() if not facts.has_steps]
    if isinstance(costs, TableCosts):
        models = [name for name in options.drafts if name not in lookups]  # those that could not be loaded among them
        heads = [name for name in models if name not in drafts or drafts[name].by_depth]
        read_engine_table(Path(costs.path), models, lookups, costs.overhead_ms, heads)
    elif isinstance(costs, RooflineCosts):
        for name, facts in {TARGET: target, **drafts}.items():
            if name not in lookups:
                shape_of(name, facts)


def as_measured(options: ProfileOptions, manifest: Manifest) -> ProfileOptions:
    """Returns the options with the target's dtype of a run that was made already, where they leave it to auto."""
    return settled(options, manifest.config["target"]["dtype"])


def require_same_profile(earlier: Run, options: ProfileOptions) -> None:
    """Raise `RunMismatch` unless a run was made with these options; what only the report reads may differ."""
    before, now = earlier.manifest.config, options.model_dump(mode="json")
    if changed := [key for key in now if key not in FREE and before.get(key) != now[key]]:
        hint = "resume with the profile and options of the first call, or choose another --out"
        raise RunMismatch(f"{earlier.path} was made with another profile ({', '.join(changed)} changed)", hint)


def require_same_models(before: Manifest, now: Manifest, worker: Worker) -> None:
    """Raise `RunMismatch` unless models and tokenizer are those of a run that goes on, and its processes compute alike:
    `worker` is this one. The profile may allow that they do not.
    """
    mixed = now.config["execution"]["mixed_devices"]
    if not mixed and (found := worker.differs_from(before)):
        raise RunMismatch(
            f"this process computes otherwise than the one that began the run ({'; '.join(found)}): its rows could differ",
            "compute as the run began, profile into a new directory, or accept it: --set execution.mixed_devices=true",
        )
    earlier, models = {"target": before.target, **before.drafts}, {"target": now.target, **now.drafts}
    fields = [f"{name} {field}" for name, facts in models.items() for field in differing(earlier[name], facts)]
    odd = [field for field in fields if not (mixed and field.endswith(" device"))]
    odd += ["tokenizer"] if before.tokenizer != now.tokenizer else []
    if odd:
        hint = "put the same models back, or profile into a new directory"
        raise RunMismatch(f"models are not those that the run began with ({', '.join(odd)} differ)", hint)


def differing(old: ModelFacts, new: ModelFacts) -> list[str]:
    """In which facts two models differ; where they lie does not matter, nor what other facts say already."""
    elsewhere = ("reference", "shape", "special", "trials", "trained")  # tokenizers are compared by themselves
    return [name for name in vars(old) if name not in elsewhere and getattr(old, name) != getattr(new, name)]


class Reused:
    """Stands in for a `Corpus`: the same documents in the same order, each with the continuation that the run stored.

    `units`: of these independent units alone (`log.split.unit_of`); None: all documents.
    """

    def __init__(self, run: Run, units: frozenset[str] | None = None) -> None:
        self.run, self.units = run, units
        self.skipped = Counter(run.manifest.skipped)
        self.truncated = Counter(run.manifest.truncated)

    @classmethod
    def open(cls, path: Path, options: ProfileOptions, units: frozenset[str] | None = None) -> Reused:
        """The documents of the complete run in `path`. Raises `RunUnreadable`, and `RunMismatch` where `options` ask for
        other data or continuations than the run holds.
        """
        run = Run.open(path)
        run.require_complete()
        order = run.manifest.sequential
        if order is not None and run.manifest.documents < order["available"]:
            raise RunMismatch(
                f"{path} stopped early because the verdict was sure: how many documents it has depends on its results",
                "reuse continuations of a run that measured all of its documents",
            )
        before, now = run.manifest.config, options.model_dump(mode="json")
        if changed := [key for key in ("data", "continuation") if now[key] != before[key]]:
            hint = "reuse continuations with the data and continuation of the run that made them"
            raise RunMismatch(f"{path} was made with another profile ({', '.join(changed)} differ)", hint)
        return cls(run, units)

    def require_same_target(self, now: Manifest) -> None:
        """Raise `RunMismatch` unless the run was made with this target, dtype and tokenizer."""
        before = self.run.manifest
        if differing(before.target, now.target) or before.tokenizer != now.tokenizer:
            hint = "profile without --reuse-continuations: another target writes other text"
            raise RunMismatch(f"{self.run.path} was made with another target, dtype or tokenizer", hint)

    def __iter__(self) -> Iterator[Document]:
        """The documents, in order."""
        for shard in self.run.shards:
            for row in self.run.continuations(shard.index).to_pylist():
                if self.units is None or unit_of(row["cluster"], row["prompt_hash"]) in self.units:
                    yield document_of(row, row["continuation_ids"], row["finish"] == "length")
