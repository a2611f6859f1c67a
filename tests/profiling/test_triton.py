"""The GPU's kernels against float64 and `statistics`: on a GPU where there is one, else in Triton's interpreter (NumPy).

The interpreter takes a second for a row of 50,000 ids, so there are few rows. That kernels compile is a test of its own.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from alphaprof.profiling.models.processing import PLAIN, Processing, processed
from alphaprof.profiling.scoring.statistics import (
    Columns,
    ProcessedLogits,
    distribution,
    draft_columns,
    proposal_columns,
    target_columns,
)
from tests import reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if importlib.util.find_spec("triton") is None:
    if os.environ.get("CI") and sys.platform == "linux":
        pytest.fail("triton is not installed: pip install -e '.[dev]'", pytrace=False)
    pytest.skip("triton is not installed", allow_module_level=True)
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("torch sees no GPU: set TRITON_INTERPRET=1", allow_module_level=True)

from alphaprof.profiling.scoring.gpu_statistics import BLOCK, measured  # noqa: E402  # not before triton is known to be there
from tests.loops import each  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@dataclass(frozen=True)
class Case:
    """Logits [n, V] on the CPU, what came next and what a lookup proposes."""

    target: torch.Tensor
    draft: torch.Tensor
    token: torch.Tensor
    proposal: torch.Tensor

    @classmethod
    def random(cls, rows: int, width: int, draft: int | None = None, dtype: torch.dtype = torch.float32) -> Case:
        """A draft near its target."""
        generator = torch.Generator().manual_seed(width)
        common = 4 * torch.randn(rows, max(width, draft or 0), generator=generator)
        near = common + torch.randn(common.shape, generator=generator)
        token, proposal = torch.randint(0, width, (2, rows), generator=generator)
        return cls(common[:, :width].to(dtype), near[:, : draft or width].to(dtype), token, proposal)


def wide(logits: torch.Tensor, padding: int) -> torch.Tensor:
    """The logits as columns of a wider matrix, whose other columns are NaN."""
    found = torch.full((len(logits), logits.shape[1] + padding), torch.nan, dtype=logits.dtype, device=DEVICE)
    found[:, : logits.shape[1]] = logits
    return found[:, : logits.shape[1]]


def side(logits: torch.Tensor, settings: Processing = PLAIN, padding: int = 0) -> ProcessedLogits:
    """Logits with the least of what truncation keeps."""
    scaled, kept = processed(logits, settings)
    least = None if kept is None else scaled.where(kept, torch.inf).amin(1).to(DEVICE)
    return ProcessedLogits(wide(logits, padding), settings.temperature, least)


def columns(
    case: Case, settings: Processing = PLAIN, draft_settings: Processing | None = None, padding: int = 0
) -> tuple[Columns, Columns, Columns]:
    """Columns of target, draft and lookup, by the kernels."""
    target, draft = side(case.target, settings, padding), side(case.draft, draft_settings or settings, padding)
    with np.errstate(all="ignore"):  # the interpreter computes with NaN where logits are
        found = measured(target, [draft], case.token.to(DEVICE), [case.proposal.to(DEVICE)])
    ours, theirs, lookup = ({name: values.cpu() for name, values in group.items()} for group in found)
    return ours, theirs, lookup


def by_torch(
    case: Case, settings: Processing = PLAIN, draft_settings: Processing | None = None
) -> tuple[Columns, Columns, Columns]:
    """Columns of target, draft and lookup, by `statistics`."""
    p, q = distribution(case.target, settings), distribution(case.draft, draft_settings or settings)
    return target_columns(p, case.token), draft_columns(p, q, case.token), proposal_columns(p, case.proposal)


def assert_float64(
    case: Case, settings: Processing = PLAIN, draft_settings: Processing | None = None, padding: int = 0
) -> None:
    """Every column is that of float64, ids and ranks exactly."""
    ours, theirs, lookup = columns(case, settings, draft_settings, padding)
    for row, token in enumerate(case.token.tolist()):
        z, y = case.target[row].float().numpy(), case.draft[row].float().numpy()
        expected = reference.columns(z, y, token, settings, draft_settings or settings)
        got = {name: values[row].item() for name, values in (ours | theirs).items()}
        assert got == pytest.approx({name: expected[name] for name in got}, abs=1e-5, rel=1e-5)
        counted = [name for name, values in (ours | theirs).items() if not values.is_floating_point()]
        assert {name: got[name] for name in counted} == {name: expected[name] for name in counted}
        proposal = int(case.proposal[row])
        assert lookup["target_rank_of_draft_top"][row] == reference.rank(z, proposal)
        law = reference.processed(z, settings)
        assert float(lookup["target_prob_of_draft_top"][row]) == pytest.approx(law[proposal], abs=1e-6)


def assert_torch(case: Case, settings: Processing = PLAIN, draft_settings: Processing | None = None) -> None:
    """Names, types and values of all columns are those of `statistics`."""
    pairs = zip(columns(case, settings, draft_settings), by_torch(case, settings, draft_settings), strict=True)
    for found, expected in pairs:
        assert list(found) == list(expected)
        for name, values in expected.items():
            assert found[name].dtype == values.dtype, name
            exact = not values.is_floating_point()
            assert torch.allclose(found[name], values, atol=0 if exact else 1e-5, rtol=0 if exact else 1e-5), name


def test_a_small_case_equals_float64() -> None:
    """In bfloat16, truncated, a block and some more, of unequal widths, with NaN in the padding."""
    assert_float64(Case.random(2, BLOCK + 905, BLOCK + 890, torch.bfloat16), Processing(1.4, 20, 0.9, 0.02), padding=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "width", "draft", "dtype", "padding"),
    [
        *((2, 32_000, None, dtype, 0) for dtype in DTYPES),
        *((1, 49_153, None, dtype, 7) for dtype in DTYPES),
        (1, 49_153, 49_000, torch.float16, 1),
        (1, 151_669, 151_937, torch.float32, 64),
        (1, 262_143, None, torch.bfloat16, 1),
    ],
)
def test_every_column_equals_float64_within_1e5(
    rows: int, width: int, draft: int | None, dtype: torch.dtype, padding: int
) -> None:
    """At sizes of real vocabularies, of other widths than a block, with NaN in the padding of both."""
    assert_float64(Case.random(rows, width, draft, dtype), padding=padding)


SETTINGS = [
    Processing(0.6),
    Processing(1.0, 20),
    Processing(1.4, 20, 0.9, 0.02),
    Processing(1.0, 1),
    Processing(0.7, 0, 0.95),
]


@pytest.mark.slow
@each("draft_settings", [None, PLAIN], ids=["same", "plain"])
@each("settings", SETTINGS, ids=str)
@each("dtype", [torch.bfloat16, torch.float32])
def test_truncated_columns_equal_float64(
    dtype: torch.dtype, settings: Processing, draft_settings: Processing | None
) -> None:
    """Whether both sides are cut or the target alone."""
    assert_float64(Case.random(2, BLOCK + 905, dtype=dtype), settings, draft_settings, padding=3)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [PLAIN, Processing(1.0, 5), Processing(0.8, 0, 0.8)], ids=str)
@pytest.mark.parametrize(("width", "draft"), [(2500, 2100), (2100, 2500), (2500, 40), (40, 2500)])
def test_sides_of_different_widths_equal_torch(width: int, draft: int, settings: Processing) -> None:
    """Tokens and tops that one side lacks have probability 0 there, and the last rank."""
    case = Case.random(4, width, draft)
    case.draft[1, -1] = 50.0  # a top that the target may lack
    case.target[2, -1] = 50.0
    token, proposal = torch.tensor([width - 1, 0, max(width, draft) - 1, 3]), torch.tensor([width, width + 7, 0, 1])
    assert_torch(replace(case, token=token, proposal=proposal), settings)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [PLAIN, Processing(1.0, 7)], ids=str)
def test_ties_go_to_the_lower_id(settings: Processing) -> None:
    """The top is the first of equal logits, whatever lanes and blocks they are in; ranks count equal ones before."""
    case = Case.random(6, 2 * BLOCK + 100)
    tied = replace(case, target=case.target.div(4).round(), draft=case.draft.div(4).round())
    for row, first in enumerate([0, 5, BLOCK - 1, BLOCK, BLOCK + 3]):
        tied.target[row, [first, first + 2, 2 * BLOCK + 1, 2 * BLOCK + 99]] = 9.0
    assert_torch(tied, settings)
    assert columns(tied, settings)[0]["target_top"][:5].tolist() == [0, 5, BLOCK - 1, BLOCK, BLOCK + 3]


@pytest.mark.slow
def test_masked_and_large_logits_equal_torch() -> None:
    """The lowest number as a mask of ids, at both or at one, and logits at which a sum of exponentials overflows."""
    case = Case.random(4, BLOCK + 500)
    case.target[0, 100:] = case.draft[0, 100:] = torch.finfo(torch.float32).min
    case.target[1:3] *= 2000.0
    case.draft[2] = case.target[2]
    case.draft[3] = -case.target[3]
    assert_torch(case)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("settings", [PLAIN, Processing(1.3), Processing(1.0, 5)], ids=str)
def test_a_bad_logit_makes_the_entropy_of_its_row_not_a_number(bad: float, settings: Processing) -> None:
    """In a whole block or the last, kept or cut off; and no other row's, nor the other side's."""
    case = Case.random(4, BLOCK + 40)
    case.target[1, 7] = case.draft[2, BLOCK + 39] = bad
    ours, theirs, _ = columns(case, settings, padding=5)
    assert ours["target_entropy"].isfinite().tolist() == [True, False, True, True]
    assert theirs["draft_entropy"].isfinite().tolist() == [True, True, False, True]
    assert all(values[[0, 3]].isfinite().all() for name, values in (ours | theirs).items() if "kl" not in name)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [PLAIN, Processing(1.0, 3)], ids=["lacking", "cut"])
def test_kl_is_infinite_exactly_where_there_is_weight_that_the_other_side_lacks(cut: Processing) -> None:
    """Weight that float32 can hold, however little; what vanishes in it counts as none."""
    rows = torch.tensor([-20.0, -85.0, -103.0, -105.0, -300.0])
    narrow = torch.zeros(5, 3).add(torch.tensor([0.0, -1.0, -2.0]))
    more = torch.cat([narrow, rows[:, None]], 1)
    draft = narrow if cut == PLAIN else torch.cat([narrow, torch.full((5, 1), -3.0)], 1)
    nothing = torch.zeros(5, dtype=torch.long)
    for case, forward in ((Case(more, draft, nothing, nothing), True), (Case(draft, more, nothing, nothing), False)):
        settings = (PLAIN, cut) if forward else (cut, PLAIN)
        found, expected = columns(case, *settings)[1], by_torch(case, *settings)[1]
        name = "kl_target_draft" if forward else "kl_draft_target"
        assert found[name].isinf().tolist() == [True, True, True, False, False] == expected[name].isinf().tolist()


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

class Driver:
    capability = 90
    def get_current_device(self): return self.capability
    def get_current_stream(self, device=None): return 0
    def get_current_target(self): return GPUTarget("cuda", self.capability, 32)

driver = Driver()
triton.runtime.driver.set_active(driver)
run, compiled = JITFunction.run, {}

def compile_only(self, *arguments, grid, warmup, **options):
    made = run(self, *arguments, grid=grid, warmup=True, **options)
    compiled.setdefault(id(made), (self.__name__, made))

JITFunction.run = compile_only
from alphaprof.profiling.scoring.statistics import ProcessedLogits
from alphaprof.profiling.scoring.gpu_statistics import measured

def ask(rows, dtype, temperature=1.0, cut=False):
    logits = torch.zeros(rows, 1040, dtype=dtype)[:, :1037]
    ids = torch.zeros(rows + 1, dtype=torch.int64)[rows % 2:]
    side = ProcessedLogits(logits, temperature, torch.zeros(rows) if cut else None)
    measured(side, [side], ids[:rows], [ids[:rows]])

for rows in (1, 2, 3, 16, 250):
    ask(rows, torch.bfloat16)
print(*sorted(name for name, made in compiled.values() if ".v4.b32" in made.asm["ptx"]))
ask(2, torch.float16, 0.7, True)
ask(2, torch.float32)
driver.capability = 80
ask(2, torch.bfloat16)
print(sum(bool(made.asm["cubin"]) for _, made in compiled.values()))
"""


@pytest.mark.slow
def test_kernels_compile_for_gpus_and_once_for_any_number_of_rows(tmp_path: Path) -> None:
    """For an H100 and an A100, with the widest loads though the width is odd (the rows' distance is not). Needs no GPU."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    kernels = "one_id one_side one_side two_sides"  # of `one_side` the target's and the draft's
    assert result.stdout.splitlines() == [kernels, "16"]
