"""What the options of `alphaprof export` ask for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from alphaprof.commands.export import engines
from alphaprof.commands.export.formats import RATES, TEXTS
from alphaprof.commands.export.rates import export_rates
from alphaprof.commands.export.scope import Artefact
from alphaprof.commands.export.texts import export_texts
from alphaprof.config.load import changed_question, known_rules
from alphaprof.errors import OptionInvalid
from alphaprof.run.reader import side_of
from alphaprof.run.split import RANDOM, SplitBy


def export(
    run: str,
    to: str,
    rule: str | None,
    gamma: int | None,
    domain: str | None,
    split: SplitBy | None,
    overrides: Sequence[str],
    out: Path | None,
) -> Artefact:
    """Return a draft, RUN[:DRAFT], in a format of ABOUT; texts are written to `out`. `overrides`: what `--set` changes of
    the question. Raises `OptionInvalid`, `ProfileInvalid`, `RunUnreadable`, and what `export_texts` raises.
    """
    if to == TEXTS:
        return export_texts(run, out, narrowed=bool(rule or gamma or domain or overrides), by=split or RANDOM)
    if split is not None:
        raise OptionInvalid(f"--split is for --to {TEXTS}: this format has no texts", "leave out --split")
    chosen, side = known_rules([rule], "--rule")[0] if rule else None, side_of(run)
    if overrides:
        side = side.asked(changed_question(side.run.manifest.config, list(overrides)))
    if to == RATES:
        return export_rates(side, rule=chosen, gamma=gamma, domain=domain)
    return engines.export(side, to, rule=chosen, gamma=gamma, domain=domain)
