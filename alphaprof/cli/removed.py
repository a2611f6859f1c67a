"""What earlier versions had on the command line, and what to do instead. Keys of profiles are in `config/options.py`,
rules in `rules.py`, and schemes of addresses in `config/paths.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from alphaprof.config.paths import require_kept_scheme
from alphaprof.errors import OptionInvalid

NO_CURVE = "train on a quarter, half and all of the texts and compare the heads: docs/training.md"
TARGET = "use --show target: one section for what the target's margins and the draft's divergences say"
NO_TIMES = "leave it out: profile two periods as two runs, train on the first and profile the head on the second"
RATES = "use --to rates, one JSON for all simulators; docs/exports.md says which field each of them reads"
# A command, an option of it, or a value of the option, as it was typed; the first that fits is named.
REMOVED: dict[str, str] = {
    "curve": NO_CURVE,
    "train --curve": NO_CURVE,
    "train --draft-vocab": "leave it out: a head proposes all ids that its training continuations have, at most 32,000",
    "train --split": NO_TIMES,
    "train --split-seed": "leave it out: the split depends on the texts alone",
    "profile --until-decided": "use --limit N as a pilot: its report says how many documents a verdict needs; then profile "
    "that many other documents (another shuffle_seed) into a new --out",
    "profile --workers": "use --set execution.workers=N (Ray), or --part I/N and alphaprof merge (docs/scale.md)",
    "profile --engine": "use --set execution.workers=N: more than one are Ray actors (docs/scale.md)",
    "runs": "see the progress that alphaprof profile prints; finish a run with alphaprof profile --resume",
    "predict --burstiness": "leave it out: a report replays the rounds of real text, in which acceptance comes in bursts",
    "predict --engine": "write --preset sglang-h200",
    "predict --request-share": "leave it out: report --show requests has whole requests, by the prefill that was timed",
    "predict --verify-slope": "give --verify of one --gamma, or --target-config and --draft-config to compute it",
    "trees": "use alphaprof report RUN --show trees",
    "check --allow-target-change": "leave it out: another target than the baseline's is compared, and named",
    "report --show certificates": TARGET,
    "report --show predictability": TARGET,
    "report --show difficulty": TARGET,
    "report --show documents": "read alphaprof.open(RUN).totals(): docs/python.md has the lines that rank documents",
    "report --format csv": "use --format json: domains[] has the rows of the table, with every digit",
    "report --replay": "leave it out: rounds are those of engines, which do not draft less near the end of a text",
    "export --split": NO_TIMES,
    "schema --of": "write alphaprof schema report: the name follows without an option",
    "export --to vllm-synthetic": RATES,
    "export --to sglang-synthetic": RATES,
    "export --to llamacpp-synthetic": RATES,
    "export --to dynamo": RATES,
    "export --to aiconfigurator": RATES,
}


def require_kept(arguments: Sequence[str]) -> None:
    """Raise `OptionInvalid` for a command, an option, a value of one, or an address that was removed, with what to do
    instead.
    """
    require_kept_scheme(" ".join(arguments))
    given = [part for argument in arguments for part in (argument.split("=", 1) if argument[:2] == "--" else [argument])]
    for name, instead in REMOVED.items():
        command, *option = name.split(" ")
        places = range(1, len(given) - len(option) + 1)
        if given[:1] == [command] and (not option or any(given[at : at + len(option)] == option for at in places)):
            raise OptionInvalid(f"alphaprof {name} was removed", instead)
