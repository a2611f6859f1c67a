"""Writes profiles/prompts/stories.jsonl: beginnings of short stories by a small grammar, for targets that tell stories.

    python scripts/make_stories.py

Nothing is taken from any data set, and the same seed writes the same file.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

FILE = Path(__file__).parent.parent / "profiles" / "prompts" / "stories.jsonl"
COUNT, SEED = 160, 0
WHO = (
    *("a boy named Tim", "a girl named Lily", "a small dog named Max", "a grey cat named Mia", "a kind farmer named Joe"),
    *("a tiny mouse named Pip", "a big bear named Ben", "two brothers, Sam and Tom", "a little bird named Kiki"),
    *("an old man named Mr. Brown", "a brave rabbit named Ruby", "a shy girl named Anna", "a green frog named Fred"),
    *("a happy duck named Daisy", "three friends, Amy, Jack and Lucy", "a young fox named Finn", "a nurse named Sue"),
    *("a slow turtle named Bob", "a baker named Ella", "a lonely little robot", "a clever monkey named Coco"),
)
WHERE = (
    *("near a big lake", "in a small house by the sea", "on a farm with many animals", "in a tall tree in the forest"),
    *(
        "at the end of a quiet street",
        "in a warm nest",
        "next to a park with a red slide",
        "in a town with snow on every roof",
    ),
    *("behind the old school", "in a garden full of flowers", "under a wooden bridge", "high up on a hill", "by the river"),
)
LIKED = (
    *(
        "to paint pictures",
        "to sing songs in the morning",
        "to collect shiny stones",
        "to ride the blue bike",
        "to bake bread",
    ),
    *("to look at the stars at night", "to build towers out of blocks", "to swim", "to read books about ships", "to jump"),
    *(
        "to play hide and seek",
        "to grow carrots",
        "to help other people",
        "to eat apples",
        "to fly a kite",
        "to dance in the rain",
    ),
)
WHEN = (
    *("One day", "One sunny morning", "One cold night", "The next day", "On a rainy afternoon", "Early in the morning"),
    *("One evening after dinner", "On Saturday", "When spring came", "That summer", "Before bedtime", "Last winter"),
)
EVENT = (
    *("there was a loud noise behind the door", "a little box came in the mail", "the wind took the red hat away"),
    *("the lights went out and it was dark", "a stranger with a long coat knocked at the door", "the boat was gone"),
    *("it was time to go to the doctor", "somebody had eaten all the cookies", "a strange egg lay in the grass"),
    *(
        "the key to the treasure box was lost",
        "Mom said that a surprise was waiting outside",
        "a balloon got stuck in a tree",
    ),
    *(
        "the snow was so high that nobody could go out",
        "the little bell did not ring",
        "a big truck stopped in front of the house",
    ),
    *("a lost puppy cried in the bushes", "the toy train broke into two pieces", "the soup was much too hot"),
)
NEXT = (
    *("At first nobody knew what to do.", "It was very exciting!", "Everyone was surprised.", "Then an idea came."),
    *(
        '"Oh no!" said a small voice.',
        '"Look over there!" somebody shouted.',
        "It looked soft and round.",
        "So they went to look.",
    ),
    *(
        "The others laughed, but not for long.",
        '"Can I help you?" asked a friend.',
        "It smelled funny.",
        "There was a map inside.",
    ),
)
FORMS = (
    "Once upon a time, there was {who} who lived {where}. {when}, {event}. {next}",
    "{Who} lived {where} and liked {liked}. {when}, {event}.",
    "{when}, {event}. {Who} lived {where} and wanted to know why. {next}",
    "There once was {who}. Nothing was better than {liked}. But {lower}, {event}. {next}",
    "{next} It began {where}, where {who} lived. {when}, {event}.",
    "Do you know the story of {who}? It happened {where}. {when}, {event}.",
    "{Who} had a dream: {liked}, every day. {when}, {event}. {next}",
)


def stories(count: int = COUNT, seed: int = SEED) -> list[str]:
    """Different beginnings, `count` of them."""
    lots = random.Random(seed)  # noqa: S311 (nothing is secret)
    texts: dict[str, None] = {}
    while len(texts) < count:
        who, when = lots.choice(WHO), lots.choice(WHEN)
        words = {"who": who, "Who": who[0].upper() + who[1:], "when": when, "lower": when[0].lower() + when[1:]}
        words |= {
            "where": lots.choice(WHERE),
            "liked": lots.choice(LIKED),
            "event": lots.choice(EVENT),
            "next": lots.choice(NEXT),
        }
        texts.setdefault(lots.choice(FORMS).format(**words))
    return list(texts)


if __name__ == "__main__":
    lines = [json.dumps({"id": f"story-{number:03d}", "prompt": text}) for number, text in enumerate(stories(), 1)]
    FILE.write_text("\n".join(lines) + "\n")
    print(f"{FILE.name}: {len(lines)} prompts")
