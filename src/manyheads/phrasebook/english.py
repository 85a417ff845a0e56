"""English: trees into words."""

from manyheads.phrasebook import numbers
from manyheads.phrasebook.tree import (
    Both,
    Clause,
    Moment,
    Name,
    Nominal,
    Number,
    Phrase,
    Place,
    Predicate,
    Pronoun,
    Sentence,
    Word,
)
from manyheads.phrasebook.verbs import BE

_SUBJECT = ("I", "you", "he", "she", "we", "they", "it")
_OBJECT = ("me", "you", "him", "her", "us", "them", "it")
_BE = ("am", "are", "is", "are", "are")
_WAS = ("was", "were", "was", "were", "were")


def sentence(tree: Sentence) -> list[Word]:
    """The sentence in English."""
    words: list[Word] = []
    main, other = tree.main, tree.other
    if main is None:
        _sum(tree, words)
    elif tree.kind == "wh":
        _wh(tree, main, words)
    elif tree.kind == "command":
        _command(tree, main, words)
    elif other is None:
        clause(main, words, inverted=tree.kind == "question")
    elif tree.front:
        words.append((tree.word, (tree.word_id,)))
        clause(other, words)
        words.append((",", (tree.comma_id,)))
        clause(main, words)
    else:
        clause(main, words)
        if tree.word == "but":
            words.append((",", (tree.comma_id,)))
        words.append((tree.word, (tree.word_id,)))
        clause(other, words)
    words.append((tree.mark, (tree.end,)))
    return words


def _sum(tree: Sentence, words: list[Word]) -> None:
    first, second, total = tree.numbers
    _number(first, words)
    words.append(("plus", (tree.word_id,)))
    _number(second, words)
    words.append(("is", (tree.word_id + 1,)))
    _number(total, words)


def _command(tree: Sentence, main: Clause, words: list[Word]) -> None:
    if tree.word:
        words.append((tree.word, (tree.word_id,)))
    if main.negated:
        words.append(("do", (main.finite_id,)))
        words.append(("not", (main.negation_id,)))
        _spread(main.verb.english.base, (main.id,), words)
    else:
        _spread(main.verb.english.base, (main.id, main.finite_id), words)
    _rest(main, words)


def _wh(tree: Sentence, main: Clause, words: list[Word]) -> None:
    if tree.asked:
        nominal(tree.asked, words)
    else:
        words.append(("who" if tree.word == "whom" else tree.word, (tree.word_id,)))
    clause(main, words, inverted=main.gap != "subject")


def clause(tree: Clause, words: list[Word], inverted: bool = False) -> None:
    """A clause; `inverted` puts the finite verb before the subject."""
    time, place = tree.time, tree.place
    if tree.front == "time" and time:
        _moment(time, words)
    elif tree.front == "place" and place:
        _place(place, words)
    finite, tail = _verbs(tree, inverted)
    if inverted:
        words.append(finite[0])
        finite = finite[1:]
    if tree.impersonal:
        words.append((tree.impersonal, (tree.subject.id,)))
    elif tree.gap != "subject":
        nominal(tree.subject, words)
    words += finite
    if tree.frequency:
        _moment(tree.frequency, words)
    words += tail
    _rest(tree, words)


def _rest(tree: Clause, words: list[Word]) -> None:
    """All that follows the verb."""
    direct = tree.direct if tree.gap != "direct" else None
    if tree.indirect and not tree.to:
        nominal(tree.indirect, words, subject=False)
    if direct:
        nominal(direct, words, subject=False)
    if tree.indirect and tree.to:
        words.append(("to", (tree.to_id,)))
        nominal(tree.indirect, words, subject=False)
    if tree.predicate:
        _predicate(tree.predicate, words)
    if tree.manner:
        _moment(tree.manner, words)
    if tree.company:
        _place(tree.company, words)
    if tree.place and tree.front != "place":
        _place(tree.place, words)
    if tree.time and tree.front != "time":
        _moment(tree.time, words)


def _spread(forms: tuple[str, ...], concepts: tuple[int, ...], words: list[Word]) -> None:
    for form in forms:
        words.append((form, concepts))


def _verbs(tree: Clause, inverted: bool) -> tuple[list[Word], list[Word]]:
    """The finite part, which a question puts first, and the rest, which adverbs precede."""
    verb, mood, slot = tree.verb.english, tree.mood, _slot(tree)
    concept, finite = (tree.id,), (tree.finite_id,)
    first: list[Word] = []
    last: list[Word] = []
    if mood in ("present", "past") and (tree.verb is BE or tree.progressive):
        form = (_BE if mood == "present" else _WAS)[slot]
        if tree.progressive:
            first.append((form, finite))
            _spread(verb.progressive, concept, last)
        else:
            first.append((form, concept + finite))
    elif mood in ("present", "past"):
        third = mood == "present" and slot == 2
        if inverted or tree.negated:
            first.append(("did" if mood == "past" else "does" if third else "do", finite))
            _spread(verb.base, concept, last)
        else:
            form_words = verb.past if mood == "past" else verb.third if third else verb.base
            _spread(form_words, concept + finite, last)
    elif mood == "want":
        if inverted or tree.negated:
            first.append(("does" if slot == 2 else "do", finite))
        last.append(("wants" if slot == 2 and not first else "want", finite))
        last.append(("to", finite))
        _spread(verb.base, concept, last)
    elif mood == "can" and tree.negated:
        first.append(("cannot", (tree.finite_id, tree.negation_id)))
        _spread(verb.base, concept, last)
        return first, last
    else:
        first.append(("will" if mood == "future" else mood, finite))
        _spread(verb.base, concept, last)
    if tree.negated:
        first.append(("not", (tree.negation_id,)))
    return first, last


def _slot(tree: Clause) -> int:
    if tree.impersonal and isinstance(tree.direct, Phrase):
        return tree.direct.slot
    return tree.subject.slot


def nominal(tree: Nominal, words: list[Word], subject: bool = True) -> None:
    """A pronoun, a name, a phrase or two of them."""
    if isinstance(tree, Phrase):
        _phrase(tree, words)
    elif isinstance(tree, Pronoun):
        words.append(((_SUBJECT if subject else _OBJECT)[tree.index], (tree.id,)))
    elif isinstance(tree, Name):
        words.append((tree.proper.english, (tree.id,)))
    else:
        _both(tree, words)


def _both(tree: Both, words: list[Word]) -> None:
    nominal(tree.first, words)
    words.append(("and", (tree.id,)))
    nominal(tree.second, words)


def _phrase(tree: Phrase, words: list[Word]) -> None:
    determiner, concept = tree.determiner, (tree.determiner_id,)
    article = -1
    if tree.owner:
        words.append((tree.owner.proper.english, (tree.owner.id,)))
        words.append(("'s", (tree.link_id,)))
    elif determiner == "this":
        words.append(("these" if tree.plural else "this", concept))
    elif determiner == "all":
        words.append(("all", (tree.link_id,)))
        words.append(("the", concept))
    elif determiner == "how many":
        words.append(("how", concept))
        words.append(("many", concept))
    elif determiner:
        article = len(words)
        words.append((determiner, concept))
    if tree.number:
        _number(tree.number, words)
    for described in tree.adjectives:
        if described.degree:
            words.append((described.degree.english[0], (described.degree_id,)))
        words.append((described.adjective.english, (described.id,)))
    words.append((tree.noun.english[tree.plural], (tree.id,)))
    if determiner == "a" and words[article + 1][0][0] in "aeiou":
        words[article] = ("a" if words[article + 1][0] == "useful" else "an", concept)
    if tree.of:
        words.append(("of", (tree.link_id,)))
        _phrase(tree.of, words)
    if tree.place:
        _place(tree.place, words)
    if tree.relative:
        gap = tree.relative.clause.gap
        person = tree.noun.kind in ("person", "kin")
        word = "that" if not person else "who" if gap == "subject" else "whom"
        words.append((word, (tree.relative.id,)))
        clause(tree.relative.clause, words)


def _number(tree: Number, words: list[Word]) -> None:
    for word, says in numbers.ENGLISH[tree.value]:
        words.append((word, tree.concepts(says)))


def _place(tree: Place, words: list[Word]) -> None:
    _spread(tree.preposition.english, (tree.id,), words)
    nominal(tree.nominal, words, subject=False)


def _moment(tree: Moment, words: list[Word]) -> None:
    concept = (tree.id,)
    if tree.adverbial:
        _spread(tree.adverbial.english, concept, words)
    elif tree.number and tree.unit is None:
        words.append(("at", concept))
        _number(tree.number, words)
        words.append(("o'clock", (tree.id + 1,)))
    elif tree.number and tree.unit:
        if not tree.past:
            words.append(("in", concept))
        _number(tree.number, words)
        words.append((tree.unit.english[1], (tree.id + 1,)))
        if tree.past:
            words.append(("ago", concept))


def _predicate(tree: Predicate, words: list[Word]) -> None:
    described = tree.described
    if tree.number:
        _number(tree.number, words)
        if tree.unit:
            words.append((tree.unit.english[1], (tree.id,)))
            words.append(("old", (tree.id + 1,)))
    elif described and tree.standard:
        if tree.comparison == "more":
            comparative = described.adjective.comparative
            if len(comparative) > 1:
                words.append((comparative[0], (tree.id,)))
                words.append((comparative[1], (described.id,)))
            else:
                words.append((comparative[0], (tree.id, described.id)))
            words.append(("than", (tree.id + 1,)))
        else:
            words.append(("as", (tree.id,)))
            words.append((described.adjective.english, (described.id,)))
            words.append(("as", (tree.id + 1,)))
        nominal(tree.standard, words)
    elif described:
        if described.degree:
            words.append((described.degree.english[0], (described.degree_id,)))
        words.append((described.adjective.english, (described.id,)))
