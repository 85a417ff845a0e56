"""Random noun phrases, pronouns and names, and the word combinations that are held out."""

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import TypeVar
from zlib import crc32

from manyheads.phrasebook.modifiers import (
    ABOUT_PEOPLE,
    DEGREES,
    FITTING,
    NAMES,
    PERSONS,
    PLACES,
    Adjective,
)
from manyheads.phrasebook.nouns import Noun, tagged
from manyheads.phrasebook.tree import (
    Both,
    Described,
    Name,
    Nominal,
    Number,
    Phrase,
    Place,
    Pronoun,
)

T = TypeVar("T")

HELD_OUT_SHARE = 0.05
PEOPLE = tagged("person", "kin")
# Where somebody can be, and where a small thing can.
SITES: tuple[Noun, ...] = tuple(noun for noun in tagged("in", "by") if noun.name != "mirror")
SPOTS: tuple[Noun, ...] = tagged("in", "on", "under", "by")
SMALL: frozenset[Noun] = frozenset(tagged("hand", "food", "find", "clothes", "cat", "mouse"))
_POSSESSIVES = ("my", "your", "his", "her", "our", "their")
_NOBODYS = ("man", "woman", "boy", "girl")
_ONLY_ONE = ("mother", "father", "grandmother", "grandfather")


@cache
def held_out(kind: str, first: str, second: str) -> bool:
    """Whether two lemmas are kept apart outside the compositional split."""
    return crc32(f"{kind} {first} {second}".encode()) < HELD_OUT_SHARE * 2**32


def _repeat(weights: dict[str, int]) -> tuple[str, ...]:
    return tuple(name for name, weight in weights.items() for _ in range(weight))


# Determiners by what a phrase is for; a name that occurs more often is drawn more often.
_FREE = _repeat(
    {"the": 15, "a": 9, "poss": 6, "this": 3, "'s": 2, "number": 5, "the number": 1}
    | {"many": 2, "some": 2, "every": 2, "all": 2}
)
_CLOSED = _repeat({"the": 10, "poss": 5, "this": 3, "'s": 2})
_DENIED = _repeat({"the": 8, "a": 7, "poss": 4, "this": 2, "'s": 1})
_KIN = _repeat({"poss": 12, "'s": 3, "the of": 4, "a": 1, "number": 1})
_KIN_CLOSED = _repeat({"poss": 12, "'s": 3, "the of": 4})
_MASS = _repeat({"": 8, "the": 4, "poss": 2, "this": 1})
_SETTING = _repeat({"the": 14, "this": 2, "poss": 2, "a": 2})
_SHARED = _repeat({"the": 6, "poss": 5, "this": 2})
_NEW = _repeat({"a": 6, "number": 3, "many": 2, "some": 2})
_POOLS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # use: (determiners of most nouns, determiners of kin)
    "free": (_FREE, _KIN),
    "closed": (_CLOSED, _KIN_CLOSED),
    "denied": (_DENIED, _KIN),
    "setting": (_SETTING, _KIN_CLOSED),
    "shared": (_SHARED, _SHARED[6:11]),
    "goal": (_SETTING, _KIN_CLOSED),
    "amount": (_SHARED, _SHARED),
    "new": (_NEW, _NEW),
    "none": (("a",), ("a",)),
}


class Nominals:
    """Draws the parts of a sentence that stand for people and things."""

    def __init__(self, seed: str) -> None:
        self.random = Random(seed).random
        self.counter = 0
        self.held_out = False

    def pick(self, pool: Sequence[T]) -> T:
        """One of the pool, all alike."""
        return pool[int(self.random() * len(pool))]

    def ids(self, count: int = 1) -> int:
        """The first of `count` fresh concept numbers."""
        first = self.counter
        self.counter = first + count
        return first

    def number(self, low: int = 2, high: int = 99) -> Number:
        """A number of the range, every second time a small one."""
        if low < 12 and self.random() < 0.4:
            high = min(high, 12)
        return Number(low + int(self.random() * (high - low + 1)), self.ids(3))

    def pronoun(self, indices: Sequence[int] = range(6)) -> Pronoun:
        """One of the pronouns; 6 is the "it" of the weather."""
        index = self.pick(indices)
        slot = 2 if index == 6 else PERSONS[index]
        return Pronoun(index, slot, slot > 2, index == 3, self.ids())

    def name(self) -> Name:
        """A random personal name."""
        proper = self.pick(NAMES)
        return Name(proper, proper.feminine, self.ids())

    def phrase(self, nouns: Sequence[Noun], use: str = "free", adjectives: float = 0.3) -> Phrase:
        """A noun phrase without anything after its noun (but "of" after kin)."""
        noun = self.pick(nouns)
        if noun.kind == "drink":
            choice = self.pick(_MASS if use != "closed" else _MASS[8:])
        else:
            choice = self.pick(_POOLS[use][noun.kind == "kin"])
        if choice in ("poss", "'s") and noun.name in _NOBODYS:
            # "My woman" would say more than it does here, and so would its translations.
            choice = "this"
        phrase = Phrase(noun, choice, False, self.ids(3), feminine=noun.feminine)
        if choice in ("number", "the number"):
            phrase.number = self.number()
            phrase.determiner = choice[:-6].strip()
        elif choice == "poss":
            phrase.determiner = self.pick(_POSSESSIVES)
        elif choice == "'s":
            phrase.owner = self.name()
        elif choice == "the of":
            phrase.determiner = "the"
            phrase.of = self.phrase(tagged("person"), "setting", adjectives / 2)
        single = noun.kind == "drink" or noun.name in _ONLY_ONE or choice in ("a", "every")
        if phrase.number or choice in ("many", "some", "all"):
            phrase.plural = True
        elif not single and use not in ("goal", "amount"):
            phrase.plural = self.random() < (0.15 if use == "setting" else 0.27)
        phrase.slot = 4 if phrase.plural else 2
        if self.random() < adjectives:
            self.describe(phrase)
        return phrase

    def describe(self, phrase: Phrase) -> None:
        """Adds one adjective, sometimes with a degree, or two: size or age, then colour."""
        fitting = FITTING[phrase.noun.name]
        if not fitting:
            return
        first = self.pick(fitting)
        self.note("adjective", first.name, phrase.noun.name)
        described = Described(first, self.ids())
        phrase.adjectives.append(described)
        if first.precedes and self.random() < 0.35:
            colours = [adjective for adjective in fitting if adjective.colour]
            if colours:
                second = self.pick(colours)
                self.note("adjective", second.name, phrase.noun.name)
                phrase.adjectives.append(Described(second, self.ids()))
        elif first.comparative and phrase.determiner == "a" and self.random() < 0.3:
            described.degree, described.degree_id = DEGREES[0], self.ids()

    def fitting(self, nominal: Nominal) -> tuple[Adjective, ...]:
        """The adjectives that may be said of something."""
        return FITTING[nominal.noun.name] if isinstance(nominal, Phrase) else ABOUT_PEOPLE

    def note(self, kind: str, word: str, noun: str) -> None:
        """Remembers if a combination of the sentence is held out."""
        if held_out(kind, word, noun):
            self.held_out = True

    def person(self, use: str = "free", pronouns: float = 0.3) -> Nominal:
        """Somebody: a pronoun, a name or a phrase."""
        chance = self.random()
        if chance < pronouns:
            return self.pronoun()
        if chance < pronouns + 0.16:
            return self.name()
        return self.phrase(PEOPLE, use)

    def both(self) -> Both:
        """Two people."""
        first = self.name() if self.random() < 0.5 else self.phrase(PEOPLE, "shared", 0.15)
        second = self.phrase(PEOPLE, "shared", 0.15)
        return Both(first, second, self.ids(), feminine=first.feminine and second.feminine)

    def place(self, nouns: Sequence[Noun] = SITES, adjectives: float = 0.25) -> Place:
        """Where something is: behind the old house."""
        phrase = self.phrase(nouns, "setting", adjectives)
        tags = [tag for tag in ("in", "on", "under", "by") if tag in phrase.noun.tags]
        return Place(self.pick(PLACES[self.pick(tags)]), phrase, self.ids())
