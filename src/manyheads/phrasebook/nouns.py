"""The nouns of the phrasebook: one line is one noun in three languages.

A line reads `tags | English | German | French`. The first tag is the noun's kind, which decides
what may be said of it; the others name what may be done with it or where something may be.
English: singular and, if irregular, plural. German: gender, singular, plural and, if it is not
the regular one, genitive; `w` after the gender marks the weak declension. French: gender,
singular and, if irregular, plural.
"""

from dataclasses import dataclass

_TABLE = """
person | man men | m Mann Männer Mannes | m homme
person | woman women | f Frau Frauen | f femme
person | child children | n Kind Kinder Kindes | m enfant
person | boy | mw Junge Jungen | m garçon
person | girl | n Mädchen Mädchen | f fille
person | teacher | m Lehrer Lehrer | m professeur
person | doctor | m Arzt Ärzte Arztes | m médecin
person | student | mw Student Studenten | m étudiant
person | farmer | mw Bauer Bauern | m fermier
person | baker | m Bäcker Bäcker | m boulanger
person | king | m König Könige | m roi
person | queen | f Königin Königinnen | f reine
person | judge | m Richter Richter | m juge
person | painter | m Maler Maler | m peintre
person | writer | m Schriftsteller Schriftsteller | m écrivain
person | singer | f Sängerin Sängerinnen | f chanteuse
person | nurse | f Krankenschwester Krankenschwestern | f infirmière
person | gardener | m Gärtner Gärtner | m jardinier
person | policeman policemen | mw Polizist Polizisten | m policier
person | guest | m Gast Gäste Gastes | m invité
kin | friend | m Freund Freunde Freundes | m ami
kin | neighbour | mw Nachbar Nachbarn | m voisin
kin | mother | f Mutter Mütter | f mère
kin | father | m Vater Väter | m père
kin | brother | m Bruder Brüder | m frère
kin | sister | f Schwester Schwestern | f sœur
kin | son | m Sohn Söhne Sohnes | m fils
kin | daughter | f Tochter Töchter | f fille
kin | uncle | m Onkel Onkel | m oncle
kin | aunt | f Tante Tanten | f tante
kin | grandmother | f Großmutter Großmütter | f grand-mère grands-mères
kin | grandfather | m Großvater Großväter | m grand-père grands-pères
kin | cousin | m Cousin Cousins | m cousin
animal | dog | m Hund Hunde Hundes | m chien
animal | cat | f Katze Katzen | m chat
animal | horse | n Pferd Pferde Pferdes | m cheval chevaux
animal | cow | f Kuh Kühe | f vache
animal | bird | m Vogel Vögel | m oiseau oiseaux
animal | duck | f Ente Enten | m canard
animal | mouse mice | f Maus Mäuse | f souris
animal | rabbit | n Kaninchen Kaninchen | m lapin
animal | lion | mw Löwe Löwen | m lion
animal | bear | mw Bär Bären | m ours
animal | elephant | mw Elefant Elefanten | m éléphant
animal | wolf wolves | m Wolf Wölfe Wolfes | m loup
animal | fox | m Fuchs Füchse Fuchses | m renard
animal | monkey | mw Affe Affen | m singe
animal | goat | f Ziege Ziegen | f chèvre
animal | pig | n Schwein Schweine Schweins | m cochon
animal | frog | m Frosch Frösche Frosches | f grenouille
animal | donkey | m Esel Esel | m âne
food | apple | m Apfel Äpfel | f pomme
food | cake | m Kuchen Kuchen | m gâteau gâteaux
food | egg | n Ei Eier | m œuf
food | orange | f Orange Orangen | f orange
food | pear | f Birne Birnen | f poire
food | tomato tomatoes | f Tomate Tomaten | f tomate
food | carrot | f Karotte Karotten | f carotte
food | banana | f Banane Bananen | f banane
food | sausage | f Wurst Würste | f saucisse
food | cherry | f Kirsche Kirschen | f cerise
food | biscuit | m Keks Kekse Kekses | m biscuit
food | strawberry | f Erdbeere Erdbeeren | f fraise
drink mass | water | n Wasser - | f eau
drink mass | milk | f Milch - | m lait
drink mass | tea | m Tee - | m thé
drink mass | coffee | m Kaffee - | m café
drink mass | juice | m Saft - Saftes | m jus
drink mass | wine | m Wein - Weines | m vin
drink mass | beer | n Bier - Bieres | f bière
text write find lose | book | n Buch Bücher Buches | m livre
text write find lose | letter | m Brief Briefe Briefes | f lettre
text find lose | newspaper | f Zeitung Zeitungen | m journal journaux
text write | story | f Geschichte Geschichten | f histoire
text write | poem | n Gedicht Gedichte Gedichts | m poème
text write find | novel | m Roman Romane | m roman
clothes lose wash | coat | m Mantel Mäntel | m manteau manteaux
clothes lose wash | shirt | n Hemd Hemden Hemdes | f chemise
clothes lose | hat | m Hut Hüte Hutes | m chapeau chapeaux
clothes wash | dress | n Kleid Kleider Kleides | f robe
clothes clean lose | shoe | m Schuh Schuhe Schuhs | f chaussure
clothes wash | skirt | m Rock Röcke Rocks | f jupe
clothes lose wash | jacket | f Jacke Jacken | f veste
vehicle wash repair by | car | n Auto Autos | f voiture
vehicle wash repair | bicycle | n Fahrrad Fahrräder Fahrrads | m vélo
vehicle repair timetable | train | m Zug Züge Zuges | m train
vehicle repair build timetable | boat | n Boot Boote Bootes | m bateau bateaux
vehicle repair timetable | bus | m Bus Busse Busses | m bus
thing clean on under build | table | m Tisch Tische Tisches | f table
thing repair on under build | chair | m Stuhl Stühle Stuhls | f chaise
thing repair break | lamp | f Lampe Lampen | f lampe
thing repair | clock | f Uhr Uhren | f horloge
thing open empty break hand | bottle | f Flasche Flaschen | f bouteille
thing lose hand | key | m Schlüssel Schlüssel | f clé
thing lose hand | ball | m Ball Bälle Balls | m ballon
thing repair lose hand | telephone | n Telefon Telefone | m téléphone
thing lose hand | knife knives | n Messer Messer | m couteau couteaux
thing wash break empty hand | cup | f Tasse Tassen | f tasse
thing paint hand | picture | n Bild Bilder Bildes | f image
thing open empty lose hand | bag | f Tasche Taschen | m sac
thing open hand | gift | n Geschenk Geschenke Geschenks | m cadeau cadeaux
thing open empty hand | box | f Kiste Kisten | f boîte
thing wash hand | spoon | m Löffel Löffel | f cuillère
thing open lose hand | umbrella | m Regenschirm Regenschirme Regenschirms | m parapluie
thing empty hand | basket | m Korb Körbe Korbes | m panier
thing on under empty | bed | n Bett Betten Bettes | m lit
thing clean break by | mirror | m Spiegel Spiegel | m miroir
thing lose hand | pencil | m Bleistift Bleistifte Bleistifts | m crayon
thing wash break empty hand | plate | m Teller Teller | f assiette
thing open empty lose hand | suitcase | m Koffer Koffer | f valise
thing open paint repair by | door | f Tür Türen | f porte
thing open clean break by | window | n Fenster Fenster | f fenêtre
plant paint hand | flower | f Blume Blumen | f fleur
plant paint under by | tree | m Baum Bäume Baumes | m arbre
place in by build paint | house | n Haus Häuser Hauses | f maison
place in by | garden | m Garten Gärten | m jardin
place in by goal build | school | f Schule Schulen | f école
place in by goal visit build paint | church | f Kirche Kirchen | f église
place in by goal | station | m Bahnhof Bahnhöfe Bahnhofs | f gare
place by goal visit | market | m Markt Märkte Marktes | m marché
place in clean | kitchen | f Küche Küchen | f cuisine
place in clean | room | n Zimmer Zimmer | f chambre
place in by goal visit | park | m Park Parks | m parc
place in by | forest | m Wald Wälder Waldes | f forêt
place in by goal visit | museum | n Museum Museen | m musée
place in by goal build | hospital | n Krankenhaus Krankenhäuser Krankenhauses | m hôpital hôpitaux
place in by goal visit | library | f Bibliothek Bibliotheken | f bibliothèque
place in by goal | restaurant | n Restaurant Restaurants | m restaurant
place in by goal build | hotel | n Hotel Hotels | m hôtel
place by goal | river | m Fluss Flüsse Flusses | f rivière
place by goal | lake | m See Seen | m lac
place under by build paint | bridge | f Brücke Brücken | m pont
place in by build visit paint | castle | n Schloss Schlösser Schlosses | m château châteaux
place in by goal | shop | n Geschäft Geschäfte Geschäfts | m magasin
place in clean | office | n Büro Büros | m bureau bureaux
place in visit | village | n Dorf Dörfer Dorfes | m village
place in visit | town | f Stadt Städte | f ville
place in by build visit paint | tower | m Turm Türme Turmes | f tour
place in by goal visit | theatre | n Theater Theater | m théâtre
measure | euro | m Euro Euro | m euro
measure | year | n Jahr Jahre Jahres | m an
measure | day | m Tag Tage Tages | m jour
measure | week | f Woche Wochen | f semaine
measure | month | m Monat Monate | m mois
amount | answer | f Antwort Antworten | f réponse
amount | number | f Zahl Zahlen | m nombre
amount | result | n Ergebnis Ergebnisse Ergebnisses | m résultat
"""


@dataclass(frozen=True, slots=True, eq=False)
class Noun:
    """A noun with all its forms. `german` is indexed by `case * 2 + plural`, cases n, a, d, g."""

    name: str
    kind: str
    tags: frozenset[str]
    english: tuple[str, str]
    german_gender: int
    german: tuple[str, ...]
    feminine: bool
    french: tuple[str, str]


def _english_plural(singular: str) -> str:
    if singular.endswith("y") and singular[-2] not in "aeiou":
        return singular[:-1] + "ies"
    return singular + ("es" if singular.endswith(("s", "x", "ch", "sh")) else "s")


def _german_forms(spec: list[str]) -> tuple[str, ...]:
    gender, singular, plural = spec[:3]
    dative_plural = plural if plural.endswith(("n", "s")) else plural + "n"
    if plural == "Euro":
        dative_plural = plural
    if gender == "mw":
        oblique = genitive = plural
    else:
        oblique = singular
        regular = singular if gender == "f" else singular + "s"
        genitive = spec[3] if len(spec) > 3 else regular
    return singular, plural, oblique, plural, oblique, dative_plural, genitive, plural


def _parse(line: str) -> Noun:
    tags, english, german, french = (column.split() for column in line.split("|"))
    plural = french[2] if len(french) > 2 else french[1]
    if len(french) == 2 and plural[-1] not in "sx":
        plural += "s"
    return Noun(
        name=english[0],
        kind=tags[0],
        tags=frozenset(tags),
        english=(english[0], english[1] if len(english) > 1 else _english_plural(english[0])),
        german_gender="mfn".index(german[0][0]),
        german=_german_forms(german),
        feminine=french[0] == "f",
        french=(french[1], plural),
    )


NOUNS: tuple[Noun, ...] = tuple(_parse(line) for line in _TABLE.strip().splitlines())
BY_NAME: dict[str, Noun] = {noun.name: noun for noun in NOUNS}


def tagged(*tags: str) -> tuple[Noun, ...]:
    """The nouns that have any of the tags, or that are named by one."""
    names = set(tags)
    return tuple(noun for noun in NOUNS if names & noun.tags or noun.name in names)
