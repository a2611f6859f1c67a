"""A first look at vLLM's counters: what rose between two pages of /metrics, without an interval. The names and labels of the
pages are those of vLLM's source; the values are counted from rounds, one by one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaprof.commands.importing.counters import Counters, build_counters
from alphaprof.errors import AlphaprofError
from alphaprof.render.json import json_schema
from tests.commands.test_import import failure, invoke
from tests.loops import each
from tests.reporting import HOSTILE

Rounds = Sequence[tuple[int, int]]  # drafted and accepted tokens of each
# The rounds of vLLM's page on per-request metrics: 43 of three drafts, 10 of which were accepted.
ROUNDS: Rounds = [(3, 0)] * 39 + [(3, 1)] + [(3, 3)] * 3
WARM: Rounds = [(3, 2), (3, 0)]
OTHER_LINES = """# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 1.2e+03
process_start_time_seconds 1.75e+09 1395066363000

vllm:e2e_request_latency_seconds_bucket{le="+Inf",model_name="a \\"quoted\\" \\\\ name\\n",} +Inf
vllm:cache_config_info{ block_size = "16" , } NaN
"""


def page(engines: Mapping[str, Rounds], gamma: int = 3, model: str = "served/target", created: float = 1.7e9) -> str:
    """What /metrics says after these rounds of each engine."""
    lines = [OTHER_LINES]
    for engine, rounds in engines.items():
        labels = f'engine="{engine}",model_name="{model}"'
        counts = {
            "drafts": len(rounds),
            "draft_tokens": sum(drafted for drafted, _ in rounds),
            "accepted_tokens": sum(accepted for _, accepted in rounds),
        }
        for name, count in counts.items():
            lines.append(f"vllm:spec_decode_num_{name}_total{{{labels}}} {float(count)}")
            lines.append(f"vllm:spec_decode_num_{name}_created{{{labels}}} {created}")
        for place in range(gamma):
            count = sum(accepted > place for _, accepted in rounds)
            where = f'{labels},position="{place}"'
            lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{where}}} {float(count)}")
    return "\n".join(lines) + "\n"


BEFORE, AFTER = page({"0": WARM}), page({"0": [*WARM, *ROUNDS]})


def saved(folder: Path, before: str | bytes, after: str | bytes) -> tuple[Path, Path]:
    """Both pages as files."""
    paths = folder / "before.txt", folder / "after.txt"
    for path, text in zip(paths, (before, after), strict=True):
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return paths


def rise(folder: Path, before: str | bytes, after: str | bytes) -> Counters:
    return build_counters(*saved(folder, before, after))


def test_what_rose_is_the_acceptance_of_the_rounds_in_between(tmp_path: Path) -> None:
    result = invoke("import", "prometheus", *saved(tmp_path, BEFORE, AFTER), "--format", "json")
    content = json.loads(result.stdout)
    jsonschema.Draft202012Validator(json.loads(json_schema("counters"))).validate(content)
    numbers = {name: content[name] for name in ("gamma", "engines", "drafts", "drafted", "accepted")}
    assert numbers == {"gamma": 3, "engines": 1, "drafts": 43, "drafted": 129, "accepted": 10}
    assert content["target"] == "served/target"
    assert content["acceptance_length"] == pytest.approx(1.2325581395348837)  # as that page says
    assert content["accepted_per_drafted"] == pytest.approx(0.07751937984496124)
    assert content["marginal"] == pytest.approx([4 / 43, 3 / 43, 3 / 43])
    assert content["conditional"] == pytest.approx([4 / 43, 3 / 4, 1.0])
    assert content["reason"] == "no interval: no requests"


def test_there_is_no_interval_and_never_a_verdict(tmp_path: Path) -> None:
    perfect = page({"0": [*WARM, *[(3, 3)] * 100_000]})
    out = tmp_path / "answer.txt"
    result = invoke("import", "prometheus", *saved(tmp_path, BEFORE, perfect), "--out", out)
    text = out.read_text()
    assert (result.exit_code, result.stdout) == (0, "")
    first, second, *_ = text.splitlines()
    assert re.fullmatch(r"acceptance length \d\.\d{3} tokens per round with a draft, at gamma \d", first)
    assert second.endswith("no interval: no requests")
    assert "100,000 rounds with a draft, 300,000 of 300,000 drafted tokens accepted" in text
    assert "GO" not in text
    assert not (tmp_path / "manifest.json").exists()


@settings(max_examples=40)
@given(
    st.integers(1, 4).flatmap(
        lambda gamma: st.tuples(
            st.just(gamma),
            st.lists(st.tuples(st.integers(1, gamma), st.integers(0, gamma)), min_size=1, max_size=9),
            st.lists(st.tuples(st.integers(1, gamma), st.integers(0, gamma)), max_size=3),
        )
    )
)
def test_engines_are_added_up(tmp_path_factory: pytest.TempPathFactory, case: tuple[int, Rounds, Rounds]) -> None:
    gamma, first, second = case
    one, two = ([(drafted, min(drafted, accepted)) for drafted, accepted in rounds] for rounds in (first, second))
    pages = page({"0": [], "1": two}, gamma), page({"0": one, "1": [*two, *two]}, gamma)
    found = rise(tmp_path_factory.mktemp("pages"), *pages)
    every = [*one, *two]
    assert (found.engines, found.drafts) == (2, len(every))
    assert (found.drafted, found.accepted) == (sum(d for d, _ in every), sum(a for _, a in every))
    assert found.marginal == tuple(sum(a > place for _, a in every) / len(every) for place in range(gamma))


CONDITIONAL: tuple[tuple[Rounds, list[float], list[float | None], str], ...] = (
    ([(3, 3), (1, 1), (3, 0), (3, 0)], [0.5, 0.25, 0.25], [0.5, None, None], "n/a where some rounds drafted fewer tokens."),
    ([(3, 1), (3, 0)], [0.5, 0, 0], [0.5, 0, None], "n/a where no round accepted the draft before."),
)


@each(("rounds", "marginal", "conditional", "why"), CONDITIONAL)
def test_conditional_acceptance_is_not_always_known(
    rounds: Rounds, marginal: list[float], conditional: list[float | None], why: str, tmp_path: Path
) -> None:
    paths = saved(tmp_path, BEFORE, page({"0": [*WARM, *rounds]}))
    found = build_counters(*paths)
    assert (list(found.marginal), list(found.conditional)) == (marginal, conditional)
    assert why in invoke("import", "prometheus", *paths).stdout


DRAFTS = 'vllm:spec_decode_num_drafts_total{engine="0",model_name="served/target"} 45.0'
VARIANTS: dict[str, Callable[[str], str]] = {
    "no _total": lambda text: text.replace("_total{engine", "{engine"),
    "no _created": lambda text: "\n".join(line for line in text.splitlines() if "_created" not in line),
    "kinds": lambda text: text.replace(DRAFTS, f"# TYPE vllm:spec_decode_num_drafts_total counter\n{DRAFTS}"),
    "another order of labels": lambda text: text.replace(
        'engine="0",model_name="served/target"', 'model_name="served/target",engine="0"'
    ),
    "lines of Windows": lambda text: text.replace("\n", "\r\n"),
}


@each("variant", VARIANTS.values())
def test_pages_may_be_written_otherwise(variant: Callable[[str], str], tmp_path: Path) -> None:
    assert variant(AFTER) != AFTER
    assert rise(tmp_path, variant(BEFORE), variant(AFTER)) == rise(tmp_path, BEFORE, AFTER)


def edited(old: str, new: str, text: str = AFTER) -> str:
    """A page with one line, or a part of some, written otherwise."""
    assert old in text
    return text.replace(old, new)


LATER: Rounds = [*WARM, *ROUNDS]
SPLIT = "not two pages of one server that went on"
REFUSED: dict[str, tuple[str | bytes, str | bytes, str]] = {
    "fell": (AFTER, BEFORE, SPLIT),
    "restarted": (BEFORE, page({"0": LATER}, created=1.8e9), SPLIT),
    "another model": (BEFORE, page({"0": LATER}, model="other"), SPLIT),
    "nothing": (AFTER, AFTER, "no draft between"),
    "two models": (BEFORE + page({"0": WARM}, model="other"), AFTER + page({"0": LATER}, model="other"), "of 2 models"),
    "no speculation": (OTHER_LINES, OTHER_LINES, "there is no vllm:spec_decode_num_drafts_total"),
    "drafted too much": (BEFORE, edited(" 135.0", " 136.0"), "43 rounds drafted 130 tokens"),
    "accepted too often": (BEFORE, edited('position="1"} 4.0', 'position="1"} 9.0'), "contradict each other"),
    "cut off": (BEFORE, AFTER[: AFTER.rindex('"')], "after.txt is not a metrics page"),
    "UTF-16, as PowerShell writes": (BEFORE, AFTER.encode("utf-16"), "after.txt is not a metrics page: \"'utf-8' codec"),
}


@each(("before", "after", "words"), REFUSED.values())
def test_pages_that_say_nothing_together_are_refused(
    before: str | bytes, after: str | bytes, words: str, tmp_path: Path
) -> None:
    with pytest.raises(AlphaprofError) as found:
        rise(tmp_path, before, after)
    assert (found.value.exit_code, words in found.value.message) == (3, True)


def test_a_page_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.txt", tmp_path):
        code, text = failure(invoke("import", "prometheus", path, path))
        assert (code, f"cannot read {path}" in text) == (3, True)


def test_a_model_name_means_nothing_but_itself(tmp_path: Path) -> None:
    name = "".join(text for text in HOSTILE.values()).replace("\r", "")
    model = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    paths = saved(tmp_path, page({"0": WARM}, model=model), page({"0": LATER}, model=model))
    text = invoke("import", "prometheus", *paths).stdout
    assert all(char.isprintable() or char == "\n" for char in text)
    assert json.loads(invoke("import", "prometheus", *paths, "--format", "json").stdout)["target"] == name
