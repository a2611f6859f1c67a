"""What engines and simulators read of a run, one pure function a format. `docs/exports.md` says where each was read."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import TYPE_CHECKING, Any, Literal

from alphaprof.report.serving import LLAMACPP, SGLANG, VLLM, ServingEngine
from alphaprof.run.manifest import NGRAM

if TYPE_CHECKING:
    from alphaprof.run.manifest import DraftFacts

Over = Literal["proposing", "all"]
PROPOSING: Over = "proposing"
ALL: Over = "all"
DIGITS = 6  # of rates and lengths
DYNAMO_MOST = 5  # drafts a step, at most: `aic_nextn must be in 1..=5`


@dataclass(frozen=True)
class Depths:
    """Rounds at one gamma: all, those that had a proposal (`ready`), those that drafted gamma tokens (`full`), and for
    d = 1, ..., gamma those whose d-th draft was `tested` (there was one, all before it were accepted, and the text had not
    ended) and those that `accepted` at least d drafts. Counts; expectations if acceptance is a matter of chance, and
    scaled if domains have weights. Some round has a proposal.
    """

    rounds: float
    ready: float
    full: float
    tested: tuple[float, ...]
    accepted: tuple[float, ...]

    def over(self, which: Over) -> float:
        """Return the rounds that rates are of."""
        return self.ready if which == PROPOSING else self.rounds

    def marginal(self, over: Over) -> tuple[float, ...]:
        """P(first d drafts all accepted) for d = 1, ..., gamma; never increasing.

        Over all rounds: shares of these, so that they add up to the mean. Over proposing rounds: of a proposal that has d
        drafts, as products of conditional rates, since the reader proposes fewer by itself where the log did.
        """
        if over == PROPOSING:
            return tuple(accumulate(self.conditional(over), mul))
        return tuple(count / self.rounds for count in self.accepted)

    def conditional(self, over: Over) -> tuple[float, ...]:
        """P(draft d accepted | the first d - 1 were), 0 if none is reached. Over proposing rounds: of the drafts that
        were tested. Over all rounds: quotients of marginals, so that products give these again.
        """
        if over == PROPOSING:
            return tuple(min(1.0, a / t) if t > 0 else 0.0 for a, t in zip(self.accepted, self.tested, strict=True))
        steps = pairwise((1.0, *self.marginal(over)))
        return tuple(after / before if before > 0 else 0.0 for before, after in steps)

    def length(self, over: Over) -> float:
        """Return acceptance length: 1 + accepted drafts / rounds."""
        return 1 + sum(self.accepted) / self.over(over)


@dataclass(frozen=True)
class Acceptance:
    """What formats of chains are written from: one draft of a run under one rule, on one domain or on the whole traffic.

    `target`: its reference, as `model` is of the draft's own checkpoint, with `revision` on the hub (None: it has none, or
    it is a part of the target's). `served`: by another engine, so that it is not known what draft it was. `drawn`: some
    drafts were drawn from q; `blocks`: they are verified together. `depths`: rounds at the exported `gamma`. `schedule`:
    first and last concurrency, and the gamma there (0: the draft does not make decoding faster); None if one is for all.
    `p_min`: the top probability below which the draft stops.
    """

    target: str
    draft: DraftFacts
    model: str | None
    revision: str | None
    served: bool
    drawn: bool
    blocks: bool
    gamma: int
    depths: Depths
    schedule: tuple[tuple[int, int, int], ...] | None
    p_min: float = 0.0


def vllm_config(chain: Acceptance) -> str:
    """VLLM's --speculative-config for serving, with the schedule over batch sizes if there is one."""
    config = _vllm_draft(chain) | {
        "draft_sample_method": "probabilistic" if chain.drawn else "greedy",
        "rejection_sample_method": "block" if chain.blocks else "standard",
    }
    return _json(config | _vllm_schedule(chain))


def vllm_synthetic(chain: Acceptance) -> str:
    """VLLM's --speculative-config with synthetic acceptance, and the schedule over batch sizes if there is one."""
    config = _vllm_draft(chain) | {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": _rounded(chain.depths.marginal(PROPOSING)),
    }
    return _json(config | _vllm_schedule(chain))


def _vllm_draft(chain: Acceptance) -> dict[str, Any]:
    return chain.draft.vllm_speculation(chain.gamma, chain.model, chain.revision)


def _vllm_schedule(chain: Acceptance) -> dict[str, Any]:
    if chain.schedule is None:
        return {}
    return {"num_speculative_tokens_per_batch_size": [list(entry) for entry in chain.schedule]}


def llamacpp_args(chain: Acceptance) -> str:
    """Return arguments of llama-server and llama-cli, quoted for a shell."""
    words = ["--spec-type", str(LLAMACPP.method(chain.draft)), "--spec-draft-model", str(chain.model)]
    words += ["--spec-draft-n-max", str(chain.gamma), *(["--spec-draft-p-min", f"{chain.p_min:g}"] if chain.p_min else [])]
    return f"{shlex.join(words)}\n"


def llamacpp_synthetic(chain: Acceptance) -> str:
    """Return arguments of llama-server and llama-cli with synthetic acceptance."""
    options = f"--spec-draft-n-max {chain.gamma}"
    if chain.draft.engine_method == NGRAM:
        longest = chain.draft.settings["max_ngram"]
        options = f"--spec-type ngram-simple --spec-ngram-simple-size-n {longest} --spec-ngram-simple-size-m {chain.gamma}"
    return f"{options} --spec-synth-rates {_comma_listed(chain.depths.marginal(PROPOSING))}\n"


def sglang_args(chain: Acceptance) -> str:
    """Return arguments of SGLang's server on one line, quoted for a shell."""
    words = [*_sglang_words(chain), *(["--speculative-use-rejection-sampling"] if chain.drawn else [])]
    return f"{shlex.join(words)}\n"


def _sglang_words(chain: Acceptance) -> list[str]:
    """Return one branch of gamma drafts, and the draft if SGLang has an algorithm for it."""
    words = []
    if (algorithm := SGLANG.method(chain.draft)) is not None:
        words = ["--speculative-algorithm", str(algorithm)]
        words += [] if chain.model is None else ["--speculative-draft-model-path", chain.model]
        words += [] if chain.revision is None else ["--speculative-draft-model-revision", chain.revision]
    words += ["--speculative-num-steps", str(chain.gamma), "--speculative-eagle-topk", "1"]
    return [*words, "--speculative-num-draft-tokens", str(chain.gamma + 1)]  # the root counts


def sglang_synthetic(chain: Acceptance) -> str:
    """Environment variables of SGLang's simulated acceptance, a line each."""
    return (
        f"SGLANG_SIMULATE_ACC_LEN={chain.depths.length(ALL):.{DIGITS}f}\n"
        "SGLANG_SIMULATE_ACC_METHOD=match-expected\n"
        "SGLANG_SIMULATE_ACC_TOKEN_MODE=real-draft-token\n"
    )


def dynamo(chain: Acceptance) -> str:
    """Return arguments of Dynamo's mocker."""
    rates = _comma_listed(chain.depths.conditional(ALL))
    return f"--aic-nextn {chain.gamma} --aic-nextn-accept-rates {rates}\n"


def aiconfigurator(chain: Acceptance) -> str:
    """Return arguments of `aiconfigurator cli`: drafts a round, and accepted ones of them on average."""
    return f"--nextn {chain.gamma} --nextn-accepted {chain.depths.length(ALL) - 1:.{DIGITS}f}\n"


def _stand_in(chain: Acceptance) -> str:
    if chain.served:
        return "add the method and model of the served draft"
    missing = "vLLM has no method for this draft: add the method and model of one with the same step time"
    return missing if chain.draft.engine_method is None else ""


def _server(chain: Acceptance) -> str:
    known = chain.served or SGLANG.method(chain.draft) is not None
    stand_in = "" if known else ", and an SGLang-supported draft with the same step time"
    return f"use with the server's {shlex.join(_sglang_words(chain))}{stand_in}"


@dataclass(frozen=True)
class Export:
    """A format: who reads it (`about`), how it is to be read (`convention`), which rounds its rates are of, the most drafts
    a round that its reader takes (None: any), what goes with it, which engine loads the draft's own files beside it, and
    whether that engine serves real requests with it (`serves`). `layers_of_target`: its reader prices each draft as a layer
    of the target.
    """

    write: Callable[[Any], str]
    about: str
    convention: str
    over: Over
    most: int | None = None
    beside: Callable[[Acceptance], str] = lambda _: ""
    engine: ServingEngine | None = None
    serves: bool = False
    layers_of_target: bool = False


SYNTHETIC = "marginal rates by depth, over rounds that draft to that depth; the target's own token is not counted"
TOP_TEN = "llama.cpp compares p_min with probabilities among the draft's top ten tokens, so it stops slightly later"
SERVING = "engine start options, without rates"
EXPORTS: dict[str, Export] = {
    "vllm-config": Export(
        vllm_config,
        "vLLM's --speculative-config, for serving",
        SERVING,
        PROPOSING,
        beside=lambda chain: _serve(
            ["vllm", "serve", chain.target, "--speculative-config", json.dumps(json.loads(vllm_config(chain)))]
        ),
        engine=VLLM,
        serves=True,
    ),
    "sglang-args": Export(
        sglang_args,
        "SGLang server arguments, for serving",
        SERVING,
        ALL,
        beside=lambda chain: _serve(
            ["python", "-m", "sglang.launch_server", "--model-path", chain.target], sglang_args(chain)
        ),
        engine=SGLANG,
        serves=True,
    ),
    "llamacpp-args": Export(
        llamacpp_args,
        "llama-server arguments, for serving",
        SERVING,
        PROPOSING,
        beside=lambda chain: "; ".join(
            [_serve(["llama-server", "-m", chain.target], llamacpp_args(chain)), *([TOP_TEN] if chain.p_min else [])]
        ),
        engine=LLAMACPP,
        serves=True,
    ),
    "vllm-synthetic": Export(
        vllm_synthetic,
        "--speculative-config of vLLM, synthetic acceptance",
        SYNTHETIC,
        PROPOSING,
        beside=_stand_in,
        engine=VLLM,
    ),
    "llamacpp-synthetic": Export(
        llamacpp_synthetic, "arguments of llama-server, synthetic acceptance", SYNTHETIC, PROPOSING
    ),
    "sglang-synthetic": Export(
        sglang_synthetic,
        "environment of SGLang, synthetic acceptance",
        "mean acceptance length over all rounds, the target's own token counted",
        ALL,
        beside=_server,
        engine=SGLANG,
    ),
    "aiconfigurator": Export(
        aiconfigurator,
        "arguments of aiconfigurator cli",
        "mean accepted drafts a round, over all rounds; the target's own token is not counted",
        ALL,
        layers_of_target=True,
    ),
    "dynamo": Export(
        dynamo,
        "arguments of Dynamo's mocker (its replay ignores them: dynamo#13517)",
        "conditional rates of drafts, over all rounds; the target's own token is not counted",
        ALL,
        DYNAMO_MOST,
    ),
}


TEXTS = "texts"
ABOUT = {name: form.about for name, form in EXPORTS.items()} | {
    TEXTS: "a folder of token ids for head trainers (speculators, SpecForge), split as in alphaprof train"
}
TRAINERS = (  # commands that read `train`, with texts of at most `longest` tokens of the target `model`
    "speculators prepare-data --model {model} --data {train} --seq-length {longest} --no-skip-token-freq --output DATA",
    "specforge train --config MY.yaml data.train_data_path= data.prompts_path={train} data.max_length={longest}",
)


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, DIGITS) for value in values]


def _comma_listed(values: Sequence[float]) -> str:
    """Return rates between commas, without exponents, which not every reader knows."""
    return ",".join(f"{value:.{DIGITS}f}" for value in values)


def _serve(command: Sequence[str], arguments: str = "") -> str:
    """Return a command to paste; `arguments`: quoted already."""
    return f"serve with: {shlex.join(command)} {arguments}".rstrip()


def _json(content: Mapping[str, Any]) -> str:
    """Return a JSON object with one entry per line; ASCII, so that names from data reach a terminal escaped."""
    lines = (f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in content.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"
