"""Cases as a loop of one test: what differs by a module, a column, a page or an option is no test of its own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

Test = Callable[..., None]


def each(names: str | tuple[str, ...], cases: Iterable[Any], **_: Any) -> Callable[[Test], Test]:
    """Like `pytest.mark.parametrize` with plain values, as one test. What a failing case was stands below its failure."""
    known = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    given = [case.values if hasattr(case, "marks") else case if len(known) > 1 else (case,) for case in cases]

    def decorated(test: Test) -> Test:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def every(*args: Any, **fixtures: Any) -> None:
            for case in given:
                own = dict(zip(known, case, strict=True))
                try:
                    test(*args, **fixtures, **own)
                except BaseException as error:
                    error.add_note(f"case: {own}")
                    raise

        rest = [parameter for name, parameter in signature.parameters.items() if name not in known]
        every.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]  # what pytest asks for
        return every

    return decorated
