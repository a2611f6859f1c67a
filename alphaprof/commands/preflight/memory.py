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
from alphaprof.profiling.heads.attention import SCORE_BYTES
from alphaprof.profiling.heads.draft import HeadPass
from alphaprof.profiling.heads.eagle import ROOM
from alphaprof.profiling.heads.steps import CHUNK
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
class HeadFootprint:
    """The same of a draft head. Bytes of one token: of its `features`, as the target has them, and of its own `hidden`
    state; of its `layer` at most, with what the layer's caller keeps meanwhile, and once its keys are in a cache (`cached`);
    of its keys and values (`cache`); of a row of its `logits`, and of what spreads them over the target's ids (`spread`, 0:
    they are all). `scores`: of a pair of tokens, in float32 and as they are multiplied with values.
    """

    features: int
    hidden: int
    layer: int
    cached: int
    cache: int
    logits: int
    spread: int
    scores: int
    depths: int

    @classmethod
    def of(cls, head: HeadPass, target: Footprint) -> HeadFootprint | None:
        """The footprint of a head on a target; None where its shape is not known.

        Five hidden states are alive in a layer: the own one, the embedding, both after their norms beside each other, and
        one of these once more. In the MLP there are two others (the sum after the attention, and its norm), keys and values,
        and those of `mlp_elements`; in the attention those of a `Footprint`.
        """
        network = head.network
        if (shape := network.shape()) is None:
            return None
        size = network.dtype.itemsize
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        config = None if network.config is None else network.config.get_text_config().to_dict()
        inner = 0 if config is None else 2 * shape.hidden + mlp_elements(config)
        rotating = max(4 * queries + 2 * keys, 2 * queries + 5 * keys)
        return cls(
            features=target.hidden * len(network.layers),
            hidden=shape.hidden * size,
            layer=size * (5 * shape.hidden + max(rotating, 2 * keys + inner)),
            cached=size * (5 * shape.hidden + max(2 * queries + 2 * keys, inner)),
            cache=2 * shape.layers * keys * size,
            logits=shape.vocabulary * size,
            spread=0 if network.ids is None else target.vocabulary * size,
            scores=shape.heads * (4 if size == 4 else 4 + size),
            depths=head.depths,
        )

    def scoring(self, tokens: int, longest: int, positions: int) -> int:
        """Bytes of a pass over a batch beside the target's states: the features, and either depth 1 of all tokens; or the
        last depth of the positions, with keys and values of verified tokens and of all depths, states of the depths before,
        and scores of a chunk of rows.
        """
        states = positions * self.hidden
        first = tokens * self.layer
        last = tokens * self.cache + positions * (self.layer + self.cache * (self.depths - 1)) + states * self.depths
        last += min(SCORE_BYTES * self.scores // 4, positions * longest * self.scores) if self.cache else 0
        return tokens * self.features + max(first, last if self.depths > 1 else 0)


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
    passes = [each for each in scorer.drafts if isinstance(each, HeadPass)]
    models = [each.model for each in forced]
    networks: list[Any] = [*(model.network for model in models), *(each.network for each in passes)]
    parameters = {id(item): item for network in networks for item in network.parameters()}.values()  # some share theirs
    weights = sum(item.numel() * item.element_size() for item in parameters)
    device = models[0].device
    known = [Footprint.of(model) for model in models]
    sizes = [size for size in known if size is not None]
    heads = [head for each in passes if sizes and (head := HeadFootprint.of(each, sizes[0])) is not None]
    if len(sizes) < len(known) or len(heads) < len(passes) or _spread(parameters, device):
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
            max((scoring(scorer, sizes, heads, (tokens, longest, share), each) for each in settings), default=0),
            max((timing(sizes, heads, *place, cells) for place in places if cells), default=0),
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


def _columns(scorer: Scorer) -> int:
    """How many columns of numbers a batch has."""
    beside = len(DRAFT) + len(RAW_DRAFT) + 2 * len(scorer.extras.logged)
    numbers = len(TARGET) + len(RAW_TARGET) + beside * len(scorer.drafts) + len(PROPOSAL) * len(scorer.without)
    numbers += sum((each.depths - 1) * (2 + each.ranks_by_depth + 2 * len(scorer.extras.drawn)) for each in scorer.drafts)
    return numbers + (TOP if scorer.extras.certified else 0)


def scoring(
    scorer: Scorer,
    sizes: Sequence[Footprint],
    heads: Sequence[HeadFootprint],
    fed: tuple[int, int, float],
    settings: Processing,
) -> int:
    """Bytes that scoring a batch takes with models of these footprints, the target's first, and draft heads. `fed`: its
    tokens, those of its longest text, and the share of them that are positions.

    Forward passes, one model after another: a layer of all tokens, the hidden states of the models before, and those of the
    target that a layer skip goes on from, or that a head reads. Statistics: hidden states of all models, of heads at every
    depth, and columns; logits of `head_rows` rows of every model, which loops on a CPU read as bfloat16 or float32 of one
    kind; and what a cut, or two whole distributions, take of `statistics_rows` rows. A model whose logits cannot be had a
    few rows at a time keeps all of them instead of states.
    """
    forced = [each for each in (scorer.target, *scorer.drafts) if isinstance(each, TeacherForced)]
    device = scorer.target.model.device
    tokens, longest, share = fed
    positions = math.ceil(tokens * share)
    kept = 0
    shared = sizes[0].hidden * len({depth for each in (scorer.target, *scorer.drafts) for depth in each.reads})
    passes = []
    for each, size in zip(forced, sizes, strict=True):
        alone = 0 if each.chunked else longest * (size.layer + size.logits)
        running = tokens * size.layer if each.chunked else positions * size.logits
        passes.append(positions * kept + tokens * shared + running + alone)
        kept += size.hidden if each.chunked else size.logits
    for head in heads:
        passes.append(positions * kept + tokens * shared + head.scoring(tokens, longest, positions))
        kept += head.hidden * head.depths
    rows, few = min(positions, scorer.head_rows), min(positions, scorer.statistics_rows)
    logits = rows * (sum(size.logits for size in sizes) + sum(head.logits + head.spread for head in heads))
    dtypes = {each.model.dtype for each in forced}
    dtypes |= {each.network.dtype for each in scorer.drafts if isinstance(each, HeadPass)}
    if device.type == "cpu" and (len(dtypes) > 1 or torch.float16 in dtypes):
        logits += rows * 4 * (sum(size.vocabulary for size in sizes) + len(heads) * sizes[0].vocabulary)
    cut = _cut(settings, device.type)
    scaled = 0 if dtypes == {torch.float32} and settings.temperature == 1 else 4  # else the logits themselves
    whole = max(LAWS, 4 + cut) if scorer.extras.logged else cut
    if dispatch.why_unavailable(device) is not None:
        whole = max(whole, PAIR + 2 * scaled + DISTRIBUTION * (len(sizes) + len(heads) - 1))
    measuring = logits + few * max(size.vocabulary for size in sizes) * whole
    passes_of_heads = [each for each in scorer.drafts if isinstance(each, HeadPass)]
    for head, each_head in zip(heads, passes_of_heads, strict=True):  # the depths after the first, one by one
        reached = 4 * (each_head.vocabulary if each_head.ids is None else len(each_head.ids)) if scorer.extras.drawn else 0
        ranked = head.spread if each_head.ranks_by_depth else 0
        deeper = rows * (sizes[0].logits + head.logits + ranked + reached)
        measuring = max(measuring, deeper + few * sizes[0].vocabulary * DISTRIBUTION if scorer.extras.drawn else 0)
    return max(*passes, positions * (kept + COLUMN * _columns(scorer)) + measuring)


def timing(sizes: Sequence[Footprint], heads: Sequence[HeadFootprint], batch: int, context: int, cells: Cells) -> int:
    """Bytes that timing steps takes at one batch size and context.

    Filling the caches of all models, one after another: a pass over one text, whose keys and values are copied for each
    sequence. The longest step: all caches, and what its tokens take in one layer, where keys are copied as `DynamicCache`
    adds to them, or keys and values are repeated for each head, since several tokens come with a mask; then the logits.
    Heads: the features of one text, and tensors for twice as many keys and values, of which each step gets a copy.
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
    for head in heads:
        peak = max(peak, held + context * (sizes[0].layer + head.features))
        held += (context + cells.longest * (1 + batch)) * head.features
        copied, begun = batch * max(ROOM, 2 * context) * head.cache, batch * min(context, CHUNK)
        peak = max(peak, held + begun * head.layer + (copied if context > CHUNK else 0))
        held += copied
        peak = max(peak, held + begun * head.cached)
        step = max(step, copied + batch * max(cells.longest * head.layer, head.logits))
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
