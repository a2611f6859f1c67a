"""What the options of `alphaprof export` ask for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from alphaprof.commands.export import engines
from alphaprof.commands.export.formats import LENGTHS, PROFILE, RATES, STEP_COSTS, TEXTS, Artefact
from alphaprof.commands.export.rates import export_lengths, export_profile, export_rates
from alphaprof.commands.export.texts import export_texts
from alphaprof.config.engines import engine_of
from alphaprof.config.load import changed_question, known_rules
from alphaprof.run.reader import side_of


def export(
    run: str,
    to: str,
    rule: str | None,
    gamma: int | None,
    domain: str | None,
    version: str | None,
    overrides: Sequence[str],
    out: Path | None,
) -> Artefact:
    """Return a draft, RUN[:DRAFT], in a format of ABOUT; texts are written to `out`. `version`: of the engine; `overrides`:
    what `--set` changes of the question. Raises `OptionInvalid`, `ProfileInvalid`, `RunUnreadable`, and what `export_texts`
    raises.
    """
    if version is not None:
        engine_of(to, version)
    if to == TEXTS:
        return export_texts(run, out, narrowed=bool(rule or gamma or domain or overrides))
    chosen, side = known_rules([rule], "--rule")[0] if rule else None, side_of(run)
    if overrides:
        side = side.asked(changed_question(side.run.manifest.config, list(overrides)))
    measured = {RATES: export_rates, LENGTHS: export_lengths, PROFILE: export_profile, STEP_COSTS: engines.export_step_costs}
    if to in measured:
        return measured[to](side, rule=chosen, gamma=gamma, domain=domain)
    return engines.export(side, to, rule=chosen, gamma=gamma, domain=domain, version=version)
