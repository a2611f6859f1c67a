"""Hold the table of alphaprof/config/engines.py against the engines' own parsers; `engine_conformance.sh` runs it.

    python scripts/engine_conformance.py cases FOLDER              (alphaprof's environment: writes cases and draft folders)
    python scripts/engine_conformance.py vllm|sglang|llamacpp FOLDER VERSION        (an engine's environment: prints a table)

A case is one kind of draft under one rule, with a schedule where the table has one. What the table calls served must be
accepted and arrive as it was meant; what it calls not served is written as if it were, and what the engine makes of that is
printed. Nothing is loaded: vLLM creates its configuration, SGLang resolves its arguments, llama.cpp parses them.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import io
import json
import logging
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

GAMMA, SCHEDULE = 4, ((1, 8, 4), (9, 64, 0))
DROPPED = "ignored: the schedule"
Check = Callable[[dict[str, Any]], str]  # of a case: what the engine made of it, or the reason of its refusal


def cases(folder: Path) -> None:
    """Write the cases of all engines, and what their drafts and targets look like on disk."""
    from alphaprof.commands.export.engines import WRITERS, ServedDraft
    from alphaprof.config.engines import EVERY, FORMATS, TOP, Method
    from alphaprof.config.options import DRAFTS
    from alphaprof.report.serving import why_not_served
    from tests.synthetic import draft_facts

    golden, models = Path("tests/golden"), Path(os.environ["ALPHAPROF_DEMO_MODELS"])
    target = json.loads((models / "stories15m/config.json").read_text())
    heads = {kind: json.loads((golden / f"{kind}_stories15m/config.json").read_text()) for kind in HEADS}
    configs = {"target": target, "model": target, "layer_skip": target, "eagle1": target | {"num_hidden_layers": 1}, **heads}
    configs["speculators"] = heads["eagle3"]
    configs["eagle3"] = target | EAGLE3 | {name: value for name, value in heads["eagle3"].items() if name in EAGLE3_KEPT}
    configs["mtp"] = configs["mtp_target"] = target | MTP
    for name in ("assistant", "target"):
        configs[f"gemma4_{name}"] = json.loads((golden / "gemma4_assistant" / name / "config.json").read_text())
    configs["gemma4_target"]["global_head_dim"] = 32  # as its head_dim: SGLang reads one for all layers
    for name, config in configs.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name / file).write_bytes((models / "stories15m" / file).read_bytes())
    kinds = [kind for draft in DRAFTS for kind in draft.model_fields["kind"].annotation.__args__]
    found = []
    for to, engines in FORMATS.items():
        for engine in engines:
            for kind in kinds:
                facts = draft_facts("draft")
                lookup = kind == "prompt_lookup"
                facts = types.SimpleNamespace(
                    **vars(facts)
                    | {
                        "kind": kind,
                        "has_distribution": not lookup,
                        "in_one_step": kind in ("dflash", "dspark", "p_eagle", "pard"),
                        "settings": {"min_ngram": 2, "max_ngram": 4} if lookup else {},
                        "method_in": lambda asked, kind=kind: asked.methods.get(kind),
                    }
                )
                method = engine.methods.get(kind, Method(kind, TOP))
                for rule in EVERY if kind in engine.methods else TOP[:1]:
                    why = why_not_served(engine, facts, rule)
                    if to == "sglang-adaptive" and not method.schedule:
                        why = why or "no schedule"
                    scheduled = SCHEDULE if method.schedule and to in ("vllm-config", "sglang-adaptive") else None
                    asked = rule if rule in engine.rules and not lookup else "one_hot"
                    model = None if kind in ("prompt_lookup", "mtp") else str(folder / kind)
                    served = ServedDraft(str(folder / "target"), facts, engine, method, model, None, asked, GAMMA, scheduled)
                    found.append(
                        {
                            "to": to, "versions": engine.versions, "kind": kind, "method": method.name, "rule": rule,
                            "why": why, "runner": method.runner, "option": rule in engine.rules,
                            "scheduled": scheduled is not None,
                            "target": str(folder / TARGETS.get(kind, "target")),
                            "text": WRITERS[to](served),
                        }
                    )  # fmt: skip
    (folder / "cases.json").write_text(json.dumps(found, indent=1))
    print(f"{len(found)} cases")


TARGETS = {"mtp": "mtp_target", "gemma4_assistant": "gemma4_target"}
HEADS = ("eagle3", "p_eagle", "pard", "dflash", "dspark")
EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}  # as SafeAILab and SpecForge write it
EAGLE3_KEPT = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")
MTP = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_nextn_predict_layers": 2}


def vllm() -> Check:
    """The argument parser of `vllm serve`, the creation of the engine's configuration, and its lookup by batch size."""
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    def check(case: dict[str, Any], *more: str, text: str | None = None) -> str:
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        options = ["--model", case["target"], "--max-num-seqs", "64", "--enforce-eager", "--max-model-len", "128", *more]
        engine = EngineArgs.from_cli_args(parser.parse_args([*options, "--speculative-config", text or case["text"]]))
        alone = case["kind"] == "dspark"  # only V2 runs it, which a CPU without Triton would not choose
        v2 = patch.dict(os.environ, VLLM_USE_V2_MODEL_RUNNER="1"), patch("vllm.config.vllm.HAS_TRITON", True, create=True)
        with contextlib.ExitStack() as stack:
            for each in v2 if alone else ():
                stack.enter_context(each)
            made = engine.create_engine_config()
        found = made.speculative_config
        words = [f"{found.method}, {found.num_speculative_tokens} tokens", found.draft_sample_method]
        words.append(found.rejection_sample_method)
        unsupported = made._get_v2_model_runner_unsupported_features()  # what a GPU would run it with
        words.append(f"runner {'V1' if unsupported else 'V2'}")
        if schedule := found.num_speculative_tokens_per_batch_size:
            by_size = build_dynamic_sd_schedule_lookup(schedule, 64, found.num_speculative_tokens)
            words.append(f"at 1, 8, 9, 64 sequences {' '.join(str(by_size[size]) for size in (1, 8, 9, 64))}")
        elif case["scheduled"]:
            words.append(DROPPED)
        if case["rule"] == "block" and unsupported and found.method != "ngram":
            words.append("ignored: block (its V1 runner reads standard and fly only)")
        if case["runner"] and words[3] != f"runner {case['runner']}":
            raise AssertionError(f"{words[3]}, not {case['runner']}")
        return ", ".join(words)

    return check


TORCHVISION = [f"torchvision{name}" for name in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2")]


class Stub(types.ModuleType):
    """A package of which SGLang's arguments need the names only."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return types.SimpleNamespace(BICUBIC=3)


def sglang() -> Check:
    """The parser of its server's arguments, and their resolution as the server does it, for CUDA."""
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()  # before a stub of it stands there: no build fits a torch for CPUs
    for name in TORCHVISION:
        stub = Stub(name)
        stub.__spec__, stub.__path__ = importlib.machinery.ModuleSpec(name, None), []
        sys.modules[name] = stub
    from transformers import AutoConfig

    register = AutoConfig.register  # transformers has had some of its configurations since
    AutoConfig.register = staticmethod(lambda name, config, exist_ok=False: register(name, config, exist_ok=True))
    from sglang.srt import server_args as module

    try:
        from sglang.srt.arg_groups.overrides import resolved_view
    except ImportError:
        resolved_view = lambda args: args  # noqa: E731

    def check(case: dict[str, Any], *more: str, text: str | None = None) -> str:
        import shlex

        words = ["--model-path", case["target"], "--device", "cuda", "--log-level", "error", *more]
        text = text or case["text"]
        if case["to"] == "sglang-adaptive":
            (file := Path(case["target"]).parent / "adaptive.json").write_text(text)
            words += ["--speculative-adaptive", "--speculative-adaptive-config", str(file)]
            text = case["args"]
        args = module.prepare_server_args([*words, *shlex.split(text)])
        if hasattr(args, "resolve_once"):
            args.resolve_once()
        view = resolved_view(args)
        found = [f"{view.speculative_algorithm}, {view.speculative_num_draft_tokens} draft tokens"]
        greedy = view.speculative_algorithm in ("DFLASH", "FROZEN_KV_MTP") and case["rule"] in ("lossless", "block")
        drafts = f"({view.speculative_algorithm} drafts greedily)"
        if view.speculative_use_rejection_sampling:
            found.append(f"ignored: rejection sampling {drafts}" if greedy else "rejection sampling")
        if getattr(view, "speculative_use_block_verification", False):
            found.append(f"ignored: block verification {drafts}" if greedy else "block verification")
        if case["to"] == "sglang-adaptive":
            if view.speculative_adaptive:
                from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

                with contextlib.redirect_stderr(io.StringIO()):
                    by_size = AdaptiveSpeculativeParams(view.speculative_num_steps, view.speculative_adaptive_config)
                steps = [by_size.get_steps_for_batch(size) for size in (1, 8, 9, 64)]
                found.append(f"at 1, 8, 9, 64 sequences {' '.join(map(str, steps))}")
            else:
                found.append(DROPPED)
        return ", ".join(found)

    return check


def llamacpp() -> Check:
    """llama.cpp's own `common_params_parse`, as xllamacpp's library has it, on the parameters of its Python object."""
    import shlex

    import xllamacpp
    from xllamacpp import xllamacpp as library

    parse = ctypes.CDLL(library.__file__)._Z19common_params_parseiPPcR13common_params13llama_examplePFviS0_E
    parse.restype = ctypes.c_bool
    head, server = 16, 12  # bytes of a Python object before its parameters; LLAMA_EXAMPLE_SERVER

    def check(case: dict[str, Any], *more: str, text: str | None = None) -> str:
        words = ["llama-server", "-m", f"{case['target']}/config.json", *more, *shlex.split(text or case["text"])]
        params = xllamacpp.CommonParams()
        argv = (ctypes.c_char_p * (len(words) + 1))(*(word.encode() for word in words), None)
        if not parse(len(words), argv, ctypes.c_void_p(id(params) + head), ctypes.c_int(server), None):
            raise ValueError
        found = params.speculative
        kinds = [kind.name.removeprefix("COMMON_SPECULATIVE_TYPE_").lower().replace("_", "-") for kind in found.types]
        sampling = "probabilistic" if getattr(found.draft, "probabilistic", False) else "greedy"
        return f"{' '.join(kind for kind in kinds if kind != 'none')}, {found.draft.n_max} tokens, {sampling}"

    return check


def broken(to: str, version: str, case: dict[str, Any]) -> Iterator[tuple[str, list[str], str]]:
    """Yield what must be refused or dropped, so that the checks are known to be at work: what, options and text."""
    if to == "vllm-config":
        config = json.loads(case["text"])
        key = "num_speculative_tokens_per_batch_size"
        yield "an unknown key", [], json.dumps(config | {"gamma": 3})
        if version == "0.33":
            yield "method medusa", [], json.dumps(config | {"method": "medusa"})
            yield "method mlp_speculator", [], json.dumps(config | {"method": "mlp_speculator"})
        yield "no tokens", [], json.dumps(config | {"num_speculative_tokens": 0})
        yield "an unknown sample method", [], json.dumps(config | {"draft_sample_method": "lossless"})
        yield "a schedule that begins at 2", [], json.dumps(config | {key: [[2, 4, 1]]})
        yield "ranges that overlap", [], json.dumps(config | {key: [[1, 4, 1], [4, 8, 0]]})
        yield "two data-parallel ranks", ["--data-parallel-size", "2"], case["text"]
    elif to == "llamacpp-args":
        yield "an unknown type", [], case["text"].replace("draft-simple", "draft-medusa")
        yield "an unknown sampling", ["--spec-draft-sampling", "lossless"], case["text"]
    else:
        yield "an unknown algorithm", [], case["text"].replace("STANDALONE", "MEDUSA")
        yield "block verification of a draft model", ["--speculative-use-block-verification"], case["text"]
        yield "rejection sampling of a draft model", ["--speculative-use-rejection-sampling"], case["text"]
        head = case["text"].replace("STANDALONE", "EAGLE3").replace("/model ", "/speculators ")
        yield "an EAGLE-3 head of speculators", [], head


def told(check: Callable[..., str], case: dict[str, Any], *more: str, text: str | None = None) -> tuple[bool, str]:
    """Return whether an engine accepts, and what it made of it or why not, on one line."""
    with tempfile.TemporaryFile() as said:
        kept = os.dup(2)
        os.dup2(said.fileno(), 2)  # C++ writes there too
        try:
            return True, check(case, *more, text=text)
        except (Exception, SystemExit) as error:
            sys.stderr.flush()
            said.seek(0)
            lines = [line for line in said.read().decode().splitlines() if "error" in line.lower()]
            silent = isinstance(error, SystemExit) or not str(error)
            reason = lines[-1:] if silent else str(error).strip().splitlines()
            words = " ".join(line.strip() for line in reason if line.strip()).replace(f"{Path(case['target']).parent}/", "")
            return False, f"{type(error).__name__}: {words[:150]}"
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def main(engine: str, folder: Path, version: str) -> int:
    """Print a line for each case of an engine's version; return how many are not as the table says."""
    check = {"vllm": vllm, "sglang": sglang, "llamacpp": llamacpp}[engine]()
    logging.disable(logging.CRITICAL)
    every = json.loads((folder / "cases.json").read_text())
    mine = [case for case in every if case["to"].startswith(engine) and version in case["versions"]]
    args = {(case["kind"], case["rule"]): case["text"] for case in mine if case["to"] == "sglang-args"}
    wrong, known = 0, dict[str, tuple[bool, str]]()
    for case in mine:
        case["args"] = args.get((case["kind"], case["rule"]), "")
        same = json.dumps([case["text"], case["args"], case["rule"] in ("lossless", "block")])  # most are written alike
        accepted, words = known[same] if same in known else known.setdefault(same, told(check, case))
        if case["why"]:
            state = f"not served: {case['why']}"
            words = f"the engine says {words}" if case["option"] else "it has no option for this rule"
            fine = True
        else:
            fine = accepted and "ignored:" not in words
            state = "served"
        wrong += not fine
        print(f"{'ok   ' if fine else 'WRONG'} {case['to']} {version} {case['kind']} {case['rule']}: {state}: {words}")
    start = next(case for case in mine if case["kind"] == "model" and not case["why"])
    for what, more, text in broken(start["to"], version, start):
        accepted, words = told(check, start, *more, text=text)
        wrong += accepted and "ignored:" not in words
        print(f"{'WRONG' if accepted and 'ignored:' not in words else 'ok   '} {start['to']} {version} with {what}: {words}")
    if engine == "vllm":
        head = next(case for case in mine if case["kind"] == "mtp" and case["rule"] == "strict")
        for gamma, fits in ((1, True), (2, True), (3, False), (4, True)):
            text = json.dumps(json.loads(head["text"]) | {"num_speculative_tokens": gamma})
            accepted, words = told(check, head, text=text)
            wrong += accepted != fits
            print(f"{'ok   ' if accepted == fits else 'WRONG'} vllm-config {version} mtp, 2 modules, K = {gamma}: {words}")
    return wrong


if __name__ == "__main__":
    if sys.argv[1] == "cases":
        sys.exit(cases(Path(sys.argv[2]).resolve()))
    sys.exit(min(main(sys.argv[1], Path(sys.argv[2]).resolve(), sys.argv[3]), 99))
