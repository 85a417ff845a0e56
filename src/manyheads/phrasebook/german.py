"""German: trees into words. The verb is second, first or last; case runs through everything."""

from manyheads.phrasebook import numbers
from manyheads.phrasebook.modifiers import PLEASE
from manyheads.phrasebook.tree import (
    Clause,
    Moment,
    Name,
    Nominal,
    Number,
    Phrase,
    Place,
    Predicate,
    Pronoun,
    Relative,
    Sentence,
    Word,
)
from manyheads.phrasebook.verbs import BE, HAVE, MODALS, WERDEN

# Tables by case (nominative, accusative, dative, genitive) and gender (m, f, n, plural).
_THE = (
    ("der", "die", "das", "die"),
    ("den", "die", "das", "die"),
    ("dem", "der", "dem", "den"),
    ("des", "der", "des", "der"),
)
_WHO = (*_THE[:2], ("dem", "der", "dem", "denen"))
_LIKE_THE = (
    ("er", "e", "es", "e"),
    ("en", "e", "es", "e"),
    ("em", "er", "em", "en"),
    ("es", "er", "es", "er"),
)
_LIKE_A = (("", "e", "", "e"), ("en", "e", "", "e"), *_LIKE_THE[2:])
_WEAK = (
    ("e", "e", "e", "en"),
    ("en", "e", "e", "en"),
    ("en", "en", "en", "en"),
    ("en", "en", "en", "en"),
)
_MIXED = (("er", "e", "es", "en"), ("en", "e", "es", "en"), *_WEAK[2:])
_STRONG = (*_LIKE_THE[:3], ("en", "er", "en", "er"))

_POSSESSIVES = {
    "a": "ein", "my": "mein", "your": "dein", "his": "sein", "her": "ihr", "our": "unser",
    "their": "ihr",
}  # fmt: skip
_DEMONSTRATIVES = {"this": "dies", "every": "jed", "which": "welch", "all": "all"}
_QUANTITIES = {"many": "viel", "some": "einig"}
# With these an object is known already, and adverbs like "oft" follow it.
_KNOWN = frozenset(("the", "this", "my", "your", "his", "her", "our", "their", "'s"))
_PRONOUNS = (
    ("ich", "du", "er", "sie", "wir", "sie", "es"),
    ("mich", "dich", "ihn", "sie", "uns", "sie", "es"),
    ("mir", "dir", "ihm", "ihr", "uns", "ihnen", "ihm"),
)
_REFLEXIVES = ("mich", "dich", "sich", "uns", "sich")
_CONTRACTIONS = {("in", "dem"): "im", ("zu", "dem"): "zum", ("zu", "der"): "zur"}
_CONJUNCTIONS = {
    "because": "weil", "when": "wenn", "if": "wenn", "while": "während", "that": "dass",
    "whether": "ob", "and": "und", "but": "aber",
}  # fmt: skip
_QUESTIONS = {"who": "wer", "whom": "wen", "what": "was", "where": "wo", "when": "wann"}
_QUESTIONS["why"] = "warum"


def sentence(tree: Sentence) -> list[Word]:
    """The sentence in German."""
    words: list[Word] = []
    main, other = tree.main, tree.other
    if main is None:
        _sum(tree, words)
    elif tree.kind == "wh":
        _wh(tree, main, words)
    elif tree.kind == "command":
        if tree.word:
            words.append((PLEASE.german[0], (tree.word_id,)))
        clause(main, words, "first")
    elif other is None:
        clause(main, words, "first" if tree.kind == "question" else "second")
    elif tree.front:
        words.append((_CONJUNCTIONS[tree.word], (tree.word_id,)))
        clause(other, words, "last")
        words.append((",", (tree.comma_id,)))
        clause(main, words, "first")
    else:
        clause(main, words, "second")
        if tree.kind == "joined":
            if tree.word == "but":
                words.append((",", (tree.comma_id,)))
            words.append((_CONJUNCTIONS[tree.word], (tree.word_id,)))
            clause(other, words, "second")
        else:
            words.append((",", (tree.word_id,)))
            words.append((_CONJUNCTIONS[tree.word], (tree.word_id,)))
            clause(other, words, "last")
    words.append((tree.mark, (tree.end,)))
    return _merge_commas(words)


def _merge_commas(words: list[Word]) -> list[Word]:
    """A comma that closes a clause gives way to the mark that follows it."""
    for index in range(len(words) - 2, 0, -1):
        if words[index][0] == "," and words[index + 1][0] in (",", ".", "?", "!"):
            if words[index + 1][0] == ",":
                words[index + 1] = (",", words[index][1] + words[index + 1][1])
            del words[index]
    return words


def _sum(tree: Sentence, words: list[Word]) -> None:
    first, second, total = tree.numbers
    _number(first, words)
    words.append(("plus", (tree.word_id,)))
    _number(second, words)
    words.append(("ist", (tree.word_id + 1,)))
    _number(total, words)


def _wh(tree: Sentence, main: Clause, words: list[Word]) -> None:
    case = main.verb.german.governs
    if tree.asked:
        nominal(tree.asked, words, case)
    elif tree.word == "whom" and case == 2:
        words.append(("wem", (tree.word_id,)))
    else:
        words.append((_QUESTIONS[tree.word], (tree.word_id,)))
    clause(main, words, "first")


def clause(tree: Clause, words: list[Word], order: str) -> None:
    """A clause whose finite verb is "first", "second" or "last"."""
    finite, closing = _verbs(tree)
    time, place = tree.time, tree.place
    said = tree.gap != "subject"
    if order == "second":
        if tree.front == "time" and time:
            _moment(time, words)
        elif tree.front == "place" and place:
            _place(place, words)
        else:
            nominal(tree.subject, words, 0)
            said = False
    if order != "last":
        words.append(finite)
    if said:
        nominal(tree.subject, words, 0)
    _middle(tree, words)
    if order != "last":
        words += closing
    elif closing and tree.mood == "present":
        # The separable prefix joins its verb again: ruft ... an, but anruft.
        words.append((closing[0][0] + finite[0], finite[1]))
    else:
        words += closing
        words.append(finite)
    _extraposed(tree, words)


def _extraposed(tree: Clause, words: list[Word]) -> None:
    """The relative clause of an object, which waits until the verb is complete."""
    direct = tree.direct
    if tree.gap != "direct" and isinstance(direct, Phrase) and direct.relative:
        _relative(direct.relative, words, 3 if direct.plural else direct.noun.german_gender)


def _verbs(tree: Clause) -> tuple[Word, list[Word]]:
    """The finite verb and what closes the bracket."""
    verb, mood, slot = tree.verb.german, tree.mood, tree.subject.slot
    own, finite = (tree.id,), (tree.finite_id,)
    if tree.impersonal:
        return ("gibt" if mood == "present" else "gab", own + finite), []
    prefix: list[Word] = [(verb.prefix, own)] if verb.prefix else []
    if mood == "command":
        return (verb.imperative, own + finite), prefix
    if mood == "present":
        return (verb.present[slot], own + finite), prefix
    if mood == "past" and "p" in tree.verb.flags:
        return (verb.past[slot], own + finite), prefix
    if mood == "past":
        auxiliary = BE.german.present if verb.to_be else HAVE.german.present
        return (auxiliary[slot], finite), [(verb.participle, own)]
    auxiliary = WERDEN if mood == "future" else MODALS[mood][0]
    return (auxiliary[slot], finite), [(verb.prefix + verb.infinitive, own)]


def _middle(tree: Clause, words: list[Word]) -> None:
    """Append the words between the finite verb and the end of its clause (the middle field)."""
    verb = tree.verb.german
    direct = tree.direct if tree.gap != "direct" else None
    indirect = tree.indirect
    after = direct if verb.preposition else None
    if after:
        direct = None
    denied = tree.negated and isinstance(direct, Phrase) and direct.indefinite
    if isinstance(direct, Pronoun):
        nominal(direct, words, verb.governs)
        direct = None
    if isinstance(indirect, Pronoun):
        nominal(indirect, words, 2)
        indirect = None
    if verb.reflexive:
        words.append((_REFLEXIVES[tree.subject.slot], (tree.id,)))
    if indirect:
        start = len(words)
        nominal(indirect, words, 2)
        if tree.to:
            words[start] = (words[start][0], (*words[start][1], tree.to_id))
    if isinstance(direct, Name):
        nominal(direct, words, verb.governs)
        direct = None
    if tree.time and tree.front != "time":
        _moment(tree.time, words)
    definite = isinstance(direct, Phrase) and direct.determiner in _KNOWN
    if direct and definite:
        nominal(direct, words, verb.governs, relative=False)
    if tree.frequency:
        _moment(tree.frequency, words)
    if direct and not definite:
        negation = tree.negation_id if denied else None
        nominal(direct, words, verb.governs, negation, relative=False)
    if tree.negated and not denied:
        words.append(("nicht", (tree.negation_id,)))
    if after:
        words.append((verb.preposition, (tree.id,)))
        nominal(after, words, verb.governs, relative=False)
    if tree.predicate:
        _predicate(tree.predicate, words)
    if tree.manner:
        _moment(tree.manner, words)
    if tree.company:
        _place(tree.company, words)
    if tree.place and tree.front != "place":
        _place(tree.place, words)


def nominal(
    tree: Nominal,
    words: list[Word],
    case: int,
    negation: int | None = None,
    relative: bool = True,
) -> None:
    """A pronoun, a name, a phrase or two of them, in a case; maybe negated by "kein"."""
    if isinstance(tree, Phrase):
        _phrase(tree, words, case, negation)
        if tree.relative and relative:
            gender = 3 if tree.plural else tree.noun.german_gender
            _relative(tree.relative, words, gender)
    elif isinstance(tree, Pronoun):
        words.append((_PRONOUNS[case][tree.index], (tree.id,)))
    elif isinstance(tree, Name):
        words.append((tree.proper.german, (tree.id,)))
    else:
        nominal(tree.first, words, case)
        words.append(("und", (tree.id,)))
        nominal(tree.second, words, case)


def _phrase(tree: Phrase, words: list[Word], case: int, negation: int | None) -> None:
    gender = 3 if tree.plural else tree.noun.german_gender
    endings = _determiner(tree, words, case, gender, negation)
    if tree.number:
        _number(tree.number, words)
    for described in tree.adjectives:
        if described.degree:
            words.append((described.degree.german[0], (described.degree_id,)))
        form = described.adjective.german_stem + endings[case][gender]
        words.append((form, (described.id,)))
    words.append((tree.noun.german[case * 2 + tree.plural], (tree.id,)))
    if tree.of:
        start = len(words)
        _phrase(tree.of, words, 3, None)
        words[start] = (words[start][0], (*words[start][1], tree.link_id))
    if tree.place:
        _place(tree.place, words)


def _determiner(
    tree: Phrase, words: list[Word], case: int, gender: int, negation: int | None
) -> tuple[tuple[str, ...], ...]:
    """Writes the determiner and returns the endings that the adjectives then have."""
    name, concept = tree.determiner, (tree.determiner_id,)
    if negation is not None:
        concepts = (negation, *concept) if name else (negation,)
        words.append(("kein" + _LIKE_A[case][gender], concepts))
        return _MIXED
    if tree.owner:
        words.append((tree.owner.proper.german + "s", (tree.owner.id, tree.link_id)))
        return _STRONG
    if name == "the":
        words.append((_THE[case][gender], concept))
        return _WEAK
    if name in _POSSESSIVES:
        words.append((_POSSESSIVES[name] + _LIKE_A[case][gender], concept))
        return _MIXED
    if name in _DEMONSTRATIVES:
        concepts = (tree.link_id, *concept) if name == "all" else concept
        words.append((_DEMONSTRATIVES[name] + _LIKE_THE[case][gender], concepts))
        return _WEAK
    if name in _QUANTITIES:
        words.append((_QUANTITIES[name] + _LIKE_THE[case][gender], concept))
    elif name == "how many":
        words.append(("wie", concept))
        words.append(("viele", concept))
    return _STRONG


def _relative(tree: Relative, words: list[Word], gender: int) -> None:
    inner = tree.clause
    case = 0 if inner.gap == "subject" else inner.verb.german.governs
    words.append((",", (tree.id,)))
    words.append((_WHO[case][gender], (tree.id,)))
    clause(inner, words, "last")
    words.append((",", (tree.id,)))


def _number(tree: Number, words: list[Word]) -> None:
    for word, says in numbers.GERMAN[tree.value]:
        words.append((word, tree.concepts(says)))


def _place(tree: Place, words: list[Word]) -> None:
    preposition = tree.preposition
    for word in preposition.german:
        words.append((word, (tree.id,)))
    start = len(words)
    nominal(tree.nominal, words, preposition.case)
    merged = _CONTRACTIONS.get((words[start - 1][0], words[start][0]))
    if merged:
        words[start - 1 : start + 1] = [(merged, (tree.id, *words[start][1]))]


def _moment(tree: Moment, words: list[Word]) -> None:
    if tree.adverbial:
        for word in tree.adverbial.german:
            words.append((word, (tree.id,)))
    elif tree.number:
        words.append(("um" if tree.unit is None else "vor" if tree.past else "in", (tree.id,)))
        _number(tree.number, words)
        words.append((tree.unit.german[5] if tree.unit else "Uhr", (tree.id + 1,)))


def _predicate(tree: Predicate, words: list[Word]) -> None:
    described = tree.described
    if tree.number:
        _number(tree.number, words)
        if tree.unit:
            words.append((tree.unit.german[1], (tree.id,)))
            words.append(("alt", (tree.id + 1,)))
    elif described and tree.standard:
        adjective = described.adjective
        if tree.comparison == "more":
            words.append((adjective.german_comparative, (tree.id, described.id)))
            words.append(("als", (tree.id + 1,)))
        else:
            words.append(("so", (tree.id,)))
            words.append((adjective.german, (described.id,)))
            words.append(("wie", (tree.id + 1,)))
        nominal(tree.standard, words, 0)
    elif described:
        if described.degree:
            words.append((described.degree.german[0], (described.degree_id,)))
        words.append((described.adjective.german, (described.id,)))
