"""Write the generated task sets, the same bytes at every run.

    python data/tasks/make_tasks.py

arithmetic.jsonl  every sum of two digits, every difference of two that is not negative
multihop.jsonl    MuSiQue's fields; invented facts, joined over two of twenty paragraphs
tracking.jsonl    in the manner of bAbI: qa2 (where is the object), qa3 (where was it before)
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SEED = 42
MULTIHOP_ITEMS = 80
PARAGRAPHS = 20
MIN_NAME_LETTERS = 7
TRACKING_ITEMS = 120
EVENTS = {"qa2": (8, 14), "qa3": (14, 22)}
"""Least and most events of a story, by kind."""

_ONSETS = "b br c cl d dr f g gr h k l m n p pr r s st t tr v w z".split()
_VOWELS = "a e i o u ai ea ou".split()
_CODAS = "l n r s th nd rk lm ven ston mar dell ric bor".split()

# A chain leads from an entity over a person (the bridge) to an answer: the first paragraph names
# the person, the second says something of the person without the entity.
_FIRST_HOPS = [
    (
        "novel",
        "{name}",
        "The novel {entity} was written by {bridge}.",
        "the author of the novel {entity}",
    ),
    ("bridge", "{name} Bridge", "{entity} was designed by {bridge}.", "the designer of {entity}"),
    (
        "company",
        "{name} Works",
        "The firm {entity} was founded by {bridge}.",
        "the founder of the firm {entity}",
    ),
    (
        "opera",
        "{name}",
        "The music of the opera {entity} is by {bridge}.",
        "the composer of the opera {entity}",
    ),
    (
        "team",
        "{name} Rovers",
        "The captain of the team {entity} is {bridge}.",
        "the captain of the team {entity}",
    ),
    (
        "ship",
        "{name}",
        "The ship {entity} was built for {bridge}.",
        "the first owner of the ship {entity}",
    ),
]
_SECOND_HOPS = [
    ("town", "{bridge} was born in the town of {answer}.", "In which town was {of} born?"),
    ("school", "{bridge} was educated at {answer} College.", "Which college educated {of}?"),
    ("spouse", "{bridge} later married {answer}.", "Whom did {of} marry?"),
    (
        "street",
        "{bridge} lived for many years in {answer} Street.",
        "In which street did {of} live?",
    ),
    ("teacher", "{bridge} learned the trade from {answer}.", "From whom did {of} learn the trade?"),
    (
        "club",
        "{bridge} was president of the {answer} Society.",
        "Which society had {of} as president?",
    ),
]
# The answer as its paragraph writes it, where that is more than the name asked for.
_LONGER_ANSWERS = {
    "town": "the town of {}",
    "school": "{} College",
    "street": "{} Street",
    "club": "the {} Society",
}
_ENTITY_DETAILS = [
    "It drew much attention when it was first shown.",
    "Several newspapers of the region wrote about it.",
    "Its early history is told in a small brochure.",
    "A plaque in the main square recalls it.",
    "It was almost given up for lack of money.",
    "Older residents still speak of it with pride.",
]
_PERSON_DETAILS = [
    "Colleagues described a quiet and stubborn character.",
    "No portrait from that time has come down to us.",
    "Most of the letters were lost in a fire.",
    "Friends recalled a fondness for long walks.",
    "A short biography was printed after the funeral.",
    "The diaries are kept in a private collection.",
]

PEOPLE = ["Mary", "John", "Sandra", "Daniel"]
PLACES = ["kitchen", "garden", "hallway", "bathroom", "office", "bedroom", "cellar", "balcony"]
OBJECTS = ["apple", "football", "milk", "lamp", "book", "hammer"]
_MOVES = [
    "{} went to the {}.",
    "{} moved to the {}.",
    "{} walked to the {}.",
    "{} travelled to the {}.",
]
_TAKES = ["{} picked up the {}.", "{} took the {}.", "{} grabbed the {}."]
_DROPS = ["{} put down the {}.", "{} dropped the {}.", "{} left the {} there."]


def arithmetic() -> list[dict[str, Any]]:
    """Return all sums of two digits and all differences that are not negative."""
    digits = range(10)
    sums = [("plus", a, b, a + b) for a in digits for b in digits]
    differences = [("minus", a, b, a - b) for a in digits for b in digits if a >= b]
    return [
        {
            "id": f"{word}_{a}_{b}",
            "question": f"What is {a} {word} {b}?",
            "answer": str(value),
            "aliases": [],
        }
        for word, a, b, value in sums + differences
    ]


class Names:
    """Invented names, none of which comes twice or is part of another."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._given: list[str] = []

    def word(self) -> str:
        """Return a new invented word of two syllables."""
        rng = self._rng
        while True:
            syllables = (rng.choice(_ONSETS), rng.choice(_VOWELS), rng.choice(_ONSETS),
                         rng.choice(_VOWELS), rng.choice(_CODAS))  # fmt: skip
            name = "".join(syllables).capitalize()
            # Shorter ones are at times English words.
            if len(name) < MIN_NAME_LETTERS:
                continue
            if not any(name.lower() in o.lower() or o.lower() in name.lower() for o in self._given):
                self._given.append(name)
                return name

    def person(self) -> str:
        """Return a new invented name of a person, first name and family name."""
        return f"{self.word()} {self.word()}"


def multihop_item(index: int, rng: random.Random) -> dict[str, Any]:
    """Return one item: a two-hop question, its two paragraphs and eighteen others.

    The other paragraphs are whole chains of the same kinds about other names, so that the kind of a
    paragraph does not give the answer away.
    """
    names = Names(rng)
    asked_first, asked_second = rng.choice(_FIRST_HOPS), rng.choice(_SECOND_HOPS)
    paragraphs: list[dict[str, Any]] = []
    question = answer = ""
    longer = _LONGER_ANSWERS.get(asked_second[0])
    for chain in range(PARAGRAPHS // 2):
        # Half of the other chains share a hop with the question.
        first = asked_first if chain in (0, 1, 2) else rng.choice(_FIRST_HOPS)
        second = asked_second if chain in (0, 1, 3, 4) else rng.choice(_SECOND_HOPS)
        entity = first[1].format(name=names.word())
        bridge = names.person()
        target = names.person() if second[0] in ("spouse", "teacher") else names.word()
        texts = (
            (entity, first[2].format(entity=entity, bridge=bridge), _ENTITY_DETAILS),
            (bridge, second[1].format(bridge=bridge, answer=target), _PERSON_DETAILS),
        )
        for title, fact, details in texts:
            before, after = rng.sample(details, 2)
            text = f"{fact} {before} {after}" if rng.random() < 0.5 else f"{before} {fact} {after}"
            paragraphs.append({"title": title, "paragraph_text": text, "is_supporting": chain == 0})
        if chain == 0:
            question = second[2].format(of=first[3].format(entity=entity))
            answer = target
    rng.shuffle(paragraphs)
    return {
        "id": f"2hop__{index:03d}",
        "question": question,
        "answer": answer,
        "answer_aliases": [] if longer is None else [longer.format(answer)],
        "paragraphs": [{"idx": i, **paragraph} for i, paragraph in enumerate(paragraphs)],
    }


def multihop() -> list[dict[str, Any]]:
    """Return the multi-hop items, each from a seed of its own."""
    return [multihop_item(i, random.Random(f"multihop/{SEED}/{i}")) for i in range(MULTIHOP_ITEMS)]


class World:
    """People who move between places and carry objects; keeps each object's places in order."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._where: dict[str, str] = {}
        self._holder: dict[str, str] = {}
        self._lying: dict[str, str] = {}
        self.visited: dict[str, list[str]] = {}

    def _visit(self, thing: str, place: str) -> None:
        """Note that an object is at a place, if it was not there already."""
        places = self.visited.setdefault(thing, [])
        if not places or places[-1] != place:
            places.append(place)

    def event(self) -> str:
        """Let one thing happen and return its sentence."""
        rng = self._rng
        person = rng.choice(PEOPLE)
        place = self._where.get(person)
        held = sorted(o for o, holder in self._holder.items() if holder == person)
        if place is not None:
            free = [
                o for o in OBJECTS if o not in self._holder and self._lying.get(o, place) == place
            ]
            chance = rng.random()
            if held and chance < 0.25:
                thing = rng.choice(held)
                del self._holder[thing]
                self._lying[thing] = place
                return rng.choice(_DROPS).format(person, thing)
            if free and not held and chance < 0.6:
                thing = rng.choice(free)
                self._holder[thing] = person
                self._lying.pop(thing, None)
                self._visit(thing, place)
                return rng.choice(_TAKES).format(person, thing)
        target = rng.choice([p for p in PLACES if p != place])
        self._where[person] = target
        for thing in held:
            self._visit(thing, target)
        return rng.choice(_MOVES).format(person, target)


def tracking_item(index: int, rng: random.Random) -> dict[str, Any]:
    """Return one story with its question; stories without a fitting object are drawn again."""
    kind = ("qa2", "qa3")[index % 2]
    while True:
        world = World(rng)
        story = " ".join(world.event() for _ in range(rng.randint(*EVENTS[kind])))
        fitting = sorted(o for o, places in world.visited.items() if len(places) >= 2)
        if not fitting:
            continue
        thing = rng.choice(fitting)
        *_, before, now = world.visited[thing]
        question, target = (
            (f"Where is the {thing}?", now)
            if kind == "qa2"
            else (f"Where was the {thing} before the {now}?", before)
        )
        # "before the X" is only clear if the object has been at X once.
        if kind == "qa3" and world.visited[thing].count(now) > 1:
            continue
        return {
            "id": f"{kind}_{index // 2:03d}",
            "kind": kind,
            "input": story,
            "question": question,
            "target": target,
        }


def tracking() -> list[dict[str, Any]]:
    """Return the stories, each from a seed of its own, qa2 and qa3 in turn."""
    return [tracking_item(i, random.Random(f"tracking/{SEED}/{i}")) for i in range(TRACKING_ITEMS)]


def json_lines(items: Iterable[dict[str, Any]]) -> str:
    """Return items as JSON lines."""
    return "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)


def make_tasks() -> dict[Path, str]:
    """Return path -> text of every generated task set."""
    sets = {"arithmetic": arithmetic(), "multihop": multihop(), "tracking": tracking()}
    return {HERE / f"{name}.jsonl": json_lines(items) for name, items in sets.items()}


if __name__ == "__main__":
    for path, text in make_tasks().items():
        path.write_bytes(text.encode("utf-8"))
