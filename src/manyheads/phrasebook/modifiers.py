"""Adjectives, adverbs, prepositions, names and the like, in three languages.

An adjective's line reads `kinds of nouns | English | German | French`, with the comparative after
the English and the German form where it may be compared; a French `<` marks an adjective that
stands before its noun, and the feminine follows the masculine.
"""

from dataclasses import dataclass

from manyheads.phrasebook.nouns import NOUNS, Noun

_ADJECTIVES = """
person,kin,animal,food,text,clothes,vehicle,thing,plant,place | big bigger | groß größer | <grand grande
person,kin,animal,food,clothes,vehicle,thing,plant,place | small smaller | klein kleiner | <petit petite
person,kin,animal | young younger | jung jünger | <jeune jeune
person,kin,animal,text,clothes,vehicle,thing,plant,place | old older | alt älter | <vieux vieille
text,clothes,vehicle,thing,place | new newer | neu neuer | <nouveau nouvelle
animal,text,clothes,vehicle,thing,plant,place | beautiful more_beautiful | schön schöner | <beau belle
clothes,plant,cup,plate,picture,lamp,bag,box,basket,mirror,cat,bird,horse,house,village | pretty prettier | hübsch hübscher | <joli jolie
animal,clothes,vehicle,thing,place | ugly uglier | hässlich hässlicher | laid laide
person,kin,animal | friendly friendlier | freundlich freundlicher | aimable aimable
person,kin,animal | clever cleverer | klug klüger | intelligent intelligente
person,kin,animal | brave braver | mutig mutiger | courageux courageuse
person,kin,animal | lazy lazier | faul fauler | paresseux paresseuse
person,kin | rich richer | reich reicher | riche riche
person,kin,animal | strong stronger | stark stärker | fort forte
person,text,visit | famous more_famous | berühmt berühmter | célèbre célèbre
person,kin | happy happier | glücklich glücklicher | heureux heureuse
person,kin,animal,story,novel,poem | sad sadder | traurig trauriger | triste triste
person,kin,animal | tired | müde | fatigué fatiguée
person,kin,animal | sick | krank | malade malade
person,kin,animal | hungry | hungrig | affamé affamée
person,kin,animal | curious more_curious | neugierig neugieriger | curieux curieuse
person,kin,animal | careful more_careful | vorsichtig vorsichtiger | prudent prudente
person,kin | shy shyer | schüchtern schüchterner | timide timide
person,kin | polite politer | höflich höflicher | poli polie
person,kin | nervous more_nervous | nervös nervöser | nerveux nerveuse
clothes,vehicle,hand,table,chair,lamp,clock,bed,wine,coffee,hotel,restaurant | expensive more_expensive | teuer teurer | cher chère
clothes,vehicle,clean,wash | clean cleaner | sauber sauberer | propre propre
clothes,vehicle,clean,wash,animal | dirty dirtier | schmutzig schmutziger | sale sale
suitcase,bag,box,basket,on,bottle,gift,book,telephone | heavy heavier | schwer schwerer | lourd lourde
repair,break | broken | kaputt | cassé cassée
key,telephone,knife,umbrella,bag,basket,pencil,book,car,bicycle,suitcase,box | useful more_useful | nützlich nützlicher | utile utile
vehicle,build,lamp,clock,telephone,picture,kitchen,museum,library,theatre,office,town,station | modern more_modern | modern moderner | moderne moderne
empty,timetable,house,school,church,room,kitchen,museum,theatre,restaurant,hotel,shop,station | empty | leer | vide vide
place | quiet quieter | ruhig ruhiger | calme calme
text,animal,visit | strange stranger | seltsam seltsamer | étrange étrange
clothes,vehicle,thing,plant | red | rot | rouge rouge
clothes,vehicle,thing | blue | blau | bleu bleue
clothes,vehicle,thing,plant,apple,pear,tomato | green | grün | vert verte
clothes,vehicle,thing,plant,animal,house | white | weiß | blanc blanche
clothes,vehicle,thing,animal | black | schwarz | noir noire
clothes,vehicle,thing,plant | yellow | gelb | jaune jaune
clothes,thing,animal | brown | braun | brun brune
clothes,vehicle,thing,animal,house | grey | grau | gris grise
food,milk,juice | fresh fresher | frisch frischer | frais fraîche
food,wine,tea | sweet sweeter | süß süßer | sucré sucrée
food,drink,text | good | gut | <bon bonne
drink | cold colder | kalt kälter | froid froide
drink | hot hotter | heiß heißer | chaud chaude
food,drink | delicious | köstlich | délicieux délicieuse
"""  # noqa: E501

_COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey")
_STEMS = {"teuer": "teur", "müde": "müd"}
# Before a vowel a few masculine adjectives have a form of their own.
_BEFORE_VOWEL = {"beau": "bel", "vieux": "vieil", "nouveau": "nouvel"}


@dataclass(frozen=True, slots=True, eq=False)
class Adjective:
    """An adjective; `french` is indexed by `feminine * 2 + plural`."""

    name: str
    colour: bool
    english: str
    comparative: tuple[str, ...]
    german: str
    german_stem: str
    german_comparative: str
    french: tuple[str, str, str, str]
    before_vowel: str
    precedes: bool


@dataclass(frozen=True, slots=True, eq=False)
class Adverbial:
    """A fixed expression of time, frequency, manner or degree, as words in each language."""

    english: tuple[str, ...]
    german: tuple[str, ...]
    french: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Preposition:
    """A preposition; `case` is the one that German wants, 1 accusative, 2 dative, 3 genitive."""

    english: tuple[str, ...]
    german: tuple[str, ...]
    case: int
    french: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Proper:
    """A personal name or the name of a city."""

    english: str
    german: str
    french: str
    feminine: bool


def _french_plural(form: str) -> str:
    return form if form[-1] in "sx" else form + ("x" if form.endswith("eau") else "s")


def _adjective(line: str) -> tuple[frozenset[str], Adjective]:
    kinds, english, german, french = (column.split() for column in line.split(" | "))
    precedes = french[0].startswith("<")
    masculine, feminine = french[0].removeprefix("<"), french[1]
    return frozenset(kinds[0].split(",")), Adjective(
        name=english[0],
        colour=english[0] in _COLOURS,
        english=english[0],
        comparative=tuple(english[1].split("_")) if len(english) > 1 else (),
        german=german[0],
        german_stem=_STEMS.get(german[0], german[0]),
        german_comparative=german[1] if len(german) > 1 else "",
        french=(masculine, _french_plural(masculine), feminine, _french_plural(feminine)),
        before_vowel=_BEFORE_VOWEL.get(masculine, masculine),
        precedes=precedes,
    )


_PARSED = [_adjective(line) for line in _ADJECTIVES.strip().splitlines()]
ADJECTIVES: tuple[Adjective, ...] = tuple(adjective for _, adjective in _PARSED)


# Together these would mean something else in French ("petit ami") or are odd in any language.
_MISFITS = {
    "old": ("boy", "girl", "child"),
    "young": ("grandmother", "grandfather"),
    "small": ("friend", "grandmother", "grandfather"),
    "big": ("man", "grandmother", "grandfather"),
}


def _fitting(noun: Noun) -> tuple[Adjective, ...]:
    kinds_of_noun = noun.tags | {noun.name}
    return tuple(
        adjective
        for kinds, adjective in _PARSED
        if kinds & kinds_of_noun and noun.name not in _MISFITS.get(adjective.name, ())
    )


FITTING: dict[str, tuple[Adjective, ...]] = {noun.name: _fitting(noun) for noun in NOUNS}
ABOUT_PEOPLE: tuple[Adjective, ...] = tuple(adj for kinds, adj in _PARSED if "kin" in kinds)


def _adverbials(table: str) -> tuple[Adverbial, ...]:
    rows = (line.split("|") for line in table.strip().splitlines())
    return tuple(Adverbial(*(tuple(column.split()) for column in row)) for row in rows)


_ANY_TIME = _adverbials("""
today | heute | aujourd'hui
in the evening | am Abend | le soir
in the morning | am Morgen | le matin
at night | in der Nacht | la nuit
in summer | im Sommer | en été
in winter | im Winter | en hiver
in spring | im Frühling | au printemps
in autumn | im Herbst | en automne
on Monday | am Montag | lundi
on Tuesday | am Dienstag | mardi
on Wednesday | am Mittwoch | mercredi
on Thursday | am Donnerstag | jeudi
on Friday | am Freitag | vendredi
on Saturday | am Samstag | samedi
on Sunday | am Sonntag | dimanche
""")
TIMES: dict[str, tuple[Adverbial, ...]] = {
    "present": _ANY_TIME
    + _adverbials("now | jetzt | maintenant\nevery day | jeden Tag | chaque jour"),
    "past": _ANY_TIME
    + _adverbials("yesterday | gestern | hier\nlast week | letzte Woche | la semaine dernière"),
    "future": _ANY_TIME
    + _adverbials("""
tomorrow | morgen | demain
tonight | heute Abend | ce soir
next year | nächstes Jahr | l' année prochaine
"""),
}
NOW = TIMES["present"][-2]
FREQUENCIES: tuple[Adverbial, ...] = _adverbials("""
often | oft | souvent
always | immer | toujours
sometimes | manchmal | parfois
rarely | selten | rarement
""")
NEVER = _adverbials("never | nie | jamais")[0]
ALREADY = _adverbials("already | schon | déjà")[0]
_QUICKLY, _SLOWLY, _QUIETLY, _LOUDLY, _HAPPILY = _adverbials("""
quickly | schnell | rapidement
slowly | langsam | lentement
quietly | leise | doucement
loudly | laut | fort
happily | fröhlich | joyeusement
""")
# How each verb may be done.
MANNERS: dict[str, tuple[Adverbial, ...]] = {
    "laugh": (_QUIETLY, _LOUDLY),
    "sing": (_QUIETLY, _LOUDLY, _HAPPILY),
    "dance": (_QUICKLY, _SLOWLY, _HAPPILY),
    "work": (_QUICKLY, _SLOWLY, _QUIETLY),
    "swim": (_QUICKLY, _SLOWLY),
    "run": (_QUICKLY, _SLOWLY),
    "cook": (_QUICKLY, _SLOWLY, _HAPPILY),
    "cry": (_QUIETLY, _LOUDLY),
    "play": (_QUIETLY, _HAPPILY),
    "shout": (_LOUDLY,),
}
DEGREES: tuple[Adverbial, ...] = _adverbials("""
very | sehr | très
too | zu | trop
quite | ziemlich | assez
""")
PLEASE = _adverbials("please | bitte | s' il te plaît")[0]


def _preposition(english: str, german: str, case: int, french: str) -> Preposition:
    return Preposition(tuple(english.split()), tuple(german.split()), case, tuple(french.split()))


IN = _preposition("in", "in", 2, "dans")
AT_CITY = _preposition("in", "in", 2, "à")
FROM = _preposition("from", "aus", 2, "de")
TO = _preposition("to", "zu", 2, "à")
WITH = _preposition("with", "mit", 2, "avec")
WITHOUT = _preposition("without", "ohne", 1, "sans")
FOR = _preposition("for", "für", 1, "pour")
# Which prepositions of place a noun takes, by its tag.
PLACES: dict[str, tuple[Preposition, ...]] = {
    "in": (IN, IN),
    "on": (_preposition("on", "auf", 2, "sur"),),
    "under": (_preposition("under", "unter", 2, "sous"),),
    "by": (
        _preposition("behind", "hinter", 2, "derrière"),
        _preposition("in front of", "vor", 2, "devant"),
        _preposition("next to", "neben", 2, "à côté de"),
        _preposition("near", "in der Nähe", 3, "près de"),
    ),
}

NAMES: tuple[Proper, ...] = tuple(
    Proper(name, name, name, name in ("Anna", "Emma", "Maria", "Nina", "Sophie"))
    for name in ("Anna", "Emma", "Maria", "Nina", "Sophie", "Paul", "Peter", "Martin", "Leo", "Tom")
)
CITIES: tuple[Proper, ...] = tuple(
    Proper(english, german, french, feminine=False)
    for english, german, french in (
        ("Berlin", "Berlin", "Berlin"),
        ("Paris", "Paris", "Paris"),
        ("London", "London", "Londres"),
        ("Vienna", "Wien", "Vienne"),
        ("Rome", "Rom", "Rome"),
        ("Munich", "München", "Munich"),
        ("Geneva", "Genf", "Genève"),
        ("Cologne", "Köln", "Cologne"),
    )
)

# I, you (one friend), he, she, we, they: the person that the verb agrees with.
PERSONS: tuple[int, ...] = (0, 1, 2, 2, 3, 4)
