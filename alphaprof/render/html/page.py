"""One self-contained HTML file from an answer, without a script: it opens offline, prints, and nothing in it comes from
anywhere else.

Text of the dataset is untrusted: Jinja escapes what goes into the page, and a content security policy lets no script run at
all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from alphaprof.errors import ExtraMissing
from alphaprof.render import format as fmt
from alphaprof.render.blocks import OUTCOMES, Block, Figure
from alphaprof.render.json import PREFIX
from alphaprof.version import __version__, install_line

if TYPE_CHECKING:
    from jinja2 import Template

OPTION = re.compile(r"(?<!\S)--[a-z][a-z-]*")
Part = tuple[str, str, Sequence[Block]]  # a section's name, its title if it has a heading, and its blocks


def plain_page(format_name: str, blocks: Sequence[Block]) -> str:
    """Return the page of an answer of a format such as alphaprof-check. Raises `ExtraMissing` without the package that draws
    it.
    """
    require_html("an HTML page", "jinja2")
    outcome, title = getattr(blocks[0], "word", "answer"), format_name.removeprefix(PREFIX)
    parts: list[Part] = [("answer", "", blocks)]
    return page(parts, outcome=outcome, title=title, version=__version__, report=None, colors={}, terms={}, figures={})


def require_html(what: str, *packages: str) -> None:
    """Raise `ExtraMissing` if a package that draws `what` is not installed."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ExtraMissing(f"{what} needs {' and '.join(missing)}", install_line("html"))


def page(parts: Sequence[Part], figures: Mapping[str, Any], **values: Any) -> str:
    """Return a page of `parts`, without those that have nothing to show, with its style. Every value is escaped unless it is
    markup.
    """
    shown = [
        (name, title, [block for block in blocks if not isinstance(block, Figure) or block.name in figures])
        for name, title, blocks in parts
    ]
    css = "".join(map(resource, ("colors.css", "page.css", "first_screen.css")))
    return str(_template().render(parts=[part for part in shown if part[2]], figures=figures, css=css, **values))


@cache
def _template() -> Template:
    """Return the template of the page, which escapes all that is put into it."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup, escape

    def prose(text: str) -> Markup:  # a line ends before an option, and not inside it
        return Markup(OPTION.sub(r'<span class="option">\g<0></span>', str(escape(fmt.visible(text)))))  # noqa: S704 - escaped

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"visible": fmt.visible, "prose": prose, "sentence": lambda text: fmt.visible(fmt.sentence(text))}
    environment.globals |= {"fmt": fmt, "outcomes": OUTCOMES, "glossary": glossary()}
    return environment.from_string(resource("page.html.j2"))


@cache
def glossary() -> dict[str, Any]:
    """Return the words of the glossary by key: `name`, `meaning`, and the `headings` of tables that it explains."""
    return dict(json.loads(resource("glossary.json")))


def resource(name: str) -> str:
    """Return the text of a file beside this one."""
    return (files("alphaprof.render.html") / name).read_text(encoding="utf-8")
