"""Load draft heads for a target, and refuse those of another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from alphaprof.config.options import ModelOptions
from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.heads.eagle import EMBEDDING, LM_HEAD, Eagle3, Reading
from alphaprof.profiling.heads.files import COMPLETE, HeadFiles, files_of
from alphaprof.profiling.heads.formats import IGNORED, Eagle3Format, eagle3_format
from alphaprof.profiling.heads.readings import alternatives, doubts_of, engines_of, reading_as, searched
from alphaprof.profiling.models.drafts import check_vocabulary
from alphaprof.profiling.models.hub import folder_of
from alphaprof.profiling.models.load import DTYPES, Model, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.options import Eagle3Draft
    from alphaprof.config.profile import ProfileOptions

OTHER_TARGET = "give the head that was trained for this target, or the target that it was trained for"


def load_eagle3(
    name: str, draft: Eagle3Draft, options: ProfileOptions, target: Model, tokenizer: PreTrainedTokenizerBase
) -> HeadDraft:
    """A loader of `load_draft`."""
    head = eagle3_format(files_of(name, draft.own_model))
    require_layers(target, head.files)
    _require_fit(head, target)
    _require_verifier(head.files, target, tokenizer)
    config = target.network.config.get_text_config()
    reading, words = reading_as(draft.serve_as, head, config)
    network = eagle3_network(head, reading, target, DTYPES[draft.dtype or options.target.dtype])
    words["embedding"] = "its own" if network.embed_tokens is not None else "the target's: its files hold none"
    words["LM head"] = "its own" if network.lm_head is not None else "the target's: its files hold none"
    return HeadDraft(
        name,
        network,
        target,
        draft.kind,
        draft.model,
        "eagle3",
        algorithm="EAGLE3",
        depths=draft.depths or max(options.gammas),
        context=head.context,
        ranks_by_depth=draft.ranks_by_depth,
        reading=words,
        engines=engines_of(reading, head, config),
        alternatives=alternatives(network, head, config),
        fallbacks=searched(network, config),
        doubts=doubts_of(name, head, reading),
    )


def eagle3_network(head: Eagle3Format, reading: Reading, target: Model, dtype: torch.dtype) -> Eagle3:
    """The network of a head on the target's device. Raises `ModelUnloadable` for tensors that are missing, unused, of other
    shapes, quantised or not finite.
    """
    files, shared = head.files, _shared(head, target)
    has_fc = head.reads_inner_states or head.width != head.layers.hidden_size
    with torch.device("meta"):  # nothing takes memory before the shapes are known to be those of the files
        network = Eagle3(
            head.layers,
            reading,
            width=head.width if has_fc else None,
            ids=head.ids,
            target=shared,
            fc_bias="fc.bias" in files.tensors,
            input_norm=reading.norm_before_fc or "input_norm.weight" in files.tensors,
            fc_norm=bool(head.settings.get("fc_norm") or head.settings.get("use_aux_norm")),
        )
    wanted = {head.stored_name(key): tuple(weight.shape) for key, weight in network.state_dict().items() if key != "ids"}
    ignored = {"d2t", "t2d", *filter(IGNORED.search, files.tensors)}
    files.require(wanted, ignored if has_fc else ignored | {"fc.weight", "fc.bias"})
    weights = {key: files.loaded(head.stored_name(key), dtype) for key in network.state_dict() if key != "ids"}
    if head.ids is not None and head.order is not None:
        weights["ids"], weights[LM_HEAD] = head.ids, weights[LM_HEAD][head.order]
    network.load_state_dict(weights, assign=True)
    return network.to(target.device).eval().requires_grad_(False)


def _shared(head: Eagle3Format, target: Model) -> dict[str, torch.Tensor]:
    """The target's weights that stand in for those that the files lack."""
    shared: dict[str, torch.Tensor] = {}
    embedding, output = target.network.get_input_embeddings(), target.network.get_output_embeddings()
    for key, module in ((EMBEDDING, embedding), (LM_HEAD, output)):
        if key in head.files.tensors or (key == LM_HEAD and head.ids is not None):
            continue
        weight: Any = getattr(module, "weight", None)
        if weight is None or weight.is_meta or not weight.is_floating_point():
            problem = f"its files lack {key}, and that of the target is quantised, or lies on no device"
            raise head.files.refused(problem, COMPLETE)
        if weight.shape[1] != head.layers.hidden_size:
            widths = f"the target's has {weight.shape[1]} columns, not {head.layers.hidden_size}"
            raise head.files.refused(f"its files lack {key}, and {widths}", COMPLETE)
        shared[key] = weight
    return shared


def require_layers(target: Model, files: HeadFiles) -> None:
    """Raise `ModelUnloadable` for a target whose states cannot be recorded."""
    if not isinstance(getattr(target.network.base_model, "layers", None), nn.ModuleList):
        problem = f"states of the target, a {type(target.network).__name__}, cannot be read: its decoder has no `layers`"
        raise files.refused(problem, "heads are measured on targets that are plain decoders")


def _require_fit(head: Eagle3Format, target: Model) -> None:
    """Raise `ModelUnloadable` for a head of a target with another width or vocabulary."""
    config = target.network.config.get_text_config()
    pairs = (
        ("reads states of {} numbers", head.width, config.hidden_size),
        ("is for a vocabulary of {} ids", head.layers.vocab_size, target.vocabulary),
    )
    for words, theirs, ours in pairs:
        if theirs != ours:
            problem = f"it {words.format(theirs)}, and the target {target.reference} has {ours}"
            raise head.files.refused(problem, OTHER_TARGET)


def _require_verifier(files: HeadFiles, target: Model, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise for a head that names a target of another architecture, or one whose tokenizer is here and is another."""
    config = files.config.get("speculators_config")
    verifier = config.get("verifier") if isinstance(config, dict) else None
    if not isinstance(verifier, dict):
        return
    named, ours = verifier.get("architectures"), type(target.network).__name__
    theirs = [str(each) for each in named] if isinstance(named, list) else []
    # A target with parts for images names another class than its decoder has.
    if theirs and ours not in theirs and all(each.endswith("ForCausalLM") for each in theirs):
        problem = f"it is for a target of architecture {', '.join(theirs)}, and {target.reference} is a {ours}"
        raise files.refused(problem, OTHER_TARGET)
    reference = verifier.get("name_or_path")
    if not isinstance(reference, str) or not reference or "\0" in reference or reference == target.reference:
        return
    options = ModelOptions(model=reference)
    folder = folder_of(options)
    if folder is not None and (folder / "tokenizer_config.json").is_file():  # else it cannot be had here
        check_vocabulary(tokenizer, load_tokenizer(options), f"{files.name}, made for {reference},")
