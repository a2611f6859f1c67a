#!/usr/bin/env python3
"""Write what has its one declaration elsewhere: docs/columns.md (the log), docs/profile.md (the profile file), the tables of
docs/rules.md (acceptance rules), docs/exports.md (engines) and docs/report.md (JSON fields).

python scripts/make_reference.py            (a test holds that the pages are up to date)
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from alphaprof import rules
from alphaprof import rules as rule_names
from alphaprof.commands.schema import json_schema
from alphaprof.config import engines, options, profile
from alphaprof.report import serving
from alphaprof.run import schema

DOCS = Path(__file__).parent.parent / "docs"
RULE = ("RULE",)
TABLES = (
    (
        "Position log: `positions/draft=NAME/`",
        "One row per position.",
        schema.LogRules(RULE, RULE).columns,
    ),
    (
        "Position log of a draft head, beside the columns of every log",
        "Depth 1 is in the columns above. Shown is depth 2; there is one for each depth up to the draft's `depths`, and of "
        "`accept` and `emitted` one for each rule that draws its drafts. `in_draft_vocabulary`: of a reduced vocabulary. "
        "`draft_confidence`: of a DSpark drafter with a confidence head, from depth 1 on.",
        schema.HEAD_COLUMNS,
    ),
    ("Documents: `documents.parquet`", "One row per document.", schema.DOCUMENT_COLUMNS),
    ("Continuations: `continuations/`", "The documents with their token ids.", schema.CONTINUATION_COLUMNS[-2:]),
    (
        "Totals: `totals/draft=NAME/`",
        "One row per document and rule; reports read these. Of the columns by depth, here 1 to 4, depth 2 is shown.",
        [column for column in schema.totals_columns([4]) if not column.name.endswith(("_4_1", "_4_3", "_4_4"))],
    ),
    ("Step times: `latency.parquet`", "One row per kind of step.", schema.LATENCY_COLUMNS),
    (
        "Rounds of vLLM's engines: `engines.parquet`",
        "One row per engine and kind of step, of which step times are made.",
        schema.ENGINE_COLUMNS,
    ),
)


def kind_of(draft: type[options.DraftOptions]) -> str:
    """The kind that a class of options is for."""
    (kind,) = typing.get_args(draft.model_fields["kind"].annotation)
    return str(kind)


HEADS = [draft for draft in options.DRAFTS if issubclass(draft, options.HeadFileOptions)]
GROUPS = (
    (profile.ProfileOptions, "Top level"),
    (options.TargetOptions, "`target`"),
    *((draft, f"`drafts.NAME` with `kind: {kind_of(draft)}`") for draft in options.DRAFTS if draft not in HEADS),
    (options.HeadFileOptions, "`drafts.NAME` of a head with files of its own"),
    (options.HybridOptions, "`hybrids.NAME`, or `drafts.NAME` with `kind: hybrid`"),
    (profile.SourceOptions, "`data`: a list of sources"),
    (options.GreedyContinuation, "`continuation` with `kind: greedy`"),
    (options.SampledContinuation, "`continuation` with `kind: sampled`"),
    (options.GivenContinuation, "`continuation` with `kind: given`"),
    (options.TextContinuation, "`continuation` with `kind: text`"),
    (options.MeasuredCosts, "`costs` with `source: auto`, the default, `measured` or `vllm`"),
    (options.TableCosts, "`costs` with `source: table`"),
    (options.RooflineCosts, "`costs` with `source: roofline`"),
    (options.NoCosts, "`costs` with `source: none`"),
    (options.VllmOptions, "`vllm`"),
    (profile.DecisionOptions, "`decision`"),
    (profile.Markers, "`thinking`, and each of `spans`"),
    (profile.ExecutionOptions, "`execution`"),
)


def columns_page() -> str:
    """The page about the tables of a run."""
    parts = [
        "# Columns\n",
        "Look up type, unit, range and meaning of each column of a run's tables. `scripts/make_reference.py` writes this",
        "page from `alphaprof/run/schema.py`; the Parquet files carry unit and meaning in metadata. Where columns name",
        "gamma (here 4), there is one for every gamma of the profile. Numbers are at least 0 where nothing else is said.\n",
    ]
    for title, about, columns in TABLES:
        parts += [f"## {title}\n", about + "\n", *map(column_line, columns), ""]
    return "\n".join(parts)


def column_line(column: schema.Column) -> str:
    """One column as a line of a list."""
    low, high = column.low, column.high
    if low is None:
        bounds = "any sign" if pa.types.is_floating(column.type) else ""
    else:
        bounds = f"{low:g} to {high:g}" if high is not None else f"from {low:g}" if low else ""
    kind = column.type_name + (" or null" if column.nullable else "")
    return f"- `{column.name}`, {', '.join(filter(None, (kind, column.unit, bounds)))}: {column.doc}"


def profile_page() -> str:
    """The page about the profile file. What several groups have in common stands once."""
    parts = [
        "# Profile file\n",
        "Look up every option of a profile: a YAML file, in which unknown keys are errors. Any value can be overridden:",
        "`--set target.dtype=float32`, `--set data.code.limit=20` (a source by its domain), `--set data.0.limit=20` (or by",
        "its index). Paths start at the profile file. Options with neither a default nor `required` can be left out.",
        "`scripts/make_reference.py` writes this page from `alphaprof/config/`.\n",
    ]
    written: dict[str, str] = {}
    for group, title in GROUPS:
        about = inspect.cleandoc(group.__doc__ or "")
        rows = [option_line(name, field) for name, field in group.model_fields.items() if name not in ("kind", "source")]
        if group is options.HeadFileOptions:
            about = "\n".join(f"- `{kind_of(head)}`: {inspect.cleandoc(head.__doc__ or '')}" for head in HEADS)
            block = options.BlockDraft.model_fields["gamma"]
            rows.append(option_line("gamma", block).replace("`,", "` of dflash and dspark,", 1))
        same = [row for row in rows if row in written]
        for place in dict.fromkeys(written[row] for row in same):
            names = [row.split("`")[1] for row in same if written[row] == place]
            rows.append(f"- as of {place}: {', '.join(f'`{name}`' for name in names)}")
        own = [row for row in rows if row not in written]
        parts += [f"## {title}\n", about + "\n", *own, *([""] if own else [])]
        written = dict.fromkeys(rows, title) | written
    return "\n".join(parts)


def option_line(name: str, field: Any) -> str:
    """One option as a line of a list."""
    if field.is_required():
        default = ", required"
    elif field.default is None or isinstance(field.default, options.Options):
        default = ""
    else:
        default = f", default `{field.default}`"
    about = f": {field.description}" if field.description else ""
    return f"- `{name}`, {type_name(field.annotation)}{default}{about}"


def type_name(annotation: Any) -> str:
    """A type in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(str(value) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_name(item) for item in arguments if item is not type(None)))
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin in (list, dict):
        return f"{'list' if origin is list else 'mapping'} of {type_name(arguments[-1])}"
    if isinstance(annotation, type) and issubclass(annotation, options.Options):
        return "group"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true or false", "Any": "any"}.get(
        getattr(annotation, "__name__", str(annotation)), str(annotation)
    )


def page_with(name: str, tables: dict[str, str]) -> str:
    """A page: its own text, with the tables between the marks written anew."""
    text = (DOCS / name).read_text(encoding="utf-8")
    for name, rows in tables.items():
        mark = f"<!-- {name}: written by scripts/make_reference.py -->\n"
        before, rest = text.split(mark)
        text = f"{before}{mark}{rows}\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}"
    return text


def rules_table() -> str:
    """The rules: when a token is kept, what becomes of the text, and who decodes like this."""
    rows = [
        "| rule | keeps the drafted token d | output | its own text | rounds | used by |",
        "|---|---|---|---|---|---|",
    ]
    for name, rule in rules.RULES.items():
        output = "another text" if rule.lossy else "the target's"
        kind = "none" if rule.lossy else "timed" if rule.timed else "not timed"
        users = ", ".join(filter(None, (engines.used_by(name), rule.used_by)))
        cells = (f"`{name}`", rule.about, output, " and ".join(rule.policies), kind, users)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def parameters_list() -> str:
    """The parameters of rules, and how they are written."""
    rows = []
    for name, rule in rules.RULES.items():
        for item in rule.parameters:
            kind, relaxing = "whole number" if item.whole else "number", "larger" if item.relaxes > 0 else "smaller"
            limits = f"{kind} from {item.low:g} to {item.high:g}; {relaxing} values accept more"
            rows.append(f"- `{rule_names.spelling(name)}`: {item.name}, {limits}")
    return "\n".join(rows)


def not_modelled_table() -> str:
    """The rules that alphaprof knows of and does not have."""
    rows = ["| rule | keeps the drafted token d |", "|---|---|"]
    return "\n".join([*rows, *(f"| `{name}` | {about} |" for name, about in rules.NOT_MODELLED.items())])


VERSIONS = [engine for name in serving.PASTED for engine in engines.FORMATS[name]]


def methods_table() -> str:
    """The engines: what each calls a kind of draft, the rules of drawn drafts that it applies, and if it has schedules."""
    rows = ["| `kind` | " + " | ".join(f"{engine.name} {', '.join(engine.versions)}" for engine in VERSIONS) + " |"]
    rows.append("|---" * (len(VERSIONS) + 1) + "|")
    for kind in map(kind_of, options.DRAFTS):
        cells = [f"`{kind}`"]
        for engine in VERSIONS:
            method = engine.methods.get(kind)
            drawn = [rule for rule in method.rules if rule not in engines.TOP] if method else []
            words = [*drawn, "schedule"] if method and method.schedule else drawn
            runner = f" ({method.runner})" if method and method.runner else ""
            cells.append(f"`{method.name}`{runner} {', '.join(words)}".rstrip() if method else "")
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def options_table() -> str:
    """How each engine is asked for a rule."""
    rows = ["| rule | " + " | ".join(engine.name for engine in engines.ENGINES) + " |"]
    rows.append("|---" * (len(engines.ENGINES) + 1) + "|")
    for rule in engines.EVERY[1:]:  # greedy text needs no other options
        asked = [engine.rules.get(rule) for engine in engines.ENGINES]
        cells = [
            "-" if words is None else " ".join(f"`{f'{key} {value}'.rstrip()}`" for key, value in words.items())
            for words in asked
        ]
        rows.append(f"| `{rule}` | " + " | ".join(cells) + " |")
    return "\n".join(rows)


FIELDS = re.compile(
    r"(<!-- fields of (\w+)(?:: ([\w ]+))?, written by scripts/make_reference.py -->\n).*?(<!-- end -->)", re.DOTALL
)


def report_page(definitions: dict[str, Any]) -> str:
    """The page about reports: its own text, with the tables of JSON fields between the marks written anew. A mark names a
    class of the report's schema, and the fields to list (default: all).
    """
    text = (DOCS / "report.md").read_text(encoding="utf-8")
    return FIELDS.sub(lambda found: f"{found[1]}{fields_list(definitions[found[2]], found[3])}\n{found[4]}", text)


def fields_list(kind: dict[str, Any], names: str | None) -> str:
    """Fields of one class as a Markdown list; `names`: those to list, with spaces between."""
    fields = kind["properties"]
    return "\n".join(f"- `{name}`: {fields[name]['description']}" for name in (names.split() if names else fields))


def pages() -> Iterable[tuple[Path, str]]:
    """All pages with their paths."""
    tables = {"rules": rules_table(), "parameters": parameters_list(), "not modelled": not_modelled_table()}
    written = {
        "columns.md": columns_page(),
        "profile.md": profile_page(),
        "rules.md": page_with("rules.md", tables),
        "exports.md": page_with("exports.md", {"methods": methods_table(), "options": options_table()}),
        "report.md": report_page(json_schema("report")["$defs"]),
    }
    return ((DOCS / name, text) for name, text in written.items())


if __name__ == "__main__":
    for path, text in pages():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
