"""The target's states on given texts: what a head reads, and what the target's own law follows from."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.teacher_forced import FINAL, TeacherForced, recorded
from alphaprof.profiling.texts.continuations import batches
from alphaprof.run.split import RunText
from alphaprof.run.storage import writing

IN_MEMORY = 0.25  # of the memory that is free: states of more than that are kept on disk
ROWS = 1024  # rows whose whole logits are made at a time


@dataclass(frozen=True)
class TextBatch:
    """Texts for a step, right-padded. `ids` [batch, length]: all tokens but the last; `states` [batch, length, features] of
    the target that a head reads, and `last` [batch, length, hidden] after its final norm; `prompt`, `size` [batch]: tokens
    of the prompt and of the whole text; `whole` [batch, length + 1]: all tokens.
    """

    ids: torch.Tensor
    states: torch.Tensor
    last: torch.Tensor
    prompt: np.ndarray[Any, Any]
    size: np.ndarray[Any, Any]
    whole: torch.Tensor


class Features:
    """The target's states on some texts: in memory if a quarter of it holds them, else (`on_disk`) in a file without a name
    in `folder`, which vanishes with the process. `bytes`: how large they are; `seconds` and `cpu`: how long they took. Texts
    are run in batches of one order, so that the states are the same each time. Raises `DiskFull`.
    """

    def __init__(self, target: Model, layers: Sequence[int], texts: Sequence[RunText], folder: Path, budget: int) -> None:
        self.texts, self._layers, self._target, self._budget = list(texts), tuple(layers), target, budget
        hidden = int(target.network.config.get_text_config().hidden_size)
        self._hidden, self.width = hidden, hidden * (1 + len(self._layers))
        ends = np.cumsum([len(text.tokens) - 1 for text in texts])
        self._place = list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))
        self.bytes = int(ends[-1]) * self.width * target.dtype.itemsize
        self.on_disk = self.bytes > IN_MEMORY * free_memory()
        self.seconds = self.cpu = 0.0
        self._held = self._store(folder, (int(ends[-1]), self.width))

    def _store(self, folder: Path, shape: tuple[int, int]) -> torch.Tensor:
        """Return a tensor for all states, which is empty as yet."""
        if not self.on_disk:
            return torch.empty(shape, dtype=self._target.dtype)
        with writing(folder), tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, self.bytes)  # a full disk is an error now, not a signal later
            mapped = np.memmap(file, dtype=np.uint8, mode="r+", shape=(self.bytes,))
        return torch.from_numpy(mapped).view(self._target.dtype).view(shape)

    def fill(self, advance: Callable[[int], None]) -> None:
        """Run the target over all texts, where they are kept. `advance`: called with how many texts are done."""
        began, cpu = time.monotonic(), time.process_time()
        for chosen in batches([len(text.tokens) for text in self.texts], self._budget):
            for index, states in zip(chosen, self._computed(chosen), strict=True):
                start, end = self._place[index]
                self._held[start:end] = states[: end - start].cpu()
            advance(len(chosen))
        self.seconds += time.monotonic() - began
        self.cpu += time.process_time() - cpu

    def batch(self, chosen: Sequence[int]) -> TextBatch:
        """Return some of the texts, on the target's device."""
        texts = [self.texts[index].tokens for index in chosen]
        sizes = np.array([len(text) for text in texts])
        device, length = self._target.device, int(sizes.max()) - 1
        whole = _padded(texts)
        held = [self._held[slice(*self._place[index])] for index in chosen]
        states = pad_sequence(held, batch_first=True).to(device)
        ids = whole[:, :-1].clone()
        ids[torch.arange(length) >= torch.from_numpy(sizes)[:, None] - 1] = 0  # as in a pass over given texts
        read, last = states[..., : -self._hidden], states[..., -self._hidden :]
        prompt = np.array([len(self.texts[index].prompt) for index in chosen])
        return TextBatch(ids.to(device), read, last, prompt, sizes, whole.to(device))

    @torch.no_grad()
    def _computed(self, chosen: Sequence[int]) -> list[torch.Tensor]:
        """Return states [length, width] of texts that are run together."""
        ids = _padded([self.texts[index].tokens[:-1] for index in chosen])
        base = self._target.decoder
        with recorded(base, (*self._layers, FINAL)) as states:
            base(input_ids=ids.to(self._target.device), use_cache=False)
        parts = [states[count].to(self._target.device) for count in (*self._layers, FINAL)]
        return list(torch.cat(parts, -1))


def _padded(texts: Sequence[np.ndarray[Any, Any]]) -> torch.Tensor:
    return pad_sequence([torch.from_numpy(text.astype(np.int64)) for text in texts], batch_first=True)


class TargetLaw:
    """The target's law over the ids that a head can propose: its softmax, renormalised over them, as EAGLE-3 and speculators
    do, before any temperature or truncation.
    """

    def __init__(self, target: Model, ids: torch.Tensor | None) -> None:
        self._forced, self._ids = TeacherForced(target), None if ids is None else ids.to(target.device)
        self._rows: torch.Tensor | None = None
        weight = getattr(target.network.get_output_embeddings(), "weight", None)
        if isinstance(weight, torch.Tensor) and weight.is_floating_point() and not weight.is_meta and self._forced.chunked:
            rows = weight if self._ids is None else weight[self._ids.to(weight.device)]
            probe = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
            plain, full = functional.linear(probe, rows).float(), self._of_logits(probe).float()
            scale = full.abs().max().clamp(min=1.0)
            if (plain - full).abs().max() <= 8 * torch.finfo(weight.dtype).eps * scale:  # no bias, cap or scale
                self._rows = rows

    @torch.no_grad()
    def __call__(self, last: torch.Tensor) -> torch.Tensor:
        """Log probabilities [n, ids], in float32, of states [n, hidden] after the final norm."""
        with torch.autocast(last.device.type, enabled=False):  # in the target's dtype, whatever a head is trained in
            if self._rows is not None:
                logits = functional.linear(last.to(self._rows.device), self._rows)
            else:
                logits = torch.cat([self._of_logits(part) for part in torch.split(last, ROWS)])
            return logits.float().log_softmax(-1).to(last.device)

    @torch.no_grad()
    def _of_logits(self, last: torch.Tensor) -> torch.Tensor:
        logits = self._forced.logits(last).clone()
        return logits if self._ids is None else logits[:, self._ids.to(logits.device)]


def free_memory(system: Path = Path("/")) -> int:
    """Return bytes of memory that this process can still have: what the machine has, and what each control group that holds
    it leaves, as containers and Slurm set them. `system`: the root of /proc and /sys. Pages of files that a group may drop
    count as free.
    """
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    with contextlib.suppress(OSError, StopIteration):
        lines = (system / "proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    groups = list[tuple[Path, str, str, str]]()
    with contextlib.suppress(OSError):
        for line in (system / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":  # version 2
                groups.append((Path("sys/fs/cgroup", path.strip("/")), "memory.max", "memory.current", "inactive_file"))
            elif "memory" in controllers.split(","):
                names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
                groups.append((Path("sys/fs/cgroup/memory", path.strip("/")), *names))
    for group, limit, usage, dropped in groups:
        for folder in (system / group, *(system / group).parents):  # a group is held by those above it
            with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                held = int((folder / limit).read_text()) - int((folder / usage).read_text())
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                free = min(free, max(0, held + int(stat.get(dropped, 0))))
    return free
