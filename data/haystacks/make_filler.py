"""Write the filler texts of a language from its grammar, the same bytes for the same grammar.

    python data/haystacks/make_filler.py            # every grammar in grammars/
    python data/haystacks/make_filler.py en zh      # these languages

A grammar is a JSON file, `grammars/{language}.json`:

    seed        base of the seeds; text number i is drawn with random.Random(f"{seed}/{i}")
    texts       number of texts, written to {language}/filler_00.txt onwards
    size, unit  least size of a text, counted in "words" or in "characters"
    joiner      what stands between two sentences of a paragraph
    paragraph   [least, most] sentences of a paragraph
    bound       names drawn once a paragraph and kept, so that a paragraph stays with its subject
    corrections list of [regular expression, replacement], applied to every sentence in turn
    names       name -> choices that every theme may use
    themes      list of {name -> choices}; a paragraph has one theme, whose names come before
                `names`; its choices under "sentence" are sentences that only this theme has
    sentences   sentences that every theme may use

In a choice, `{name}` stands for one of the choices of that name, and `[a|b|c]` for one of a, b, c.
Within a sentence a name never gives the same choice twice (unless it has no other), within a
paragraph no pattern is used twice, and within a text no sentence occurs twice.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
_SLOT = re.compile(r"\{(\w+)\}|\[([^\[\]{}]*)\]")
_OWN_SENTENCE = 0.55
"""Chance that a sentence is one of the theme's own, where the theme has any."""


class Paragraph:
    """One theme with its bound names, from which sentences are drawn."""

    def __init__(self, grammar: dict[str, Any], rng: random.Random) -> None:
        theme = rng.choice(grammar["themes"])
        self._rng = rng
        self._names = {**grammar["names"], **theme}
        self._own, self._common = list(theme["sentence"]), list(grammar["sentences"])
        self._corrections = grammar["corrections"]
        self._bound: dict[str, str] = {}
        for name in grammar["bound"]:
            self._bound[name] = self._expand(rng.choice(self._names[name]))

    def _expand(self, text: str) -> str:
        """Replace slots, innermost first, until none is left."""
        used: set[str] = set()
        while (slot := _SLOT.search(text)) is not None:
            name, alternatives = slot.groups()
            if name is None:
                chosen = self._rng.choice(alternatives.split("|"))
            elif name in self._bound:
                chosen = self._bound[name]
            else:
                choices = self._names[name]
                chosen = self._rng.choice([c for c in choices if c not in used] or choices)
                used.add(chosen)
            text = text[: slot.start()] + chosen + text[slot.end() :]
        return text

    def sentence(self) -> str:
        """Draw one sentence, its first letter raised; its pattern is not used again."""
        own = self._own and self._rng.random() < _OWN_SENTENCE
        patterns = self._own if own else self._common
        text = self._expand(patterns.pop(self._rng.randrange(len(patterns))))
        for expression, replacement in self._corrections:
            text = re.sub(expression, replacement, text)
        return text[0].upper() + text[1:]


def size_of(text: str, unit: str) -> int:
    """Return the number of words, or of characters other than white space."""
    return len(text.split()) if unit == "words" else len("".join(text.split()))


def paragraphs(grammar: dict[str, Any], rng: random.Random) -> Iterator[str]:
    """Yield paragraphs without end; a sentence that has already come is left out."""
    seen: set[str] = set()
    while True:
        paragraph = Paragraph(grammar, rng)
        drawn = [paragraph.sentence() for _ in range(rng.randint(*grammar["paragraph"]))]
        sentences = [sentence for sentence in drawn if sentence not in seen]
        seen.update(sentences)
        if sentences:
            yield grammar["joiner"].join(sentences)


def make_text(grammar: dict[str, Any], index: int) -> str:
    """Return text number `index` of a grammar, paragraphs parted by an empty line."""
    rng = random.Random(f"{grammar['seed']}/{index}")
    parts: list[str] = []
    size = 0
    for paragraph in paragraphs(grammar, rng):
        parts.append(paragraph)
        size += size_of(paragraph, grammar["unit"])
        if size >= grammar["size"]:
            break
    return "\n\n".join(parts) + "\n"


def make_language(language: str) -> dict[Path, str]:
    """Return path -> text for every filler text of a language."""
    grammar = json.loads((HERE / "grammars" / f"{language}.json").read_text(encoding="utf-8"))
    return {
        HERE / language / f"filler_{index:02d}.txt": make_text(grammar, index)
        for index in range(grammar["texts"])
    }


def main(languages: list[str]) -> None:
    """Write the texts of these languages, or of all that have a grammar."""
    for language in languages or sorted(p.stem for p in (HERE / "grammars").glob("*.json")):
        for path, text in make_language(language).items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(text.encode("utf-8"))


if __name__ == "__main__":
    main(sys.argv[1:])
