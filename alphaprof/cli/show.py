"""A report in one of its renderings, as text."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable
from functools import partial

from rich.console import Console

from alphaprof.commands.check.build import Check
from alphaprof.commands.check.text import check_json, check_junit, check_markdown, check_terminal
from alphaprof.commands.compare.build import Comparison
from alphaprof.commands.compare.text import comparison_json, comparison_terminal
from alphaprof.commands.importing.counters import Counters, counters_json, counters_terminal
from alphaprof.commands.latency import latency_csv, latency_json, latency_terminal
from alphaprof.commands.predict import Prediction, prediction_json, prediction_terminal
from alphaprof.commands.preflight.build import Preflight, preflight_json, preflight_terminal
from alphaprof.commands.rollout.build import Rollout, rollout_json, rollout_terminal
from alphaprof.commands.trees.build import TreesReport
from alphaprof.commands.trees.text import trees_json, trees_terminal
from alphaprof.commands.validate.build import Validation
from alphaprof.commands.validate.text import validation_json, validation_terminal
from alphaprof.log.store import Run
from alphaprof.render.html.page import render_html
from alphaprof.render.json import render_json
from alphaprof.render.markdown import report_markdown
from alphaprof.render.terminal import render_terminal
from alphaprof.report.model import Report

PLAIN_WIDTH = 150


def render(report: Report, output: str, to_file: bool = False) -> str:
    """The report as text: `terminal` (coloured and as wide as the terminal where stdout is one), `json`, `md` or `html`.

    Raises `ExtraMissing` where the packages of the HTML report are missing.
    """
    if output == "json":
        return render_json(report) + "\n"
    if output == "md":
        return report_markdown(report)
    if output == "html":
        return render_html(report)
    return _drawn(partial(render_terminal, report), to_file)


def render_comparison(comparison: Comparison, output: str, to_file: bool = False) -> str:
    """A comparison as text, likewise."""
    if output == "json":
        return comparison_json(comparison) + "\n"
    return _drawn(partial(comparison_terminal, comparison), to_file)


def render_trees(report: TreesReport, output: str, to_file: bool = False) -> str:
    """Draft trees as text, likewise."""
    if output == "json":
        return trees_json(report) + "\n"
    return _drawn(partial(trees_terminal, report), to_file)


def render_prediction(prediction: Prediction, output: str, to_file: bool = False) -> str:
    """A prediction as text, likewise."""
    if output == "json":
        return prediction_json(prediction) + "\n"
    return _drawn(partial(prediction_terminal, prediction), to_file)


def render_counters(counters: Counters, output: str, to_file: bool = False) -> str:
    """What an engine's counters say as text, `terminal` or `json`."""
    if output == "json":
        return counters_json(counters) + "\n"
    return _drawn(partial(counters_terminal, counters), to_file)


def render_validation(validation: Validation, output: str) -> str:
    """A prediction beside what was measured as text, likewise."""
    if output == "json":
        return validation_json(validation) + "\n"
    return _drawn(partial(validation_terminal, validation), to_file=False)


def render_check(check: Check, output: str, to_file: bool = False) -> str:
    """A check as text, likewise; or `junit`."""
    if output == "json":
        return check_json(check) + "\n"
    if output == "md":
        return check_markdown(check)
    if output == "junit":
        return check_junit(check)
    return _drawn(partial(check_terminal, check), to_file)


def render_latency(run: Run, output: str, to_file: bool = False) -> str:
    """The latency table of a run that has one as text, likewise; or `csv`."""
    latency = run.latency()
    rows = latency.to_pylist() if latency is not None else []
    if output == "csv":
        return latency_csv(rows)
    if output == "json":
        return latency_json(run.manifest, rows) + "\n"
    return _drawn(partial(latency_terminal, run.manifest, rows), to_file)


def render_rollout(rollout: Rollout, output: str, to_file: bool = False) -> str:
    """What rollouts gave as text, likewise."""
    if output == "json":
        return rollout_json(rollout) + "\n"
    return _drawn(partial(rollout_terminal, rollout), to_file)


def render_preflight(preflight: Preflight, output: str) -> str:
    """A dry run as text, likewise."""
    if output == "json":
        return preflight_json(preflight) + "\n"
    return _drawn(partial(preflight_terminal, preflight), to_file=False)


def _drawn(draw: Callable[[Console], None], to_file: bool) -> str:
    """What `draw` prints on a console, coloured and as wide as the terminal where stdout is one."""
    colour = sys.stdout.isatty() and not to_file
    width = shutil.get_terminal_size().columns if colour else PLAIN_WIDTH
    buffer = io.StringIO()
    draw(Console(file=buffer, force_terminal=colour, width=max(width, 100)))
    return buffer.getvalue()
