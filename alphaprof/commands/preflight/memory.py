"""What a run takes of its device's memory at most, worked out from the shapes of its models before it begins.

A run loads its models, generates, scores and times steps, one after another, so its peak is the weights and the largest of
the three. Each figure below counts what is alive at the worst moment of a phase; what is smaller than a hundredth of that is
left out (ids, masks of single tokens, workspaces of matrix libraries). Shapes are those of decoders in `shapes.KNOWN` with
`scaled_dot_product_attention`, run without gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from alphaprof.commands.preflight.facts import MemoryNeeds
from alphaprof.commands.preflight.trial import length, new_tokens
from alphaprof.costs.roofline import ModelShape, mlp_elements
from alphaprof.profiling.decoding.drafters import REPEATS
from alphaprof.profiling.models.load import Model, shape_of
from alphaprof.profiling.models.processing import PLAIN, Processing
from alphaprof.profiling.models.teacher_forced import TeacherForced
from alphaprof.profiling.scoring import dispatch
from alphaprof.profiling.scoring.columns import DRAFT, PROPOSAL, RAW_DRAFT, RAW_TARGET, TARGET
from alphaprof.profiling.scoring.extras import TOP
from alphaprof.profiling.texts.continuations import generation_batches
from alphaprof.profiling.timing.steppers import LONGEST_STEP

if TYPE_CHECKING:
    from alphaprof.profiling.scoring.scorer import Scorer
    from alphaprof.profiling.texts.corpus import Document

# Bytes an element of [rows, V] beside the logits themselves. A `Distribution` in float32: scaled, shifted, weights, kept.
# Two of them with the copies that align p and q, all without scaled. What a rule that needs whole distributions keeps: p and
# q, and what it makes of them. Weights of a sampler with the running sums that tokens are drawn by.
DISTRIBUTION, PAIR, LAWS, DRAWN = 13, 34, 16, 20
# The same while `processed` finds out what top_k, min_p and top_p keep. For top_p a GPU sorts whole rows: values and indices
# twice, and the sort's own keys and pairs; a CPU sorts the largest 256, and whole rows where these do not hold top_p.
TOP_K, MIN_P, TOP_P = 9, 13, {"cpu": 34, "cuda": 65}
COLUMN = 26  # bytes of one number of a position: in its chunk, joined, as float64, and there among the others


@dataclass(frozen=True)
class Footprint:
    """Bytes that a model takes beside its weights: of one token's hidden state (`hidden`); of one token in a layer at most,
    with everything that the layers' caller keeps meanwhile (`layer`), and in its attention (`attention`); of its keys and
    values in all layers (`cache`), and in one layer once for each query head (`repeated`); of a row of logits (`logits`).
    `layers`, `vocabulary`: how many; `size`: of one element.
    """

    hidden: int
    layer: int
    attention: int
    cache: int
    repeated: int
    logits: int
    layers: int
    vocabulary: int
    size: int

    @classmethod
    def of(cls, model: Model) -> Footprint | None:
        """The footprint of a loaded model; None where its shape is not known.

        In the MLP four hidden states are alive (the embeddings, the layer's input, the sum after the attention and its norm)
        and those of `mlp_elements`. In the attention three hidden states are alive (embeddings, input and its norm), and
        while queries are rotated queries four times, keys and values; while keys are, queries twice, values and keys four
        times.
        """
        fields: Any = shape_of(model.network)
        if fields is None:
            return None
        shape, size = ModelShape(**fields), model.dtype.itemsize
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        attention = size * (3 * shape.hidden + max(4 * queries + 2 * keys, 2 * queries + 5 * keys))
        return cls(
            hidden=shape.hidden * size,
            layer=max(attention, size * (4 * shape.hidden + mlp_elements(model.network.config.to_dict()))),
            attention=attention,
            cache=2 * shape.layers * keys * size,
            repeated=2 * queries * size if queries > keys else 0,
            logits=model.vocabulary * size,
            layers=shape.layers,
            vocabulary=model.vocabulary,
            size=size,
        )


@dataclass(frozen=True)
class Cells:
    """Step times that are measured: every batch size at every context, in steps of up to `longest` tokens; `static`: over
    static caches, as CUDA graphs need them.
    """

    concurrency: Sequence[int]
    context: Sequence[int]
    longest: int
    static: bool


def needed(
    scorer: Scorer, documents: Sequence[Document], batch_tokens: int, shard_documents: int, cells: Cells | None
) -> MemoryNeeds:
    """What a run takes at most, if its documents are like these: the first ones of every source, as the run takes them.

    `cells`: None where no step is timed. What models of an unknown shape, or on several devices, take beside their weights
    is not known.
    """
    forced = [each for each in (scorer.target, *scorer.drafts) if isinstance(each, TeacherForced)]
    models = [each.model for each in forced]
    parameters = {id(item): item for model in models for item in model.network.parameters()}.values()  # some share theirs
    weights = sum(item.numel() * item.element_size() for item in parameters)
    device = models[0].device
    known = [Footprint.of(model) for model in models]
    sizes = [size for size in known if size is not None]
    if len(sizes) < len(known) or _spread(parameters, device):
        return MemoryNeeds(weights, None, None, None, None, None, free(device))
    batches = list(generation_batches(documents[:shard_documents], batch_tokens))
    longest = max(map(length, documents), default=1)
    tokens = max(longest, min(batch_tokens, longest * min(shard_documents, len(documents))))
    tokens = math.ceil(tokens * (1 - 1 / longest))  # the last of each text is not fed
    share = max((new_tokens(document) / length(document) for document in documents), default=0.0)
    settings = {document.processing or PLAIN for document in documents}

    def phases(
        batches: Iterable[Sequence[Document]], tokens: int, places: Iterable[tuple[int, int]]
    ) -> tuple[int, int, int]:
        return (
            max((generation(sizes[0], batch, device.type) for batch in batches), default=0),
            max((scoring(scorer, sizes, (tokens, longest, share), each) for each in settings), default=0),
            max((timing(sizes, *place, cells) for place in places if cells), default=0),
        )

    places = list(itertools.product(cells.concurrency, cells.context)) if cells else []
    full = phases(batches, tokens, places)
    halved = full  # on a CPU nothing says that memory runs out before the system ends the process
    if device.type != "cpu":
        alone = [[document] for batch in batches for document in batch]
        halved = phases(alone, longest, [place for place in places if place[0] == 1])
    return MemoryNeeds(weights, *full, weights + max(full), weights + max(halved), free(device))


def generation(size: Footprint, batch: Sequence[Document], device: str) -> int:
    """Bytes that the target takes to continue a batch.

    Prompts: their cache and a layer of them, and where they are padded a mask of one byte for each pair of tokens, in the
    attention once more in the model's dtype. The last step: the cache of all tokens, the scores of the step before, and
    either one layer's keys, copied as `DynamicCache` adds a token to them, or where REPEATS keys and values of one layer for
    each head; after it logits, once more in float32, and what a sampler needs of them.
    """
    lengths = [len(document.prompt) for document in batch]
    read = len(batch) * max(lengths)
    whole = read + len(batch) * max(document.max_new_tokens or 0 for document in batch)
    mask = read * max(lengths) if min(lengths) < max(lengths) else 0
    reading = read * size.cache + mask + max(read * size.layer, read * size.attention + mask * size.size)
    copied = max(whole * size.cache // (2 * size.layers), whole * size.repeated if mask and REPEATS else 0)
    settings = batch[0].processing
    drawn = 0 if settings is None else max(DRAWN, _cut(settings, device))
    scores = len(batch) * 4 * size.vocabulary * (1 if settings is None else 2)
    chosen = len(batch) * (size.logits + size.vocabulary * (4 + drawn)) + scores // (1 if settings is None else 2)
    return max(reading, whole * size.cache + max(copied + scores, chosen))


def scoring(scorer: Scorer, sizes: Sequence[Footprint], fed: tuple[int, int, float], settings: Processing) -> int:
    """Bytes that scoring a batch takes with models of these footprints, the target's first. `fed`: its tokens, those of its
    longest text, and the share of them that are positions.

    Forward passes, one model after another: a layer of all tokens, the hidden states of the models before, and those that a
    layer skip goes on from. Statistics: hidden states of all models and columns; logits of `head_rows` rows of every model,
    which loops on a CPU read as bfloat16 or float32 of one kind; and what a cut, or two whole distributions, take of
    `statistics_rows` rows. A model whose logits cannot be had a few rows at a time keeps all of them instead of states.
    """
    heads = [each for each in (scorer.target, *scorer.drafts) if isinstance(each, TeacherForced)]
    device = scorer.target.model.device
    tokens, longest, share = fed
    positions = math.ceil(tokens * share)
    kept = 0
    shared = sizes[0].hidden * len({depth for head in heads for depth in head.reads})
    passes = []
    for head, size in zip(heads, sizes, strict=True):
        alone = 0 if head.chunked else longest * (size.layer + size.logits)
        running = tokens * size.layer if head.chunked else positions * size.logits
        passes.append(positions * kept + tokens * shared + running + alone)
        kept += size.hidden if head.chunked else size.logits
    rows, few = min(positions, scorer.head_rows), min(positions, scorer.statistics_rows)
    logits = rows * sum(size.logits for size in sizes)
    dtypes = {head.model.dtype for head in heads}
    if device.type == "cpu" and (len(dtypes) > 1 or torch.float16 in dtypes):
        logits += rows * 4 * sum(size.vocabulary for size in sizes)
    cut = _cut(settings, device.type)
    scaled = 0 if dtypes == {torch.float32} and settings.temperature == 1 else 4  # else the logits themselves
    whole = max(LAWS, 4 + cut) if scorer.extras.logged else cut
    if dispatch.why_unavailable(device) is not None:
        whole = max(whole, PAIR + 2 * scaled + DISTRIBUTION * (len(sizes) - 1))
    beside = len(DRAFT) + len(RAW_DRAFT) + 2 * len(scorer.extras.logged)
    numbers = len(TARGET) + len(RAW_TARGET) + beside * (len(heads) - 1) + len(PROPOSAL) * len(scorer.without)
    numbers += TOP if scorer.extras.certified else 0
    statistics = positions * (kept + COLUMN * numbers) + logits + few * max(size.vocabulary for size in sizes) * whole
    return max(*passes, statistics)


def timing(sizes: Sequence[Footprint], batch: int, context: int, cells: Cells) -> int:
    """Bytes that timing steps takes at one batch size and context.

    Filling the caches of all models, one after another: a pass over one text, whose keys and values are copied for each
    sequence. The longest step: all caches, and what its tokens take in one layer, where keys are copied as `DynamicCache`
    adds to them, or keys and values are repeated for each head, since several tokens come with a mask; then the logits.
    """
    held = peak = step = 0
    tokens = batch * (context + (LONGEST_STEP if cells.static else cells.longest))
    for size in sizes:
        peak = max(peak, held + context * (size.cache + size.layer))
        held += tokens * size.cache
        peak = max(peak, held + context * size.cache // (1 if cells.static else size.layers))
        copied = 0 if cells.static else tokens * size.cache // (2 * size.layers)
        attending = max(copied, tokens * size.repeated) + batch * cells.longest * size.attention
        step = max(step, attending, batch * cells.longest * max(size.layer, size.logits))
    return max(peak, held + step)


def _cut(settings: Processing, device: str) -> int:
    """Bytes an element of logits while it is found out which of them sampling keeps."""
    if settings.top_p < 1:
        return TOP_P.get(device, TOP_P["cuda"])
    return MIN_P if settings.min_p > 0 else TOP_K if settings.top_k > 0 else 0


def _spread(parameters: Iterable[torch.Tensor], device: torch.device) -> bool:
    """Whether some parameters are on another device."""
    return any(item.device != device for item in parameters)


def free(device: torch.device) -> int | None:
    """Bytes that are free on a device, what torch holds for later included; None: not known."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            kilobytes = next(line.split()[1] for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return 1024 * int(kilobytes)
