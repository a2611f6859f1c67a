"""Profile files: every mistake names its key and the next step, what wins over what, and where relative paths start."""

from __future__ import annotations

import copy
import operator
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from alphaprof.config.load import load_profile, validate
from alphaprof.config.options import ModelDraft
from alphaprof.config.paths import resolve
from alphaprof.config.profile import template_parts
from alphaprof.errors import ProfileInvalid
from alphaprof.rules import GAMMA_LIMIT
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


MISTAKES: list[tuple[Keys, Any, str, str]] = [
    (("target",), ABSENT, "target: is missing", "add this key"),
    (("target",), 7, "target: expected a group of options, not 7", "group of options"),
    (("target", "dtype"), "int8", "target.dtype: 'int8' is not auto, float32, bfloat16 or float16", "served_dtype"),
    (("drafts", "small", "kind"), ABSENT, "drafts.small: ", "add kind: model or layer_skip"),
    (
        ("drafts", "Small draft"),
        {"kind": "prompt_lookup"},
        "drafts: invalid draft name 'Small draft': use lower case",
        "correct",
    ),
    (("drafts", "target"), {"kind": "prompt_lookup"}, "drafts: invalid draft name 'target'", "correct"),
    (("drafts", "skip", "drop_layers"), [-1], "drafts.skip.drop_layers.0: must be at least 0, not -1", "correct"),
    (("data",), [], "data: needs at least 1 entry", "correct"),
    (("data", 0, "limit"), True, "data.0.limit: expected a whole number, not True", "correct"),
    (("data", 0, "domain"), True, "data.0.domain: expected text, not True", "quote the word"),
    (("data", 0, "continuation", "kind"), ABSENT, "data.0.continuation: ", "add kind: greedy or sampled or given or text"),
    (("data", 0, "prompt"), ABSENT, "data.0: needs exactly one of prompt, messages, prompt_ids (has none)", "correct"),
    (("data", 0, "prompt"), "{a", "data.0.prompt: '{a': expected", "correct"),
    (("data", 0, "prompt"), "{a!r}", "data.0.prompt: '{a!r}' has a field that is not a plain column", "correct"),
    (("data", 1, "chat"), True, "data.1: chat: true needs prompt", "correct"),
    (("data", 0, "system"), "be brief", "data.0: system needs messages, or prompt with chat: true", "correct"),
    (("rules",), ["strict", "stric"], "rules.1: unknown rule 'stric' (did you mean strict?); known: strict", "correct"),
    (("rules",), ["auto"], "rules.0: unknown rule 'auto'", "correct"),
    (("rules",), [{"tree": 1.5}], "rules.0: tree: width must be a whole number from 1 to 1e+06", "correct"),
    (("gammas",), [1, GAMMA_LIMIT + 1], "gammas.1: must be at most", "correct"),
    (("continuation",), {"temperature": 1}, "continuation: temperature need kind: sampled", "correct"),
    (
        ("continuation",),
        {"kind": "sampled", "temperature": 0},
        "continuation.temperature: must be above 0, not 0",
        "correct",
    ),
    (
        ("continuation",),
        {"kind": "given", "column": "a", "top_k": 2},
        "continuation: top_k, top_p and min_p need",
        "correct",
    ),
    (("execution",), {"workers": 0}, "execution.workers: ", "correct"),
    (("decision", "draft"), "large", "decision.draft 'large' is not among the drafts (small, skip, layer_skip, ngram)", ""),
    (("decision", "gamma"), 9, "decision.gamma 9 is not among gammas [1, 2, 3, 4, 5, 6, 7, 8]", ""),
    (("decision", "concurrency"), 2, "decision.concurrency 2 is outside costs.concurrency [1]", ""),
    (("decision", "weights"), {"code": 0.5, "chat": 0.4}, "decision.weights: must be shares that add up to 1 (they", ""),
]


@each(("keys", "value", "problem", "advice"), MISTAKES)
def test_a_mistake_is_named_with_its_place_and_the_next_step(keys: Keys, value: Any, problem: str, advice: str) -> None:
    error = refusal(changed((keys, value)))
    assert error.message.startswith(f"profile.yaml: {problem}")
    assert "problems" not in error.message
    assert advice in error.hint


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


def test_all_mistakes_are_named_at_once() -> None:
    error = refusal(changed((("data", 0, "limit"), 0), (("costs", "repeats"), 2), (("data", 1, "domain"), True)))
    assert error.message.startswith("profile.yaml: 3 problems: data.0.limit: must be at least 1, not 0; ")
    assert "; data.1.domain: expected text, not True" in error.message
    many = refusal(
        changed(*((("data", place, "limit"), 0) for place in (0, 1, 2)), *((("drafts", f"d{n}"), 1) for n in range(5)))
    )
    assert many.message.endswith("; and 2 more")


COMMON = [  # the commonest mistakes of newcomers
    ((("data", 0, "prompt"), {"prompt": None}), "data.0.prompt: expected text", 'quote it: "{prompt}"'),
    ((("drafts", "small", "kind"), "eagle"), "drafts.small: unknown kind eagle; known: model, ", "did you mean eagle3?"),
    ((("drafts", "ngram"), {"kind": "prompt_lookup", "min_ngram": 4}), "drafts.ngram: min_ngram 4 exceeds max_ngram 3", ""),
    ((("drafts", "small", "kind"), "ngram"), "drafts.small: unknown kind ngram", "did you mean prompt_lookup?"),
    ((("drafts", "small"), "hub/small"), "drafts.small: expected a group", "write {kind: model, model: hub/small}"),
    ((("drafts",), [{"kind": "prompt_lookup"}]), "drafts: expected a group", "give each draft a name"),
    ((("drafts", "skip", "drop_layers"), 3), "drafts.skip.drop_layers: expected a list, not 3", "write [3]"),
    ((("data",), {"domain": "code"}), "data: expected a list", "begin each entry with -"),
    ((("data", 0, "domain:code"), None), "unknown key data.0.domain:code", "write a space after the colon"),
    (
        (("continuation",), {"kind": "greedy", "temperature": 1}),
        "unknown key continuation.temperature",
        "needs kind: sampled",
    ),
    ((("continuation",), "greedy"), "continuation: expected a group", "write {kind: greedy}"),
    ((("shard_documents",), "8"), "shard_documents: expected a whole number, not '8'", "remove the quotes"),
]


@each(("change", "problem", "advice"), COMMON)
def test_a_common_mistake_is_answered_with_what_to_write(change: tuple[Keys, Any], problem: str, advice: str) -> None:
    error = refusal(changed(change))
    assert error.message.startswith(f"profile.yaml: {problem}")
    assert advice in error.hint


def test_a_target_may_be_its_name_alone() -> None:
    assert validate(changed((("target",), "hub/target")), "").target.model == "hub/target"


def test_gammas_are_sorted_and_distinct_up_to_their_limit() -> None:
    assert validate(changed((("gammas",), [GAMMA_LIMIT, 1, 3, 1])), "").gammas == [1, 3, GAMMA_LIMIT]


def test_weights_name_every_domain() -> None:
    """Of sources that name their domains; others only the data know."""
    tree = changed((("data", 2), ABSENT), (("decision", "weights"), {"code": 0.5, "chat": 0.3, "poetry": 0.2}))
    assert "must name exactly the domains of the data (check poetry)" in refusal(tree).message
    assert validate(changed((("decision", "weights"), {"code": 0.5, "poetry": 0.5})), "").decision.weights


def test_a_template_is_split_into_text_and_columns() -> None:
    assert template_parts("{{{a}}}: {b c}") == [("{", None), ("", "a"), ("}", None), (": ", "b c")]


BROKEN = {
    "a: b: c": " line 1: mapping values are not allowed here",
    "target: !!python/object:os.system x": "could not determine a constructor",
    "target:\n  model: a\n  model: b\n": " line 3: duplicate key 'model'",
}


@each(("text", "problem"), BROKEN.items())
def test_a_file_that_is_no_profile_is_refused_with_the_line(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ProfileInvalid) as caught:
        load_profile(write(tmp_path, text))
    assert problem in caught.value.message


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


@each("url", ["localhost:8000", "10.0.0.1:30000/v1", "http://localhost:8000"])
def test_an_address_needs_no_scheme(tmp_path: Path, url: str) -> None:
    options = load_profile(write(tmp_path, PROFILE), [f"vllm={{url: '{url}'}}"])
    assert options.vllm is not None
    assert options.vllm.url == f"http://{url.removeprefix('http://')}"


def test_words_that_older_yaml_takes_for_true_and_false_are_words(tmp_path: Path) -> None:
    """Where text is meant: languages, domains, names of keys. Options that are true or false, and settings, take them."""
    where = {"language": ["en", "no"], "on": ["yes"]}
    text = """
        target: {model: t}
        drafts: {ngram: {kind: prompt_lookup}}
        data:
        - {domain: no, path: a.jsonl, prompt: x, chat: on, where: {language: [en, no], on: yes},
           chat_options: {enable_thinking: off, effort: low}}
        certificates: yes
        vllm: {python: p, args: {enforce_eager: Yes}}
    """
    options = load_profile(write(tmp_path, text), ["data.0.cluster=off", "drafts.ngram.min_ngram=1"])
    (source,) = options.data
    assert (source.domain, source.where, source.cluster, source.chat) == ("no", where, "off", True)
    assert source.chat_options == {"enable_thinking": False, "effort": "low"}
    assert options.certificates is True
    assert options.vllm is not None
    assert options.vllm.args == {"enforce_eager": True}


OVERRIDES = [
    (" target.dtype = float32", "target.dtype", "float32"),
    ("target.revision=", "target.revision", None),
    ("rules=[strict, tree:4, strict]", "rules", ["strict", "tree_4"]),
    ("gammas=[2, 1]", "gammas", [1, 2]),
    ("rules.0=strict", "rules", ["strict"]),
    ("costs.repeats=7", "costs.repeats", 7),
    ("decision={min_speedup: 1.5, gamma: 2}", "decision.gamma", 2),
    ("target.model=a=b", "target.model", "a=b"),
]


@each(("override", "option", "value"), OVERRIDES)
def test_set_reaches_every_option(tmp_path: Path, override: str, option: str, value: Any) -> None:
    path = write(tmp_path, changed((("rules",), ["strict"])))
    assert operator.attrgetter(option)(load_profile(path, [override])) == value


@pytest.mark.parametrize("element", ["1", "chat"])
def test_set_finds_a_source_by_its_index_or_its_domain(tmp_path: Path, element: str) -> None:
    options = load_profile(write(tmp_path, PROFILE), [f"data.{element}.limit=5"])
    assert [source.limit for source in options.data] == [None, 5, None]


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
    ("target.dtype=[", "'[' is not a YAML value", "quote it"),
    ("target.model.name=x", "target.model: expected text, not an object", "correct"),
    (
        "data.poetry.limit=5",
        "data.poetry: 'poetry' does not name exactly one of 3 list elements",
        "or a domain that only one source has",
    ),
    ("target.dtpe=float32", "unknown key target.dtpe", "did you mean dtype?"),
    ("drafts.smal.dtype=float32", "there is no draft 'smal'", "did you mean drafts.small?"),
]


@each(("override", "problem", "advice"), WRONG_OVERRIDES)
def test_an_override_that_means_nothing_is_refused(tmp_path: Path, override: str, problem: str, advice: str) -> None:
    with pytest.raises(ProfileInvalid) as caught:
        load_profile(write(tmp_path, PROFILE), [override])
    assert problem in caught.value.message
    assert advice in caught.value.hint


def test_a_default_yields_to_the_file_and_the_file_to_set_and_set_to_a_later_set(tmp_path: Path) -> None:
    def dtype(tree: dict[str, Any], *overrides: str) -> str:
        return load_profile(write(tmp_path, tree), list(overrides)).target.dtype

    in_file = changed((("target", "dtype"), "float16"))
    assert dtype(PROFILE) == "auto"
    assert dtype(in_file) == "float16"
    assert dtype(in_file, "target.dtype=float32") == "float32"
    assert dtype(in_file, "target.dtype=float32", "target.dtype=float16") == "float16"


def test_a_source_may_override_the_continuation_of_the_profile() -> None:
    options = validate(PROFILE, "")
    assert [options.continuation_of(index).kind for index in range(3)] == ["given", "greedy", "greedy"]
    assert [options.continuation_of(index).max_new_tokens for index in range(3)] == [None, 256, 64]


@pytest.mark.parametrize(("limit", "limits"), [(None, [None, 20, None]), (50, [50, 20, 50]), (7, [7, 7, 7])])
def test_a_limit_holds_for_every_source_that_has_no_smaller_one(
    tmp_path: Path, limit: int | None, limits: list[Any]
) -> None:
    assert [source.limit for source in load_profile(write(tmp_path, PROFILE), limit=limit).data] == limits


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


REFERENCES = [
    ("./model", "FOLDER/model"),
    ("../model", "PARENT/model"),
    ("/elsewhere/model", "/elsewhere/model"),
    ("~/model", "HOME/model"),
    ("sub/data.parquet", "FOLDER/sub/data.parquet"),
    ("owner/name", "owner/name"),
    ("name", "name"),
    ("sub/Model.GGUF", "FOLDER/sub/Model.GGUF"),
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
