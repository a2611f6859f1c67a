"""Runs of trained heads on stories15M, and rounds that other decoders recorded of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from alphaprof.config.load import load_profile
from alphaprof.config.profile import ProfileOptions
from alphaprof.profiling import profile as profiling
from alphaprof.profiling.decoding.drafters import HeadDrafter
from alphaprof.profiling.decoding.speculative import Speculation
from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.models.kinds import load_drafts
from alphaprof.profiling.models.load import Model, load_model, load_tokenizer
from alphaprof.profiling.timing.steppers import read
from alphaprof.rules import parse_rule
from alphaprof.run.reader import Run
from alphaprof.totals.replay import Trace, listed_rounds
from tests.runs import Silent

GOLDEN = Path(__file__).parent.parent / "golden"


def profile_of(
    folder: Path,
    target: Path,
    drafts: Mapping[str, Mapping[str, Any]],
    prompts: Iterable[list[int]],
    tokens: int,
    gammas: Iterable[int],
    *rules: str,
) -> ProfileOptions:
    """A profile of drafts on prompts, whose continuations the target writes anew."""
    folder.mkdir(exist_ok=True)
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    tree = {
        "target": {"model": str(target), "dtype": "float32"},
        "drafts": {name: dict(draft) for name, draft in drafts.items()},
        "data": [{"domain": "stories", "path": "prompts.jsonl", "prompt_ids": "prompt"}],
        "continuation": {"kind": "greedy", "max_new_tokens": tokens},
        "gammas": list(gammas),
        "rules": ["strict", *rules],
        "costs": {"source": "none"},
    }
    (folder / "profile.yaml").write_text(yaml.safe_dump(tree))
    return load_profile(folder / "profile.yaml", [])


def greedy_run(folder: Path, *given: Any) -> Run:
    """A run of such a profile."""
    return profiling.profile(profile_of(folder, *given), folder / "run", Silent())


def models_of(options: ProfileOptions) -> tuple[Model, list[HeadDraft]]:
    """The target of a profile, and its drafts."""
    target = load_model("target", options.target, "float32")
    drafts = load_drafts(options, target, load_tokenizer(options.target))
    assert all(isinstance(draft, HeadDraft) for draft in drafts)
    return target, drafts  # type: ignore[return-value]


def rounds(run: Run, gamma: int, draft: str = "head") -> list[list[list[int]]]:
    """Rounds of each text: where they start, and what they accept of the text."""
    table, texts = run.positions(draft, 0), run.continuations(0, ["continuation_tokens"])
    columns = {name: table[name].fill_null(0).to_numpy().astype(np.int64) for name in ("accepted_run", "proposed")}
    length = texts["continuation_tokens"].to_numpy().astype(np.int64)
    stop = np.cumsum(length)
    trace = Trace(columns["accepted_run"], columns["proposed"], stop - length, stop)
    found = listed_rounds(trace, gamma)
    at = found.at - (stop - length)[found.document]
    pairs = np.stack([at, np.minimum(found.accepted, length[found.document] - at)], 1)
    return [pairs[found.document == number].tolist() for number in range(len(length))]


def recorded(text: Mapping[str, Any], gamma: int) -> list[list[int]]:
    """The recorded rounds, of which the last may accept a token after the end of the text."""
    return [[at, min(accepted, len(text["text"]) - at)] for at, accepted in text["rounds"][str(gamma)]]


def vllm_rounds(accepted_by_step: Iterable[int], size: int) -> Iterator[list[int]]:
    """Where vLLM's rounds start, and what they accept of the text: it counts drafts after the end of the text, too."""
    at = 1
    for accepted in accepted_by_step:
        yield [at, min(accepted, size - at)]
        at += accepted + 1


@torch.inference_mode()
def drafted(target: Model, network: Any, text: Mapping[str, Any], gamma: int, feeds: bool = True) -> list[list[Any]]:
    """What one pass over a text drafts in the recorded rounds: where each starts, and all of its tokens. `feeds`: each depth
    reads what the depth before drafted.
    """
    prompt, starts = len(text["prompt"]), [start for start, _ in text["drafts"][str(gamma)]]
    ids, features = read(target, network, np.array([*text["prompt"], *text["text"]], dtype=np.int32))
    states, tops = network.states(ids[None, :-1], features[None], gamma, 0), list[torch.Tensor]()
    for depth in range(1, gamma + 1):
        state = states.send(tops[-1][None]) if tops and feeds else next(states)
        tops.append(network.logits(state[0], depth).argmax(1))
    return [[start, torch.stack(tops, 1)[prompt + start - 2].tolist()] for start in starts]


def require_drafted(engine: Speculation, text: Mapping[str, Any], gamma: int) -> None:
    """Real decoding of a text has the recorded rounds, and proposes what was recorded."""
    proposed: list[list[int]] = []
    propose = HeadDrafter.propose

    def spy(self: HeadDrafter, ids: list[int], most: int) -> Any:
        proposed.append((proposal := propose(self, ids, most)).ids.tolist())
        return proposal

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeadDrafter, "propose", spy)
        found = engine.decode(np.array(text["prompt"], dtype=np.int32), len(text["text"]))
    assert found.accepted.tolist() == [accepted for _, accepted in recorded(text, gamma)]
    whole = [tokens for _, tokens in text["drafts"][str(gamma)]]
    assert proposed == [tokens[: len(own)] for own, tokens in zip(proposed, whole, strict=True)]
    assert proposed[0] == whole[0]


def require_decoded(run: Run, texts: Iterable[Mapping[str, Any]], gammas: Iterable[int]) -> None:
    """Real decoding with the one draft of a run has the recorded rounds."""
    target, (head,) = models_of(run.manifest.profile)
    for gamma in gammas:
        engine = Speculation(target, head, parse_rule("strict"), gamma)
        for text in texts:
            found = engine.decode(np.array(text["prompt"], dtype=np.int32), len(text["text"]))
            assert found.ids.tolist() == text["text"]
            assert found.accepted.tolist() == [accepted for _, accepted in recorded(text, gamma)]
