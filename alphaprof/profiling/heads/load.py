"""Load draft heads for a target, and refuse those of another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from alphaprof.config.heads import load_heads
from alphaprof.config.options import ModelOptions
from alphaprof.errors import HeadRecordUnreadable, ModelUnloadable, ProfileInvalid
from alphaprof.log.manifest import Trained
from alphaprof.log.training import TRAINING, read_training
from alphaprof.profiling.heads.draft import HeadDraft, depths_of
from alphaprof.profiling.heads.eagle import EMBEDDING, LM_HEAD, Eagle1, Eagle3, EagleHead, Reading
from alphaprof.profiling.heads.files import COMPLETE, HeadFiles, files_of
from alphaprof.profiling.heads.formats import IGNORED, EagleFormat, eagle1_format, eagle3_format
from alphaprof.profiling.heads.readings import alternatives, doubts_of, engines_of, reading_as, searched, words_of
from alphaprof.profiling.models.dtype import DTYPES
from alphaprof.profiling.models.hub import folder_of
from alphaprof.profiling.models.load import Model, check_vocabulary, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.options import Eagle1Draft, Eagle3Draft, HeadFileOptions
    from alphaprof.config.profile import ProfileOptions

Head = TypeVar("Head", bound=EagleHead)
OTHER_TARGET = "give the head that was trained for this target, or the target that it was trained for"


def load_eagle3(
    name: str, draft: Eagle3Draft, options: ProfileOptions, target: Model, tokenizer: PreTrainedTokenizerBase
) -> HeadDraft:
    """A loader of `load_draft`."""
    head = _head(name, draft, target, eagle3_format)
    _require_verifier(head.files, target, tokenizer)
    config = target.network.config.get_text_config()
    reading = reading_as(draft.serve_as, head, config)
    network = _eagle3(head, reading, target, DTYPES[draft.dtype or target.dtype_name])
    return HeadDraft(
        name=name,
        network=network,
        target=target,
        kind=draft.kind,
        reference=draft.model,
        method="eagle3",
        depths=depths_of(head.files.name, draft.depths, options.gammas, network.most),
        ranks_by_depth=draft.ranks_by_depth,
        algorithm="EAGLE3",
        context=head.context,
        reading=words_of(draft.serve_as, head, reading) | _described(head, network),
        engines=engines_of(reading, head, config),
        alternatives=alternatives(network, head, config),
        fallbacks=searched(network, config),
        doubts=doubts_of(name, head, reading),
        trained=trained_of(Path(draft.model)),
    )


def trained_of(folder: Path) -> Trained | None:
    """What the record of a training in the folder of a head says; None: there is none, or it cannot be read."""
    if not (folder / TRAINING).is_file():
        return None
    try:
        size = read_training(folder).size
    except HeadRecordUnreadable:
        return None
    return Trained(size.units, size.tokens, _curve_of(folder.absolute()))


def _curve_of(folder: Path) -> str | None:
    """The folder whose curve.yaml names a head in OUT/heads/NAME as a point of the curve."""
    out = folder.parent.parent
    try:
        heads, _ = load_heads(out)
    except ProfileInvalid:
        return None
    listed = [Path(each.head).resolve() for each in heads.heads if each.head]
    return str(out) if folder.resolve() in listed else None


def _eagle3(head: EagleFormat, reading: Reading, target: Model, dtype: torch.dtype) -> Eagle3:
    """The network of a head on the target's device. Raises `ModelUnloadable` for tensors that are missing, unused, of other
    shapes, quantised or not finite.
    """
    files = head.files
    missing = {EMBEDDING, LM_HEAD} - files.tensors.keys() - ({LM_HEAD} if head.ids is not None else set())
    has_fc = head.reads_inner_states or head.width != head.layers.hidden_size
    with torch.device("meta"):  # nothing takes memory before the shapes are known to be those of the files
        network = Eagle3(
            head.layers,
            reading,
            width=head.width if has_fc else None,
            ids=head.ids,
            target=_shared(head, target, missing),
            fc_bias="fc.bias" in files.tensors,
            input_norm=reading.norm_before_fc or "input_norm.weight" in files.tensors,
            fc_norm=bool(head.settings.get("fc_norm") or head.settings.get("use_aux_norm")),
        )
    return _filled(network, head, set() if has_fc else {"fc.weight", "fc.bias"}, target, dtype)


def load_eagle1(
    name: str, draft: Eagle1Draft, options: ProfileOptions, target: Model, tokenizer: PreTrainedTokenizerBase
) -> HeadDraft:
    """A loader of `load_draft`."""
    head = _head(name, draft, target, eagle1_format)
    shared = _shared(head, target, {EMBEDDING, LM_HEAD} - (head.files.tensors.keys() - {LM_HEAD}))
    with torch.device("meta"):
        empty = Eagle1(head.layers, target=shared, fc_bias="fc.bias" in head.files.tensors)
    network = _filled(empty, head, {LM_HEAD}, target, DTYPES[draft.dtype or target.dtype_name])
    words = {"layout": head.layout, "target states": "after the final norm", "fed back": "the state of its last layer"}
    return HeadDraft(
        name=name,
        network=network,
        target=target,
        kind=draft.kind,
        reference=draft.model,
        method="eagle",
        depths=depths_of(head.files.name, draft.depths, options.gammas, network.most),
        ranks_by_depth=draft.ranks_by_depth,
        algorithm="EAGLE",
        context=head.context,
        reading=words | _described(head, network),
    )


def _described(head: EagleFormat, network: EagleHead) -> dict[str, str]:
    """What of its layers its tensors do not show, and whose its embedding and LM head are, in words."""
    layers = head.layers
    heads = f"{layers.num_attention_heads} heads of {layers.head_dim}, {layers.num_key_value_heads} of them with keys"
    rope = ", ".join(f"{key} {value}" for key, value in sorted(layers.rope_parameters.items()))
    count = f"{layers.num_hidden_layers} of {layers.model_type}"
    return {
        "layers": f"{count}: {heads}; {layers.hidden_act}; norms {layers.rms_norm_eps:g}; {rope}",
        "embedding": "the target's" if network.embed_tokens is None else "its own",
        "LM head": "the target's" if network.lm_head is None else "its own",
    }


def _filled(network: Head, head: EagleFormat, unread: set[str], target: Model, dtype: torch.dtype) -> Head:
    """A network on the meta device, with the tensors of its files, on the target's device. `unread`: tensors that may be
    there and are not read.
    """
    files = head.files
    own = {key: weight for key, weight in network.state_dict().items() if key != "ids"}
    ignored = {"d2t", "t2d", *unread, *filter(IGNORED.search, files.tensors)}
    files.require({head.stored_name(key): tuple(weight.shape) for key, weight in own.items()}, ignored)
    weights = {key: files.loaded(head.stored_name(key), dtype) for key in own}
    if head.ids is not None and head.order is not None:
        weights["ids"], weights[LM_HEAD] = head.ids, weights[LM_HEAD][head.order]
    network.load_state_dict(weights, assign=True)
    return network.to(target.device).eval().requires_grad_(False)


def _shared(head: EagleFormat, target: Model, keys: set[str]) -> dict[str, torch.Tensor]:
    """The target's weights that stand in for those of a head."""
    shared: dict[str, torch.Tensor] = {}
    embedding, output = target.network.get_input_embeddings(), target.network.get_output_embeddings()
    for key, module in ((EMBEDDING, embedding), (LM_HEAD, output)):
        if key not in keys:
            continue
        weight: Any = getattr(module, "weight", None)
        is_usable = weight is not None and not weight.is_meta and weight.is_floating_point()
        if not is_usable or weight.shape[1] != head.layers.hidden_size:
            problem = f"it needs the target's {key}, which is quantised, lies on no device or has another width"
            raise head.files.refused(problem, COMPLETE)
        shared[key] = weight
    return shared


def require_layers(target: Model, refused: Callable[[str, str], ModelUnloadable]) -> None:
    """Raise `ModelUnloadable` for a target whose states cannot be recorded; `refused` words it."""
    if not isinstance(getattr(target.network.base_model, "layers", None), nn.ModuleList):
        problem = f"states of the target, a {type(target.network).__name__}, cannot be read: its decoder has no `layers`"
        raise refused(problem, "heads are measured on targets that are plain decoders")


def _head(name: str, draft: HeadFileOptions, target: Model, read: Callable[[HeadFiles], EagleFormat]) -> EagleFormat:
    """What the files of a head say. Raises `ModelUnloadable` if they are of another target, by width or vocabulary."""
    head = read(files_of(name, draft.own_model))
    require_layers(target, head.files.refused)
    config = target.network.config.get_text_config()
    theirs, ours = (head.width, head.layers.vocab_size), (config.hidden_size, target.vocabulary)
    if theirs != ours:
        problem = "it is for states of {} numbers and {} ids".format(*theirs)
        problem += ", and {} has {} and {}".format(target.reference, *ours)
        raise head.files.refused(problem, OTHER_TARGET)
    return head


def _require_verifier(files: HeadFiles, target: Model, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise for a head that names a target of another architecture, or one whose tokenizer is here and is another."""
    verifier = (files.config.get("speculators_config") or {}).get("verifier") or {}
    theirs, ours = verifier.get("architectures") or [], type(target.network).__name__
    # A target with parts for images names another class than its decoder has.
    if theirs and ours not in theirs and all(each.endswith("ForCausalLM") for each in theirs):
        problem = f"it is for a target of architecture {', '.join(theirs)}, and {target.reference} is a {ours}"
        raise files.refused(problem, OTHER_TARGET)
    reference = verifier.get("name_or_path")
    if not reference or reference == target.reference:
        return
    options = ModelOptions(model=reference)
    folder = folder_of(options)
    if folder is not None and (folder / "tokenizer_config.json").is_file():  # else it cannot be had here
        check_vocabulary(tokenizer, load_tokenizer(options), f"{files.name}, made for {reference},")
