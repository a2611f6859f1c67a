"""What shows before torch is imported and a model is loaded: places, options, addresses, and the engine's python."""

from __future__ import annotations

import os
import socket
from importlib.util import find_spec
from pathlib import Path

from alphaprof.config.engines import VLLM
from alphaprof.config.hardware import preset_of
from alphaprof.config.options import MeasuredCosts, RooflineCosts, TableCosts
from alphaprof.config.part import WHOLE, Part
from alphaprof.config.paths import KEPT
from alphaprof.config.profile import AUTO, ProfileOptions
from alphaprof.costs.engine_table import read_engine_table
from alphaprof.errors import ExtraMissing, OptionInvalid, RunMismatch, without_secrets
from alphaprof.profiling.engine.client import check_engine, no_method
from alphaprof.profiling.models.hub import check_references
from alphaprof.run.manifest import MANIFEST, Manifest
from alphaprof.run.place import require_free
from alphaprof.run.reader import Run
from alphaprof.run.storage import storage_of
from alphaprof.run.writer import FREE
from alphaprof.version import install_line

ADDRESS = "RAY_ADDRESS"


def check_early(
    options: ProfileOptions, out: Path | str | None, resume: bool = False, reuse: Path | None = None, part: Part = WHOLE
) -> None:
    """Raise what would end a profile later and shows already, the cheapest first: `RunExists` and `DiskFull` for `out`,
    `RunMismatch` for a run that another profile made, `DataUnreadable`, `DataEmpty`, `ModelUnloadable`, `CostsUnreadable`,
    `EngineFailed`, and what `require_ray` raises. `out`: where the run will be, if that is known; `resume`, `reuse`, `part`:
    as of `profile`.
    """
    going = False
    if out is not None:
        storage = storage_of(out)
        storage.require_writable()
        require_free(storage, resume=resume or part != WHOLE)
        going = storage.has(MANIFEST)
    if going:
        run = Run.open(str(out))
        require_same_profile(run, as_measured(options, run.manifest), part)
    if reuse is not None:
        reusable(reuse, options)
    check_references(options, data=not going)
    check_costs(options)
    if options.execution.workers != 1:
        require_ray()
    elif options.vllm is not None and options.uses_engine and not going:  # an actor's engine is on its own machine
        check_engine(options, options.vllm, reuse is None and bool(options.written_by_engine()))


def require_ray() -> None:
    """Raise `ExtraMissing` if Ray is not installed, and `OptionInvalid` for an address that takes no driver, or where
    nobody answers.
    """
    if find_spec("ray") is None:
        raise ExtraMissing("execution.workers needs ray", install_line("ray"))
    address = os.environ.get(ADDRESS, "")
    if "://" in address:
        raise OptionInvalid(
            f"{ADDRESS}={address} is not a node's HOST:PORT, needed by a driver",
            "run it in the cluster: ray job submit --address http://HOST:8265 -- alphaprof profile ...",
        )
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except (OSError, OverflowError, UnicodeError) as error:  # Ray itself asks for minutes
            raise OptionInvalid(
                f"nothing answers at {ADDRESS}={address}: {error}",
                f"correct {ADDRESS}, or unset it to use this machine alone",
            ) from None


def check_costs(options: ProfileOptions) -> None:
    """Raise `CostsUnreadable` for a table that cannot be used, `OptionInvalid` for a preset that cannot be read, and
    `EngineFailed` for a draft that vLLM does not have.
    """
    costs, drafts = options.costs, options.drafts
    models = [name for name, draft in drafts.items() if draft.has_steps]
    if isinstance(costs, TableCosts):
        heads = [name for name in models if drafts[name].by_depth]
        lookups = [name for name in drafts if name not in models]
        read_engine_table(Path(costs.path), models, lookups, costs.overhead_ms, heads)
    elif isinstance(costs, RooflineCosts):
        preset_of(costs.preset)
    elif costs.source == "vllm":
        for name, draft in drafts.items():
            if not VLLM.methods.get(draft.kind):
                raise no_method(name, draft.kind)


def reusable(path: Path, options: ProfileOptions) -> Run:
    """Return the complete run in `path`, whose continuations a profile measures again. Raises `RunUnreadable`, and
    `RunMismatch` if `options` ask for other data or continuations than the run holds.
    """
    run = Run.open(path)
    run.require_complete()
    before, asked = (each.model_dump(mode="json") for each in (run.manifest.profile, options))
    if changed := [key for key in ("data", "continuation") if asked[key] != before[key]]:
        raise RunMismatch(
            f"{path} was made with another profile (other {', '.join(changed)})",
            "reuse continuations with the data and continuation of the run that made them",
        )
    return run


def as_measured(options: ProfileOptions, manifest: Manifest) -> ProfileOptions:
    """Return the options with what a run that was made already chose where they say auto: the target's dtype, the source of
    step times and the tokens of a batch.
    """
    stored, costs = manifest.profile, options.costs
    if isinstance(costs, TableCosts) and isinstance(stored.costs, TableCosts) and stored.costs.path == f"{KEPT}{costs.path}":
        options = options.model_copy(update={"costs": costs.model_copy(update={"path": stored.costs.path})})
    where = (stored.costs.accelerator, stored.costs.tp) if isinstance(stored.costs, RooflineCosts) else (None,)
    options = options.with_costs(*where).with_dtype(stored.target.dtype)
    if options.batch_tokens != AUTO:
        return options
    return options.model_copy(update={"batch_tokens": stored.batch_tokens})


def require_same_profile(earlier: Run, options: ProfileOptions, part: Part) -> None:
    """Raise `RunMismatch` unless a run was made with these options; what only the report reads may differ. A run is not
    extended by another limit: documents that are added until the verdict is good make it wrong too often.
    """
    before = earlier.manifest.profile.model_dump(mode="json")
    asked = without_secrets(options.model_dump(mode="json"))
    if isinstance(options.costs, MeasuredCosts) and isinstance(earlier.manifest.profile.costs, MeasuredCosts):
        before, asked = ({**each, "costs": each["costs"]["source"]} for each in (before, asked))  # steps are timed again
    if str(part) != earlier.manifest.part:
        raise RunMismatch(
            f"{earlier.path} is part {earlier.manifest.part} of the documents, not {part}",
            "resume with the options of the first call, or choose another --out",
        )
    if changed := [key for key in asked if key not in FREE and before.get(key) != asked[key]]:
        hint = "resume with the profile and options of the first call, or choose another --out"
        sources = [[{**source, "limit": None} for source in each["data"]] for each in (before, asked)]
        if changed == ["data"] and sources[0] == sources[1]:
            raise RunMismatch(
                f"{earlier.path} was made with another limit, and a run is never extended",
                "resume with the first limit, or profile that many other documents (another shuffle_seed) into a new --out",
            )
        raise RunMismatch(f"{earlier.path} was made with another profile ({', '.join(changed)} changed)", hint)
