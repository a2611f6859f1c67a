"""Writing texts: a decode loop with keys and values at fixed addresses, whose step a GPU records once, beside `generate`.

The loop is no part of the product until a GPU has shown what it saves: its texts are compared here with those of `generate`,
greedy and sampled, in float32, and its time in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import StaticCache

from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.private import CACHE
from alphaprof.profiling.models.processing import Processing, Sampler, uniforms
from alphaprof.profiling.texts.continuations import Continuation, finished, generate
from alphaprof.profiling.texts.corpus import Document
from scripts.gpu.setting import Line, Setting, documents
from scripts.gpu.speed import TARGET, in_turn, ratios, seconds, spread, within

NUCLEUS = Processing(0.8, 0, 0.95)
LOOK_EVERY = 16  # steps between two looks at whether all texts have ended: a look waits for the device


class Step:
    """One token of every text of a batch; on a GPU a CUDA graph of it, recorded at the second call."""

    def __init__(
        self, network: Any, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: StaticCache
    ) -> None:
        self.network, self.ids, self.mask, self.positions, self.cache = network, ids, mask, positions, cache
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits = torch.empty(0)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, V] after the tokens `ids` [batch]; the next call overwrites them."""
        self.ids.copy_(ids[:, None])
        if self.ids.device.type == "cpu":
            self.logits = self._forward()
        else:
            self.graph = self.graph or self._recorded()
            self.graph.replay()
        self.positions.add_(1)
        return self.logits

    def _forward(self) -> torch.Tensor:
        output = self.network(
            input_ids=self.ids,
            attention_mask=self.mask,
            position_ids=self.positions,
            use_cache=True,
            **{CACHE: self.cache},
        )
        return output.logits[:, -1]

    def _recorded(self) -> torch.cuda.CUDAGraph:
        """Return the step as a graph. Runs to warm up write where the graph will write: their lengths are taken back."""
        lengths = [layer.cumulative_length for layer in self.cache.layers]
        stream = torch.cuda.Stream(self.ids.device)
        stream.wait_stream(torch.cuda.current_stream(self.ids.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._forward()
                torch._foreach_sub_(lengths, 1)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                self.logits = self._forward()
        torch.cuda.current_stream(self.ids.device).wait_stream(stream)
        return graph


@torch.inference_mode()
def decoded(target: Model, asked: Sequence[Document], ids_drawn: int) -> list[Continuation]:
    """What `generate` returns, by a loop of our own with a static cache."""
    network, device = target.network, target.device
    width = max(len(document.prompt) for document in asked)
    settings, limit = asked[0].processing, asked[0].max_new_tokens or 0
    prompts = [torch.from_numpy(document.prompt.astype(np.int64)) for document in asked]
    pad = target.eos[0] if target.eos else 0
    ids = pad_sequence(prompts, batch_first=True, padding_value=pad, padding_side="left").to(device)
    mask = pad_sequence([*map(torch.ones_like, prompts)], batch_first=True, padding_side="left").to(device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = StaticCache(config=network.config, max_cache_len=width + limit)
    # The mask of a static cache is as wide as the cache; what is not written yet is hidden by causality.
    whole = torch.cat([mask, mask.new_ones(len(asked), limit)], 1)
    logits = network(
        input_ids=ids, attention_mask=whole, position_ids=positions, use_cache=True, logits_to_keep=1, **{CACHE: cache}
    ).logits[:, -1]
    step = Step(network, ids[:, -1:].clone(), whole, positions[:, -1:] + 1, cache)
    sampler = None
    if settings is not None:
        numbers = np.stack([uniforms(item.seed or 0, item.prompt, item.source_row, limit) for item in asked])
        sampler = Sampler(settings, torch.from_numpy(numbers).to(device), width, min(ids_drawn, target.vocabulary))
    eos = torch.tensor(target.eos, device=device)
    ended = torch.zeros(len(asked), dtype=torch.bool, device=device)
    for index in range(limit):
        scores = logits.float()
        token = (sampler(ids, scores) if sampler is not None else scores).argmax(-1)
        token = torch.where(ended, pad, token)
        ids = torch.cat([ids, token[:, None]], 1)
        ended |= torch.isin(token, eos)
        if index % LOOK_EVERY == LOOK_EVERY - 1 and bool(ended.all()):
            break
        if index + 1 < limit:
            logits = step(token)
    new = ids[:, width:].cpu().numpy().astype(np.int32)
    return [finished(document, row, target.eos) for document, row in zip(asked, new, strict=True)]


def generation(setting: Setting) -> Iterator[Line]:
    """Texts of a decode loop with a recorded step against those of `generate`, and how much faster it writes them."""
    setting = within(setting, 60)
    exact = setting.loaded(TARGET, torch.float32) if setting.tiny else setting.loaded("llama-3.2-1b", torch.float32)
    count, new = (4, 12) if setting.tiny else (16, 64)
    for name, processing in (("greedy", None), ("sampled", NUCLEUS)):
        asked = documents(count, (8, 24), new, processing, ids=exact.vocabulary)
        same = [
            np.array_equal(ours.ids, theirs.ids)
            for ours, theirs in zip(decoded(exact, asked, 250), generate(exact, asked, 250), strict=True)
        ]
        text = f"{sum(same)} of {count} {name} texts of {new} tokens equal those of generate, float32"
        yield Line(text, {"same": sum(same), "of": count}, all(same))
    del exact
    setting.clean()
    target = setting.loaded(TARGET, setting.dtypes[0])
    count, prompts, new = (4, (8, 24), 8) if setting.tiny else (64, (256, 768), 128)
    asked = documents(count, prompts, new, ids=target.vocabulary)
    ways = {
        "generate": lambda: generate(target, asked, target.vocabulary),
        "loop": lambda: decoded(target, asked, target.vocabulary),
    }
    taken = in_turn(ways, 1 if setting.tiny else 3, lambda work: seconds(setting.device, work))
    found = ratios(taken, "loop", "generate")
    text = f"{count} texts of {new} tokens, {TARGET}: the loop takes {spread(found)} of generate's time"
    yield Line(text, {"ratio": found, "seconds": taken})
