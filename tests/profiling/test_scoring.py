"""The scoring pass: every column is that of the right token, row, model and position, whatever the batch."""

from __future__ import annotations

import contextlib
import copy
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from alphaprof.config.options import ModelDraft
from alphaprof.errors import LogitsNotFinite, ModelUnloadable, VocabularyMismatch
from alphaprof.profiling.models import load as models
from alphaprof.profiling.models.identity import check_vocabulary, token_count
from alphaprof.profiling.models.kinds import DraftModel, PromptLookup, check_tokenizers, layer_skip
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.processing import PLAIN, Processing
from alphaprof.profiling.models.teacher_forced import TeacherForced
from alphaprof.profiling.scoring.scorer import Extras, Layout, Scorer, by_document, position_table
from alphaprof.profiling.scoring.statistics import Columns
from alphaprof.profiling.texts.continuations import Continuation
from alphaprof.profiling.texts.corpus import Document
from alphaprof.run.schema import LogRules
from tests import reference
from tests.loops import each
from tests.reference import LOGGED_RULES
from tests.tiny import llama, noisy, tokenizer

pytestmark = pytest.mark.models
TOKENS = 260
LOOKUP: dict[str, bool] = {"has_distribution": False, "starts_matter": True}  # what its log holds


def model(name: str, network: Any) -> Model:
    return DraftModel(name, network, "model", name)


def continuation(
    number: int, prompt: int, length: int, domain: str = "a", processing: Processing | None = None
) -> Continuation:
    """A document of random tokens."""
    ids = np.random.default_rng(number).integers(0, 250, prompt + length).astype(np.int32)
    kind = "greedy" if processing is None else "sampled"
    document = Document(number, domain, None, 0, number, ids[:prompt], None, False, length, kind, True, processing)
    return Continuation(document, ids[prompt:], "length")


def batch_of(settings: Processing | None = None) -> list[Continuation]:
    """Documents of all shapes; of sampled text the target keeps half of the tokens or so."""
    shapes = ((0, 5, 7), (1, 1, 12), (2, 30, 3), (3, 2, 1))
    return [continuation(number, prompt, length, processing=settings) for number, prompt, length in shapes]


BATCH = batch_of()


@pytest.fixture(scope="module")
def target() -> Model:
    return model("target", llama())


@pytest.fixture(scope="module")
def draft(target: Model) -> Model:
    return model("draft", noisy(target.network, 0.05))


def logits_alone(network: Any, item: Continuation) -> np.ndarray:
    """Logits [positions, vocabulary] of a document, by the plain forward of the document alone."""
    ids = torch.from_numpy(np.concatenate([item.document.prompt, item.ids[:-1]]).astype(np.int64))
    with torch.inference_mode():
        logits = network(input_ids=ids[None], attention_mask=torch.ones(1, len(ids), dtype=torch.long)).logits[0]
    return logits[len(item.document.prompt) - 1 :].double().numpy()


def assert_equal(
    found: dict[str, np.ndarray],
    target: Model,
    draft: Model,
    item: Continuation,
    upto: int | None = None,
    draft_settings: Processing | None = None,
) -> None:
    """The columns of one document, or of its first positions, against the reference."""
    ours, theirs = logits_alone(target.network, item), logits_alone(draft.network, item)
    for place, token in enumerate(item.ids[:upto]):
        expected = reference.columns(ours[place], theirs[place], int(token), item.document.processing, draft_settings)
        got = {name: float(found[name][place]) for name in expected}
        assert got == pytest.approx(expected, abs=2e-5, rel=2e-5), f"document {item.document.document} position {place}"
        assert int(found["token"][place]) == token


def test_a_head_that_looks_at_other_tokens_is_not_run_in_chunks(target: Model) -> None:
    class Mixing(type(target.network)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits + output.logits.cumsum(1)
            return output

    network = Mixing(target.network.config)
    network.load_state_dict(target.network.state_dict())
    assert not TeacherForced(model("target", network.eval())).chunked


def test_beyond_its_context_a_draft_proposes_nothing_and_no_row_is_missing(target: Model) -> None:
    short = model("short", noisy(target.network, 0.05))
    short.network.config.max_position_embeddings = 24
    item = continuation(9, 20, 10)
    scored = by_document([item], Scorer(target, [short], TOKENS).score([item])["short"])
    # Position t is predicted from 20 + t tokens: the draft can until t = 4, and a round there drafts one token.
    assert scored[9]["proposed"].tolist() == [5, 4, 3, 2, 1, 0, 0, 0, 0, 0]
    table = position_table([item], scored, LogRules(("strict",)), "short").to_pandas()
    assert len(table) == 10
    draft_side = ["draft_top", "overlap", "kl_target_draft", "accept_strict", "draft_rank_of_token"]
    assert table.loc[5:, draft_side].isna().all().all()
    assert table.loc[:4, draft_side].notna().all().all()
    assert table[["target_top", "target_entropy", "token"]].notna().all().all()


class Poisoned(torch.nn.Module):
    """A head whose logits above a limit become NaN."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.head, self.limit = head, np.inf

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden)
        return torch.where(logits > self.limit, torch.nan, logits)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_bad_logits_stop_the_run_and_name_document_position_and_model(target: Model, draft: Model, name: str) -> None:
    models = {"target": target, "draft": draft}
    network = copy.deepcopy(models[name].network)
    network.lm_head = Poisoned(network.lm_head)
    models[name] = model(name, network)
    scorer = Scorer(models["target"], [models["draft"]], TOKENS)
    largest = logits_alone(network, BATCH[1]).max(1)
    worst = int(largest.argmax())
    network.lm_head.limit = largest[worst] - 1e-3
    with pytest.raises(LogitsNotFinite, match=rf"logits of {name} .* document 1, position {worst}$"):
        scorer.score([continuation(0, 5, 1), BATCH[1]])


def test_equal_vocabularies_pass_and_another_one_is_named_token_by_token() -> None:
    """Tokens that only one side has are no mismatch."""
    larger = tokenizer()
    larger.add_tokens(["<tool>"])
    check_vocabulary(larger, tokenizer(), "draft")
    check_vocabulary(tokenizer(), larger, "draft")
    assert token_count(tokenizer()) == TOKENS
    with pytest.raises(VocabularyMismatch, match=r"256 of 260 ids differ \(target / draft id 0: '!' / '&'"):
        check_vocabulary(tokenizer(), tokenizer(shift=5), "draft")


def renamed(names: dict[str, str], shift: int = 0) -> PreTrainedTokenizerFast:
    """A tokenizer with other names for some tokens."""
    text = tokenizer(shift).backend_tokenizer.to_str()
    for old, new in names.items():
        text = text.replace(json.dumps(old), json.dumps(new))
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text))


def test_special_tokens_may_have_other_names_if_the_profile_says_so() -> None:
    """Only those: a letter that differs, alone or beside them, is another vocabulary whatever the profile says."""
    special = {"<user>": "<human>", "<model>": "<answer>"}
    with pytest.raises(VocabularyMismatch, match=r"2 of 260 ids differ .* '<user>' / '<human>'") as caught:
        check_vocabulary(tokenizer(), renamed(special), "draft")
    assert "set special_tokens: any" in caught.value.hint
    check_vocabulary(tokenizer(), renamed(special), "draft", "any")
    check_vocabulary(tokenizer(), tokenizer(), "draft", "any")
    for other, count in ((tokenizer(shift=1), 256), (renamed(special, shift=1), 258)):
        with pytest.raises(VocabularyMismatch, match=f"{count} of 260") as caught:
            check_vocabulary(tokenizer(), other, "draft", "any")
        assert "special_tokens" not in caught.value.hint


def test_the_option_of_a_draft_decides_which_tokenizers_fit(tmp_path: Path) -> None:
    renamed({"<user>": "<human>"}).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for said, refused in (("same", True), ("any", False)):
        draft = ModelDraft(kind="model", model=str(tmp_path), special_tokens=said)  # type: ignore[arg-type]
        with pytest.raises(VocabularyMismatch) if refused else contextlib.nullcontext():
            check_tokenizers(SimpleNamespace(drafts={"small": draft}), tokenizer())  # type: ignore[arg-type]


def test_layers_that_do_not_exist_or_all_of_them_cannot_be_dropped(target: Model) -> None:
    for dropped in ([4], [0, 1, 2, 3]):
        with pytest.raises(ModelUnloadable, match="does not fit a target with 4 layers"):
            layer_skip("skip", target, dropped)
    network = copy.deepcopy(target.network)
    network.model.layers[0]._hf_hook = object()
    with pytest.raises(ModelUnloadable, match="layers cannot be left out"):
        layer_skip("skip", model("target", network), [1])


def test_devices_that_nothing_waits_for_are_refused() -> None:
    """torch makes tensors on `meta` everywhere; it stands for all devices whose step times would be those of launches."""
    assert models.choose_device("cpu") == torch.device("cpu")
    for device, reason in (("meta", "models run on CPUs and on GPUs"), ("gpu", "")):
        with pytest.raises(ModelUnloadable, match=f"device '{device}' cannot be used: {reason}"):
            models.choose_device(device)


def test_a_draft_with_learned_positions_is_never_fed_more_than_its_context(target: Model) -> None:
    torch.manual_seed(2)
    settings = GPT2Config(
        vocab_size=260, n_positions=24, n_embd=32, n_layer=2, n_head=2, eos_token_id=256, bos_token_id=None
    )
    draft = model("short", GPT2LMHeadModel(settings).eval())
    items = [continuation(9, 20, 10), continuation(10, 2, 4)]
    found = by_document(items, Scorer(target, [draft], TOKENS).score(items)["short"])
    assert found[9]["proposed"].tolist() == [5, 4, 3, 2, 1, 0, 0, 0, 0, 0]
    covered = Continuation(items[0].document, items[0].ids[:5], "length")
    assert_equal({name: values[:5] for name, values in found[9].items()}, target, draft, covered)
    assert_equal(found[10], target, draft, items[1])


def test_behind_a_token_that_the_draft_does_not_have_it_proposes_nothing(target: Model) -> None:
    small = llama(vocabulary=250, pad_token_id=249, eos_token_id=248)
    item = continuation(9, 6, 8)
    item.document.prompt[:], item.ids[:] = item.document.prompt % 200, item.ids % 200
    item.ids[3] = 255  # fed to the draft from position 4 on
    scored = by_document([item], Scorer(target, [model("small", small)], TOKENS).score([item])["small"])
    assert scored[9]["proposed"].tolist() == [4, 3, 2, 1, 0, 0, 0, 0]
    assert scored[9]["draft_token_prob"][3] == 0.0
    known = Continuation(item.document, item.ids[:4], "length")
    assert_equal({name: values[:3] for name, values in scored[9].items()}, target, model("small", small), known, upto=3)


def test_ids_of_a_reduced_vocabulary_go_where_the_logits_are(target: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """`device_map` puts a target's last layer on another device than its first, where the ids lie. Tensors without data
    stand for both, of a kind of device that need not be there.
    """
    scoring = "alphaprof.profiling.scoring.scorer.measured"
    monkeypatch.setattr(scoring, lambda shared, *_: [{"shared": each} for each in shared])
    scorer = Scorer(target, [], target.vocabulary, "same", Extras(drawn=("lossless", "block")))
    with FakeTensorMode():
        scorer.ids = [torch.tensor([0, 2, 3, 5], device="xla")]
        logits, drafted, token = torch.zeros((6, scorer.width)), torch.zeros((6, 4)), torch.zeros(6, dtype=torch.long)
        head = SimpleNamespace(depths=2, reduced=True, logits=lambda rows, depth: torch.zeros((6, 4), device="xla"))
        scorer.drafts = [head]  # type: ignore[list-item]
        columns = scorer._statistics(logits, [drafted], [token], PLAIN)
        deeper = scorer._deeper(logits, 0, drafted, token, Processing(0.7))
    assert {each["shared"].device.type for each in columns} == {each.device.type for each in deeper.values()} == {"cpu"}
    assert {"agrees_2", "accept_block_2", "emitted_lossless_2"} <= set(deeper)


def test_a_model_that_device_map_spreads_makes_its_logits_a_few_rows_at_a_time_too(target: Model) -> None:
    """As accelerate prepares it, here with all parts on one device; the full forward would make those of whole documents."""
    accelerate = pytest.importorskip("accelerate")
    parts = {
        "model.embed_tokens": "cpu",
        "model.layers": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    network = accelerate.dispatch_model(copy.deepcopy(target.network), parts, force_hooks=True)
    assert network._hf_hook is not None
    layout = Layout.of(BATCH)
    spread, whole = TeacherForced(model("target", network)), TeacherForced(target)
    assert spread.chunked
    rows = [head.rows(layout.ids, layout.row, layout.column) for head in (spread, whole)]
    assert torch.equal(spread.logits(rows[0]), whole.logits(rows[1]))


SETTINGS = [
    PLAIN,
    Processing(0.4),
    Processing(1.8, 0, 0.9),
    Processing(1.0, 5),
    Processing(1.5, 30, 0.8, 0.1),
    Processing(1.0, 1),
]


WAYS: list[tuple[Processing | None, str, int]] = [(None, "same", rows) for rows in (1, 5, 128)]
WAYS += [(settings, way, 5) for settings in SETTINGS for way in ("same", "temperature")]


@each(("settings", "draft_processing", "head_rows"), WAYS)
def test_columns_of_a_padded_batch_are_those_of_each_documents_processed_distributions(
    target: Model, draft: Model, settings: Processing | None, draft_processing: str, head_rows: int
) -> None:
    batch = batch_of(settings)
    scorer = Scorer(target, [draft], TOKENS, draft_processing)
    scorer.head_rows, scorer.statistics_rows = head_rows, 3
    assert scorer.target.chunked
    assert scorer.drafts[0].chunked
    found = by_document(batch, scorer.score(batch)["draft"])
    chosen = settings if settings is None or draft_processing == "same" else Processing(settings.temperature)
    for item in batch:
        assert_equal(found[item.document.document], target, draft, item, draft_settings=chosen)


@each("draft_processing", ["same", "temperature"])
@each("settings", [None, *SETTINGS])
def test_acceptance_of_every_default_rule_is_that_of_the_whole_distributions(
    target: Model, draft: Model, settings: Processing | None, draft_processing: str
) -> None:
    batch = batch_of(settings)
    scored = by_document(batch, Scorer(target, [draft], TOKENS, draft_processing).score(batch)["draft"])
    table = position_table(batch, scored, LogRules(LOGGED_RULES), "draft").to_pandas()
    for item in batch:
        rows = table[table["document"] == item.document.document].to_dict("records")
        logits = zip(logits_alone(target.network, item), logits_alone(draft.network, item), strict=True)
        for row, (ours, theirs), token in zip(rows, logits, item.ids, strict=True):
            chosen = settings if settings is None or draft_processing == "same" else Processing(settings.temperature)
            p, q = reference.processed(ours, settings), reference.processed(theirs, chosen)
            reference_top = int(token) if settings is None else int(np.argmax(ours))
            before = reference.rank(ours, int(np.argmax(theirs))) - 1
            expected = reference.accepted(p, q, reference_top, int(np.argmax(theirs)), before)
            assert set(expected) == set(LOGGED_RULES)
            assert {rule: row[f"accept_{rule}"] for rule in expected} == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("settings", [None, PLAIN, Processing(1.5, 30, 0.8, 0.1)], ids=str)
def test_columns_of_prompt_lookup_are_the_targets_view_of_its_proposals(
    target: Model, draft: Model, settings: Processing | None
) -> None:
    text = np.tile([7, 8, 9, 10, 8, 11], 5).astype(np.int32)
    documents = [
        Document(number, "a", None, 0, 0, text[number : 8 + number], None, False, 9, "sampled", True, settings)
        for number in range(3)
    ]
    batch = [Continuation(item, text[8 + number : 17 + number], "length") for number, item in enumerate(documents)]
    lookup = PromptLookup("ngram", 2, (256,), TOKENS, "float32")
    scores = Scorer(target, [draft, lookup], TOKENS).score(batch)
    assert list(scores) == ["draft", "ngram"]
    table = position_table(batch, by_document(batch, scores["ngram"]), LogRules(LOGGED_RULES), "ngram", **LOOKUP).to_pandas()
    for item in batch:
        found = table[table["document"] == item.document.document].reset_index(drop=True)
        expected = lookup.columns(np.concatenate([item.document.prompt, item.ids]), len(item.document.prompt))
        for place, logits in enumerate(logits_alone(target.network, item)):
            p, first = reference.processed(logits, settings), int(expected["draft_top"][place])
            assert found["proposed"][place] == expected["proposed"][place]
            assert found["accepted_run"][place] == expected["accepted_run"][place]
            assert found["draft_top"][place] == first
            assert found["target_prob_of_draft_top"][place] == pytest.approx(p[first], abs=2e-5)
            assert found["target_rank_of_draft_top"][place] == reference.rank(logits, first)
            assert found["accept_one_hot"][place] == found["accept_lossless"][place] == pytest.approx(p[first], abs=2e-5)
            assert found["target_entropy"][place] == pytest.approx(-reference.kl(p, np.ones(len(p))), abs=2e-5)
    without = ["draft_top_prob", "draft_entropy", "draft_token_prob", "overlap", "kl_target_draft", "draft_rank_of_token"]
    assert table[without].isna().all().all()


@each("name", ["kl_draft_target", "draft_top", "target_entropy", "threshold_strict", "accepted_run"])
def test_a_declared_column_that_scoring_does_not_deliver_is_an_error_for_every_draft_that_can_have_it(
    target: Model, draft: Model, name: str
) -> None:
    """Nullable or not: nulls would say that there is no such value."""
    extras = Extras.of(["strict"], certificates=True)
    scored = Scorer(target, [draft, PromptLookup("ngram", 1, (), TOKENS, "float32")], TOKENS, extras=extras).score(BATCH)
    rules = extras.log_rules(["strict"])
    for each_draft, flags in (("draft", {}), ("ngram", LOOKUP)):
        whole = by_document(BATCH, scored[each_draft])
        assert len(position_table(BATCH, whole, rules, each_draft, **flags)) == 23
        less = {number: {key: values for key, values in part.items() if key != name} for number, part in whole.items()}
        if (each_draft, name) in (("ngram", "kl_draft_target"), ("draft", "accepted_run")):
            assert position_table(BATCH, less, rules, each_draft, **flags)[name].null_count == 23
        else:
            with pytest.raises(KeyError, match=name):
                position_table(BATCH, less, rules, each_draft, **flags)


class PretendedGpu(TorchDispatchMode):
    """Takes the device `meta` for a GPU. Reading a value there fails by itself (item, nonzero, masks as indices, .cpu()).

    This notes what else a GPU would stumble over: `mixed`, operations on tensors of both devices; `waited`, copies that wait
    for all that the device was given before, since a model ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running = False
        self.mixed: list[str] = []
        self.waited: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
        found = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        self.running = self.running or name == "linear"
        if name in ("to", "_to_copy", "copy_"):
            crosses = tensors[-1].device != found.device
            if crosses and self.running and not kwargs.get("non_blocking"):
                self.waited.append(tuple(found.shape))
        elif len({item.device for item in tensors if item.dim()}) > 1:
            self.mixed.append(name)
        return found


def test_what_a_gpu_would_wait_for_is_noticed() -> None:
    """Each of these, so that the next test can fail."""
    values, mode = torch.ones(3, device="meta"), PretendedGpu()
    with torch.inference_mode(), mode:
        for look in (
            *(lambda: values[0].item(), lambda: float(values.sum()), lambda: bool((values > 0).all()), values.tolist),
            *(lambda: values[values > 0], lambda: torch.where(values > 0), lambda: values.unique(), values.cpu),
        ):
            with pytest.raises((RuntimeError, NotImplementedError)):
                look()
        host = torch.zeros(3, dtype=torch.long)
        host.to("meta")
        assert mode.waited == []  # no model has run
        torch.nn.functional.linear(values, values[None])
        host.to("meta", non_blocking=True)
        assert mode.waited == []
        host.to("meta")
        values[host]
    assert (mode.waited, mode.mixed) == ([(3,)], ["index"])


class Crossed(Exception):
    """The columns of a batch are on their way to the host."""


def crossing(patch: pytest.MonkeyPatch, made: Callable[[], Scorer], batch: list[Continuation]) -> list[Columns]:
    """The columns that a scorer has made on a pretended GPU when they cross to the host at once; nothing waited before."""
    found: list[list[Columns]] = []

    def cross(groups: list[Columns]) -> None:
        found.append(groups)
        raise Crossed

    patch.setattr("alphaprof.profiling.models.teacher_forced._reproduces", lambda *_: True)
    patch.setattr("alphaprof.profiling.scoring.scorer._to_host", cross)
    # transformers itself looks at its position ids before a model runs.
    patch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    scorer, mode = made(), PretendedGpu()
    with mode, pytest.raises(Crossed):
        scorer.score(batch)
    assert (mode.running, mode.waited, mode.mixed) == (True, [], [])
    return found[0]


@pytest.mark.parametrize("settings", [None, Processing(0.4), Processing(1.5, 30, 0.8, 0.1)], ids=str)
def test_columns_on_a_gpu_are_made_on_it_and_nothing_waits_before_they_cross_at_once(
    target: Model, draft: Model, settings: Processing | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(settings)
    requested = Extras.of(LOGGED_RULES, certificates=True)
    there = [model(item.name, copy.deepcopy(item.network).to("meta")) for item in (target, draft)]
    lookup = PromptLookup("ngram", 2, (256,), TOKENS, "float32")

    def made() -> Scorer:
        scorer = Scorer(there[0], [there[1], lookup], TOKENS, extras=requested)
        scorer.head_rows, scorer.statistics_rows = 5, 3
        return scorer

    columns = [column for group in crossing(monkeypatch, made, batch) for column in group.values()]
    assert {column.device.type for column in columns} == {"meta"}
    assert {len(column) for column in columns} == {sum(len(item.ids) for item in batch)}


def test_logits_are_freed_before_the_next_are_made(target: Model, draft: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of HEAD_ROWS rows of every model are alive at a time, not twice as many."""
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    logits = TeacherForced.logits

    def spy(forced: TeacherForced, rows: torch.Tensor, depth: int = 1) -> torch.Tensor:
        alive.append(sum(one() is not None for one in made))
        found = logits(forced, rows, depth)
        made.append(weakref.ref(found))
        return found

    scorer = Scorer(target, [draft], TOKENS)
    scorer.head_rows = 5
    monkeypatch.setattr(TeacherForced, "logits", spy)
    scorer.score(BATCH)
    assert alive == [0, 1] * 5
