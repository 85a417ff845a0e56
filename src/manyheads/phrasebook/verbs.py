"""The verbs of the phrasebook: one line is one verb in three languages.

A line reads `frame subject object flags | English | German | French`. Subject and object are tags
of nouns, joined by commas (`-` where there is none). English: base, past and, if the consonant
doubles, the -ing form (`_` stands for a space). German: infinitive with `|` after a separable
prefix, third person, participle, then `s` (perfect with sein), `d` (dative object), `sich`, or
a preposition with its case. French: infinitive; an irregular verb adds je, tu, il, nous, ils,
participle and the stem of the future; then `e` (perfect with être), `se`, or `à`.

Flags: `s` stative (no progressive), `p` simple past also in German and imperfect in French,
`c` may be a command, `w` goes with company, `l` happens somewhere.
"""

from dataclasses import dataclass

_TABLE = """
plain person,kin,animal - cl | sleep slept | schlafen schläft geschlafen | dormir dors dors dort dormons dorment dormi dormir
plain person,kin - l | laugh laughed | lachen lacht gelacht | rire ris ris rit rions rient ri rir
plain person,kin - cwl | sing sang | singen singt gesungen | chanter
plain person,kin - cwl | dance danced | tanzen tanzt getanzt | danser
plain person,kin - cwl | work worked | arbeiten arbeitet gearbeitet | travailler
plain person,kin,animal - cl | wait waited | warten wartet gewartet | attendre attends attends attend attendons attendent attendu attendr
plain person,kin - cw | swim swam swimming | schwimmen schwimmt geschwommen s | nager nage nages nage nageons nagent nagé nager
plain person,kin,animal - cl | run ran running | laufen läuft gelaufen s | courir cours cours court courons courent couru courr
plain person,kin - l | cry cried | weinen weint geweint | pleurer
plain person,kin - clw | play played | spielen spielt gespielt | jouer
plain person,kin - w | travel travelled travelling | reisen reist gereist s | voyager voyage voyages voyage voyageons voyagent voyagé voyager
plain person,kin,timetable - - | arrive arrived | an|kommen kommt angekommen s | arriver e
plain person,kin,timetable - - | leave left | ab|fahren fährt abgefahren s | partir pars pars part partons partent parti partir e
plain person,kin,animal - w | come_back came_back | zurück|kommen kommt zurückgekommen s | revenir reviens reviens revient revenons reviennent revenu reviendr e
plain person,kin,animal - cl | stay stayed | bleiben bleibt geblieben s | rester e
plain person,kin,animal - - | get_up got_up getting_up | auf|stehen steht aufgestanden s | lever lève lèves lève levons lèvent levé lèver se
plain person,kin - - | hurry hurried | beeilen beeilt beeilt sich | dépêcher se
plain person,kin,animal - l | rest rested | aus|ruhen ruht ausgeruht sich | reposer se
plain person,kin - - | dream dreamed | träumen träumt geträumt | rêver
plain person,kin - clw | cook cooked | kochen kocht gekocht | cuisiner
plain person,kin - l | shout shouted | schreien schreit geschrien | crier
plain animal,person,kin - cl | jump jumped | springen springt gesprungen s | sauter
acts person,kin,animal any s | see saw | sehen sieht gesehen | voir vois vois voit voyons voient vu verr
acts person,kin find,lose,animal,hand s | find found | finden findet gefunden | trouver
acts person,kin food,clothes,thing,car,bicycle,boat,find,drink,plant c | buy bought | kaufen kauft gekauft | acheter achète achètes achète achetons achètent acheté achèter
acts person,kin food,clothes,hand,car,bicycle,boat,drink,animal,house - | sell sold | verkaufen verkauft verkauft | vendre vends vends vend vendons vendent vendu vendr
acts person,kin food c | eat ate | essen isst gegessen | manger mange manges mange mangeons mangent mangé manger
acts person,kin drink c | drink drank | trinken trinkt getrunken | boire bois bois boit buvons boivent bu boir
acts person,kin text c | read read | lesen liest gelesen | lire lis lis lit lisons lisent lu lir
acts person,kin write c | write wrote | schreiben schreibt geschrieben | écrire écris écris écrit écrivons écrivent écrit écrir
acts person,kin person,kin,animal s | love loved | lieben liebt geliebt | aimer
acts person,kin person,kin c | help helped | helfen hilft geholfen d | aider
acts person,kin visit c | visit visited | besuchen besucht besucht | visiter
acts person,kin person,kin,visit,text sp | know knew | kennen kennt gekannt | connaître connais connais connaît connaissons connaissent connu connaîtr
acts person,kin,animal person,kin,animal,hand,lose c | look_for looked_for | suchen sucht gesucht | chercher
acts person,kin person,kin c | call called | an|rufen ruft angerufen | appeler appelle appelles appelle appelons appellent appelé appeller
acts person,kin open c | open opened | auf|machen macht aufgemacht | ouvrir ouvre ouvres ouvre ouvrons ouvrent ouvert ouvrir
acts person,kin open c | close closed | zu|machen macht zugemacht | fermer
acts person,kin hand,food,clothes c | take took | nehmen nimmt genommen | prendre prends prends prend prenons prennent pris prendr
acts person,kin hand,clothes,cat,rabbit,duck - | carry carried | tragen trägt getragen | porter
acts person,kin clothes - | wear wore | tragen trägt getragen | porter
acts person,kin wash,dog,cat,horse,donkey c | wash washed | waschen wäscht gewaschen | laver
acts person,kin paint,animal - | paint painted | malen malt gemalt | peindre peins peins peint peignons peignent peint peindr
acts person,kin repair c | repair repaired | reparieren repariert repariert | réparer
acts person,kin clean,car,bicycle,lamp,knife,spoon c | clean cleaned | putzen putzt geputzt | nettoyer nettoie nettoies nettoie nettoyons nettoient nettoyé nettoier
acts person,kin,animal person,kin,animal,timetable s | hear heard | hören hört gehört | entendre entends entends entend entendons entendent entendu entendr
acts person,kin person,kin,text s | understand understood | verstehen versteht verstanden | comprendre comprends comprends comprend comprenons comprennent compris comprendr
acts person,kin,animal person,kin,animal,vehicle c | follow followed | folgen folgt gefolgt s d | suivre suis suis suit suivons suivent suivi suivr
acts person,kin person,kin c | thank thanked | danken dankt gedankt d | remercier
acts person,kin person,kin - | meet met | treffen trifft getroffen | rencontrer
acts person,kin person,kin c | invite invited | ein|laden lädt eingeladen | inviter
acts person,kin person,kin,animal - | listen_to listened_to | zu|hören hört zugehört d | écouter
acts person,kin person,kin,timetable - | wait_for waited_for | warten wartet gewartet auf:1 | attendre attends attends attend attendons attendent attendu attendr
acts person,kin person,kin,animal,house - | think_of thought_of | denken denkt gedacht an:1 | penser à
acts person,kin person,kin c | answer answered | antworten antwortet geantwortet d | répondre réponds réponds répond répondons répondent répondu répondr à
acts person,kin,animal lose s | lose lost | verlieren verliert verloren | perdre perds perds perd perdons perdent perdu perdr
acts person,kin lose,hand s | forget forgot forgetting | vergessen vergisst vergessen | oublier
acts person,kin break - | break broke | zerbrechen zerbricht zerbrochen | casser
acts person,kin hand,food,find - | hide hid | verstecken versteckt versteckt | cacher
acts person,kin person,kin,animal,paint - | photograph photographed | fotografieren fotografiert fotografiert | photographier
acts person,kin,animal person,kin,animal - | watch watched | beobachten beobachtet beobachtet | observer
acts person,kin paint,animal,vehicle - | draw drew | zeichnen zeichnet gezeichnet | dessiner
acts person,kin,animal person,kin,animal - | protect protected | beschützen beschützt beschützt | protéger protège protèges protège protégeons protègent protégé protéger
acts person,kin animal - | feed fed | füttern füttert gefüttert | nourrir nourris nourris nourrit nourrissons nourrissent nourri nourrir
acts person,kin build - | build built | bauen baut gebaut | construire construis construis construit construisons construisent construit construir
acts person,kin hand,clothes,text c | choose chose | wählen wählt gewählt | choisir choisis choisis choisit choisissons choisissent choisi choisir
acts person,kin person,kin c | greet greeted | begrüßen begrüßt begrüßt | saluer
acts person,kin,animal person,kin,animal,text - | look_at looked_at | an|sehen sieht angesehen | regarder
own person,kin animal,clothes,car,bicycle,boat,hand,friend,brother,sister,son,daughter,cousin,uncle,aunt,find sp | have had | haben hat gehabt | avoir
gives person,kin food,hand,find,clothes c | give gave | geben gibt gegeben | donner
gives person,kin animal,hand,text,clothes,visit c | show showed | zeigen zeigt gezeigt | montrer
gives person,kin find,poem,hand,clothes c | send sent | schicken schickt geschickt | envoyer envoie envoies envoie envoyons envoient envoyé enverr
gives person,kin food,hand,find,clothes c | bring brought | bringen bringt gebracht | apporter
gives person,kin hand,find,clothes,car,bicycle c | lend lent | leihen leiht geliehen | prêter
gives person,kin food,hand - | offer offered | an|bieten bietet angeboten | offrir offre offres offre offrons offrent offert offrir
that person,kin - s | say said | sagen sagt gesagt | dire dis dis dit disons disent dit dir
that person,kin - s | think thought | denken denkt gedacht | penser
that person,kin - s | know knew | wissen weiß gewusst | savoir sais sais sait savons savent su saur
that person,kin - s | believe believed | glauben glaubt geglaubt | croire crois crois croit croyons croient cru croir
that person,kin - s | hope hoped | hoffen hofft gehofft | espérer espère espères espère espérons espèrent espéré espérer
that person,kin - s | write wrote | schreiben schreibt geschrieben | écrire écris écris écrit écrivons écrivent écrit écrir
whether person,kin - s | ask asked | fragen fragt gefragt | demander
whether person,kin - s | know knew | wissen weiß gewusst | savoir sais sais sait savons savent su saur
live person,kin - c | live lived | wohnen wohnt gewohnt | habiter
goal person,kin - c | go went | gehen geht gegangen s | aller vais vas va allons vont allé ir e
from person,kin - s | come came | kommen kommt gekommen s | venir viens viens vient venons viennent venu viendr e
owned thing,vehicle,clothes,house,book person s | belong_to belonged_to | gehören gehört gehört d | appartenir appartiens appartiens appartient appartenons appartiennent appartenu appartiendr à
cost clothes,hand,table,chair,lamp,clock,bed,find,bicycle - s | cost cost | kosten kostet gekostet | coûter
sky - - - | rain rained | regnen regnet geregnet | pleuvoir - - pleut - - plu pleuvr
sky - - - | snow snowed | schneien schneit geschneit | neiger neige neiges neige neigeons neigent neigé neiger
be - - sp | be - | sein ist gewesen s | être
"""  # noqa: E501

# The five persons are I, you, he or she, we, they.
_GERMAN_PRESENT = {
    "sein": "bin bist ist sind sind",
    "haben": "habe hast hat haben haben",
    "werden": "werde wirst wird werden werden",
    "wissen": "weiß weißt weiß wissen wissen",
    "können": "kann kannst kann können können",
    "müssen": "muss musst muss müssen müssen",
    "wollen": "will willst will wollen wollen",
}
_GERMAN_PAST = {
    "sein": "war warst war waren waren",
    "haben": "hatte hattest hatte hatten hatten",
    "kennen": "kannte kanntest kannte kannten kannten",
}
_FRENCH_IRREGULAR = {
    "être": "suis es est sommes sont été ser",
    "avoir": "ai as a avons ont eu aur",
    "pouvoir": "peux peux peut pouvons peuvent pu pourr",
    "devoir": "dois dois doit devons doivent dû devr",
    "vouloir": "veux veux veut voulons veulent voulu voudr",
}


@dataclass(frozen=True, slots=True, eq=False)
class English:
    """Base, third person, past and -ing form, each a tuple of words ("look", "for")."""

    base: tuple[str, ...]
    third: tuple[str, ...]
    past: tuple[str, ...]
    progressive: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class German:
    """The forms of a German verb; `governs` is the case of its object, 1 accusative, 2 dative."""

    infinitive: str
    prefix: str
    present: tuple[str, ...]
    past: tuple[str, ...]
    participle: str
    imperative: str
    to_be: bool
    reflexive: bool
    governs: int
    preposition: str


@dataclass(frozen=True, slots=True, eq=False)
class French:
    """The forms of a French verb; `future` and `imperfect` as the five persons have them."""

    infinitive: str
    present: tuple[str, ...]
    future: tuple[str, ...]
    imperfect: tuple[str, ...]
    participle: str
    imperative: str
    to_be: bool
    reflexive: bool
    indirect: bool


@dataclass(frozen=True, slots=True, eq=False)
class Verb:
    """A verb, the nouns it goes with (as tags) and its forms in three languages."""

    name: str
    frame: str
    subjects: tuple[str, ...]
    objects: tuple[str, ...]
    flags: frozenset[str]
    english: English
    german: German
    french: French


def _english(spec: list[str]) -> English:
    words = [form.split("_") for form in spec]
    base = words[0]
    head = base[0]
    if head.endswith("y") and head[-2] not in "aeiou":
        third = head[:-1] + "ies"
    elif head == "have":
        third = "has"
    else:
        third = head + ("es" if head.endswith(("s", "x", "ch", "sh", "go")) else "s")
    silent = head.endswith("e") and not head.endswith(("ee", "be"))
    progressive = words[2] if len(words) > 2 else [head[: -1 if silent else None] + "ing"]
    rest = base[1:]
    return English(
        base=tuple(base),
        third=(third, *rest),
        past=tuple(words[1]),
        progressive=(progressive[0], *rest),
    )


def _german(spec: list[str]) -> German:
    prefix, _, infinitive = spec[0].rpartition("|")
    third, participle, options = spec[1], spec[2], spec[3:]
    stem = infinitive[:-1] if infinitive.endswith("ern") else infinitive[:-2]
    second = third if third[-2] in "sßzx" else third[:-1] + "st"
    first = stem + "e"
    raised = "i" in third[:-1] and "i" not in stem.replace("ie", "")
    imperative = third[:-1] if raised else stem
    if imperative.endswith(("t", "d", "chn", "lg", "ank", "enk", "ier", "er")):
        imperative += "e"
    forms = _GERMAN_PRESENT.get(infinitive)
    preposition = next((option for option in options if ":" in option), "")
    return German(
        infinitive=infinitive,
        prefix=prefix,
        present=tuple(forms.split()) if forms else (first, second, third, infinitive, infinitive),
        past=tuple(_GERMAN_PAST.get(infinitive, "").split()),
        participle=participle,
        imperative=imperative,
        to_be="s" in options,
        reflexive="sich" in options,
        governs=2 if "d" in options else 1,
        preposition=preposition.split(":")[0],
    )


def _french(spec: list[str]) -> French:
    infinitive = spec[0]
    options = {word for word in spec[1:] if word in ("e", "se", "à")}
    forms = [word for word in spec[1:] if word not in options]
    if infinitive in _FRENCH_IRREGULAR:
        forms = _FRENCH_IRREGULAR[infinitive].split()
    if not forms:
        stem = infinitive[:-2]
        forms = [stem + end for end in ("e", "es", "e", "ons", "ent", "é", "er")]
    future = forms[6]
    past = "ét" if infinitive == "être" else forms[3].removesuffix("ons")
    second = forms[1]
    return French(
        infinitive=infinitive,
        present=tuple(forms[:5]),
        future=tuple(future + end for end in ("ai", "as", "a", "ons", "ont")),
        imperfect=tuple(past + end for end in ("ais", "ais", "ait", "ions", "aient")),
        participle=forms[5],
        imperative=second[:-1] if second.endswith(("es", "as")) else second,
        to_be="e" in options or "se" in options,
        reflexive="se" in options,
        indirect="à" in options,
    )


def _parse(line: str) -> Verb:
    head, english, german, french = (column.split() for column in line.split(" | "))
    return Verb(
        name=english[0],
        frame=head[0],
        subjects=tuple(head[1].split(",")),
        objects=tuple(head[2].split(",")),
        flags=frozenset(head[3].replace("-", "")),
        english=_english(english),
        german=_german(german),
        french=_french(french),
    )


VERBS: tuple[Verb, ...] = tuple(_parse(line) for line in _TABLE.strip().splitlines())


def framed(frame: str) -> tuple[Verb, ...]:
    """The verbs of one frame."""
    return tuple(verb for verb in VERBS if verb.frame == frame)


BE = framed("be")[0]
HAVE = framed("own")[0]

# What can stand before an infinitive: the present in German and in French.
MODALS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    name: (tuple(_GERMAN_PRESENT[german].split()), tuple(forms.split()[:5]))
    for name, german, forms in (
        ("can", "können", _FRENCH_IRREGULAR["pouvoir"]),
        ("must", "müssen", _FRENCH_IRREGULAR["devoir"]),
        ("want", "wollen", _FRENCH_IRREGULAR["vouloir"]),
    )
}
WERDEN: tuple[str, ...] = tuple(_GERMAN_PRESENT["werden"].split())
