"""Profile files: every mistake names its key and the next step, what wins over what, and where relative paths start."""

from __future__ import annotations

import contextlib
import copy
import datetime
import operator
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from alphaprof.config.load import apply_override, load_profile, validate
from alphaprof.config.options import LayerSkipDraft, ModelDraft
from alphaprof.config.profile import ProfileOptions, resolve, template_parts
from alphaprof.errors import ProfileInvalid, shown
from alphaprof.rules import GAMMA_LIMIT
from tests.conftest import ROOT
from tests.loops import each

Keys = tuple[str | int, ...]
PROFILE: dict[str, Any] = {
    "target": {"model": "hub/target"},
    "drafts": {
        "small": {"kind": "model", "model": "hub/small"},
        "skip": {"kind": "layer_skip", "drop_layers": [2, 1]},
        "layer_skip": {"kind": "model", "model": "hub/named-like-a-kind"},
        "ngram": {"kind": "prompt_lookup", "max_ngram": 2},
    },
    "data": [
        {
            "domain": "code",
            "path": "code.jsonl",
            "prompt": "{prompt}",
            "continuation": {"kind": "given", "column": "answer"},
        },
        {"domain": "chat", "path": "chat.jsonl", "messages": "messages", "continuation": {"kind": "greedy"}, "limit": 20},
        {"domain": {"column": "topic"}, "path": "hub/rest", "prompt_ids": "ids"},
    ],
    "continuation": {"kind": "greedy", "max_new_tokens": 64},
    "costs": {"context": 128},
    "thinking": {"begin": "<think>", "end": "</think>"},
    "decision": {"min_speedup": 1.2},
}
ABSENT = object()


def at(tree: Any, keys: Keys) -> Any:
    """What stands below a path of keys."""
    for key in keys:
        tree = tree[key]
    return tree


def changed(*changes: tuple[Keys, Any]) -> dict[str, Any]:
    """The profile with values put at paths of keys; ABSENT removes one."""
    tree = copy.deepcopy(PROFILE)
    for (*keys, last), value in changes:
        if value is ABSENT:
            del at(tree, tuple(keys))[last]
        else:
            at(tree, tuple(keys))[last] = value
    return tree


def write(folder: Path, content: dict[str, Any] | str) -> Path:
    """A profile file."""
    path = folder / "profile.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def refusal(tree: dict[str, Any]) -> ProfileInvalid:
    """The failure that a profile ends in."""
    with pytest.raises(ProfileInvalid) as caught:
        validate(tree, "profile.yaml")
    return caught.value


def dotted(keys: Keys) -> str:
    return ".".join(map(str, keys))


# Where option groups stand in the profile above.
GROUPS: list[Keys] = [
    (),
    ("target",),
    ("drafts", "small"),
    ("drafts", "skip"),
    ("drafts", "layer_skip"),
    ("drafts", "ngram"),
    ("thinking",),
    ("data", 0),
    ("data", 0, "continuation"),
    ("data", 1, "continuation"),
    ("data", 2, "domain"),
    ("continuation",),
    ("costs",),
    ("decision",),
]


def group_at(keys: Keys) -> Any:
    """The options that a group of the profile becomes."""
    options: Any = validate(PROFILE, "profile.yaml")
    for key in keys:
        options = options[key] if isinstance(options, (list, dict)) else getattr(options, key)
    return options


MISSPELT = [(group, name) for group in GROUPS for name in type(group_at(group)).model_fields]


@each(("group", "name"), MISSPELT, ids=lambda value: dotted(value) if isinstance(value, tuple) else value)
def test_a_misspelt_key_is_named_and_the_right_one_suggested_at_every_level(group: Keys, name: str) -> None:
    error = refusal(changed(((*group, f"{name}x"), 1)))
    assert error.message == f"profile.yaml: unknown key {dotted((*group, f'{name}x'))}"
    assert error.hint == f"did you mean {name}?"


@pytest.mark.parametrize("group", GROUPS, ids=dotted)
def test_a_key_like_no_other_is_answered_with_what_is_known_there(group: Keys) -> None:
    error = refusal(changed(((*group, "qqqqqq"), 1)))
    assert error.hint == f"remove it; known here: {', '.join(sorted(type(group_at(group)).model_fields))}"


def test_a_misspelt_required_key_is_reported_as_unknown_rather_than_as_missing() -> None:
    error = refusal(changed((("target", "model"), ABSENT), (("target", "modell"), "x")))
    assert error.message == "profile.yaml: unknown key target.modell (and 1 more)"


MISTAKES: list[tuple[Keys, Any, str, str]] = [
    (("target",), ABSENT, "target: Field required", "add this key"),
    (("target", "model"), ABSENT, "target.model: Field required", "add this key"),
    (("target",), "hub/target", "target: ", "group of options"),
    (("target", "model"), "", "target.model: String should have at least 1 character", "correct"),
    (("target", "dtype"), "int8", "target.dtype: Input should be 'auto', 'float32', 'bfloat16' or 'float16'", "correct"),
    (("drafts",), ABSENT, "drafts: Field required", "add this key"),
    (("drafts",), None, "drafts: Input should be a valid dictionary", ""),
    (("drafts",), [], "drafts: Input should be a valid dictionary", ""),
    (("drafts", "small", "kind"), ABSENT, "drafts.small: ", "add kind: model or layer_skip"),
    (("drafts", "small", "kind"), "hydra", "drafts.small: Input tag 'hydra'", "correct"),
    (("drafts", "skip", "drop_layers"), [1, 1], "drafts.skip.drop_layers: must be distinct", "correct"),
    (("drafts", "skip", "drop_layers"), [-1], "drafts.skip.drop_layers: must be distinct indices, 0 or above", "correct"),
    (("drafts", "skip", "drop_layers"), [], "drafts.skip.drop_layers: List should have at least 1 item", "correct"),
    (("data",), [], "data: List should have at least 1 item", "correct"),
    (("data",), 5, "data: Input should be a valid list", "correct"),
    (("data", 0, "path"), "", "data.0.path: ", "correct"),
    (("data", 0, "limit"), 0, "data.0.limit: Input should be greater than or equal to 1", "correct"),
    (("data", 0, "limit"), True, "data.0.limit: Input should be a valid integer", "correct"),
    (("data", 0, "shuffle_seed"), -1, "data.0.shuffle_seed: Input should be greater than or equal to 0", "correct"),
    (("data", 0, "continuation", "kind"), ABSENT, "data.0.continuation: ", "add kind: greedy or sampled or given or text"),
    (("data", 0, "prompt"), ABSENT, "data.0: needs exactly one of prompt, messages, prompt_ids (has none)", "correct"),
    (
        ("data", 0, "messages"),
        "m",
        "data.0: needs exactly one of prompt, messages, prompt_ids (has prompt, messages)",
        "correct",
    ),
    (("target", "model"), "a\0b", "target.model: contains a NUL", "correct"),
    (("drafts", "small", "model"), "a\0b", "drafts.small.model: contains a NUL", "correct"),
    (("data", 0, "path"), "a\0b", "data.0.path: contains a NUL", "correct"),
    (("data", 1, "chat_options"), {"a": datetime.date(2024, 1, 1)}, "data.1.chat_options: Object of type date", "correct"),
    (("data", 1, "chat_options"), {"a": float("nan")}, "data.1.chat_options: Out of range float", "correct"),
    (("data", 1, "chat"), True, "data.1: chat: true needs prompt", "correct"),
    (("data", 0, "system"), "be brief", "data.0: system needs chat: true", "correct"),
    (("data", 2, "domain"), {"column": 5}, "data.2.domain.column: Input should be a valid string", "quote it"),
    (
        ("rules",),
        ["strict", "stric"],
        "rules.1: unknown rule 'stric' (did you mean strict?); known: strict, lossless",
        "correct",
    ),
    (("rules",), [{"multi_draft": 0}], "rules.0: multi_draft: width must be a whole number from 1 to 64, not 0", "correct"),
    (("rules",), [{"multi_draft": 65}], "rules.0: multi_draft: width must be a whole number from 1 to 64", "correct"),
    (("rules",), [{"multi_draft": 1.5}], "rules.0: multi_draft: width must be a whole number from 1 to 64", "correct"),
    (
        ("rules",),
        ["strict", "multi_draft"],
        "rules.1: multi_draft has 1 parameter, not 0: write multi_draft:width",
        "corr",
    ),
    (("rules",), [{"multi_draft": "many"}], "rules.0: 'many' is not a number", "correct"),
    (("certificates",), "perhaps", "certificates: Input should be a valid boolean", "correct"),
    (("certificates",), None, "certificates: Input should be a valid boolean", "correct"),
    (("data", 0, "min_prompt_tokens"), 0, "data.0.min_prompt_tokens: Input should be greater than or equal to 1", "correct"),
    (("costs", "repeats"), 2, "costs.repeats: Input should be greater than or equal to 3", "correct"),
    (("costs", "budget"), -1, "costs.budget: Input should be greater than or equal to 0", "correct"),
    (("costs", "budget"), float("inf"), "costs.budget: Input should be a finite number", "correct"),
    (("decision", "confidence"), 0.5, "decision.confidence: Input should be greater than 0.5", "correct"),
    (("decision", "confidence"), 1, "decision.confidence: Input should be less than 1", "correct"),
    (("decision", "min_speedup"), float("nan"), "decision.min_speedup: ", "correct"),
    (("drafts", "ngram", "max_ngram"), 0, "drafts.ngram.max_ngram: Input should be greater than or equal to 1", "correct"),
    (("drafts", "ngram", "max_ngram"), 65, "drafts.ngram.max_ngram: Input should be less than or equal to 64", "correct"),
    (("thinking", "end"), "", "thinking.end: String should have at least 1 character", "correct"),
    (("draft_processing",), "top_p", "draft_processing: Input should be 'same' or 'temperature'", "correct"),
    (("batch_tokens",), "many", "batch_tokens: Input should be a valid integer", "correct"),
]


@each(("keys", "value", "problem", "advice"), MISTAKES)
def test_a_mistake_is_named_with_its_place_and_the_next_step(keys: Keys, value: Any, problem: str, advice: str) -> None:
    error = refusal(changed((keys, value)))
    assert error.message.startswith(f"profile.yaml: {problem}")
    assert "more)" not in error.message
    assert advice in error.hint


CONTINUATIONS: dict[str, dict[str, Any]] = {
    "greedy": {"kind": "greedy"},
    "sampled": {"kind": "sampled"},
    "given": {"kind": "given", "column": "answer", "temperature": 1},
    "text": {"kind": "text"},
}
OPTIONS = {
    kind: type(validate({**PROFILE, "continuation": group}, "").continuation) for kind, group in CONTINUATIONS.items()
}


@each(("kind", "name"), [(kind, name) for kind in OPTIONS for name in OPTIONS[kind].model_fields])
def test_a_misspelt_key_of_any_kind_of_continuation_is_named_and_the_right_one_suggested(kind: str, name: str) -> None:
    error = refusal(changed((("continuation",), CONTINUATIONS[kind] | {f"{name}x": 1})))
    assert error.message == f"profile.yaml: unknown key continuation.{name}x"
    assert error.hint == f"did you mean {name}?"


SAMPLING_MISTAKES: list[tuple[str, Any, str]] = [
    ("temperature", 0, "must be above 0; greedy text is kind: greedy"),
    ("temperature", -1, "must be above 0; greedy text is kind: greedy"),
    ("temperature", float("nan"), ""),
    ("temperature", 101, "Input should be less than or equal to 100"),
    ("top_k", -1, "Input should be greater than or equal to 0"),
    ("top_k", 2.5, "Input should be a valid integer"),
    ("top_p", 0, "Input should be greater than 0"),
    ("top_p", 1.1, "Input should be less than or equal to 1"),
    ("min_p", -0.1, "Input should be greater than or equal to 0"),
    ("min_p", 1.1, "Input should be less than or equal to 1"),
]


@each(("name", "value", "problem"), SAMPLING_MISTAKES)
@each("kind", ["sampled", "given"])
def test_a_sampling_setting_out_of_its_range_is_refused(kind: str, name: str, value: Any, problem: str) -> None:
    error = refusal(changed((("continuation",), CONTINUATIONS[kind] | {name: value})))
    assert error.message.startswith(f"profile.yaml: continuation.{name}: {problem}")


@pytest.mark.parametrize(("name", "value"), [("seed", -1), ("seed", 2**63), ("max_new_tokens", 0), ("max_new_tokens", None)])
def test_a_sampled_continuation_has_a_seed_and_a_limit(name: str, value: Any) -> None:
    error = refusal(changed((("continuation",), {"kind": "sampled", name: value})))
    assert error.message.startswith(f"profile.yaml: continuation.{name}: Input should be")


@pytest.mark.parametrize("rule", ["strict", "one_hot", {"additive": 0.1}, "auto"])
def test_the_rule_of_the_decision_may_be_any_or_follow_the_text(rule: Any) -> None:
    expected = "additive_0p1" if isinstance(rule, dict) else rule
    assert validate(changed((("decision", "rule"), rule)), "").decision.rule == expected


def test_auto_is_no_rule_to_be_profiled() -> None:
    assert "auto is not a rule" in refusal(changed((("rules",), ["auto"]))).message


def test_rules_that_draw_several_tokens_are_written_like_any_other_and_counted_once() -> None:
    tree = changed(
        (("rules",), [{"multi_draft": 4}, "multi_draft:2", "strict", "multi_draft_4", {"multi_draft": {"width": 64}}])
    )
    assert validate(tree, "").rules == ["multi_draft_4", "multi_draft_2", "strict", "multi_draft_64"]


def test_certificates_are_off_unless_asked_for_and_explained_in_the_reference() -> None:
    assert validate(PROFILE, "").certificates is False
    assert validate(PROFILE | {"certificates": True}, "").certificates is True
    (line,) = [row for row in (ROOT / "docs" / "profile.md").read_text().splitlines() if row.startswith("| `certificates`")]
    assert line.split(" | ")[2] == "`False`"
    assert "threshold_<rule>" in line


@pytest.mark.parametrize("more", [{}, {"certificates": False}, {"certificates": True}])
def test_without_drafts_the_target_is_measured_with_certificates_and_the_draft_that_is_free(more: dict[str, bool]) -> None:
    """Unless it is said that it be without."""
    options = validate(changed((("drafts",), {})) | more, "")
    assert list(options.drafts) == ["ngram"]
    assert options.drafts["ngram"].kind == "prompt_lookup"
    assert options.certificates is more.get("certificates", True)


def test_a_target_alone_is_the_same_profile_when_it_is_read_again(tmp_path: Path) -> None:
    """What the manifest holds; and certificates can be switched off in it."""
    found = load_profile(write(tmp_path, changed((("drafts",), {}))))
    assert validate(found.model_dump(mode="json"), "") == found
    assert validate(found.model_dump(mode="json") | {"certificates": False}, "").certificates is False
    assert load_profile(write(tmp_path, changed((("drafts",), {}))), ["certificates=false"]).certificates is False


def test_prompt_lookup_that_was_asked_for_brings_no_certificates() -> None:
    assert validate(changed((("drafts",), {"ngram": {"kind": "prompt_lookup"}})), "").certificates is False


def test_the_decision_about_a_target_alone_may_name_its_free_draft() -> None:
    alone = changed((("drafts",), {}))
    assert validate(alone | {"decision": {"draft": "ngram"}}, "").decision.draft == "ngram"
    problem = refusal(alone | {"decision": {"draft": "small"}}).message
    assert "decision.draft 'small' is none of the drafts (ngram)" in problem


def test_prompts_of_any_length_are_taken_unless_the_profile_says_otherwise() -> None:
    assert validate(changed(), "").data[0].min_prompt_tokens == 1
    assert validate(changed((("data", 0, "min_prompt_tokens"), 64)), "").data[0].min_prompt_tokens == 64


def test_the_number_of_further_mistakes_is_told() -> None:
    error = refusal(changed((("data", 0, "limit"), 0), (("costs", "repeats"), 2), (("data", 1, "domain"), True)))
    assert error.message.endswith("(and 2 more)")


@pytest.mark.parametrize("name", ["Small", "1b", "small draft", "-a", "", "auto", "target", "höhe", "x" * 201])
def test_a_draft_cannot_have_a_name_that_a_folder_or_an_option_cannot_have(name: str) -> None:
    error = refusal(changed((("drafts", name), {"kind": "model", "model": "x"})))
    assert f"draft name {shown(name)} must be lower case" in error.message


@pytest.mark.parametrize("name", ["a", "eagle-3_v2", "kind", "drop_layers", "model"])
def test_a_draft_may_be_named_like_an_option(name: str) -> None:
    assert name in validate(changed((("drafts", name), {"kind": "model", "model": "x"})), "").drafts


def test_layers_are_sorted() -> None:
    draft = validate(PROFILE, "").drafts["skip"]
    assert isinstance(draft, LayerSkipDraft)
    assert draft.drop_layers == [1, 2]


@pytest.mark.parametrize("gammas", [[0], [1, GAMMA_LIMIT + 1], [-1], [], [True], [1.5], ["2"]])
def test_gammas_outside_their_bounds_are_refused(gammas: list[Any]) -> None:
    assert refusal(changed((("gammas",), gammas))).message.startswith("profile.yaml: gammas")


def test_gammas_are_sorted_and_distinct_up_to_their_limit() -> None:
    assert validate(changed((("gammas",), [GAMMA_LIMIT, 1, 3, 1])), "").gammas == [1, 3, GAMMA_LIMIT]


INCONSISTENT = [
    ({"draft": "large"}, "decision.draft 'large' is none of the drafts (small, skip, layer_skip, ngram)"),
    ({"gamma": 9}, "decision.gamma 9 is not among gammas [1, 2, 3, 4, 5, 6, 7, 8]"),
    ({"gamma": True}, "decision.gamma"),
    ({"gamma": "best"}, "decision.gamma"),
]


@pytest.mark.parametrize(("decision", "problem"), INCONSISTENT)
def test_the_decision_is_about_something_that_is_measured(decision: dict[str, Any], problem: str) -> None:
    assert problem in refusal(changed((("decision",), decision))).message


@pytest.mark.parametrize("decision", [{"draft": "skip", "gamma": 8, "rule": "strict"}, {"draft": "auto", "gamma": "auto"}])
def test_a_decision_about_what_is_measured_is_accepted(decision: dict[str, Any]) -> None:
    assert validate(changed((("decision",), decision)), "").decision.model_dump(include=set(decision)) == decision


WEIGHTS = [
    ({"code": 0.5, "chat": 0.4}, "add up to 1 (they add up to 0.9)"),
    ({"code": 1.5, "chat": -0.5}, "must be shares"),
    ({"code": float("nan"), "chat": 1}, "decision.weights.code: Input should be a finite number"),
    ({"code": float("inf"), "chat": 0}, "decision.weights.code: Input should be a finite number"),
    ({}, "add up to 1"),
    ({"code": 1}, "must name every domain and no other (check chat)"),
    ({"code": 0.5, "chat": 0.3, "poetry": 0.2}, "must name every domain and no other (check poetry)"),
]


@pytest.mark.parametrize(("weights", "problem"), WEIGHTS)
def test_weights_are_shares_that_name_every_domain(weights: dict[str, float], problem: str) -> None:
    tree = changed((("data", 2), ABSENT), (("decision", "weights"), weights))
    assert problem in refusal(tree).message


@pytest.mark.parametrize("weights", [{"code": 0.1, "chat": 0.9}, {"code": 0, "chat": 1}])
def test_weights_that_do_so_are_accepted(weights: dict[str, float]) -> None:
    assert validate(changed((("data", 2), ABSENT), (("decision", "weights"), weights)), "").decision.weights == weights


def test_weights_may_name_domains_that_only_the_data_know() -> None:
    assert validate(changed((("decision", "weights"), {"code": 0.5, "from-a-column": 0.5})), "").decision.weights


TEMPLATES = {
    "{": "Single",
    "}": "Single",
    "{a": "expected",
    "{}": "field",
    "{a!r}": "field",
    "{a:>3}": "field",
    "{a!}": "{a!}",
}


@pytest.mark.parametrize(("template", "problem"), TEMPLATES.items())
def test_a_malformed_template_is_found_before_any_model_loads(template: str, problem: str) -> None:
    message = refusal(changed((("data", 0, "prompt"), template))).message
    assert message.startswith(f"profile.yaml: data.0.prompt: {template!r}")
    assert problem in message


def test_a_template_is_split_into_text_and_columns() -> None:
    assert template_parts("{{{a}}}: {b c}") == [("{", None), ("", "a"), ("}", None), (": ", "b c")]


BROKEN = {
    "": "holds no profile",
    "- target": "holds no profile",
    "target: [": " line 1: ",
    "a: b: c": " line 1: mapping values are not allowed here",
    "\ttarget: x": " line 1: found character '\\t'",
    "target: !!python/object:os.system x": "could not determine a constructor",
    "target: 2024-99-99": "month must be in 1..12",
    "target: !!bool maybe": "maybe",
    "target: !!timestamp soon": "not YAML",
    "a: 1\n---\nb: 2": " line 2: but found another document",
    "? {a: b}\n: c": "unhashable key",
    "target: !!int ''": "not YAML",
    "target: " + "[" * 5000: "nested too deeply",
    "batch_tokens: " + "9" * 5000: "not YAML",
}


@pytest.mark.parametrize(("text", "problem"), BROKEN.items())
def test_a_file_that_is_no_profile_is_refused_with_the_line(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ProfileInvalid) as caught:
        load_profile(write(tmp_path, text))
    assert problem in caught.value.message


LONG = {"a word": "w" * 3000, "a sentence": "w " * 3000}
# Where a message may repeat what was given: places in the profile, and overrides.
REPEATED: list[tuple[Keys, Any]] = [
    *[((*group, "WWW"), 1) for group in GROUPS],
    (("data", 0, "domain"), {"WWW": 1}),
    (("data", 0, "prompt"), "{WWW"),
    (("data", 0, "prompt"), "{WWW!r}"),
    (("drafts", "-WWW"), {"kind": "prompt_lookup"}),
    (("drafts", "small", "kind"), "WWW"),
    (("continuation", "kind"), "WWW"),
    (("costs", "source"), "WWW"),
    (("costs",), {"source": "roofline", "accelerator": "WWW"}),
    (("rules",), ["WWW"]),
    (("rules",), [{"WWW": 1}]),
    (("rules",), [{"additive": "WWW"}]),
    (("rules",), [{"typical": {"WWW": 1}}]),
    (("decision", "draft"), "WWW"),
    (("decision", "weights"), {"WWW": 1}),
]


@each("long", LONG.values(), ids=list(LONG))
@each(("keys", "value"), REPEATED, ids=str)
def test_no_message_repeats_more_than_200_characters_of_a_profile(keys: Keys, value: Any, long: str) -> None:
    def filled(part: Any) -> Any:
        if isinstance(part, dict):
            return {filled(key): filled(inner) for key, inner in part.items()}
        if isinstance(part, (list, tuple)):
            return type(part)(map(filled, part))
        return part.replace("WWW", long) if isinstance(part, str) else part

    tree = changed((filled(keys), filled(value)))
    if keys == ("decision", "weights"):
        tree["data"].pop()
    error = refusal(tree)
    assert 0 < (error.message + error.hint).count(long[:2]) * 2 <= 200
    assert len(error.message) <= 600


@pytest.mark.parametrize("long", LONG.values(), ids=list(LONG))
@pytest.mark.parametrize(
    "override", ["WWW", "WWW.a=1", "target.WWW=1", "data.WWW.limit=1", "target.model.WWW.b=1", "WWW=[", "target.dtype=[WWW"]
)
def test_no_message_repeats_more_than_200_characters_of_an_override(tmp_path: Path, override: str, long: str) -> None:
    with pytest.raises(ProfileInvalid) as caught:
        load_profile(write(tmp_path, PROFILE), [override.replace("WWW", long)])
    assert 0 < (caught.value.message + caught.value.hint).count(long[:2]) * 2 <= 200


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"target: \xf6")
    for path, reason in (
        (tmp_path / "none.yaml", "No such file"),
        (tmp_path, "directory"),
        (tmp_path / "latin.yaml", "UTF-8"),
    ):
        with pytest.raises(ProfileInvalid, match=reason):
            load_profile(path)


DUPLICATES = [
    ("target: {model: a}\ndata: []\ntarget: {model: b}\n", 3, "target"),
    ("target:\n  model: a\n  dtype: float32\n  model: b\n", 4, "model"),
    ("drafts:\n  d: {kind: model}\n  e: {kind: model}\n  d: {kind: model}\n", 4, "d"),
    ("data:\n- {domain: a,\n   domain: b}\n", 3, "domain"),
]


@pytest.mark.parametrize(("text", "line", "key"), DUPLICATES)
def test_a_key_that_occurs_twice_is_refused_with_its_line(tmp_path: Path, text: str, line: int, key: str) -> None:
    with pytest.raises(ProfileInvalid, match=f"line {line}: the key '{key}' occurs twice"):
        load_profile(write(tmp_path, text))


def test_a_merged_key_that_is_overridden_does_not_occur_twice(tmp_path: Path) -> None:
    text = """
        target: {model: hub/target}
        drafts: {small: {kind: model, model: hub/small}}
        data:
        - {domain: a, path: a.jsonl, prompt: x, continuation: &base {kind: greedy, max_new_tokens: 3}}
        - {domain: b, path: b.jsonl, prompt: x, continuation: &inner {<<: *base, max_new_tokens: 9}}
        continuation: {<<: *inner}
    """
    options = load_profile(write(tmp_path, text))
    assert [options.continuation_of(0).max_new_tokens, options.continuation_of(1).max_new_tokens] == [3, 9]
    assert options.continuation.max_new_tokens == 9


UNQUOTED = [(word, "quote the word") for word in ("no", "No", "on", "off", "yes", "true")]
UNQUOTED += [(value, "reads it as a number or a date: quote it") for value in ("7", "1.5", "2024-01-01")]


@pytest.mark.parametrize(("word", "advice"), UNQUOTED)
def test_a_domain_that_yaml_reads_as_something_else_is_to_be_quoted(tmp_path: Path, word: str, advice: str) -> None:
    text = yaml.safe_dump(PROFILE).replace("domain: code", f"domain: {word}")
    with pytest.raises(ProfileInvalid, match=r"data\.0\.domain: Input should be a valid string$") as caught:
        load_profile(write(tmp_path, text))
    assert advice in caught.value.hint
    assert load_profile(write(tmp_path, text.replace(f"domain: {word}", f"domain: '{word}'"))).data[0].domain == word


OVERRIDES = [
    ("target.dtype=float32", "target.dtype", "float32"),
    (" target.dtype = float32", "target.dtype", "float32"),
    ("target.revision=", "target.revision", None),
    ("batch_tokens=99", "batch_tokens", 99),
    ("certificates=true", "certificates", True),
    ("rules=[strict, multi_draft:4]", "rules", ["strict", "multi_draft_4"]),
    ("gammas=[2, 1]", "gammas", [1, 2]),
    ("rules.0=strict", "rules", ["strict"]),
    ("continuation.max_new_tokens=5", "continuation.max_new_tokens", 5),
    ("shard_documents=3", "shard_documents", 3),
    ("costs.repeats=7", "costs.repeats", 7),
    ("decision={min_speedup: 1.5, gamma: 2}", "decision.gamma", 2),
    ("decision.weights={a: 0.5, b: 0.5}", "decision.weights", {"a": 0.5, "b": 0.5}),
    ("target.model=a=b", "target.model", "a=b"),
]


@pytest.mark.parametrize(("override", "option", "value"), OVERRIDES)
def test_set_reaches_every_option(tmp_path: Path, override: str, option: str, value: Any) -> None:
    path = write(tmp_path, changed((("rules",), ["strict"])))
    assert operator.attrgetter(option)(load_profile(path, [override])) == value


@pytest.mark.parametrize("element", ["1", "chat"])
def test_set_finds_a_source_by_its_index_or_its_domain(tmp_path: Path, element: str) -> None:
    options = load_profile(write(tmp_path, PROFILE), [f"data.{element}.limit=5"])
    assert [source.limit for source in options.data] == [None, 5, None]


def test_set_prefers_an_index_to_a_domain_that_looks_like_one(tmp_path: Path) -> None:
    options = load_profile(write(tmp_path, changed((("data", 1, "domain"), "0"))), ["data.0.limit=5"])
    assert [source.limit for source in options.data] == [5, 20, None]


@pytest.mark.parametrize("empty", [ABSENT, None])
def test_set_makes_the_groups_that_the_file_leaves_out_or_empty(tmp_path: Path, empty: Any) -> None:
    path = write(tmp_path, changed((("continuation",), empty), (("decision",), empty)))
    options = load_profile(
        path, ["continuation.max_new_tokens=5", "decision.gamma=3", "drafts.new.kind=model", "drafts.new.model=x"]
    )
    assert (options.continuation.kind, options.continuation.max_new_tokens, options.decision.gamma) == ("greedy", 5, 3)
    assert "new" in options.drafts


def test_set_changes_one_place_where_yaml_anchors_share_a_group(tmp_path: Path) -> None:
    tree = changed()
    tree["data"][0]["continuation"] = tree["data"][1]["continuation"] = tree["continuation"]
    assert "*id" in write(tmp_path, tree).read_text()
    options = load_profile(tmp_path / "profile.yaml", ["data.code.continuation.max_new_tokens=5"])
    assert [options.continuation_of(index).max_new_tokens for index in range(3)] == [5, 64, 64]


WRONG_OVERRIDES = [
    ("target.dtype", "is not KEY=VALUE", "target.dtype=float32"),
    ("=3", "is not KEY=VALUE", "target.dtype=float32"),
    ("target.=3", "is not KEY=VALUE", "target.dtype=float32"),
    (".target=3", "is not KEY=VALUE", "target.dtype=float32"),
    ("target..dtype=3", "is not KEY=VALUE", "target.dtype=float32"),
    ("target.dtype=[", "'[' is not a YAML value", "quote it"),
    ("target.dtype=2024-99-99", "'2024-99-99' is not a YAML value", "quote it"),
    ("decision={gamma: 1, gamma: 2}", "is not a YAML value", "quote it"),
    ("target.model.name=x", "target.model.name is below a plain value", "name an option"),
    ("target.model.name.first=x", "target.model.name is below a plain value", "name an option"),
    (
        "data.poetry.limit=5",
        "data.poetry: no single element 'poetry' in a list of 3",
        "0 to 2 or a domain that one source has (code, chat)",
    ),
    ("data.3.limit=5", "no single element '3' in a list of 3", "an index from 0 to 2"),
    ("data.-1.limit=5", "no single element '-1'", "an index from 0 to 2"),
    ("data.\u00b2.limit=5", "no single element '\u00b2'", "an index from 0 to 2"),
    ("target.dtpe=float32", "unknown key target.dtpe", "did you mean dtype?"),
    ("nowhere.at.all=1", "unknown key nowhere", "known here: batch_tokens"),
    ("data.0.domain=no", "data.0.domain", "quote the word"),
    ("gammas.0=3", "gammas: Input should be a valid list", "correct"),
]


@pytest.mark.parametrize(("override", "problem", "advice"), WRONG_OVERRIDES)
def test_an_override_that_means_nothing_is_refused(tmp_path: Path, override: str, problem: str, advice: str) -> None:
    with pytest.raises(ProfileInvalid) as caught:
        load_profile(write(tmp_path, PROFILE), [override])
    assert problem in caught.value.message
    assert advice in caught.value.hint


def test_an_override_cannot_name_a_domain_that_two_sources_have(tmp_path: Path) -> None:
    with pytest.raises(ProfileInvalid, match="no single element 'code'"):
        load_profile(write(tmp_path, changed((("data", 1, "domain"), "code"))), ["data.code.limit=5"])


def test_an_override_of_an_element_of_an_empty_list_says_so() -> None:
    with pytest.raises(ProfileInvalid) as caught:
        apply_override({"data": []}, "data.0.limit=5")
    assert "the list is empty" in caught.value.hint


KEY = st.sampled_from(["target", "data", "drafts", "model", "code", "gammas", "0", "9", "", "\u00b2"]) | st.text()


@given(st.builds("{}={}".format, st.lists(KEY, max_size=4).map(".".join), st.text()))
def test_no_override_ends_in_anything_but_a_value_or_a_refusal(override: str) -> None:
    with contextlib.suppress(ProfileInvalid):
        apply_override(changed(), override)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["auto", "greedy", "given", "model"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers() | st.booleans(), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.sampled_from([(*group, name) for group, name in MISSPELT]), JSON)
def test_no_value_of_any_option_ends_in_anything_but_options_or_a_refusal(keys: Keys, value: Any) -> None:
    with contextlib.suppress(ProfileInvalid):
        assert isinstance(validate(changed((keys, value)), "profile.yaml"), ProfileOptions)


def test_a_default_yields_to_the_file_and_the_file_to_set_and_set_to_a_later_set(tmp_path: Path) -> None:
    def dtype(tree: dict[str, Any], *overrides: str) -> str:
        return load_profile(write(tmp_path, tree), list(overrides)).target.dtype

    in_file = changed((("target", "dtype"), "float16"))
    assert dtype(PROFILE) == "auto"
    assert dtype(in_file) == "float16"
    assert dtype(in_file, "target.dtype=float32") == "float32"
    assert dtype(in_file, "target.dtype=float32", "target.dtype=float16") == "float16"


def test_the_continuation_of_the_profile_may_be_given_responses() -> None:
    tree = changed((("continuation",), {"kind": "given", "column": "answer"}))
    assert validate(tree, "").continuation.kind == "given"


def test_a_source_may_override_the_continuation_of_the_profile() -> None:
    options = validate(PROFILE, "")
    assert [options.continuation_of(index).kind for index in range(3)] == ["given", "greedy", "greedy"]
    assert [options.continuation_of(index).max_new_tokens for index in range(3)] == [None, 256, 64]


@pytest.mark.parametrize(("limit", "limits"), [(None, [None, 20, None]), (50, [50, 20, 50]), (7, [7, 7, 7])])
def test_a_limit_holds_for_every_source_that_has_no_smaller_one(
    tmp_path: Path, limit: int | None, limits: list[Any]
) -> None:
    assert [source.limit for source in load_profile(write(tmp_path, PROFILE), limit=limit).data] == limits


def test_a_limit_meets_the_one_that_set_gives(tmp_path: Path) -> None:
    assert load_profile(write(tmp_path, PROFILE), ["data.code.limit=3"], limit=7).data[0].limit == 3


@pytest.mark.parametrize("data", [5, "code", [5], [{"limit": "many"}], [{"limit": 0}], None])
def test_a_limit_does_not_hide_that_the_sources_are_malformed(tmp_path: Path, data: Any) -> None:
    with pytest.raises(ProfileInvalid, match="data"):
        load_profile(write(tmp_path, changed((("data",), data))), limit=3)


def test_paths_start_at_the_folder_of_the_profile_and_hub_ids_stay(tmp_path: Path) -> None:
    (tmp_path / "hub" / "small").mkdir(parents=True)
    options = load_profile(write(tmp_path, changed((("target", "model"), "../model.gguf"))))
    assert options.target.model == str(tmp_path.parent / "model.gguf")
    models = {name: draft.model for name, draft in options.drafts.items() if isinstance(draft, ModelDraft)}
    assert models == {"small": str(tmp_path / "hub/small"), "layer_skip": "hub/named-like-a-kind"}  # only the first exists
    assert [source.path for source in options.data] == [
        str(tmp_path / "code.jsonl"),
        str(tmp_path / "chat.jsonl"),
        "hub/rest",
    ]


def test_where_the_command_is_run_makes_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, PROFILE)
    monkeypatch.chdir(tmp_path)
    assert load_profile(Path("profile.yaml")) == load_profile(tmp_path / "profile.yaml")


REFERENCES = [
    ("./model", "FOLDER/model"),
    ("../model", "PARENT/model"),
    (".", "FOLDER"),
    ("/elsewhere/model", "/elsewhere/model"),
    ("~/model", "HOME/model"),
    ("~nobody-of-this-name/model", "FOLDER/~nobody-of-this-name/model"),
    ("sub/data.parquet", "FOLDER/sub/data.parquet"),
    ("owner/name", "owner/name"),
    ("name", "name"),
    ("x" * 5000, "x" * 5000),
]


@pytest.mark.parametrize(("reference", "expected"), REFERENCES)
def test_a_reference_becomes_an_absolute_path_or_stays_a_hub_id(tmp_path: Path, reference: str, expected: str) -> None:
    folder = tmp_path / "profiles"
    folder.mkdir()
    places = {"FOLDER": folder, "PARENT": tmp_path, "HOME": os.path.expanduser("~")}
    for word, place in places.items():
        expected = expected.replace(word, str(place))
    assert resolve(reference, folder) == expected


def test_a_link_keeps_the_name_that_tells_its_format(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("")
    (tmp_path / "model.gguf").symlink_to("blob")
    assert resolve("model.gguf", tmp_path) == str(tmp_path / "model.gguf")
