"""French: trees into words. Agreement everywhere; negation and clitics around the verb."""

from manyheads.phrasebook import numbers
from manyheads.phrasebook.modifiers import NEVER, PLEASE
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
    Sentence,
    Word,
)
from manyheads.phrasebook.verbs import BE, HAVE, MODALS

_VOWELS = frozenset("aeiouhâéèêîôœ")
_ASPIRATED = ("huit", "onze")
_ELIDING = ("le", "la", "de", "ne", "que", "je", "me", "te", "se")
_ELIDED = {word: word[:-1] + "'" for word in _ELIDING}
_CONTRACTIONS = {
    ("de", "le"): "du", ("de", "les"): "des", ("à", "le"): "au", ("à", "les"): "aux",
}  # fmt: skip
# Determiners: masculine, plural, feminine, plural.
_DETERMINERS = {
    "the": ("le", "les", "la", "les"),
    "a": ("un", "", "une", ""),
    "this": ("ce", "ces", "cette", "ces"),
    "my": ("mon", "mes", "ma", "mes"),
    "your": ("ton", "tes", "ta", "tes"),
    "his": ("son", "ses", "sa", "ses"),
    "her": ("son", "ses", "sa", "ses"),
    "our": ("notre", "nos", "notre", "nos"),
    "their": ("leur", "leurs", "leur", "leurs"),
    "every": ("chaque", "", "chaque", ""),
    "some": ("", "quelques", "", "quelques"),
    "which": ("quel", "quels", "quelle", "quelles"),
}
_BEFORE_VOWEL = {"ce": "cet", "ma": "mon", "ta": "ton", "sa": "son"}
_SUBJECTS = ("je", "tu", "il", "elle", "nous", "ils", "il")
_DIRECT = ("me", "te", "le", "la", "nous", "les")
_INDIRECT = ("me", "te", "lui", "lui", "nous", "leur")
_STRESSED = ("moi", "toi", "lui", "elle", "nous", "eux")
_REFLEXIVES = ("me", "te", "se", "nous", "se")
_CONJUNCTIONS = {
    "because": ("parce", "que"), "when": ("quand",), "if": ("si",), "while": ("pendant", "que"),
    "that": ("que",), "whether": ("si",), "and": ("et",), "but": ("mais",),
}  # fmt: skip
_QUESTIONS = {"who": "qui", "whom": "qui", "what": "que", "where": "où", "when": "quand"}
_QUESTIONS["why"] = "pourquoi"


def sentence(tree: Sentence) -> list[Word]:
    """The sentence in French."""
    words: list[Word] = []
    main, other = tree.main, tree.other
    if main is None:
        _sum(tree, words)
    elif tree.kind == "wh":
        _wh(tree, main, words)
    elif tree.kind == "command":
        if tree.word:
            for word in (*PLEASE.french, ","):
                words.append((word, (tree.word_id,)))
        clause(main, words)
    elif other is None:
        if tree.kind == "question":
            _ask(main, words)
        clause(main, words)
    elif tree.front:
        _conjunction(tree, words)
        clause(other, words)
        words.append((",", (tree.comma_id,)))
        clause(main, words)
    else:
        clause(main, words)
        if tree.word == "but":
            words.append((",", (tree.comma_id,)))
        _conjunction(tree, words)
        clause(other, words)
    words.append((tree.mark, (tree.end,)))
    return _elide(words)


def _conjunction(tree: Sentence, words: list[Word]) -> None:
    for word in _CONJUNCTIONS[tree.word]:
        words.append((word, (tree.word_id,)))


def _ask(main: Clause, words: list[Word]) -> None:
    words.append(("est-ce", (main.finite_id,)))
    words.append(("que", (main.finite_id,)))


def _sum(tree: Sentence, words: list[Word]) -> None:
    first, second, total = tree.numbers
    _number(first, words)
    words.append(("plus", (tree.word_id,)))
    _number(second, words)
    words.append(("font", (tree.word_id + 1,)))
    _number(total, words)


def _wh(tree: Sentence, main: Clause, words: list[Word]) -> None:
    if tree.asked:
        nominal(tree.asked, words)
    else:
        words.append((_QUESTIONS[tree.word], (tree.word_id,)))
    if main.gap != "subject":
        _ask(main, words)
    clause(main, words)


def _vowel(word: str) -> bool:
    """Whether the word begins with a vowel sound, so that others elide before it."""
    return word[0].lower() in _VOWELS and word not in _ASPIRATED


def _elide(words: list[Word]) -> list[Word]:
    for index in range(len(words) - 1):
        word, concepts = words[index]
        following = words[index + 1][0]
        if word in _ELIDED and _vowel(following):
            words[index] = (_ELIDED[word], concepts)
        elif word == "si" and following in ("il", "ils"):
            words[index] = ("s'", concepts)
    return words


def clause(tree: Clause, words: list[Word]) -> None:
    """A clause: subject, ne, clitics, verb, pas, and the rest."""
    if tree.front == "time" and tree.time:
        _moment(tree.time, words)
        words.append((",", (tree.time.id,)))
    elif tree.front == "place" and tree.place:
        _place(tree.place, words)
        words.append((",", (tree.place.id,)))
    if tree.gap != "subject":
        nominal(tree.subject, words)
    _verbs(tree, words)
    _rest(tree, words)


def _verbs(tree: Clause, words: list[Word]) -> None:
    """The whole verb group with negation, clitics and adverbs of frequency in their places."""
    mood, verb, slot = tree.mood, tree.verb.french, tree.subject.slot
    own, finite = (tree.id,), (tree.finite_id,)
    if tree.predicate and tree.predicate.unit:
        verb = HAVE.french  # One has years.
    never = tree.frequency and tree.frequency.adverbial is NEVER
    clitics = _clitics(tree)
    tail: list[Word] = []
    if tree.impersonal:
        clitics = [("y", own)]
        verb = HAVE.french
    form: Word
    if mood == "present":
        form = (verb.present[slot], own + finite)
    elif mood == "command":
        form = (verb.imperative, own + finite)
    elif mood == "future":
        form = (verb.future[slot], own + finite)
    elif mood == "past" and "p" in tree.verb.flags:
        form = (verb.imperfect[slot], own + finite)
    elif mood == "past":
        form = ((BE if verb.to_be else HAVE).french.present[slot], finite)
        tail.append((verb.participle + _agreement(tree), own))
    else:
        form = (MODALS[mood][1][slot], finite)
        tail = [*clitics, (verb.infinitive, own)]
        clitics = []
    if tree.negated:
        words.append(("ne", (tree.negation_id,)))
    elif never and tree.frequency:
        words.append(("ne", (tree.frequency.id,)))
    words += clitics
    words.append(form)
    if tree.negated:
        words.append(("pas", (tree.negation_id,)))
    if tree.frequency:
        _moment(tree.frequency, words)
    words += tail


def _clitics(tree: Clause) -> list[Word]:
    direct, indirect = tree.direct, tree.indirect
    verb = tree.verb.french
    if verb.reflexive:
        return [(_REFLEXIVES[tree.subject.slot], (tree.id,))]
    if isinstance(direct, Pronoun) and tree.gap != "direct":
        table = _INDIRECT if verb.indirect else _DIRECT
        return [(table[direct.index], (direct.id,))]
    if isinstance(indirect, Pronoun):
        return [(_INDIRECT[indirect.index], (indirect.id,))]
    return []


def _agreement(tree: Clause) -> str:
    """The ending of the participle, which agrees with the subject or with an object before it."""
    verb, direct = tree.verb.french, tree.direct
    if verb.to_be:
        agrees: Nominal | None = tree.subject
    elif tree.gap == "direct" or isinstance(direct, Pronoun):
        agrees = direct
    else:
        return ""
    if agrees is None:
        return ""
    plural = agrees.plural and (agrees.feminine or verb.participle[-1] != "s")
    return ("e" if agrees.feminine else "") + ("s" if plural else "")


def _rest(tree: Clause, words: list[Word]) -> None:
    direct = tree.direct if tree.gap != "direct" else None
    indirect = tree.indirect
    if tree.manner:
        _moment(tree.manner, words)
    if direct and not isinstance(direct, Pronoun):
        if tree.verb.french.indirect:
            _governed(("à",), (tree.id,), direct, words)
        else:
            nominal(direct, words, denied=tree.negated)
    if indirect and not isinstance(indirect, Pronoun):
        concept = tree.to_id if tree.to else indirect.id
        _governed(("à",), (concept,), indirect, words)
    if tree.predicate:
        _predicate(tree.predicate, tree.subject, words)
    if tree.company:
        _place(tree.company, words)
    if tree.place and tree.front != "place":
        _place(tree.place, words)
    if tree.time and tree.front != "time":
        _moment(tree.time, words)


def nominal(tree: Nominal, words: list[Word], denied: bool = False) -> None:
    """A pronoun, a name, a phrase or two of them; `denied` turns "un" into "de"."""
    if isinstance(tree, Phrase):
        _phrase(tree, words, denied)
    elif isinstance(tree, Pronoun):
        words.append((_SUBJECTS[tree.index], (tree.id,)))
    elif isinstance(tree, Name):
        words.append((tree.proper.french, (tree.id,)))
    else:
        nominal(tree.first, words)
        words.append(("et", (tree.id,)))
        nominal(tree.second, words)


def _governed(
    before: tuple[str, ...], concepts: tuple[int, ...], tree: Nominal, words: list[Word]
) -> None:
    """A preposition and what it governs, with du, des, au and aux."""
    for word in before:
        words.append((word, concepts))
    start = len(words)
    if isinstance(tree, Pronoun):
        words.append((_STRESSED[tree.index], (tree.id,)))
    else:
        nominal(tree, words)
    _contract(words, start)


def _contract(words: list[Word], start: int) -> None:
    """Joins the preposition before `start` with the article at `start`."""
    before, article = words[start - 1], words[start]
    merged = _CONTRACTIONS.get((before[0], article[0]))
    if merged and not (article[0] == "le" and _vowel(words[start + 1][0])):
        words[start - 1 : start + 1] = [(merged, (*before[1], *article[1]))]


def _phrase(tree: Phrase, words: list[Word], denied: bool) -> None:
    index = tree.noun.feminine * 2 + tree.plural
    group: list[Word] = []
    if tree.number:
        _number(tree.number, group, tree.noun.feminine)
    noun = tree.noun.french[tree.plural]
    for described in tree.adjectives:
        adjective = described.adjective
        if adjective.precedes:
            if described.degree:
                group.append((described.degree.french[0], (described.degree_id,)))
            special = index == 0 and _vowel(noun)
            form = adjective.before_vowel if special else adjective.french[index]
            group.append((form, (described.id,)))
    group.append((noun, (tree.id,)))
    for described in tree.adjectives:
        adjective = described.adjective
        if not adjective.precedes:
            if described.degree:
                group.append((described.degree.french[0], (described.degree_id,)))
            group.append((adjective.french[index], (described.id,)))
    _determiner(tree, words, index, group[0][0], denied)
    words += group
    if tree.owner:
        _governed(("de",), (tree.link_id,), tree.owner, words)
    if tree.of:
        _governed(("de",), (tree.link_id,), tree.of, words)
    if tree.place:
        _place(tree.place, words)
    if tree.relative:
        word = "qui" if tree.relative.clause.gap == "subject" else "que"
        words.append((word, (tree.relative.id,)))
        clause(tree.relative.clause, words)


def _determiner(tree: Phrase, words: list[Word], index: int, following: str, denied: bool) -> None:
    name, concept = tree.determiner, (tree.determiner_id,)
    if denied and tree.indefinite:
        words.append(("de", concept if name else (tree.id,)))
    elif tree.owner:
        words.append((_DETERMINERS["the"][index], (tree.link_id,)))
    elif name in ("many", "how many"):
        words.append(("beaucoup" if name == "many" else "combien", concept))
        words.append(("de", concept))
    elif name == "all":
        words.append(("toutes" if tree.noun.feminine else "tous", (tree.link_id,)))
        words.append(("les", concept))
    elif name:
        form = _DETERMINERS[name][index]
        if form in _BEFORE_VOWEL and _vowel(following):
            form = _BEFORE_VOWEL[form]
        words.append((form, concept))
    elif tree.number is None:
        # Some of a mass: du lait, de l'eau.
        article = _DETERMINERS["the"][index]
        if article == "le" and not _vowel(following):
            words.append(("du", (tree.id,)))
        else:
            words.append(("de", (tree.id,)))
            words.append((article, (tree.id,)))


def _number(tree: Number, words: list[Word], feminine: bool = False) -> None:
    for word, says in numbers.FRENCH[tree.value]:
        words.append(("une" if feminine and word == "un" else word, tree.concepts(says)))


def _place(tree: Place, words: list[Word]) -> None:
    _governed(tree.preposition.french, (tree.id,), tree.nominal, words)


def _moment(tree: Moment, words: list[Word]) -> None:
    concept = (tree.id,)
    if tree.adverbial:
        for word in tree.adverbial.french:
            words.append((word, concept))
    elif tree.number and tree.unit is None:
        words.append(("à", concept))
        _number(tree.number, words, feminine=True)
        words.append(("heures", (tree.id + 1,)))
    elif tree.number and tree.unit:
        for word in ("il", "y", "a") if tree.past else ("dans",):
            words.append((word, concept))
        _number(tree.number, words, tree.unit.feminine)
        words.append((tree.unit.french[1], (tree.id + 1,)))


def _predicate(tree: Predicate, subject: Nominal, words: list[Word]) -> None:
    described = tree.described
    if tree.number:
        _number(tree.number, words)
        if tree.unit:
            words.append((tree.unit.french[1], (tree.id, tree.id + 1)))
        return
    if described is None:
        return
    form = described.adjective.french[subject.feminine * 2 + subject.plural]
    if described.degree:
        words.append((described.degree.french[0], (described.degree_id,)))
    if tree.standard:
        words.append(("plus" if tree.comparison == "more" else "aussi", (tree.id,)))
    words.append((form, (described.id,)))
    if tree.standard:
        words.append(("que", (tree.id + 1,)))
        nominal(tree.standard, words)
