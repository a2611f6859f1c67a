"""How the files of an EAGLE-3 head are read, as they mean it or as an engine takes them, and what else they could mean."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import product
from typing import Any

from alphaprof.errors import ModelUnloadable, shown
from alphaprof.log.notes import note
from alphaprof.profiling.heads.draft import Alternative
from alphaprof.profiling.heads.eagle import Eagle3, Reading
from alphaprof.profiling.heads.formats import IDS, SPECFORGE, SPECULATORS, EagleFormat
from alphaprof.profiling.models.teacher_forced import FINAL

CHECKPOINT = "checkpoint"
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
# Targets for which SGLang 0.5.23 takes explicit ids as outputs of layers only if the first one is 1 (sglang#25454); for
# gpt-oss it does unless the last id is the number of layers (sglang#32334), and for all others always.
FIRST_ID_TELLS = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe_lite")


def reading_as(serve_as: str, head: EagleFormat, target: Any) -> Reading:
    """How `checkpoint`, `vllm` or `sglang` reads a head for a target (its config). Raises `ModelUnloadable` where its files
    cannot be read so.
    """
    settings = head.settings
    before = settings.get("norm_before_residual")
    if before is None:  # vLLM takes true for files of speculators, all others false
        before = serve_as == "vllm" and head.layout == SPECULATORS
    meant = serve_as == CHECKPOINT and "input_norm.weight" in head.files.tensors  # engines go by the key alone
    return Reading(
        _states(serve_as, head, target),
        bool(before) and serve_as != "sglang",  # which has no norm_before_residual
        bool(settings.get("norm_output")),
        bool(settings.get("norm_before_fc")) or meant,
    )


def words_of(serve_as: str, head: EagleFormat, reading: Reading) -> dict[str, str]:
    """A reading in words, by what they are about."""
    states = "after the final norm" if reading.layers == (FINAL,) else f"after {_listed(reading.layers)} layers"
    words = {
        "layout": head.layout,
        "serve_as": serve_as,
        "target states": states + (": no ids in config.json, and engines guess these" if is_guessed(head) else ""),
        "residual": f"{'after' if reading.norm_before_residual else 'before'} the norm",
        "fed back": f"the state {'after' if reading.norm_output else 'before'} the final norm",
    }
    if reading.norm_before_fc or "input_norm.weight" in head.files.tensors:
        words["norm before fc"] = "yes" if reading.norm_before_fc else "left out: config.json has no norm_before_fc"
    return words


def is_guessed(head: EagleFormat) -> bool:
    """Whether the files leave open which states of the target the head reads."""
    return head.reads_inner_states and not (head.settings.get(IDS) or head.settings["nested_ids"])


def usual_layers(blocks: int) -> tuple[int, int, int]:
    """The numbers of layers that engines guess of a target with `blocks` layers."""
    return 2, blocks // 2, blocks - 3


def _states(serve_as: str, head: EagleFormat, target: Any) -> tuple[int, ...]:
    """The target's states that enter. Raises `ModelUnloadable` for states that the target does not have, or that are not as
    many as the head reads.
    """
    if not head.reads_inner_states:
        return (FINAL,)
    blocks = target.num_hidden_layers
    top, nested = head.settings.get(IDS), head.settings["nested_ids"]
    given = nested if serve_as == "sglang" and head.layout != SPECULATORS else top or nested
    if given and not (isinstance(given, list) and all(type(layer) is int and layer >= 0 for layer in given)):
        raise head.files.refused(f"{IDS} in its config.json is {shown(given)}", "write a list of layers, like [2, 16, 29]")
    layers = _explicit(serve_as, head, given, target) if given else tuple(sorted(set(usual_layers(blocks))))
    fc = head.files.tensors.get("fc.weight")
    reads = len(layers) if fc is None else fc.shape[-1] / head.width
    if len(set(layers)) != reads or min(layers) < 0 or max(layers) > blocks:
        raise head.files.refused(
            f"it reads {reads:g} states, and its config.json means those after {_listed(layers)} of {blocks} layers",
            f"give the head that belongs to this target, or correct {IDS} in its config.json",
        )
    return layers


def _explicit(serve_as: str, head: EagleFormat, given: list[int], target: Any) -> tuple[int, ...]:
    """The numbers of layers that explicit ids mean: they count layers passed, or are outputs of layers counted from 0."""
    blocks, later = target.num_hidden_layers, tuple(layer + 1 for layer in given)
    if serve_as == "vllm":
        return tuple(sorted(given))
    if serve_as == "sglang":
        passed = (target.model_type in FIRST_ID_TELLS and given[0] != 1) or (
            target.model_type == "gpt_oss" and max(given) == blocks
        )
        return tuple(sorted(given if passed else later))
    # An output of layer `blocks` does not exist.
    return tuple(given) if head.layout != SPECFORGE or max(given) == blocks else later


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))


def engines_of(reading: Reading, head: EagleFormat, target: Any) -> tuple[str, ...]:
    """The engines that read the files of a head so, for a target (its config)."""
    return tuple(engine for engine, theirs in _served(head, target).items() if theirs == reading)


def alternatives(network: Eagle3, head: EagleFormat, target: Any) -> list[Alternative]:
    """What else the files of a head could mean for a target (its config): states of one layer later and earlier, the norms
    in their other places, and what each engine takes them for.
    """
    measured, served = network.reading, _served(head, target)
    readings: dict[str, Reading] = {}
    for offset, words in ((1, "later"), (-1, "earlier")):
        moved = tuple(layer + offset for layer in measured.layers)
        if FINAL not in measured.layers and min(moved) >= 0 and max(moved) <= target.num_hidden_layers:
            readings[f"states of the target one layer {words}"] = replace(measured, layers=moved)
    for words, name in (("the residual taken", "norm_before_residual"), ("states fed back", "norm_output")):
        other: dict[str, Any] = {name: not getattr(measured, name)}
        readings[f"{words} {'after' if other[name] else 'before'} the norm"] = replace(measured, **other)
    for engine, reading in served.items():
        if reading not in (measured, *readings.values()):
            readings[f"its files read as {engine} does"] = reading
    return [
        Alternative(
            words,
            _setting(measured, reading, target),
            network.with_reading(reading),
            2 if reading == replace(measured, norm_output=reading.norm_output) else 1,  # what is fed back shows then
            tuple(engine for engine, theirs in served.items() if theirs == reading),
        )
        for words, reading in readings.items()
    ]


def _served(head: EagleFormat, target: Any) -> dict[str, Reading]:
    """How each engine reads the files, without those that could not serve them."""
    served = {}
    for serve_as, engine in ENGINES.items():
        with contextlib.suppress(ModelUnloadable):
            served[engine] = reading_as(serve_as, head, target)
    return served


def searched(network: Eagle3, target: Any) -> list[Alternative]:
    """The readings of three states around those that engines guess, 2, n//2 and n-3, each up to two layers away; none for
    heads that read another number of states.
    """
    measured, blocks = network.reading, target.num_hidden_layers
    if len(measured.layers) != 3:
        return []
    around = [range(max(0, middle - 2), min(blocks, middle + 2) + 1) for middle in usual_layers(blocks)]
    readings = [replace(measured, layers=(low, mid, high)) for low, mid, high in product(*around) if low < mid < high]
    return [
        Alternative(
            f"states of the target after {_listed(reading.layers)} layers",
            _setting(measured, reading, target),
            network.with_reading(reading),
        )
        for reading in readings
        if reading != measured
    ]


def doubts_of(name: str, head: EagleFormat, reading: Reading) -> tuple[dict[str, str], ...]:
    """A warning about the files of draft `name` where they leave open which states it reads."""
    if not is_guessed(head):
        return ()
    message = (
        f"the files of draft {name} do not say which states of the target it reads: after {_listed(reading.layers)} layers "
        "is what engines guess (2, n//2 and n-3 of n)"
    )
    return (note("wiring", doubt=message, remedy=f"ask who trained it, and set {IDS} in its config.json"),)


def _setting(measured: Reading, reading: Reading, target: Any) -> str:
    """What to do so that engines read the files like this."""
    settings = []
    for key, value in vars(reading).items():
        if value != getattr(measured, key):
            settings.append(f"{key}: {str(value).lower()}" if key != "layers" else f"{IDS}: {list(value)}")
    earlier = [layer - 1 for layer in reading.layers]
    if reading.layers != measured.layers and min(earlier) >= 0 and target.model_type not in FIRST_ID_TELLS:
        settings[0] += f" ({earlier} for SGLang)"
    return f"set {', '.join(settings)} in its config.json"
