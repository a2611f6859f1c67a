"""A first look at vLLM's counters: what rose between two pages of /metrics, without an interval. The names and labels of the
pages are those of vLLM's source; the values are counted from rounds, one by one.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaprof.commands.first_look import Counters, first_look
from alphaprof.errors import AlphaprofError
from alphaprof.servers.pages import CountedRounds, read_pages, traffic_of
from alphaprof.servers.pages import counted as counted_in
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


def counted(paths: Sequence[Path]) -> Counters:
    return first_look([str(path) for path in paths])


def rise(folder: Path, before: str | bytes, after: str | bytes) -> Counters:
    return counted(saved(folder, before, after))


def speculation(counters: Counters) -> CountedRounds:
    assert counters.speculation is not None
    return counters.speculation


def test_what_rose_is_the_acceptance_of_the_rounds_in_between(tmp_path: Path) -> None:
    result = invoke("diagnose", *saved(tmp_path, BEFORE, AFTER), "--format", "json")
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
    result = invoke("diagnose", *saved(tmp_path, BEFORE, perfect), "--out", out)
    text = out.read_text()
    assert (result.exit_code, result.stdout) == (0, "")
    first, second, *_ = text.splitlines()
    assert re.fullmatch(r"acceptance length \d\.\d{3} tokens per round with a draft, at gamma \d", first)
    assert second.endswith("no interval: counters are sums over requests")
    assert "100,000 rounds with a draft, 300,000 of 300,000 drafted tokens accepted" in text
    assert "GO" not in text
    assert not (tmp_path / "manifest.json").exists()


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
    assert why in invoke("diagnose", *paths).stdout


DRAFTS = 'vllm:spec_decode_num_drafts_total{engine="0",model_name="served/target"} 45.0'
VARIANTS: dict[str, Callable[[str], str]] = {
    "no _total": lambda text: text.replace("_total{engine", "{engine"),
    "no _created": lambda text: "\n".join(line for line in text.splitlines() if "_created" not in line),
    "kinds": lambda text: text.replace(DRAFTS, f"# TYPE vllm:spec_decode_num_drafts_total counter\n{DRAFTS}"),
    "another order of labels": lambda text: text.replace(
        'engine="0",model_name="served/target"', 'model_name="served/target",engine="0"'
    ),
    "lines of Windows": lambda text: text.replace("\n", "\r\n"),
    "a mark of the byte order": lambda text: f"\ufeff{text}",
    "values that are no numbers": lambda text: (
        f"{text}\nvllm:iteration_tokens_total_count NaN\nvllm:spec_decode_num_drafts_total +Inf\n"
    ),
    "OpenMetrics": lambda text: text.replace(DRAFTS, f'{DRAFTS} # {{trace_id="a"}} 0.5 1.7e9') + "# EOF\n",
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
ENDLESS = ("drafts 1", "draft_tokens 1e15", "accepted_tokens 1", 'accepted_tokens_per_pos{position="0"} 1')
REFUSED: dict[str, tuple[str | bytes, str | bytes, str]] = {
    "fell": (AFTER, BEFORE, SPLIT),
    "another model": (BEFORE, page({"0": LATER}, model="other"), SPLIT),
    "nothing": (AFTER, AFTER, "nothing was decoded between"),
    "two models": (BEFORE + page({"0": WARM}, model="other"), AFTER + page({"0": LATER}, model="other"), "counts 2 models"),
    "no speculation": (OTHER_LINES, OTHER_LINES, "has no counter of vLLM"),
    "drafted too much": (BEFORE, edited(" 135.0", " 145.0"), "43 rounds drafted 139 tokens"),
    "accepted too often": (BEFORE, edited('position="1"} 4.0', 'position="1"} 9.0'), "contradict each other"),
    "more drafts than memory": (
        "llamacpp:spec_decode_num_drafts 0\n",
        "".join(f"llamacpp:spec_decode_num_{each}\n" for each in ENDLESS),
        "contradict each other",
    ),
    "cut off": (BEFORE, AFTER[: AFTER.rindex('"')], "after.txt is not a metrics page"),
    "cut off, and compressed": (BEFORE, gzip.compress(AFTER.encode())[:99], "is compressed, and damaged"),
    "bounds that are no numbers": (
        BEFORE,
        f'{AFTER}vllm:inter_token_latency_seconds_bucket{{le="x"}} 1\n',
        "not a metrics page",
    ),
}


@each(("before", "after", "words"), REFUSED.values())
def test_pages_that_say_nothing_together_are_refused(
    before: str | bytes, after: str | bytes, words: str, tmp_path: Path
) -> None:
    with pytest.raises(AlphaprofError) as found:
        rise(tmp_path, before, after)
    assert (found.value.exit_code, words in found.value.message) == (3, True)


def test_a_page_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.txt").write_text(BEFORE)
    for path in (tmp_path / "none.txt", tmp_path):
        code, text = failure(invoke("diagnose", tmp_path / "page.txt", path))
        assert (code, f"cannot read {path}" in text) == (3, True)


def test_a_model_name_means_nothing_but_itself(tmp_path: Path) -> None:
    name = "".join(text for text in HOSTILE.values()).replace("\r", "")
    model = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    paths = saved(tmp_path, page({"0": WARM}, model=model), page({"0": LATER}, model=model))
    text = invoke("diagnose", *paths).stdout
    assert all(char.isprintable() or char == "\n" for char in text)
    assert json.loads(invoke("diagnose", *paths, "--format", "json").stdout)["target"] == name


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
    lines = invoke("diagnose", *RECORDED).stdout
    assert "--set decision.concurrency=3 --set costs.concurrency=3 --set costs.context=51" in lines


def test_windows_show_how_step_times_vary() -> None:
    first, last = read_pages([str(path) for path in RECORDED])
    middle = {key: (first[key] + last[key]) / 2 for key in first}
    key = next(key for key in middle if key[1] == "gap_sum")
    middle[key] = first[key] + 0.25 * (last[key] - first[key])
    found = traffic_of(counted_in([first, middle, last], "pages"), 10.0)
    assert found is not None
    assert found.slowest_ms == pytest.approx((0.5 * (found.step_ms or 0), 1.5 * (found.step_ms or 0)))


def test_at_most_two_pages_are_asked_for() -> None:
    code, text = failure(invoke("diagnose", *RECORDED, RECORDED[0]))
    assert (code, "expected an address, or 1 or 2 pages" in text) == (2, True)


@pytest.mark.loopback
def test_an_address_that_does_not_answer_is_refused() -> None:
    code, text = failure(invoke("diagnose", "http://127.0.0.1:1"))
    assert (code, "http://127.0.0.1:1 does not answer" in text) == (4, True)


# Files of counts

LOG = "(APIServer pid=1) INFO 11-20 10:00:0{} [loggers.py:257] Engine 000: Running: 4 reqs, Waiting: 0 reqs\n{}"
# As SpecDecodingLogging of vLLM 0.32 wrote these rounds, and seven that drafted 3, 2, 1, 3, 3, 3, 2 tokens and accepted
# 2, 2, 0, 0, 3, 1, 0.
VLLM_LINES = (
    "INFO SpecDecoding metrics: Mean acceptance length: 1.23, Accepted throughput: 3194.57 tokens/s, Drafted throughput: "
    "41209.99 tokens/s, Accepted: 10 tokens, Drafted: 129 tokens, Per-position acceptance rate: 0.093, 0.070, 0.070, Avg "
    "Draft acceptance rate: 7.8%\n",
    "INFO SpecDecoding metrics: Mean acceptance length: 2.14, Accepted throughput: 307231.50 tokens/s, Drafted throughput: "
    "652866.93 tokens/s, Accepted: 8 tokens, Drafted: 17 tokens, Per-position acceptance rate: 0.571, 0.429, 0.143, Avg "
    "Draft acceptance rate: 47.1%\n",
)
EARLY = "INFO SpecDecoding metrics: Draft acceptance rate: 50.0%, Accepted: 6 tokens, Drafted: 12 tokens\n"
OLDEST = (
    "INFO Speculative metrics: Draft acceptance rate: 0.500, System efficiency: 0.600, Number of speculative tokens: 3, "
)
OLDEST += "Number of accepted tokens: {}, Number of draft tokens: {}, Number of emitted tokens: {}.\n"
BENCH = {"model_id": "m", "spec_decode_num_drafts": 43, "spec_decode_draft_tokens": 129, "spec_decode_accepted_tokens": 10}
BENCH |= {"spec_decode_per_position_acceptance_rates": [4 / 43, 3 / 43, 3 / 43]}
TIMINGS = {"prompt_n": 9, "predicted_n": 9, "draft_n": 12, "draft_n_accepted": 5}
LLAMA = "0.06 I slot print_timing: id 1 | task 0 | draft acceptance{} = 0.55000 (   11 accepted /    20 generated){}\n"
PLACED = ", mean acceptance length =  2.10, acceptance rate per position = (0.700, 0.400)"
FINISH = "[2026] Finish: obj=GenerateReqInput(rid='r'), out={'meta_info': {'completion_tokens': 16, 'spec_verify_ct': 6}}\n"
USAGE = {"completion_tokens": 9}
USAGE |= {"completion_tokens_details": {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 7}}  # type: ignore[dict-item]
TRT = {"perf_metrics": {"speculative_decoding": {"total_accepted_draft_tokens": 5, "total_draft_tokens": 12}}}
# Server, rounds, drafted and accepted tokens, and how many rounds accepted each depth.
FILES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "vLLM's log": (LOG.format(0, VLLM_LINES[0]) + LOG.format(1, VLLM_LINES[1]), ("vLLM", 50, 146, 18, [8, 6, 4])),
    "its earlier form": (LOG.format(0, EARLY) + LOG.format(1, EARLY), ("vLLM", None, 24, 12, [])),
    "V0's log, which counts from the start": (OLDEST.format(1, 6, 3) + OLDEST.format(6, 12, 10), ("vLLM", 4, 12, 6, [])),
    "vllm bench serve": (json.dumps(BENCH, indent=1), ("vLLM", 43, 129, 10, [4, 3, 3])),
    "llama.cpp's log": (LLAMA.format("", PLACED) * 2, ("llama.cpp", 20, 40, 22, [14, 8])),
    "its earlier log": (LLAMA.format(" rate", ""), ("llama.cpp", None, 20, 11, [])),
    "llama.cpp's answers": ((json.dumps({"id": "a", "timings": TIMINGS}) + "\n") * 2, ("llama.cpp", 8, 24, 10, [])),
    "numbers that end in others": (
        FINISH.replace("6}}", "6.0.1}}"),
        ("SGLang", 6, None, 9, []),
    ),
    "small shares": (
        json.dumps(BENCH | {"spec_decode_per_position_acceptance_rates": [10 / 43, 1e-05, 0.0]}),
        ("vLLM", 43, 129, 10, [10, 0, 0]),
    ),
    "those of mlx-vlm": (json.dumps({"timings": TIMINGS | {"draft_rounds": 4}}), ("llama.cpp", 4, 12, 5, [])),
    "SGLang's log": (FINISH * 2, ("SGLang", 12, None, 18, [])),
    "old answers of SGLang": (
        json.dumps({"meta_info": {"spec_verify_ct": 6, "completion_tokens": 16}}),
        ("SGLang", 6, None, 9, []),
    ),
    "tabbyAPI": (json.dumps({"usage": USAGE}), ("an OpenAI server", 3, 12, 5, [])),
    "TensorRT-LLM": (json.dumps(TRT) + "\n" + json.dumps(TRT), ("TensorRT-LLM", None, 24, 10, [])),
}


@each("text, known", FILES.values(), ids=FILES)
@each("packed", [False, True])
def test_files_of_counts_are_read(text: str, known: tuple[Any, ...], packed: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    found = counted([path])
    rounds = speculation(found)
    server, drafts, drafted, accepted, depths = known
    assert (found.server, rounds.drafts, rounds.drafted, rounds.accepted) == (server, drafts, drafted, accepted)
    assert [share * (drafts or 0) for share in rounds.marginal] == pytest.approx(depths, abs=0.02)  # logs round
    length = None if drafts is None else 1 + accepted / drafts
    assert rounds.acceptance_length == (None if length is None else pytest.approx(length))
    words = "acceptance length unknown" if length is None else f"acceptance length {length:.3f} tokens per round"
    assert words in invoke("diagnose", path).stdout


def test_rounds_without_a_draft_do_not_tell_gamma(tmp_path: Path) -> None:
    """25 rounds of 75 drafted tokens may have been up to 3 or to 16 at a time."""
    path = tmp_path / "file"
    path.write_text(json.dumps({"timings": {"predicted_n": 61, "draft_n": 75, "draft_n_accepted": 36}}))
    found = speculation(counted([path]))
    assert (found.gamma, found.drafts, found.acceptance_length) == (None, 25, 2.44)
    assert "gamma" not in invoke("diagnose", path).stdout.splitlines()[0]


@each(
    "content",
    ["SpecDecoding metrics: Accepted: " * 500_000, "emitted tokens: speculative tokens: 1, " * 200_000, "[" * 200_000],
)
def test_long_lines_and_deep_ones_are_read_once(content: str, tmp_path: Path) -> None:
    """In the square of their length they would take hours."""
    path = tmp_path / "file"
    path.write_text(content)
    assert failure(invoke("diagnose", path))[0] == 3


def test_a_text_that_only_mentions_a_format_is_not_taken_for_it(tmp_path: Path) -> None:
    told = json.dumps({"content": json.dumps({"timings": TIMINGS}) + FINISH.replace("'", '"')})
    path = tmp_path / "file"
    path.write_text(told)
    code, text = failure(invoke("diagnose", path))
    assert (code, "holds JSON, not a metrics page" in text) == (3, True)


# Pages of several servers, and of other engines


def labelled(text: str, **labels: str) -> str:
    """A page as a federation serves it."""
    more = "".join(f',{name}="{value}"' for name, value in labels.items())
    return text.replace('model_name="served/target"', f'model_name="served/target"{more}')


def test_one_of_several_servers_is_asked_for_by_label(tmp_path: Path) -> None:
    first, second = (labelled(AFTER, job="llm", instance=f"{host}:8000") for host in ("a", "b"))
    other = page({"0": WARM}, model="other")
    path = saved(tmp_path, first + second, first + other)
    code, text = failure(invoke("diagnose", path[0]))
    assert (code, "2 instances: a:8000, b:8000" in text, "--label instance=a:8000" in text) == (3, True, True)
    code, text = failure(invoke("diagnose", path[1]))
    assert (code, "2 models: other, served/target" in text) == (3, True)

    def rounds(place: Path, *labels: str) -> int:
        asked = [word for label in labels for word in ("--label", label)]
        answer = json.loads(invoke("diagnose", place, *asked, "--format", "json").stdout)
        return int(answer["speculation"]["drafts"])

    assert rounds(path[0], "instance=a:8000") == len(LATER)
    assert rounds(path[0], "instance=a:8000", "instance=b:8000") == 2 * len(LATER)
    assert rounds(path[1], "model_name=other") == len(WARM)
    for label, words in (("model_name=none", "the pages have engine=0"), ("model_name", "has no value")):
        code, text = failure(invoke("diagnose", path[1], "--label", label))
        assert (code, words in text) == (2, True)


def test_counters_that_were_reset_count_from_then_on_and_it_is_said(tmp_path: Path) -> None:
    """Engine 1 restarts between the pages, and has made fewer rounds since, or more."""
    for made in (1, 20):
        before = page({"0": WARM, "1": WARM})
        after = page({"0": LATER}) + page({"1": [(3, 3)] * made}, created=1.8e9)
        paths = saved(tmp_path, before, after)
        found = counted(paths)
        assert (speculation(found).drafts, len(found.reset)) == (len(ROUNDS) + made, 1)
        assert "counters of 1 served/target were reset between" in invoke("diagnose", *paths).stdout


def test_a_second_page_without_times_of_creation_is_of_the_same_server(tmp_path: Path) -> None:
    paths = saved(tmp_path, BEFORE, VARIANTS["no _created"](AFTER) + "\n")
    assert (speculation(counted(paths)).drafts, counted(paths).reset) == (len(ROUNDS), ())


def test_a_file_may_be_called_as_an_address_and_a_counter_as_a_field_of_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("http.txt").write_text(AFTER + 'sglang:spec_accept_histogram_bucket{le="1"} 0\n')
    assert speculation(counted([Path("http.txt")])).drafts == len(LATER)


def test_other_engines_and_names_are_read(tmp_path: Path) -> None:
    """llama.cpp counts positions that occurred; Ray writes each counter twice; V0 counts what rounds emitted."""
    counts = {"num_draft_tokens_total": 30, "num_accepted_tokens_total": 14}
    lines = {
        engine: "".join(f"{engine}spec_decode_{name} {count}\n" for name, count in counts.items())
        for engine in ("llamacpp:", "vllm:", "ray_vllm_")
    }
    places = 'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 14\n'
    twice = lines["ray_vllm_"] + lines["ray_vllm_"].replace("_total", "") + "ray_vllm_spec_decode_num_drafts_total 10\n"
    sglang = 'sglang:spec_accept_length{model_name="m"} 2.4\nsglang:generation_tokens_total{model_name="m"} 28\n'
    gaps = "".join(
        f'sglang:inter_token_latency_seconds_{end}{{model_name="m"}} {n}\n' for end, n in (("count", 24), ("sum", 0.24))
    )
    rounds = 'sglang:spec_verify_calls_total{model_name="m"} 10\nsglang:num_requests_total{model_name="m"} 4\n'
    for name, text, known in (
        ("llama.cpp", lines["llamacpp:"] + places + "llamacpp:spec_decode_num_drafts_total 20\n", (2, 20, 30, [0.7, 0.0])),
        ("vLLM", twice, (3, 10, 30, [])),
        ("vLLM", lines["vllm:"] + "vllm:spec_decode_num_emitted_tokens_total 24\n", (3, 10, 30, [])),
        ("vLLM", lines["vllm:"], (None, None, 30, [])),
        ("SGLang", sglang + gaps + rounds, (None, 10, None, [])),
    ):
        path = tmp_path / "page.txt"
        path.write_text(text)
        found = counted([path])
        counted_rounds = speculation(found)
        assert (found.server, counted_rounds.accepted) == (name, 14)
        assert (counted_rounds.gamma, counted_rounds.drafts, counted_rounds.drafted, list(counted_rounds.marginal)) == known
        assert (found.traffic.step_ms if found.traffic else None) == (10.0 if name == "SGLang" else None)
        assert found.traffic is None or found.traffic.prompt_tokens is None  # requests are counted, and not their tokens
    path.write_text(lines["vllm:"])
    assert "rounds are not counted here (no vllm:spec_decode_num_drafts_total)" in invoke("diagnose", path).stdout
    path.write_text(sglang + gaps)
    code, text = failure(invoke("diagnose", path))
    assert (code, "has no sglang:spec_verify_calls_total" in text, "import logged requests" in text) == (3, True, True)
