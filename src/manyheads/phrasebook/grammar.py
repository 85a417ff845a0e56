"""The grammar: random sentences as trees, the same for the same seed everywhere."""

from manyheads.phrasebook.clauses import (
    ACTS,
    DIRECT,
    GIVES,
    LIVE,
    OBJECTS,
    PLAIN,
    TENSES,
    Clauses,
)
from manyheads.phrasebook.tree import Clause, Number, Phrase, Sentence
from manyheads.phrasebook.verbs import Verb, framed

_THAT = framed("that")
_ASK, _KNOW = framed("whether")
_WHOM = tuple(verb for verb in DIRECT if "person" in verb.objects)
_WHAT = tuple(v for v in DIRECT if "person" not in v.objects and v.objects != ("any",))
_HOW_MANY = tuple(verb for verb in _WHAT if verb.name != "drink")
_SOMEWHERE = (*(verb for verb in PLAIN if "l" in verb.flags), LIVE)
_COMMANDS = tuple(verb for verb in (*PLAIN, *ACTS, *GIVES) if "c" in verb.flags)
# What can happen meanwhile, what can be a reason, and what can follow from one.
_EVENTS = ["plain"] * 8 + ["acts"] * 14 + ["gives"] * 3 + ["sky"] * 2 + ["goal"]
_REASONS = [*_EVENTS, *_EVENTS, *["feel"] * 6, "own", "live", "from", "age"]
_CONSEQUENCES = ["plain"] * 8 + ["acts"] * 14 + ["gives"] * 3 + ["feel"] * 3 + ["goal"]


class Grammar(Clauses):
    """Draws sentences. Every draw starts a new tree with its concepts counted from zero."""

    def sentence(self) -> Sentence:
        """The next random sentence."""
        self.counter = 0
        self.held_out = False
        sentence = self._draw(self.random())
        sentence.held_out = self.held_out
        return sentence

    def _draw(self, chance: float) -> Sentence:
        if chance < 0.36:
            return Sentence("statement", self.ids(), self.clause(front=0.45))
        if chance < 0.54:
            return self._subordinate()
        if chance < 0.66:
            return self._content()
        if chance < 0.76:
            first, second = self.clause(tail=0.6), self.clause(tail=0.6)
            word = "and" if self.random() < 0.5 else "but"
            return Sentence(
                "joined", self.ids(), first, second, word, self.ids(), comma_id=self.ids()
            )
        if chance < 0.85:
            return Sentence("question", self.ids(), self.clause(denied=0.0))
        if chance < 0.93:
            return self._wh()
        if chance < 0.98:
            return self._command()
        one, two = self.number(0, 60), self.number(1, 39)
        total = Number(one.value + two.value, self.ids(3))
        return Sentence("sum", self.ids(), word_id=self.ids(2), numbers=(one, two, total))

    def _subordinate(self) -> Sentence:
        word = self.pick(("because", "because", "when", "if", "while"))
        mood = self.pick(TENSES) if word == "because" else "present"
        if mood == "past":
            moods = ["past"]
        elif word == "when":
            # French wants a future after "quand" beside a future: no future here.
            moods = ["present", "can", "must"]
        else:
            moods = ["present", "present", "future", "can", "must"]
        if word == "while":
            main = self.clause(_EVENTS, ("present",), 0.5)
        else:
            main = self.clause(_CONSEQUENCES, moods, 0.5)
        other = self.clause(_REASONS if word == "because" else _EVENTS, (mood,), 0.5)
        return Sentence(
            "adverbial", self.ids(), main, other, word, self.ids(), self.ids(),
            front=self.random() < 0.4,
        )  # fmt: skip

    def _content(self) -> Sentence:
        whether = self.random() < 0.4
        verb = self.pick((_ASK, _KNOW)) if whether else self.pick(_THAT)
        main = Clause(verb, self.person("closed", 0.35), self.ids(4), negated=verb is _KNOW)
        other = self.clause(tail=0.7)
        word = "whether" if whether else "that"
        return Sentence("content", self.ids(), main, other, word, self.ids())

    def _command(self) -> Sentence:
        verb = self.pick(_COMMANDS)
        you = self.pronoun((1,))
        clause = Clause(verb, you, self.ids(4), "command", gap="subject")
        clause.negated = self.random() < 0.2
        use = "denied" if clause.negated else "free"
        if verb.frame != "plain":
            clause.direct = self.object(verb, use, pronouns=0.0)
        if verb.frame == "gives":
            clause.indirect = self.receiver(you, pronouns=0.0)
            clause.to = self.random() < 0.4
        elif verb.frame == "plain":
            self.settle(clause, 0.8)
        please = "please" if self.random() < 0.4 else ""
        return Sentence("command", self.ids(), clause, word=please, word_id=self.ids())

    def _wh(self) -> Sentence:
        word = self.pick(("who", "whom", "what", "where", "when", "why", "which", "how many"))
        noun_phrase: Phrase | None = None
        if word == "who":
            who = self.pronoun((2,))
            clause = self.clause(("plain", "acts", "acts", "gives"), denied=0.0, subject=who)
            clause.gap = "subject"
        elif word in ("when", "why"):
            clause = self.clause(
                ("plain", "acts", "acts", "gives", "goal"), moods=("present", "past", "future"),
                tail=0.0, denied=0.0,
            )  # fmt: skip
        elif word == "where":
            verb = self.pick(_SOMEWHERE)
            clause = Clause(verb, self.subject(verb, "closed"), self.ids(4))
            self.inflect(clause, ("present", "past"))
        else:
            verbs = _WHOM if word == "whom" else _HOW_MANY if word == "how many" else _WHAT
            verb = self.pick(verbs)
            clause = Clause(verb, self.subject(verb, "closed"), self.ids(4), gap="direct")
            self.inflect(clause, ("present", "past", "future", "can", "must", "want"))
            if word in ("which", "how many"):
                noun_phrase = self._asked_phrase(verb, word)
            clause.direct = noun_phrase or self.pronoun((2,))
        return Sentence("wh", self.ids(), clause, word=word, word_id=self.ids(), asked=noun_phrase)

    def _asked_phrase(self, verb: Verb, word: str) -> Phrase:
        nouns = OBJECTS[verb]
        if word == "how many":
            nouns = tuple(noun for noun in nouns if noun.kind != "drink")
        noun = self.pick(nouns)
        self.note("verb", verb.name, noun.name)
        plural = word == "how many" or (noun.kind != "drink" and self.random() < 0.3)
        phrase = Phrase(noun, word, plural, self.ids(3), 4 if plural else 2, noun.feminine)
        if self.random() < 0.3:
            self.describe(phrase)
        return phrase
