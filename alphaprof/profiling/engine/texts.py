"""Texts that vLLM writes: the prompts of a shard go there together, and what comes back is scored like any other text."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from alphaprof.errors import EngineFailed, shown
from alphaprof.profiling.engine.client import VllmEngine
from alphaprof.profiling.engine.server import VllmServer
from alphaprof.profiling.texts.continuations import Continuation, finished
from alphaprof.profiling.texts.corpus import Document
from alphaprof.run.manifest import ModelFacts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.options import VllmOptions
    from alphaprof.config.profile import ProfileOptions

PROBE = "alphaprof asks: 12.5 % of Größe 日本 is\n\tdef f(x): return x**2 # 😀"  # what tokenizers cut differently


class TextWriter:
    """Writes continuations by the engine of a profile. The engine starts with the first document, and `close` ends it."""

    def __init__(self, options: ProfileOptions, engine: VllmOptions, target: ModelFacts) -> None:
        self.options, self.target = engine, target
        self.sources = options.written_by_engine()
        self._model = model_arguments(options, engine, target) if engine.url is None else {}
        self._engine: VllmEngine | VllmServer | None = None

    def writes(self, document: Document) -> bool:
        """Return whether a document's continuation comes from the engine."""
        return document.given is None and document.source in self.sources

    def write(self, documents: Sequence[Document]) -> Iterator[Continuation]:
        """Yield the continuations of documents, each up to its first EOS. Raises `EngineFailed`."""
        if not documents:
            return
        if self._engine is None:
            self._engine = self._opened()
        for answer in self._engine.write(
            [prompt_of(document, self.target.eos) for document in documents], self.options.concurrency
        ):
            ids = checked_ids(answer["ids"], documents[answer["place"]].max_new_tokens, self.target.vocabulary)
            yield finished(documents[answer["place"]], ids, self.target.eos)

    def _opened(self) -> VllmEngine | VllmServer:
        if self.options.url is None:
            return VllmEngine(self.options, self._model)
        return VllmServer(self.options, self.options.url)

    def close(self) -> None:
        """End the engine, if it runs."""
        if self._engine is not None:
            self._engine.close()


def checked_ids(given: Any, most: int, vocabulary: int | None) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the token ids of an engine's text. Raises `EngineFailed` for what no text of the target can be."""
    limit, problem = vocabulary or 2**31 - 1, None
    if not isinstance(given, list) or any(type(each) is not int for each in given):
        problem = "what are no token ids"
    elif not 0 < len(given) <= most:
        problem = f"{len(given)} tokens, of at most {most}"
    elif odd := [each for each in given if not 0 <= each < limit]:
        problem = f"token {shown(odd[0])} of a vocabulary of {limit}"
    if problem:
        raise EngineFailed(f"the engine answers {problem}", "serve the profile's target, or correct vllm.model")
    return np.array(given, dtype=np.int32)


def require_tokenizer(server: VllmServer, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `EngineFailed` for a server that does not encode a text as the target's tokenizer does."""
    mine = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    if (other := server.tokens(PROBE)) != mine:
        problem = f"{server.url} does not use the target's tokenizer: it encodes a text as {other[:6]}, not {mine[:6]}"
        raise EngineFailed(problem, "serve the profile's target, or correct target.model")


def prompt_of(document: Document, eos: Sequence[int]) -> dict[str, Any]:
    """Return a document as a prompt of vLLM, which ends at the target's EOS tokens."""
    asked: dict[str, Any] = {"ids": document.prompt.tolist(), "max_tokens": document.max_new_tokens}
    asked["stop_token_ids"] = list(eos)
    if document.processing is None:
        return asked
    named = f"{document.seed} {document.source_row} {document.prompt_hash}"  # neither the batch nor the order
    seed = int.from_bytes(hashlib.sha256(named.encode()).digest()[:4])
    return asked | dataclasses.asdict(document.processing) | {"seed": seed}


def model_arguments(options: ProfileOptions, engine: VllmOptions, target: ModelFacts) -> dict[str, Any]:
    """Return the arguments of vLLM that name the target as it is profiled; `vllm.args` go before them."""
    arguments: dict[str, Any] = {
        "model": options.target.model,
        "dtype": target.dtype,
        "revision": options.target.revision,
    }
    arguments |= {"trust_remote_code": True} if options.target.trust_remote_code else {}
    return {name: value for name, value in arguments.items() if value is not None}
