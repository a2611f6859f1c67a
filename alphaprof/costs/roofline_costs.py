"""Step times of a target and its drafts on an accelerator that is not at hand, as rows: the roofline wherever asked.

It leaves out what `roofline` leaves out. Prefill is a step over the prompt's tokens with an empty cache: attention among
these tokens is not in it (it grows with their square, and matters beyond some thousand), while the output head is counted
for each of them, where engines compute it for the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from alphaprof.costs.roofline import ACCELERATORS, Efficiency, step_ms
from alphaprof.costs.shapes import ModelShape
from alphaprof.costs.steps import TARGET, StepRow
from alphaprof.errors import CostsUnreadable
from alphaprof.log.manifest import ModelFacts


@dataclass(frozen=True)
class RooflineSetting:
    """The hardware: `accelerator`, a name of `ACCELERATORS`; `tp` and `draft_tp` devices in tensor parallelism (None: the
    draft is split like the target); shares of bandwidth and peak that kernels reach (the defaults fit published ratios);
    `all_reduce_ms` a layer. `overhead_ms` is added to every decode and verify step of the target, `draft_overhead_ms` to
    every step of a draft: kernel launches, without which a small draft's step would be as cheap as its bytes.
    """

    accelerator: str
    tp: int = 1
    draft_tp: int | None = None
    memory_efficiency: float = 0.8
    compute_efficiency: float = 0.66
    all_reduce_ms: float = 0.0
    overhead_ms: float = 0.0
    draft_overhead_ms: float = 0.0

    def ms(self, shape: ModelShape, is_target: bool, tokens: int, batch: int, context: int) -> float:
        """A step's time without overhead."""
        efficiency = Efficiency(self.memory_efficiency, self.compute_efficiency, self.all_reduce_ms)
        tp = self.tp if is_target or self.draft_tp is None else self.draft_tp
        return step_ms(shape, ACCELERATORS[self.accelerator], efficiency, tokens, batch, context, tp)


def roofline_rows(
    target: ModelShape,
    drafts: Mapping[str, ModelShape | None],
    setting: RooflineSetting,
    gamma_max: int,
    batches: Sequence[int],
    contexts: Sequence[int],
    prompt_lengths: Sequence[int],
) -> tuple[StepRow, ...]:
    """Decode and verify steps up to gamma_max + 1 tokens, drafts' steps over 1 and 2 tokens, and prefill at batch 1.

    A draft without a shape is prompt lookup: a search that costs nothing.
    """
    rows: list[StepRow] = []
    for batch, context in product(batches, contexts):
        for tokens in range(1, gamma_max + 2):
            ms = setting.ms(target, True, tokens, batch, context) + setting.overhead_ms
            rows.append(StepRow(TARGET, "decode" if tokens == 1 else "verify", tokens, batch, context, ms))
        for name, shape in drafts.items():
            rows += _draft_rows(name, shape, setting, batch, context)
    for name, shape in {TARGET: target, **drafts}.items():
        if shape is not None:
            prefill = [(tokens, setting.ms(shape, name == TARGET, tokens, 1, 0)) for tokens in prompt_lengths]
            rows += [StepRow(name, "prefill", tokens, 1, 0, ms) for tokens, ms in prefill]
    return tuple(rows)


def _draft_rows(
    name: str, shape: ModelShape | None, setting: RooflineSetting, batch: int, context: int
) -> Iterator[StepRow]:
    if shape is None:
        yield StepRow(name, "lookup", 1, batch, context, 0.0)
        return
    for tokens in (1, 2):
        ms = setting.ms(shape, False, tokens, batch, context) + setting.draft_overhead_ms
        yield StepRow(name, "draft", tokens, batch, context, ms)


def shape_of(name: str, facts: ModelFacts) -> ModelShape:
    """The shape of a model of a run. Raises `CostsUnreadable` where it is not known."""
    if facts.shape is None:
        raise CostsUnreadable(
            f"a roofline needs the shape of {name}, and that of {facts.architecture} is not known",
            "give step times instead: costs: {source: table, path: FILE} (docs/costs.md)",
        )
    return ModelShape(**facts.shape)  # type: ignore[arg-type]
