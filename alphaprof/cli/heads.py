"""The commands about heads for one's own traffic: train one, and what more data would bring."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from alphaprof.cli.common import (
    SPLIT,
    Format,
    OutFile,
    ProfileChanges,
    ProfileFile,
    QuestionChanges,
    Resume,
    SplitWay,
    command,
    how,
    output,
    show,
)
from alphaprof.cli.measuring import loaded_profile, require_references, working
from alphaprof.errors import OptionInvalid

group = Typer()
DraftVocab = Annotated[
    float | None,
    Option(min=0, metavar="N", help="Ids that the head proposes, or a share of tokens like 0.99; default: all that occur."),
]


@command(
    group,
    "alphaprof train my.yaml --from runs/my --out heads/my",
    "alphaprof train my.yaml --from runs/my --out heads/curve --curve",
)
def train(
    profile_file: ProfileFile,
    run: Annotated[str, Option("--from", metavar="RUN", help="The run whose texts the head is trained on.")],
    out: Annotated[Path, output(readable=False, help="Directory of the head; new, or with --resume the interrupted one.")],
    curve: Annotated[
        bool, Option("--curve", help="Train on 1/8, 1/4, 1/2 and all of the texts, for alphaprof curve.")
    ] = False,
    init: Annotated[str | None, Option(metavar="HEAD", help="Begin with this EAGLE-3 head.")] = None,
    draft_vocab: DraftVocab = None,
    ttt: Annotated[int, how(metavar="N", min=1, max=16, help="Drafts of a round that are trained.")] = 3,
    steps: Annotated[int | None, how(metavar="N", min=1, help="Updates; default: ten passes over the texts.")] = None,
    batch_tokens: Annotated[int, how(metavar="N", min=1, help="Tokens of continuations in a step.")] = 1536,
    learning_rate: Annotated[float, how(metavar="X", min=0, help="The largest, after the warm-up.")] = 2e-3,
    seed: Annotated[int, how(metavar="N", min=0, help="Of the first weights and the order of the texts.")] = 0,
    split: Annotated[SplitWay, SPLIT] = "random",
    split_seed: Annotated[int, how(metavar="N", min=0, help="Of the parts that texts are split into at random.")] = 0,
    resume: Resume = False,
    overrides: ProfileChanges = None,
) -> None:
    """Train an EAGLE-3 head on the texts that a run holds, and test it on documents that were held out."""
    options = loaded_profile(profile_file, overrides)
    require_references(options, data=False, drafts=False)
    if not learning_rate or draft_vocab == 0:
        raise OptionInvalid("--learning-rate and --draft-vocab must be above 0", "leave them out for the defaults")
    with working(str(out)) as progress:
        from alphaprof.profiling.training.train import TrainingOptions, done, train_curve
        from alphaprof.profiling.training.train import train as train_one

        asked = TrainingOptions(steps, ttt, batch_tokens, learning_rate, draft_vocab, init, seed, split_seed, split)
        given = options, run, out, asked, progress, resume
        records = train_curve(*given) if curve else [train_one(*given)]
    print(done(records, out))


@command(group, "alphaprof curve heads/curve", "alphaprof curve heads.yaml --set decision.min_speedup=1.5")
def curve(
    heads: Annotated[
        Path,
        Argument(
            metavar="OUT|HEADS.yaml", readable=False, help="What train --curve wrote, or a list of heads (docs/curve.md)."
        ),
    ],
    form: Format = "terminal",
    out: OutFile = None,
    overrides: QuestionChanges = None,
) -> None:
    """What heads trained on more and more texts reach, and what more data would bring: a forecast with its backtest."""
    from alphaprof.commands.curve import build_curve
    from alphaprof.config.heads import load_heads

    show(build_curve(*load_heads(heads), overrides or []), form, out)
