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


def reading_as(serve_as: str, head: EagleFormat, target: Any) -> tuple[Reading, dict[str, str]]:
    """How `checkpoint`, `vllm` or `sglang` reads a head for a target (its config), and why, in words by what they are about.
    Raises `ModelUnloadable` where its files cannot be read so.
    """
    layers, states_words = _states(serve_as, head, target)
    settings, who = head.settings, ENGINES.get(serve_as, "speculators" if head.layout == SPECULATORS else "its trainer")
    before, why = bool(settings.get("norm_before_residual")), "as norm_before_residual in config.json says"
    if serve_as == "sglang":
        before, why = False, "SGLang has no norm_before_residual"
    elif settings.get("norm_before_residual") is None:
        before = serve_as == "vllm" and head.layout == SPECULATORS
        why = f"config.json has no norm_before_residual, which {who} takes for {str(before).lower()}"
    is_set, is_there = bool(settings.get("norm_before_fc")), "input_norm.weight" in head.files.tensors
    norm_before_fc = is_set or (serve_as == CHECKPOINT and is_there)
    reading = Reading(layers, before, bool(settings.get("norm_output")), norm_before_fc)
    words = {
        "layout": head.layout,
        "serve_as": serve_as,
        "target states": states_words,
        "residual": f"{'after' if before else 'before'} the norm: {why}",
        "fed back": f"the state {'after' if reading.norm_output else 'before'} the final norm",
    }
    if is_set or is_there:
        left_out = f"left out: config.json has no norm_before_fc, which {who} needs"
        words["norm before fc"] = "yes" if norm_before_fc else left_out
    return reading, words


def usual_layers(blocks: int) -> tuple[int, int, int]:
    """The numbers of layers that engines guess of a target with `blocks` layers."""
    return 2, blocks // 2, blocks - 3


def _states(serve_as: str, head: EagleFormat, target: Any) -> tuple[tuple[int, ...], str]:
    """The target's states that enter, and why, in words."""
    if not head.reads_inner_states:
        return (FINAL,), "after the final norm: use_aux_hidden_state is false"
    blocks = target.num_hidden_layers
    top, nested = head.settings.get(IDS), head.settings["nested_ids"]
    given = nested if serve_as == "sglang" and head.layout != SPECULATORS else top or nested
    if not given:
        layers = tuple(sorted(set(usual_layers(blocks))))
        words = f"after {_listed(layers)} layers: {IDS} is not in config.json, and engines guess 2, n//2, n-3"
    else:
        layers, why = _explicit(serve_as, head, given, target)
        words = f"after {_listed(layers)} layers: {IDS} {list(given)} {why}"
    _require_states(head, layers, blocks)
    return layers, words


def _explicit(serve_as: str, head: EagleFormat, given: Any, target: Any) -> tuple[tuple[int, ...], str]:
    """The numbers of layers that explicit ids mean, and why, in words."""
    if not isinstance(given, list) or not all(type(layer) is int and layer >= 0 for layer in given):
        raise head.files.refused(f"{IDS} in its config.json is {shown(given)}", "write a list of layers, like [2, 16, 29]")
    blocks, later = target.num_hidden_layers, tuple(layer + 1 for layer in given)
    if serve_as == "vllm":
        return tuple(sorted(given)), "count layers passed for vLLM"
    if serve_as == "sglang":
        if target.model_type in FIRST_ID_TELLS and given[0] != 1:
            return tuple(sorted(given)), f"count layers passed for SGLang: the first is not 1 ({target.model_type})"
        if target.model_type == "gpt_oss" and max(given) == blocks:
            return tuple(sorted(given)), "count layers passed for SGLang: the last one is the number of layers (gpt_oss)"
        return tuple(sorted(later)), "are outputs of layers counted from 0 for SGLang"
    if head.layout != SPECFORGE:
        return tuple(given), f"count layers passed ({head.layout})"
    if max(given) == blocks:
        return tuple(given), f"count layers passed: an output of layer {blocks} does not exist"
    return later, f"are outputs of layers counted from 0 ({head.layout})"


def _require_states(head: EagleFormat, layers: tuple[int, ...], blocks: int) -> None:
    """Raise `ModelUnloadable` for states that the target does not have, or that are not as many as the head reads."""
    hint = f"give the head that belongs to this target, or correct {IDS} in its config.json"
    if min(layers) < 0 or max(layers) > blocks:
        problem = f"it reads states after {_listed(layers)} layers, and the target has {blocks} layers"
        raise head.files.refused(problem, hint)
    stored = head.files.tensors.get("fc.weight")
    if len(set(layers)) != len(layers):
        raise head.files.refused(f"it reads a state twice (after {_listed(layers)} layers)", hint)
    if stored is not None and len(stored.shape) == 2 and stored.shape[1] != len(layers) * head.width:
        problem = (
            f"its fc reads {stored.shape[1] / head.width:g} states of {head.width} numbers, and its config.json names "
            f"{len(layers)} (after {_listed(layers)} of the target's {blocks} layers)"
        )
        raise head.files.refused(problem, hint)


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
            served[engine] = reading_as(serve_as, head, target)[0]
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
    if not head.reads_inner_states or head.settings.get(IDS) or head.settings["nested_ids"]:
        return ()
    message = (
        f"the files of draft {name} do not say which states of the target it reads: after {_listed(reading.layers)} layers "
        "is what engines guess (2, n//2 and n-3 of n)"
    )
    return (note("wiring", doubt=message, remedy=f"ask who trained it, and set {IDS} in its config.json"),)


def _setting(measured: Reading, reading: Reading, target: Any) -> str:
    """What to do so that engines read the files like this."""
    settings = []
    if reading.layers != measured.layers:
        earlier = [layer - 1 for layer in reading.layers]
        sglang = f" ({earlier} for SGLang)" if min(earlier) >= 0 and target.model_type not in FIRST_ID_TELLS else ""
        settings.append(f"{IDS}: {list(reading.layers)}{sglang}")
    names = ("norm_before_residual", "norm_output", "norm_before_fc")
    changed = [name for name in names if getattr(reading, name) != getattr(measured, name)]
    keys = ", ".join([*settings, *(f"{name}: {str(getattr(reading, name)).lower()}" for name in changed)])
    return f"set {keys} in its config.json"
