"""The language-independent meaning of a sentence: a tree of nouns, verbs and their features.

Every node that a language expresses has concept ids. The grammar assigns them, the realisers
attach them to words, and two words that share an id are aligned.
"""

from dataclasses import dataclass, field

from manyheads.phrasebook.modifiers import Adjective, Adverbial, Preposition, Proper
from manyheads.phrasebook.nouns import Noun
from manyheads.phrasebook.verbs import Verb

Word = tuple[str, tuple[int, ...]]
"""A written word (or punctuation mark) and the concepts that it expresses."""


@dataclass(slots=True)
class Pronoun:
    """I, you, he, she, we, they: `index` 0 to 5; `slot` is the verb's person, 0 to 4."""

    index: int
    slot: int
    plural: bool
    feminine: bool
    id: int


@dataclass(slots=True)
class Name:
    """The name of somebody or of a city."""

    proper: Proper
    feminine: bool
    id: int
    slot: int = 2
    plural: bool = False


@dataclass(slots=True)
class Number:
    """A number with the concepts of its tens, of the link between and of its units."""

    value: int
    id: int

    def concepts(self, says: str) -> tuple[int, ...]:
        """Concept numbers for the letters `t`, `l`, `u` of a number word."""
        if len(says) == 1:
            return (self.id + "tlu".index(says),)
        return tuple(self.id + "tlu".index(letter) for letter in says)


@dataclass(slots=True)
class Described:
    """An adjective before or after its noun, with "very" or the like if `degree` is given."""

    adjective: Adjective
    id: int
    degree: Adverbial | None = None
    degree_id: int = 0


@dataclass(slots=True)
class Phrase:
    """A noun with its determiner and all that goes with it.

    `determiner` is one of: the, a, this, my, your, his, her, our, their, every, many, some, all,
    which, how many, 's (with `owner`), and "" (a bare number or a mass noun). The concepts of
    determiner and link follow `id`, the noun's own.
    """

    noun: Noun
    determiner: str
    plural: bool
    id: int
    slot: int = 2
    feminine: bool = False
    number: Number | None = None
    adjectives: list[Described] = field(default_factory=list)
    owner: "Name | None" = None
    of: "Phrase | None" = None
    place: "Place | None" = None
    relative: "Relative | None" = None

    @property
    def determiner_id(self) -> int:
        """Concept of the determiner."""
        return self.id + 1

    @property
    def link_id(self) -> int:
        """Concept of "of", of "'s" or of "all" beside "the"."""
        return self.id + 2

    @property
    def animate(self) -> bool:
        """Whether it is somebody or an animal."""
        return self.noun.kind in ("person", "kin", "animal")

    @property
    def indefinite(self) -> bool:
        """Whether negation changes the determiner: a dog, water."""
        return self.determiner == "a" or (not self.determiner and self.number is None)


@dataclass(slots=True)
class Both:
    """Two noun phrases joined by "and"."""

    first: "Name | Phrase"
    second: "Name | Phrase"
    id: int
    slot: int = 4
    plural: bool = True
    feminine: bool = False


Nominal = Pronoun | Name | Phrase | Both


@dataclass(slots=True)
class Place:
    """A preposition with what it governs: behind the house, with Anna, from Berlin."""

    preposition: Preposition
    nominal: Nominal
    id: int


@dataclass(slots=True)
class Moment:
    """When or how: a fixed expression, or one with a number.

    A number without a unit is the hour ("at three o'clock"); with a unit it is a distance in time,
    back if `past` ("three days ago"), else ahead. The concept of the hour or unit follows `id`.
    """

    adverbial: Adverbial | None
    id: int
    number: Number | None = None
    unit: Noun | None = None
    past: bool = False


@dataclass(slots=True)
class Predicate:
    """The complement of "to be": adjective, comparison, years or a number."""

    described: Described | None = None
    comparison: str = ""
    standard: Nominal | None = None
    number: Number | None = None
    unit: Noun | None = None
    id: int = 0


@dataclass(slots=True)
class Clause:
    """A verb with its subject, objects and circumstances.

    `mood` is present, past, future, can, must, want or command; `id` is the verb's own concept.
    `gap` names the part that a relative or a question word stands for ("subject", "direct"); it
    is known, but not said in its place.
    """

    verb: Verb
    subject: Nominal
    id: int
    mood: str = "present"
    progressive: bool = False
    negated: bool = False
    impersonal: str = ""
    direct: Nominal | None = None
    indirect: Nominal | None = None
    to: bool = False
    predicate: Predicate | None = None
    frequency: Moment | None = None
    manner: Moment | None = None
    company: Place | None = None
    place: Place | None = None
    time: Moment | None = None
    front: str = ""
    gap: str = ""

    @property
    def finite_id(self) -> int:
        """Concept of tense and mood."""
        return self.id + 1

    @property
    def negation_id(self) -> int:
        """Concept of "not"."""
        return self.id + 2

    @property
    def to_id(self) -> int:
        """Concept of the "to" before a receiver."""
        return self.id + 3


@dataclass(slots=True)
class Relative:
    """A relative clause; its pronoun stands for the phrase that it modifies."""

    clause: Clause
    id: int


@dataclass(slots=True)
class Sentence:
    """A whole sentence. `kind` says how its clauses are put together.

    statement · question · command (`word` "please" or "") · wh (`word` is the question word)
    · joined (`word` and, but) · because and the like (`word`, `front`) · content (that, whether)
    · sum (three `numbers`)
    """

    kind: str
    end: int
    main: Clause | None = None
    other: Clause | None = None
    word: str = ""
    word_id: int = 0
    comma_id: int = 0
    front: bool = False
    asked: Nominal | None = None
    numbers: tuple[Number, ...] = ()
    held_out: bool = False

    @property
    def mark(self) -> str:
        """The punctuation mark at the end."""
        if self.kind in ("question", "wh"):
            return "?"
        return "!" if self.kind == "command" else "."
