"""Independent units against the slow way: a loop over documents that connects names one by one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from alphaprof.report.verdict import held_out
from alphaprof.totals.documents import Documents, Units, lots_of
from tests.loops import each

prompts_and_clusters = st.lists(
    st.tuples(st.sampled_from("abcdefgh"), st.sampled_from([None, None, *"uvwxyz"])), min_size=1, max_size=40
)


def slow_units(prompts: Sequence[str], clusters: Sequence[str | None]) -> list[str]:
    """The name of each document's unit: a loop over the documents that puts one name below another."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            name = parent[name]
        return name

    for prompt, cluster in zip(prompts, clusters, strict=True):
        if cluster is not None:
            parent[root(f"cluster {cluster}")] = root(prompt)
    return [root(prompt) for prompt in prompts]


def slow_lot(name: str) -> int:
    """The first 64 bits of a SHA-256: of the name, or the name itself."""
    digest = name if len(name) == 64 and set(name) <= set("0123456789abcdef") else hashlib.sha256(name.encode()).hexdigest()
    return int(digest, 16) >> 192


def slow_halves(clusters: dict[str, list[str]]) -> dict[str, list[bool]]:
    """Every second cluster in the order of domains and lot, by sorting names."""
    homes: dict[str, list[str]] = {}
    for domain in sorted(clusters):
        for cluster in set(clusters[domain]):
            homes.setdefault(cluster, []).append(domain)
    ordered = sorted(homes, key=lambda cluster: (homes[cluster], slow_lot(cluster)))
    kept_back = set(ordered[1::2])
    return {domain: [cluster in kept_back for cluster in members] for domain, members in clusters.items()}


@each("width", [1, 64])
@given(rows=prompts_and_clusters)
def test_units_are_those_of_a_loop_over_documents(width: int, rows: list[tuple[str, str | None]]) -> None:
    """Names included, of hashes and of other names: the halves that they are split into hang on them."""
    prompts = [prompt if width == 1 else hashlib.sha256(prompt.encode()).hexdigest() for prompt, _ in rows]
    clusters = [cluster for _, cluster in rows]
    table = pa.table({"prompt_hash": prompts, "cluster": pa.array(clusters, pa.string())})
    found = Units.of(table)
    names = found.names.values.to_pylist()
    assert [names[code] for code in found.codes] == slow_units(prompts, clusters)
    assert names == list(dict.fromkeys(prompts))
    assert found.lots.tolist() == [slow_lot(name) for name in slow_units(prompts, clusters)]


hashes = st.integers(0, 2**256 - 1).map(lambda number: f"{number:064x}")


@given(
    names=st.lists(hashes | hashes.map(str.upper) | st.text(max_size=9) | st.just("x" * 64) | st.just(" " * 64), max_size=8)
)
def test_what_a_name_draws_does_not_hang_on_the_others(names: list[str]) -> None:
    assert lots_of(names).tolist() == [int(lots_of([name])[0]) for name in names]
    lower = [name for name in names if name == name.lower()]
    assert lots_of(lower).tolist() == [slow_lot(name) for name in lower]


@given(st.dictionaries(st.sampled_from("abc"), st.lists(st.sampled_from("pqrstuvwxyz"), max_size=20), min_size=1))
def test_halves_are_those_of_sorted_names(clusters: dict[str, list[str]]) -> None:
    """Clusters that lie in several domains included."""
    found = held_out({domain: lots_of(names) for domain, names in clusters.items()})
    assert {domain: mask.tolist() for domain, mask in found.items()} == slow_halves(clusters)


kinds = st.tuples(
    st.sampled_from(["code", "chat"]),
    st.sampled_from(["greedy", "sampled"]),
    st.booleans(),
    st.sampled_from([None, 0.7, 1.0]),
)


def table(prompts: Sequence[str], sources: Sequence[int], domains: Sequence[str] | None = None) -> Documents:
    """Documents of prompts, from sources; without domains each source is one."""
    return Documents.of(
        pa.table(
            {
                "prompt_hash": pa.array([hashlib.sha256(prompt.encode()).hexdigest() for prompt in prompts]),
                "cluster": pa.array([None] * len(prompts), pa.string()),
                "source": pa.array(sources, pa.int32()),
                "domain": pa.array(list(domains or map(str, sources))),
            }
        )
    )


def test_domains_of_a_column_end_at_their_limit_each_by_itself() -> None:
    """Two documents of each domain were asked for: there was one of b, which is chance."""
    documents = table("abcdefg", [0, 0, 0, 0, 0, 1, 1], domains="xxyybzw")
    strata = documents.strata({0: 2})[documents.units.codes].tolist()
    assert strata[0] == strata[1]
    assert strata[2] == strata[3]
    assert strata[4] == strata[5] == strata[6]
    assert len(set(strata)) == 3


@each(
    ("sources", "domains", "strata"),
    [
        ([0, 0, 1, 1], "xxyy", 2),  # two files, a domain each
        ([0, 0, 1, 1], "xxxx", 2),  # of one domain
        ([0, 0, 0, 0], "xxxx", 1),  # one file is all that there is
        ([0, 0, 0, 0], "xxyy", 1),  # how many documents of it are of either domain is chance
        ([0, 0, 1, 1, 2, 2], "xyxyzz", 2),  # the same in two files, beside one of one domain
    ],
)
def test_a_source_that_is_one_domain_is_a_stratum(sources: list[int], domains: str, strata: int) -> None:
    """Read to its end, without a limit."""
    documents = table("abcdef"[: len(sources)], sources, domains)
    found = documents.strata({})[documents.units.codes].tolist()
    assert len(set(found)) == strata
    assert all(len({each for each, other in zip(found, sources, strict=True) if other == source}) == 1 for source in sources)


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 3)), min_size=1, max_size=30))
def test_strata_are_those_of_a_loop_over_units(rows: list[tuple[str, int]]) -> None:
    """Two units are of one stratum where their sets of sources are equal; of sources with two domains each, those without a
    limit count as one.
    """
    prompts, sources = [row[0] for row in rows] * 2, [row[1] for row in rows] * 2
    limits = {source: sources.count(source) // 2 for source in (0, 1) if source in sources}
    documents = table(prompts, sources, ["x"] * len(rows) + ["y"] * len(rows))
    strata = documents.strata(limits)[documents.units.codes].tolist()
    sets = {name: frozenset(s if s in limits else -1 for p, s in rows if p == name) for name in prompts}
    for first, one in zip(prompts, strata, strict=True):
        for second, other in zip(prompts, strata, strict=True):
            assert (one == other) == (sets[first] == sets[second])
