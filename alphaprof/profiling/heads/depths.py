"""How many drafts of a round are measured of a head."""

from __future__ import annotations

from collections.abc import Sequence

from alphaprof.errors import ModelUnloadable


def depths_of(called: str, wanted: int | None, gammas: Sequence[int], most: int | None, other: str = "") -> int:
    """The depths that are measured: those that are wanted, else the largest of `gammas`. Raises `ModelUnloadable` where the
    head has fewer: `most`, None for any number; `other` says which setting has more. `called`: what messages call the head.
    """
    depths = max(gammas) if wanted is None else wanted
    if most is not None and max(depths, *gammas) > most:
        hint = f"gammas and depths of {most} or less" + (f"; {other}" if other else "")
        raise ModelUnloadable(f"{called} has {most} depths, and {max(depths, *gammas)} are asked for", hint)
    return depths
