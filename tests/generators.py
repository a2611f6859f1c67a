"""Rounds of other generators, token by token: Hugging Face's assisted generation and llama.cpp's server.

transformers starts its first round at the first token, leaves room for the target's own token, ends a draft after its own
EOS and a proposal of prompt lookup before one, and counts a matched EOS as the target's own. llama.cpp leaves such room,
too, and ends a draft before an unsure token. Rounds are (drafted, matched), of one text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

Rounds = list[tuple[int, int]]


def by_model(
    text: Sequence[int],
    top: Sequence[int],
    gamma: int,
    limit: int,
    eos: Collection[int] = (),
    unsure: Sequence[bool] | None = None,
) -> Rounds:
    """Rounds of Hugging Face with a draft whose top token at each place of the text is `top`, and `unsure` or not: it ends
    after such a token. What it drafts after a wrong token is not known: as many as there is room for.
    """
    rounds, at = Rounds(), 0
    while at < len(text):
        drafted = matched = 0
        right = True
        while drafted < min(gamma, limit - at - 1):
            place, known = at + drafted, right and at + drafted < len(text)
            drafted += 1
            right = known and top[place] == text[place]
            matched += right
            if known and (top[place] in eos or (unsure is not None and unsure[place])):
                break
        emitted = min(matched + 1, len(text) - at)
        rounds.append((drafted, emitted - 1))
        at += emitted
    return rounds


def by_lookup(proposed: Sequence[int], run: Sequence[int], gamma: int, limit: int) -> Rounds:
    """Rounds of Hugging Face's prompt lookup: what a round that starts at each place would propose (see `until_eos`), and
    how many of these tokens the text goes on with. Only where one token is left it drafts none.
    """
    rounds, at = Rounds(), 0
    while at < len(run):
        drafted = 0 if limit - at == 1 else min(gamma, proposed[at])
        emitted = min(min(drafted, run[at]) + 1, len(run) - at)
        rounds.append((drafted, emitted - 1))
        at += emitted
    return rounds


def by_llama_cpp(agrees: Sequence[bool], unsure: Sequence[bool], gamma: int, limit: int) -> tuple[int, int, int]:
    """Tokens that llama.cpp's server drafts at least and at most in all rounds, and those accepted; the prefill writes the
    first token. What it drafts after a wrong token is not known.
    """
    least = most = accepted = 0
    at = 1
    while at < len(agrees):
        room, drafted, matched = max(0, min(gamma, limit - at - 1)), 0, 0
        while drafted < room and matched == drafted and at + drafted < len(agrees) and not unsure[at + drafted]:
            matched += agrees[at + drafted]
            drafted += 1
        least, accepted = least + drafted, accepted + matched
        elsewhere = matched < drafted or at + drafted == len(agrees)
        most += room if elsewhere else drafted
        at += min(matched + 1, len(agrees) - at)
    return least, most, accepted


def proposal(tokens: Sequence[int], max_ngram: int) -> list[int]:
    """What prompt lookup proposes behind a text: what followed its last tokens, as many as stood there before, at the first
    such place.
    """
    for size in range(min(max_ngram, len(tokens) - 1), 0, -1):
        for place in range(len(tokens) - size):
            if list(tokens[place : place + size]) == list(tokens[len(tokens) - size :]):
                return list(tokens[place + size :])
    return []


def until_eos(proposed: Sequence[int], eos: Collection[int]) -> int:
    """How many tokens of a proposal stand before the first EOS among them."""
    return next((number for number, token in enumerate(proposed) if token in eos), len(proposed))


def before_eos(prompt: Sequence[int], text: Sequence[int], max_ngram: int, eos: Collection[int]) -> list[int]:
    """`until_eos` of the proposal at each place of a text behind a prompt."""
    whole = [*prompt, *text]
    return [until_eos(proposal(whole[: len(prompt) + place], max_ngram), eos) for place in range(len(text))]
