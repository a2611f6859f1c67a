"""Which draft a config.json describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REDUCED = "draft_vocab_size"  # ids that an EAGLE-3 head has logits of
NESTED = "dflash_config"  # settings of z-lab's DFlash
MASKS = ("mask_token_id", "ptd_token_id")  # what tells the config of a P-EAGLE head from that of EAGLE-3
MODULES = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
NOT_COMPUTED = ("medusa", "hydra", "mlp_speculator", "xpress")


@dataclass(frozen=True)
class DraftForm:
    """What decides the steps of a draft. `whole`: a model by itself; `module`: a part of the target, which the target's
    config describes; `wide`: the first layer reads embedding and state side by side; `joins`: a matrix joins both in each
    step; `one_pass`: all tokens of a round are drafted at once; `block`: in as many rows as the config says, the first of
    which is the last token's and drafts nothing, unless `from_anchor`.
    """

    name: str
    whole: bool = False
    module: bool = False
    wide: bool = False
    joins: bool = False
    one_pass: bool = False
    block: bool = False
    from_anchor: bool = False


MODEL = DraftForm("model", whole=True)
PARD = DraftForm("pard", whole=True, one_pass=True)
MTP = DraftForm("mtp", module=True)
EAGLE = DraftForm("eagle", joins=True)
EAGLE3 = DraftForm("eagle3", wide=True)
P_EAGLE = DraftForm("p-eagle", wide=True, one_pass=True)
DFLASH = DraftForm("dflash", one_pass=True, block=True)
DSPARK = DraftForm("dspark", one_pass=True, block=True, from_anchor=True)


def draft_form(config: Mapping[str, Any], decoder: Mapping[str, Any], target: Mapping[str, Any]) -> DraftForm:
    """Return what draft a config describes. `decoder`: its settings of the decoder; `target`: those of the target's, which
    describe its MTP module too, if it has one. Raises `KeyError` for heads whose steps are not known.
    """
    names = (*(config.get("architectures") or ()), config.get("speculators_model_type"), config.get("model_type"))
    named = " ".join(map(str, names)).lower()
    if other := next((word for word in NOT_COMPUTED if word in named), None):
        raise KeyError(f"steps of {other} heads are not computed")
    for form in (DSPARK, DFLASH):
        if form.name in named or f"{form.name}_config" in config:
            return form
    if REDUCED in config or "eagle" in named:
        parallel = "peagle" in named or any(config.get(key) is not None for key in MASKS)
        return P_EAGLE if parallel else EAGLE3 if REDUCED in config or EAGLE3.name in named else EAGLE
    if config.get("pard_token") is not None:
        return PARD
    same = all(decoder.get(key) == target.get(key) for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
    if "nextn" in named or MTP.name in named or (same and any(decoder.get(key) for key in MODULES)):
        return MTP
    return MODEL


def layer_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a head's layers, which speculators keep apart."""
    layer: Mapping[str, Any] = config.get("transformer_layer_config") or config
    return layer


def longest_block(config: Mapping[str, Any], form: DraftForm) -> int | None:
    """Return how many tokens a block drafts at most; None: as many as asked for."""
    settings = {**config, **(config.get(NESTED) or {})}
    block = settings.get("block_size") if form.block else None
    return None if block is None else block - (not settings.get("sample_from_anchor", form.from_anchor))
