"""Every answer of the command line for fixed runs, a file each: what a change of the code must not change unasked.

    python scripts/answers.py OUT [RUN ...]     and later, with another OUT: diff -r OUT OTHER

The fixed runs are synthetic ones and an import; each RUN, such as those of the demo, is read as well.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
LINES = f"""
rules
schema
schema check
import {ROOT}/tests/golden/vllm/offline-draft-g1-0.32.0.jsonl --rule strict --out imported
import {ROOT}/tests/golden/vllm/metrics-1.txt --out x
diagnose {ROOT}/tests/golden/vllm/metrics-0.txt {ROOT}/tests/golden/vllm/metrics-1.txt
diagnose {ROOT}/tests/golden/vllm/metrics-1.txt --format json
predict --alpha 0.75 --cost 0.04
predict --alpha 0.5 --cost 0.3 --gamma 3 --format json
predict --accepted-per-drafted 0.5 --at-gamma 3 --cost 0.1
predict --alpha 2 --cost 0.1
report two:small
report nothing
report two --show nothing
report two --set decision.gamma=99
report two --set target.dtype=float32
report two --set costs.source=table
report two --rules no
check two --draft no
check two --gamma 99
compare two two
export two:small --to no
export two:small --to dynamo
profile nothing.yaml --out x
import nothing --rule strict --out x
validate nothing.yaml
"""
FORMS = ("terminal", "md", "json")
VARIES = re.compile(r"\d{4}-\d\d-\d\dT[\d:.+]+Z?")  # times


def lines_about(run: str, drafts: Sequence[str]) -> Iterator[str]:
    """The command lines that are answered about a run."""
    from alphaprof.commands.export.formats import ABOUT, TEXTS

    yield from (f"report {run} --format {form}" for form in (*FORMS, "html"))
    yield from (f"report {run} --show all{more}" for more in ("", " --format md", " --set decision.min_speedup=1.4"))
    for asked in ("", " --min-alpha 0.5", " --min-acceptance-length 1.2 --gamma 2", " --min-speedup 1.05"):
        yield from (f"check {run}{asked} --format {form}" for form in (*FORMS, "junit"))
    for draft in drafts:
        yield from (f"check {run} --draft {draft} --baseline {run} --format {form}" for form in FORMS)
        yield from (f"export {run}:{draft} --to {form}" for form in ABOUT if form != TEXTS)
    for first, second in itertools.combinations(drafts, 2):
        yield from (f"compare {run}:{first} {run}:{second} --format {form}" for form in FORMS)


def answered(line: str) -> str:
    """What a command line prints on both streams, and its exit code."""
    from alphaprof.cli import app

    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2)]
    sys.argv, code = ["alphaprof", *line.split()], 0
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        try:
            app.main()
        except SystemExit as end:
            code = int(end.code or 0)
    out, err = (stream.buffer.getvalue().decode() for stream in streams)  # type: ignore[attr-defined]
    return f"{out}\n-- stderr\n{err}\n-- exit code {code}\n"


def main(arguments: Sequence[str]) -> None:
    """Write the answers."""
    from tests.cli.test_help import commands
    from tests.render.test_first_screen import TWO
    from tests.render.test_sections import EVERYTHING
    from tests.synthetic import Recipe, write_run

    os.environ["COLUMNS"] = "100"
    out, others = Path(arguments[0]).resolve(), [Path(each).resolve() for each in arguments[1:]]
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        runs = {"everything": EVERYTHING, "two": TWO, "untimed": Recipe(latency=False)}
        drafts = {name: list(write_run(Path(name), recipe).manifest.drafts) for name, recipe in runs.items()}
        for other in others:
            Path(other.name).symlink_to(other)
            drafts[other.name] = ["skip", "ngram"]
        drafts["imported"] = []
        lines = [*LINES.strip().splitlines(), *(f"{' '.join(words)} --help" for words in commands())]
        for line in itertools.chain(lines, *(lines_about(run, mine) for run, mine in drafts.items())):
            name = re.sub(r"[^\w.=:-]+", "_", re.sub(r"/\S*/", "", line))
            (out / name).write_text(VARIES.sub("...", answered(line).replace(folder, "").replace(str(ROOT), "")))


if __name__ == "__main__":
    main(sys.argv[1:])
