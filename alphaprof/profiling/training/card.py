"""The model card of a trained head: what it is, how to use and to serve it, what was measured, in Markdown."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np

from alphaprof.log.run import Run
from alphaprof.log.split import of_units
from alphaprof.log.training import TESTED, TrainingRecord, learnt, split_words
from alphaprof.totals.pool import decoded_totals

USE = """
## Use

As a draft of a profile:

```yaml
drafts:
  head: {{kind: eagle3, model: {name}}}
```

With vLLM, which reads these files as they are:

```bash
{command}
```

## Licence

The licence of the texts is unknown to alphaprof. A head is made from its target and from these texts: the licences of both
apply. training.json holds every setting and the units of each part.
"""


def card(record: TrainingRecord, run: Run, draft: str, folder: Path) -> str:
    """The text of README.md; `run` tested the head as a draft."""
    size, target = record.size, record.target
    trained = "fine-tuned" if record.settings.get("init") else "trained from the target's last layer"
    facts = {
        "target": f"{target.model} (fingerprint {target.fingerprint[:16]}, width {target.hidden_size})",
        "trained on": f"{size.tokens:,} tokens of {size.documents} documents ({size.units} independent units, "
        f"{size.fraction} of the training units), {size.prompt_tokens:,} tokens of prompts before them",
        "split": split_words(record),
        "steps": f"{record.steps}; the weights are those of step {record.best_step}, the best on the stop part",
        "parameters": f"{record.parameters:,}, {trained}",
        "proposes": f"{record.vocabulary.size:,} ids; {record.vocabulary.ceiling_test:.1%} of test tokens are among them",
        "device": f"{record.device}; {record.seconds.training:.0f} s of steps, {record.seconds.cpu:.0f} s of processors",
        "loss": "KL of the head's law to the target's, renormalised over the ids that the head proposes",
    }
    lines = ["# An EAGLE-3 draft head", "", "Written by `alphaprof train`.", ""]
    lines += ["| | |", "|---|---|", *(_row(name, _cell(value)) for name, value in facts.items())]
    lines += ["", "## What was measured", "", *_measured(record, run, draft), ""]
    if learnt(record) is None:
        lines += ["Nothing says what the head that training began with had learnt: it may have seen test texts.", ""]
    served = json.dumps({"method": "eagle3", "model": str(folder), "num_speculative_tokens": record.settings["ttt"]})
    command = shlex.join(["vllm", "serve", target.model, "--speculative-config", served])
    return "\n".join(lines) + USE.format(name=json.dumps(str(folder)), command=command)


def _measured(record: TrainingRecord, run: Run, draft: str) -> list[str]:
    """Acceptance and tokens a round on the test part; the stop part chose the step, and is left out."""
    table = of_units(run.documents(), record.units.test)
    totals, rules = decoded_totals(run, draft, table, run.manifest.profile.decision.rule)
    kinds = np.array(table["continuation"].to_pylist())
    shown = [f"By replay of {len(table)} test documents (`alphaprof report {TESTED}` in this folder says more):", ""]
    gammas = run.gammas
    shown.append(_row("text", "rule", "tokens", "accept@1", *(f"tokens/round, gamma {each}" for each in gammas)))
    shown.append("|" + "---|" * (4 + len(gammas)))
    for kind, rule in sorted(set(zip(kinds.tolist(), rules.tolist(), strict=True))):
        of = totals.rows((kinds == kind) & (rules == rule))
        tokens, right = of["tokens"].sum(), of["accepted"].sum() / max(of["proposals"].sum(), 1)
        rounds = [tokens / max(of[f"rounds_{gamma}"].sum(), 1e-9) for gamma in gammas]
        shown.append(_row(kind, rule, f"{int(tokens):,}", *(f"{each:.3f}" for each in (right, *rounds))))
    return [*shown, "", "accept@1: share of positions whose first draft is accepted."]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """Text for a table: names of models and folders may hold anything."""
    plain = "".join(each if each.isprintable() else " " for each in text)
    return "".join(f"\\{each}" if each in "|`<*_[" else each for each in plain)
