"""What the steps of a run have written, shard by shard: records in segments, of which a new record rewrites one alone."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from alphaprof.errors import RunDamaged
from alphaprof.run.manifest import VERSION, File, Shard, Stored, listed, named, read_signed, signed, typed, undamaged
from alphaprof.run.storage import Storage

RECORDS = "alphaprof-records"
STEPS = ("prompts", "texts", "rows")  # that are recorded shard by shard
SEGMENT = 256  # shards whose records lie in one file, so that a record costs the same at shard 1 and at 15,000
SEGMENTS = re.compile(rf"records/({'|'.join(STEPS)})-(\d{{4,}})\.json")


@dataclass(frozen=True)
class Record(Stored):
    """What a step has written of a shard: its `files` by their paths below the run's directory, in `seconds`. It is written
    after them.
    """

    shard: Shard
    files: dict[str, File]
    seconds: Annotated[float, Ge(0)] = 0.0


class Journal(dict[str, dict[int, Record]]):
    """The records of each step by number of the shard."""

    def __init__(self) -> None:
        super().__init__({step: {} for step in STEPS})

    @classmethod
    def of(cls, storage: Storage, damaged: bool = False) -> Journal:
        """Return what is recorded of a run. Raises `RunDamaged` for a segment that is not what was written, unless `damaged`
        ones are passed over.
        """
        journal, names = cls(), list(filter(SEGMENTS.fullmatch, storage.names("records")))

        def read(name: str) -> list[Record]:
            try:
                return read_records(storage, name)
            except RunDamaged:
                if damaged:
                    return []
                raise

        for name, records in zip(names, storage.each(read, names), strict=True):
            journal[name.partition("/")[2].rpartition("-")[0]] |= {each.shard.index: each for each in records}
        return journal

    @property
    def files(self) -> dict[str, File]:
        """All files that are recorded."""
        return {name: file for step in self.values() for record in step.values() for name, file in record.files.items()}

    def forget(self, step: str, shards: Collection[int]) -> list[tuple[str, int]]:
        """Drop what this step and all later ones have of some shards: rows of texts that are written again are of other
        texts. Return the segments that change, by step and first shard, those of the last step first.
        """
        changed = list[tuple[str, int]]()
        for each in reversed(STEPS[STEPS.index(step) :]):
            lost = self[each].keys() & set(shards)
            self[each] = {index: record for index, record in self[each].items() if index not in lost}
            changed += [(each, first) for first in sorted({index // SEGMENT * SEGMENT for index in lost})]
        return changed

    def segment(self, step: str, index: int) -> tuple[str, bytes]:
        """Return name and content of the segment that a shard lies in."""
        first = index // SEGMENT * SEGMENT
        known = (self[step].get(each) for each in range(first, first + SEGMENT))
        return f"records/{step}-{index // SEGMENT:04d}.json", records_text(each for each in known if each is not None)


def records_text(records: Iterable[Record]) -> bytes:
    """Return the content of a segment."""
    fields = [dataclasses.asdict(dataclasses.replace(each, files={})) | {"files": listed(each.files)} for each in records]
    return signed({"format": RECORDS, "version": VERSION, "records": fields}).encode()


def read_records(storage: Storage, name: str) -> list[Record]:
    """Return the records of a segment; none if it does not exist. Raises `RunUnreadable`, and `RunDamaged`."""
    data = read_signed(storage, name, RECORDS)
    with undamaged(storage, name):
        given = [each | {"files": named(each["files"])} for each in data["records"]] if data else []
        records: list[Record] = typed(given, list[Record])
        if odd := [each.shard.index for each in records if not name.endswith(f"-{each.shard.index // SEGMENT:04d}.json")]:
            raise ValueError(f"it does not belong to shard {odd[0]}")
    return records
