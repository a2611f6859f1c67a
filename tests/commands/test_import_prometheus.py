"""A first look at vLLM's counters: what rose between two pages of /metrics, without an interval. The names and labels of the
pages are those of vLLM's source; the values are counted from rounds, one by one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaprof.commands.importing.counters import CountedRounds, Counters, counters_of
from alphaprof.errors import AlphaprofError
from alphaprof.profiling.engine.counts import read_pages
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
    return counted(saved(folder, before, after))


def counted(paths: Sequence[Path]) -> Counters:
    return counters_of(read_pages([str(path) for path in paths]))


def speculation(counters: Counters) -> CountedRounds:
    assert counters.speculation is not None
    return counters.speculation


def test_what_rose_is_the_acceptance_of_the_rounds_in_between(tmp_path: Path) -> None:
    result = invoke("import", "prometheus", *saved(tmp_path, BEFORE, AFTER), "--format", "json")
    content = json.loads(result.stdout)
    assert (content["target"], content["engines"], content["traffic"]) == ("served/target", 1, None)
    content = content["speculation"]
    numbers = {name: content[name] for name in ("gamma", "drafts", "drafted", "accepted")}
    assert numbers == {"gamma": 3, "drafts": 43, "drafted": 129, "accepted": 10}
    assert content["acceptance_length"] == pytest.approx(1.2325581395348837)  # as that page says
    assert content["accepted_per_drafted"] == pytest.approx(0.07751937984496124)
    assert content["marginal"] == pytest.approx([4 / 43, 3 / 43, 3 / 43])
    assert content["conditional"] == pytest.approx([4 / 43, 3 / 4, 1.0])


def test_there_is_no_interval_and_never_a_verdict(tmp_path: Path) -> None:
    perfect = page({"0": [*WARM, *[(3, 3)] * 100_000]})
    out = tmp_path / "answer.txt"
    result = invoke("import", "prometheus", *saved(tmp_path, BEFORE, perfect), "--out", out)
    text = out.read_text()
    assert (result.exit_code, result.stdout) == (0, "")
    first, second, *_ = text.splitlines()
    assert re.fullmatch(r"acceptance length \d\.\d{3} tokens per round with a draft, at gamma \d", first)
    assert second.endswith("no interval: counters are sums over requests")
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
    counters = rise(tmp_path_factory.mktemp("pages"), *pages)
    every = [*one, *two]
    found = speculation(counters)
    assert (counters.engines, found.drafts) == (2, len(every))
    assert (found.drafted, found.accepted) == (sum(d for d, _ in every), sum(a for _, a in every))
    assert found.marginal == tuple(sum(a > place for _, a in every) / len(every) for place in range(gamma))


CONDITIONAL: tuple[tuple[Rounds, list[float], list[float | None], str], ...] = (
    ([(3, 3), (1, 1), (3, 0), (3, 0)], [0.5, 0.25, 0.25], [0.5, None, None], "n/a if some rounds drafted fewer tokens."),
    ([(3, 1), (3, 0)], [0.5, 0, 0], [0.5, 0, None], "n/a if no round accepted draft d - 1."),
)


@each(("rounds", "marginal", "conditional", "why"), CONDITIONAL)
def test_conditional_acceptance_is_not_always_known(
    rounds: Rounds, marginal: list[float], conditional: list[float | None], why: str, tmp_path: Path
) -> None:
    paths = saved(tmp_path, BEFORE, page({"0": [*WARM, *rounds]}))
    found = speculation(counted(paths))
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
SPLIT = "not from one server run"
REFUSED: dict[str, tuple[str | bytes, str | bytes, str]] = {
    "fell": (AFTER, BEFORE, SPLIT),
    "another model": (BEFORE, page({"0": LATER}, model="other"), SPLIT),
    "nothing": (AFTER, AFTER, "nothing was decoded between"),
    "two models": (BEFORE + page({"0": WARM}, model="other"), AFTER + page({"0": LATER}, model="other"), "count 2 models"),
    "no speculation": (OTHER_LINES, OTHER_LINES, "has no counter of vLLM"),
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


# Two pages of vLLM 0.32.0 on a CPU, with 40 requests of 21 prompt tokens and 60 written ones in between, 3 at a time.
GOLDEN = Path(__file__).parents[1] / "golden" / "vllm"
RECORDED = [GOLDEN / f"metrics-{number}.txt" for number in (0, 1)]


def test_a_server_without_speculation_shows_its_traffic() -> None:
    found = counted(RECORDED)
    assert found.speculation is None
    assert found.traffic is not None
    assert (found.traffic.requests, found.traffic.prompt_tokens, found.traffic.written_tokens) == (40, 21.0, 60.0)
    assert found.traffic.tokens_per_step == 1.0
    # 40 requests of 60 tokens, each of which some step wrote.
    assert found.traffic.sequences == pytest.approx(2400 / found.traffic.steps)
    assert 2.5 < (found.traffic.sequences or 0) < 3
    page = {line.split("{")[0].split()[0]: float(line.split()[-1]) for line in RECORDED[1].read_text().splitlines()}
    total, gaps = (page[f"vllm:inter_token_latency_seconds_{end}"] for end in ("sum", "count"))
    assert found.traffic.step_ms == pytest.approx(1e3 * total / gaps, rel=0.02)  # nearly all of the server's life
    lines = invoke("import", "prometheus", *RECORDED).stdout
    assert "--set decision.concurrency=3 --set costs.concurrency=3 --set costs.context=51" in lines


def test_windows_show_how_step_times_vary() -> None:
    first, last = read_pages([str(path) for path in RECORDED])
    middle = {key: (first[key] + last[key]) / 2 for key in first}
    key = next(key for key in middle if key[1] == "gap_sum")
    middle[key] = first[key] + 0.25 * (last[key] - first[key])
    found = counters_of([first, middle, last], 10.0).traffic
    assert found is not None
    assert found.slowest_ms == pytest.approx((0.5 * (found.step_ms or 0), 1.5 * (found.step_ms or 0)))


def test_at_most_two_pages_are_asked_for() -> None:
    code, text = failure(invoke("import", "prometheus", "one.txt", "two.txt", "three.txt"))
    assert (code, "expected an address, or 1 or 2 pages" in text) == (2, True)


@pytest.mark.loopback
def test_an_address_that_does_not_answer_is_refused() -> None:
    code, text = failure(invoke("import", "prometheus", "http://127.0.0.1:1"))
    assert (code, "http://127.0.0.1:1 does not answer" in text) == (4, True)
