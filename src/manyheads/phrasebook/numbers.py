"""The number words from zero to ninety-nine in three languages.

Each number is a list of (word, parts); the parts that a word expresses are a subset of "tens",
"link", "units". "thirty-four" is thirty (tens), - (link), four (units); "vierunddreißig" expresses
all three; "quatre-vingt-douze" expresses ninety by quatre, -, vingt and, with the two, douze.
"""

Parts = tuple[tuple[str, str], ...]
"""Words, each with the letters of the parts that it expresses: t tens, l link, u units."""


def _list(words: str) -> tuple[str, ...]:
    return tuple(words.split())


_ENGLISH = _list(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
_ENGLISH_TENS = _list("twenty thirty forty fifty sixty seventy eighty ninety")
_GERMAN = _list(
    "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn "
    "fünfzehn sechzehn siebzehn achtzehn neunzehn"
)
_GERMAN_TENS = _list("zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")
_FRENCH = _list(
    "zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze "
    "seize dix-sept dix-huit dix-neuf"
)
_FRENCH_TENS = _list("vingt trente quarante cinquante soixante soixante quatre-vingt quatre-vingt")


def _english(number: int) -> Parts:
    if number < 20:
        return ((_ENGLISH[number], "u"),)
    tens = _ENGLISH_TENS[number // 10 - 2]
    if number % 10 == 0:
        return ((tens, "t"),)
    return ((tens, "t"), ("-", "l"), (_ENGLISH[number % 10], "u"))


def _german(number: int) -> Parts:
    if number < 20:
        return ((_GERMAN[number], "u"),)
    tens = _GERMAN_TENS[number // 10 - 2]
    if number % 10 == 0:
        return ((tens, "t"),)
    units = "ein" if number % 10 == 1 else _GERMAN[number % 10]
    return ((units + "und" + tens, "tlu"),)


def _hyphenated(word: str, says: str, link: str) -> Parts:
    """The word cut at its hyphens; each piece says the same, the hyphens say the link."""
    words: list[tuple[str, str]] = []
    for piece in word.split("-"):
        if words:
            words.append(("-", link))
        words.append((piece, says))
    return tuple(words)


def _french(number: int) -> Parts:
    if number < 20:
        return _hyphenated(_FRENCH[number], "u", "u")
    tens, units = divmod(number, 10)
    round_ten = units == 0
    head = _hyphenated(_FRENCH_TENS[tens - 2], "t", "t")
    if number == 80:
        return (*head[:-1], ("vingts", "t"))
    if tens in (7, 9):
        # soixante-dix, quatre-vingt-douze: the second half expresses tens too.
        if round_ten:
            return (*head, ("-", "t"), ("dix", "t"))
        if number == 71:
            return (*head, ("et", "l"), ("onze", "tu"))
        if units < 7:
            return (*head, ("-", "l"), (_FRENCH[10 + units], "tu"))
        return (*head, ("-", "t"), ("dix", "t"), ("-", "l"), (_FRENCH[units], "u"))
    if round_ten:
        return head
    if units == 1 and tens != 8:
        return (*head, ("et", "l"), ("un", "u"))
    return (*head, ("-", "l"), (_FRENCH[units], "u"))


ENGLISH: tuple[Parts, ...] = tuple(_english(number) for number in range(100))
GERMAN: tuple[Parts, ...] = tuple(_german(number) for number in range(100))
FRENCH: tuple[Parts, ...] = tuple(_french(number) for number in range(100))
