"""What `--help` adds to the commands and options: the panel that an option stands in, and examples of each command."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperOption

ASKED, HOW, OUTPUT, SERVED = "What is asked", "How", "Output", "How it was served"

ORDER = (SERVED, ASKED, HOW, OUTPUT)

# Instead of <float range> and the like, which leave no room for the help in 80 columns.
NUMBERS = {"gamma": "N", "nodes": "N", "depth": "N", "top_k": "N", "margin": "X", "temperature": "X", "top_p": "X"}
NUMBERS |= {
    "ttt": "N",
    "steps": "N",
    "batch_tokens": "N",
    "learning_rate": "X",
    "seed": "N",
    "split_seed": "N",
}

# The panels of options, by the names of their parameters; what is not named here says what is asked.
PANELS = {
    OUTPUT: ("out", "output", "sections"),
    HOW: (
        *("replay", "whole_log", "verify", "target_change", "undecided", "top"),
        *("resume", "reuse", "until_decided", "dry_run", "part", "workers", "repeats", "leave_out"),
        *("verify_slope", "overhead", "burstiness"),
        *("ttt", "steps", "batch_tokens", "learning_rate", "seed", "split", "split_seed"),
    ),
}
IMPORTED = {SERVED: ("rule", "temperature", "top_k", "top_p", "gamma", "drafting", "verification")} | PANELS

EXAMPLES = {
    "profile": ("alphaprof profile my.yaml --dry-run", "alphaprof profile my.yaml --out runs/my"),
    "report": (
        "alphaprof report runs/my",
        "alphaprof report runs/my --show causes --show load",
        "alphaprof report runs/my --format html --out report.html",
    ),
    "check": (
        "alphaprof check runs/my --draft small --min-alpha code=0.5",
        "alphaprof check runs/new --draft small --baseline runs/old",
    ),
    "compare": ("alphaprof compare runs/my:small runs/my:ngram", "alphaprof compare runs/new:small runs/old:small"),
    "trees": ("alphaprof trees runs/my:small --nodes 8 --nodes 16",),
    "curve": ("alphaprof curve heads/curve", "alphaprof curve heads.yaml --set decision.min_speedup=1.5"),
    "export": (
        "alphaprof export runs/my:small --to vllm-config",
        "alphaprof export runs/my:small --to dynamo --domain code",
        "alphaprof export runs/my --to texts --out data",
    ),
    "latency": ("alphaprof latency my.yaml --format csv --out h100.csv",),
    "validate": (
        "alphaprof validate my.yaml --documents 8 --gamma 3",
        "alphaprof validate my.yaml --documents 16 --rule additive:0.1",
    ),
    "predict": (
        "alphaprof predict --alpha 0.75 --cost 0.04",
        "alphaprof predict --accepted-per-drafted 0.6 --at-gamma 3 --cost 0.04",
    ),
    "train": (
        "alphaprof train my.yaml --from runs/my --out heads/my",
        "alphaprof train my.yaml --from runs/my --out heads/curve --curve",
    ),
    "schema": ("alphaprof schema", "alphaprof schema --of report"),
    "rules": ("alphaprof rules",),
    "doctor": ("alphaprof doctor",),
    "status": ("alphaprof runs status runs/my",),
    "finish": ("alphaprof runs finish runs/my",),
    "clean": ("alphaprof runs clean runs/my",),
    "vllm": ("alphaprof import vllm requests.jsonl --rule strict --out runs/served",),
    "sglang": ("alphaprof import sglang log.jsonl --rule strict --drafting chain --out runs/sg",),
    "prometheus": ("alphaprof import prometheus before.txt after.txt",),
}


def examples(command: str) -> str:
    """Returns the examples of a command as the last paragraphs of its help."""
    return "\n\n".join(("Examples:" if len(EXAMPLES[command]) > 1 else "Example:", *EXAMPLES[command]))


class Command(TyperCommand):
    """A command whose `--help` groups its options in panels, and ends with examples."""

    panels = PANELS

    def __init__(self, name: str, **arguments: Any) -> None:
        super().__init__(name, **arguments | {"epilog": examples(name)})
        for option in self.params:
            if isinstance(option, TyperOption):
                option.rich_help_panel = next((panel for panel, names in self.panels.items() if option.name in names), ASKED)
                option.metavar = "" if option.is_flag else option.metavar or NUMBERS.get(str(option.name))
        self.params.sort(key=lambda param: ORDER.index(getattr(param, "rich_help_panel", None) or ASKED))

    def get_help_option(self, ctx: Any) -> Any:
        """Returns the option `--help`, which stands in the last panel."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.rich_help_panel, option.metavar = OUTPUT, ""
        return option


class ImportCommand(Command):
    """A command below `import`."""

    panels = IMPORTED
