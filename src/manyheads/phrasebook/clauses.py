"""Random clauses: a verb, the nouns that go with it, and when, where and how."""

from collections.abc import Sequence

from manyheads.phrasebook.modifiers import (
    ADJECTIVES,
    ALREADY,
    AT_CITY,
    CITIES,
    DEGREES,
    FITTING,
    FOR,
    FREQUENCIES,
    FROM,
    MANNERS,
    NEVER,
    NOW,
    TIMES,
    TO,
    WITH,
    WITHOUT,
    Adjective,
)
from manyheads.phrasebook.nominals import PEOPLE, SITES, SMALL, SPOTS, Nominals
from manyheads.phrasebook.nouns import BY_NAME, NOUNS, tagged
from manyheads.phrasebook.tree import (
    Clause,
    Described,
    Moment,
    Name,
    Nominal,
    Phrase,
    Place,
    Predicate,
    Pronoun,
    Relative,
)
from manyheads.phrasebook.verbs import BE, VERBS, Verb, framed

_CONCRETE = tuple(noun for noun in NOUNS if noun.kind not in ("measure", "amount"))
_ANIMATE = tagged("person", "kin", "animal")
_SUBJECTS = {verb: tagged(*verb.subjects) for verb in VERBS}
OBJECTS = {verb: _CONCRETE if verb.objects == ("any",) else tagged(*verb.objects) for verb in VERBS}
PLAIN, ACTS, GIVES = framed("plain"), framed("acts"), framed("gives")
_SKY = framed("sky")
LIVE = framed("live")[0]
_VERBS = {verb.frame: framed(verb.frame) for verb in VERBS}
# Verbs whose object may be asked for or left to a relative pronoun without a preposition.
DIRECT = tuple(v for v in ACTS if not v.french.indirect and not v.german.preposition)
_FOR_SOMEBODY = ("cook", "work", "sing", "dance")
_GOALS = tagged("goal")
_HOMES = tuple(noun for noun in SITES if noun.kind == "place")
_NOWHERE = ("visit", "build", "love", "know", "understand", "think_of", "forget", "choose", "wear")
_LOCATED = tagged("animal", "hand", "food", "find", "person")
_AMOUNTS = tagged("amount")
# For each adjective that can be compared, what it can be said of.
_COMPARED = tuple(
    (adjective, tuple(noun for noun in _CONCRETE if adjective in FITTING[noun.name]))
    for adjective in ADJECTIVES
    if adjective.comparative
)
_OPEN = ("the", "a", "many", "some", "all", "every", "")
_UNITS = tuple(BY_NAME[name] for name in ("day", "week", "month", "year"))
_YOUNG = ("child", "boy", "girl")
_YEAR, _EURO = BY_NAME["year"], BY_NAME["euro"]


# The verbs that a noun may be the subject or the object of in a relative clause.
_DOES = {n.name: tuple(v for v in (*PLAIN, *ACTS) if n in _SUBJECTS[v]) for n in _CONCRETE}
_UNDERGOES = {n.name: tuple(v for v in DIRECT if n in OBJECTS[v]) for n in _CONCRETE}

_FRAMES = (
    ["plain"] * 24 + ["acts"] * 44 + ["own"] * 4 + ["gives"] * 9 + ["be"] * 13 + ["compare"] * 7
    + ["located"] * 4 + ["there"] * 3 + ["live"] * 3 + ["goal"] * 3 + ["from"] * 2 + ["sky"] * 3
    + ["owned"] * 2 + ["cost"] * 3 + ["age"] * 3 + ["result"] * 3
)  # fmt: skip
_BEING = ("be", "feel", "compare", "located", "age", "result")
_MOODS = ["present"] * 46 + ["past"] * 27 + ["future"] * 9 + ["can"] * 6 + ["must"] * 6
_MOODS += ["want"] * 6
TENSES = ("present", "present", "past")


class Clauses(Nominals):
    """Draws clauses."""

    def clause(
        self,
        frames: Sequence[str] = _FRAMES,
        moods: Sequence[str] = _MOODS,
        tail: float = 1.0,
        front: float = 0.0,
        denied: float = 0.16,
        subject: Nominal | None = None,
    ) -> Clause:
        """A clause; `tail` scales how much is said beyond the verb and its objects."""
        frame = self.pick(frames)
        negated = self.random() < denied and frame != "cost"
        never = not negated and self.random() < denied / 4
        use = "closed" if negated or never else "free"
        if frame in _BEING:
            return self._being(frame, negated, use, moods)
        if frame in ("there", "sky"):
            return self._impersonal(frame, moods, front)
        verb = self.pick(_VERBS[frame])
        subject = subject or self.subject(verb, use, tail)
        clause = Clause(verb, subject, self.ids(4), negated=negated)
        if frame in ("owned", "cost", "from"):
            moods = ["present"]
        elif frame == "own":
            moods = [mood for mood in moods if mood in TENSES] or ["present"]
        lasting = frame in ("own", "owned", "cost", "from", "live") or verb.name == "know"
        self._choose_time(clause, moods, 0.0 if lasting else tail)
        if never and not lasting and clause.mood in TENSES and verb.name != "read":
            clause.frequency = Moment(NEVER, self.ids())
            clause.progressive, clause.time = False, None
        self._complete(clause, frame, "denied" if negated else use, tail)
        if clause.time and self.random() < front:
            clause.front = "time"
        elif clause.place and frame in ("plain", "acts") and self.random() < front / 3:
            clause.front = "place"
        return clause

    def _complete(self, clause: Clause, frame: str, use: str, tail: float) -> None:
        verb = clause.verb
        if frame in ("acts", "own"):
            if frame == "own":
                use = "none" if clause.negated else "new"
            clause.direct = self.object(verb, use, subject=clause.subject)
            somewhere = frame == "acts" and verb.name not in _NOWHERE
            if somewhere and self.random() < 0.14 * tail:
                clause.place = self.place()
            elif clause.time is None and tail:
                self._relate_object(clause)
        elif frame == "gives":
            clause.direct = self.object(verb, use, pronouns=0.0)
            clause.indirect = self.receiver(clause.subject)
            clause.to = not isinstance(clause.indirect, Pronoun) and self.random() < 0.4
        elif frame == "plain":
            self.settle(clause, tail)
        elif frame == "goal":
            clause.place = Place(TO, self.phrase(_GOALS, "goal", 0.2), self.ids())
        elif frame == "owned":
            clause.direct = self.person("closed", 0.15)
        elif frame == "cost":
            clause.direct = Phrase(_EURO, "", True, self.ids(3), number=self.number())
        elif frame == "from" or self.random() < 0.4:
            city = Name(self.pick(CITIES), False, self.ids())
            clause.place = Place(FROM if frame == "from" else AT_CITY, city, self.ids())
        else:
            clause.place = self.place(_HOMES)

    def _being(self, frame: str, negated: bool, use: str, moods: Sequence[str]) -> Clause:
        compared = self.pick(_COMPARED)
        mood = self.pick([m for m in moods if m in ("present", "past", "future")] or ["present"])
        if frame == "result":
            subject: Nominal = self.phrase(_AMOUNTS, "amount", 0.0)
            mood = "present"
        elif frame == "located":
            subject = located = self.phrase(_LOCATED, use)
        elif frame == "age":
            subject = self.person("closed")
        elif self.random() < 0.3:
            subject = self.person(use, 0.6)
        else:
            nouns = {"feel": _ANIMATE, "compare": compared[1]}.get(frame, _CONCRETE)
            subject = phrase = self.phrase(nouns, use, 0.0)
            if not phrase.determiner and not phrase.number:
                phrase.determiner = "the"  # No bare "water" as a subject: French needs an article.
            self.extend(phrase, 0.8)
        if mood == "future" and isinstance(subject, Phrase) and subject.noun not in PEOPLE:
            mood = "present"
        clause = Clause(BE, subject, self.ids(4), mood, negated=negated)
        if frame == "located":
            clause.place = self.place(SPOTS if located.noun in SMALL else SITES)
        elif frame in ("age", "result"):
            unit = _YEAR if frame == "age" else None
            young = isinstance(subject, Phrase) and subject.noun.name in _YOUNG
            low, high = (0, 99) if unit is None else (2, 17) if young else (18, 99)
            clause.predicate = Predicate(number=self.number(low, high), unit=unit, id=self.ids(2))
        else:
            clause.predicate = self._predicate(subject, compared[0] if frame == "compare" else None)
            if not negated and mood != "future" and self.random() < 0.15:
                pool = (*FREQUENCIES, NEVER) if use == "closed" else FREQUENCIES
                clause.frequency = Moment(self.pick(pool), self.ids())
        return clause

    def _predicate(self, subject: Nominal, compared: Adjective | None) -> Predicate:
        """An adjective for the subject; `compared` is the wish for a comparison with it."""
        fitting = self.fitting(subject)
        if compared and compared not in fitting:
            compared = self.pick([adjective for adjective in fitting if adjective.comparative])
        adjective = compared or self.pick(fitting)
        if isinstance(subject, Phrase):
            self.note("adjective", adjective.name, subject.noun.name)
        described = Described(adjective, self.ids())
        if compared is None:
            if adjective.comparative and self.random() < 0.3:
                described.degree, described.degree_id = self.pick(DEGREES), self.ids()
            return Predicate(described)
        if isinstance(subject, Phrase):
            standard: Nominal = self.phrase(tagged(subject.noun.kind), "closed", 0.0)
        else:
            standard = self.name() if self.random() < 0.4 else self.phrase(PEOPLE, "closed", 0.0)
        comparison = "more" if self.random() < 0.6 else "as"
        return Predicate(described, comparison, standard, id=self.ids(2))

    def _impersonal(self, frame: str, moods: Sequence[str], front: float) -> Clause:
        mood = self.pick([m for m in moods if m in ("present", "past", "future")] or ["present"])
        it = self.pronoun((6,))
        if frame == "sky":
            clause = Clause(self.pick(_SKY), it, self.ids(4), mood, mood == "present")
            if mood != "present" or self.random() < 0.5:
                times = TIMES[mood] if mood != "present" else (TIMES["present"][0], NOW)
                clause.time = Moment(self.pick(times), self.ids())
                clause.front = "time" if self.random() < front else ""
            return clause
        clause = Clause(BE, it, self.ids(4), "present" if mood == "future" else mood)
        clause.impersonal = "there"
        clause.direct = located = self.phrase(_LOCATED, "new")
        clause.place = self.place(SPOTS if located.noun in SMALL else SITES)
        return clause

    def subject(self, verb: Verb, use: str, tail: float = 1.0) -> Nominal:
        """Somebody or something that may do what the verb says."""
        chance = self.random()
        if "person" in verb.subjects:
            if chance < 0.26:
                return self.pronoun()
            if chance < 0.38:
                return self.name()
            if chance < 0.44:
                return self.both()
        phrase = self.phrase(_SUBJECTS[verb], use)
        self.extend(phrase, tail)
        return phrase

    def object(
        self, verb: Verb, use: str, pronouns: float = 0.2, subject: Nominal | None = None
    ) -> Nominal:
        """The object of the verb."""
        chance = self.random()
        plain = not verb.german.preposition and not verb.french.indirect
        if use == "denied" and not plain:
            use = "closed"
        if "person" in verb.objects:
            if chance < pronouns and plain:
                return self._other_pronoun(subject)
            if 0.2 < chance < 0.3:
                return self._other_name(subject)
        phrase = self.phrase(OBJECTS[verb], use)
        self.note("verb", verb.name, phrase.noun.name)
        return phrase

    def _other_pronoun(self, subject: Nominal | None) -> Pronoun:
        """A pronoun that is not about the subject itself."""
        slot = subject.slot if isinstance(subject, Pronoun) else 2
        indices = {0: (1, 2, 3, 5), 1: (0, 2, 3, 4, 5), 3: (1, 2, 3, 5)}.get(slot, range(6))
        return self.pronoun(indices)

    def _other_name(self, subject: Nominal | None) -> Name:
        name = self.name()
        while isinstance(subject, Name) and name.proper is subject.proper:
            name = self.name()
        return name

    def receiver(self, subject: Nominal, pronouns: float = 0.35) -> Nominal:
        """To whom something is given."""
        chance = self.random()
        if chance < pronouns:
            return self._other_pronoun(subject)
        if chance < pronouns + 0.15:
            return self._other_name(subject)
        return self.phrase(PEOPLE, "closed", 0.2)

    def extend(self, phrase: Phrase, tail: float) -> None:
        """Adds a place or a relative clause after the noun, so that its verb comes late."""
        if phrase.of or phrase.owner or phrase.determiner not in _OPEN:
            return
        chance = self.random()
        movable = phrase.animate or phrase.noun in SMALL
        if chance < 0.12 * tail and movable:
            phrase.place = self.place(SPOTS if phrase.noun in SMALL else SITES, 0.15)
        elif chance < 0.34 * tail:
            phrase.relative = self.relative(phrase)

    def relative(self, phrase: Phrase) -> Relative | None:
        """A relative clause about the phrase, which is its subject or its object."""
        does, undergoes = _DOES[phrase.noun.name], _UNDERGOES[phrase.noun.name]
        if does and self.random() < 0.65:
            verb = self.pick(does)
            clause = Clause(verb, phrase, self.ids(4), gap="subject")
            self.inflect(clause, TENSES)
            if verb.frame == "acts":
                clause.direct = self.object(verb, "free", pronouns=0.1)
            elif "l" in verb.flags and self.random() < 0.8:
                clause.place = self.place(adjectives=0.2)
        elif undergoes:
            verb = self.pick(undergoes)
            self.note("verb", verb.name, phrase.noun.name)
            clause = Clause(verb, self.subject(verb, "closed", 0.0), self.ids(4), gap="direct")
            clause.direct = phrase
            self.inflect(clause, TENSES)
        else:
            return None
        return Relative(clause, self.ids())

    def _relate_object(self, clause: Clause) -> None:
        """Sometimes a relative clause on the object, where nothing comes after it."""
        phrase = clause.direct
        if not isinstance(phrase, Phrase) or clause.negated:
            return
        if phrase.determiner in _OPEN and not phrase.of and self.random() < 0.12:
            phrase.relative = self.relative(phrase)

    def settle(self, clause: Clause, tail: float) -> None:
        """Manner, company and place of what somebody does."""
        verb = clause.verb
        manners = MANNERS.get(verb.name)
        if manners and self.random() < 0.22 * tail:
            clause.manner = Moment(self.pick(manners), self.ids())
        elif "w" in verb.flags and self.random() < 0.35 * tail:
            options = [WITH, WITH] if clause.negated else [WITH, WITH, WITHOUT]
            if verb.name in _FOR_SOMEBODY:
                options.append(FOR)
            clause.company = Place(self.pick(options), self.person("closed", 0.2), self.ids())
            if isinstance(clause.company.nominal, Pronoun):
                clause.company.nominal = self._other_pronoun(clause.subject)
        if "l" in verb.flags and self.random() < 0.45 * tail:
            clause.place = self.place()

    def _choose_time(self, clause: Clause, moods: Sequence[str], tail: float) -> None:
        """Mood, time or frequency, and the progressive where they allow it."""
        self.inflect(clause, moods)
        mood = clause.mood
        chance = self.random()
        if chance < 0.3 * tail:
            clause.time = self._moment(mood)
            if mood == "present":
                now = clause.time.adverbial is NOW and "s" not in clause.verb.flags
                clause.progressive = now or clause.verb.name == "read"
        elif chance < 0.42 * tail and not clause.negated and mood in ("present", "past"):
            if clause.verb.name in ("read", "live"):
                return
            pool = FREQUENCIES if mood == "present" else (*FREQUENCIES, ALREADY)
            clause.frequency = Moment(self.pick(pool), self.ids())
            clause.progressive = False

    def _moment(self, mood: str) -> Moment:
        if self.random() < 0.2:
            if mood in ("past", "future") and self.random() < 0.6:
                number, unit = self.number(2, 20), self.pick(_UNITS)
                return Moment(None, self.ids(2), number, unit, mood == "past")
            return Moment(None, self.ids(2), self.number(2, 11))
        return Moment(self.pick(TIMES.get(mood, TIMES["future"])), self.ids())

    def inflect(self, clause: Clause, moods: Sequence[str]) -> None:
        """Chooses the mood, and the progressive if it is the present of an action."""
        clause.mood = mood = self.pick(moods)
        if mood == "must":
            clause.negated = False
        if mood == "present" and "s" not in clause.verb.flags:
            # "they read" could be past as well: say "they are reading".
            clause.progressive = self.random() < 0.4 or clause.verb.name == "read"
