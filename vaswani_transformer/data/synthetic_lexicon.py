"""Words and endings of the synthetic English-German corpus, as tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Noun:
    """A noun with both plurals, its German gender ("m", "f" or "n") and the kind that verbs and adjectives select."""

    en: str
    en_plural: str
    de: str
    gender: str
    de_plural: str
    kind: str


@dataclass(frozen=True)
class Adjective:
    """An adjective: `de` is the predicate form, `stem` the form that takes endings, `takes` the nouns it goes with."""

    en: str
    de: str
    stem: str
    takes: str


@dataclass(frozen=True)
class Verb:
    """A verb: "base past participle" in English, "prefix|infinitive", "ich du er" and participle in German.

    `takes` names the kinds of noun, or the nouns, that can be its object. `options`: "animal" (animals do it too),
    "dat" (dative object), "sein" (perfect with sein), "to" (needs a recipient), "for" and "with" (somebody may
    be named), "into" or "on" (needs a direction), "place" (needs a place).
    """

    en: str
    infinitive: str
    forms: str
    participle: str
    takes: str = ""
    options: str = ""


NOUN_TABLE = {  # by kind: English singular and plural, German singular, gender and plural
    "person": "man men Mann m Männer, woman women Frau f Frauen, child children Kind n Kinder, girl girls Mädchen n "
    "Mädchen, father fathers Vater m Väter, mother mothers Mutter f Mütter, brother brothers Bruder m Brüder, sister "
    "sisters Schwester f Schwestern, teacher teachers Lehrer m Lehrer, doctor doctors Arzt m Ärzte, king kings König "
    "m Könige, queen queens Königin f Königinnen",
    "animal": "dog dogs Hund m Hunde, cat cats Katze f Katzen, horse horses Pferd n Pferde, bird birds Vogel m Vögel, "
    "cow cows Kuh f Kühe, mouse mice Maus f Mäuse, pig pigs Schwein n Schweine",
    "food": "apple apples Apfel m Äpfel, pear pears Birne f Birnen, egg eggs Ei n Eier, cake cakes Kuchen m Kuchen",
    "thing": "letter letters Brief m Briefe, newspaper newspapers Zeitung f Zeitungen, flower flowers Blume f Blumen, "
    "knife knives Messer n Messer, key keys Schlüssel m Schlüssel, bed beds Bett n Betten, car cars Auto n Autos, "
    "window windows Fenster n Fenster, table tables Tisch m Tische, chair chairs Stuhl m Stühle, basket baskets Korb "
    "m Körbe, lamp lamps Lampe f Lampen, door doors Tür f Türen, clock clocks Uhr f Uhren, bag bags Tasche f Taschen, "
    "box boxes Kiste f Kisten, picture pictures Bild n Bilder, book books Buch n Bücher",
    "place": "house houses Haus n Häuser, garden gardens Garten m Gärten, kitchen kitchens Küche f Küchen, school "
    "schools Schule f Schulen, city cities Stadt f Städte, office offices Büro n Büros, forest forests Wald m Wälder, "
    "hotel hotels Hotel n Hotels, station stations Bahnhof m Bahnhöfe, tree trees Baum m Bäume",
}
NOUNS = {row.split()[0]: Noun(*row.split(), kind) for kind, table in NOUN_TABLE.items() for row in table.split(",")}

# The first part of a compound brings its linking element with it, whatever the head is.
COMPOUND_FIRST = {
    "kitchen": "Küchen", "garden": "Garten", "dog": "Hunde", "cat": "Katzen", "school": "Schul", "office": "Büro",
    "birthday": "Geburtstags", "summer": "Sommer", "hotel": "Hotel", "station": "Bahnhofs", "travel": "Reise",
}  # fmt: skip
COMPOUND_HEADS = ["table", "chair", "basket", "lamp", "door", "clock", "bag", "box", "picture", "book"]

ANY = "person animal food thing place"
ADJECTIVE_TABLE = {  # by the nouns they go with: English, German predicate form, German stem
    ANY: "big groß groß, small klein klein, old alt alt, beautiful schön schön",
    "person": "rich reich reich",
    "person animal": "young jung jung, tired müde müd, strong stark stark, friendly freundlich freundlich",
    "animal thing": "black schwarz schwarz, white weiß weiß",
    "food thing": "red rot rot, green grün grün",
    "thing place": "new neu neu, dark dunkel dunkl",
    "food thing hotel house": "expensive teuer teur",
    "thing kitchen school city office hotel house station": "clean sauber sauber",
}
ADJECTIVES = {r.split()[0]: Adjective(*r.split(), k) for k, table in ADJECTIVE_TABLE.items() for r in table.split(",")}

GOODS = "book letter newspaper key picture flower bag clock"
VERB_LIST = (
    Verb("see saw seen", "sehen", "sehe siehst sieht", "gesehen", ANY, "animal"),
    Verb("find found found", "finden", "finde findest findet", "gefunden", "person animal food thing", "animal"),
    Verb("look_for looked_for looked_for", "suchen", "suche suchst sucht", "gesucht", "person animal thing place"),
    Verb("draw drew drawn", "zeichnen", "zeichne zeichnest zeichnet", "gezeichnet", ANY, "for"),
    Verb("buy bought bought", "kaufen", "kaufe kaufst kauft", "gekauft", "animal food thing house", "for"),
    Verb("sell sold sold", "verkaufen", "verkaufe verkaufst verkauft", "verkauft", "animal food thing house hotel"),
    Verb("repair repaired repaired", "reparieren", "repariere reparierst repariert", "repariert",
         "table chair basket lamp box door clock bag bed car window house", "for"),
    Verb("wash washed washed", "waschen", "wasche wäschst wäscht", "gewaschen", "animal bag car apple pear knife"),
    Verb("eat ate eaten", "essen", "esse isst isst", "gegessen", "food"),
    Verb("hear heard heard", "hören", "höre hörst hört", "gehört", "person animal clock car door", "animal"),
    Verb("visit visited visited", "besuchen", "besuche besuchst besucht", "besucht", "person city school"),
    Verb("call called called", "an|rufen", "rufe rufst ruft", "angerufen", "person"),
    Verb("invite invited invited", "ein|laden", "lade lädst lädt", "eingeladen", "person"),
    Verb("collect collected collected", "ab|holen", "hole holst holt", "abgeholt", "person car letter", "for"),
    Verb("wake woke woken", "auf|wecken", "wecke weckst weckt", "aufgeweckt", "person animal", "animal"),
    Verb("open opened opened", "auf|machen", "mache machst macht", "aufgemacht", "door window box bag letter", "for"),
    Verb("help helped helped", "helfen", "helfe hilfst hilft", "geholfen", "person animal", "dat"),
    Verb("thank thanked thanked", "danken", "danke dankst dankt", "gedankt", "person", "dat"),
    Verb("follow followed followed", "folgen", "folge folgst folgt", "gefolgt", "person animal", "animal dat sein"),
    Verb("give gave given", "geben", "gebe gibst gibt", "gegeben", "animal food thing", "to"),
    Verb("show showed shown", "zeigen", "zeige zeigst zeigt", "gezeigt", "animal food thing place", "to"),
    Verb("send sent sent", "schicken", "schicke schickst schickt", "geschickt", GOODS + " box basket lamp cake", "to"),
    Verb("bring brought brought", "bringen", "bringe bringst bringt", "gebracht", GOODS + " food chair knife", "to"),
    Verb("carry carried carried", "tragen", "trage trägst trägt", "getragen",
         GOODS + " table chair basket lamp box food cat child bed", "into"),
    Verb("lay laid laid", "legen", "lege legst legt", "gelegt", GOODS + " food knife", "on"),
    Verb("run ran run", "laufen", "laufe läufst läuft", "gelaufen", "", "animal sein into"),
    Verb("stay stayed stayed", "bleiben", "bleibe bleibst bleibt", "geblieben", "", "animal sein place"),
    Verb("sleep slept slept", "schlafen", "schlafe schläfst schläft", "geschlafen", "", "animal"),
    Verb("work worked worked", "arbeiten", "arbeite arbeitest arbeitet", "gearbeitet", "", "with"),
    Verb("dance danced danced", "tanzen", "tanze tanzt tanzt", "getanzt", "", "with"),
    Verb("sing sang sung", "singen", "singe singst singt", "gesungen", "", "with"),
    Verb("laugh laughed laughed", "lachen", "lache lachst lacht", "gelacht"),
    Verb("be was been", "sein", "bin bist ist", "gewesen"),
    Verb("know knew known", "wissen", "weiß weißt weiß", "gewusst"),
    Verb("say said said", "sagen", "sage sagst sagt", "gesagt"),
    Verb("believe believed believed", "glauben", "glaube glaubst glaubt", "geglaubt"),
    Verb("hope hoped hoped", "hoffen", "hoffe hoffst hofft", "gehofft"),
)  # fmt: skip
VERBS = {verb.en.split()[0]: verb for verb in VERB_LIST}
MATRIX_VERBS = ("know", "say", "believe", "hope")  # these take a clause with "that"

AGREEMENT = ("1sg", "2sg", "3sg", "1pl", "3pl")
AUXILIARIES = {
    "haben": "habe hast hat haben haben", "sein": "bin bist ist sind sind", "can": "kann kannst kann können können",
    "want to": "will willst will wollen wollen", "must": "muss musst muss müssen müssen",
    "will": "werde wirst wird werden werden", "should": "sollte solltest sollte sollten sollten",
}  # fmt: skip
MODALS = ("can", "want to", "must", "will", "should")
PRONOUNS = {  # English subject: English object, agreement, German nominative, accusative, dative
    "I": "me 1sg ich mich mir", "you": "you 2sg du dich dir", "he": "him 3sg er ihn ihm",
    "she": "her 3sg sie sie ihr", "we": "us 1pl wir uns uns", "they": "them 3pl sie sie ihnen",
}  # fmt: skip
TIMES = {  # by the tenses they go with
    "present perfect modal": "today/heute",
    "present modal": "now/jetzt,every day/jeden Tag",
    "present past modal": "on Monday/am Montag,on Friday/am Freitag,in the evening/am Abend,in summer/im Sommer",
    "past": "yesterday/gestern,last week/letzte Woche",
    "perfect modal": "this week/diese Woche",
    "modal": "tomorrow/morgen,next week/nächste Woche",
}
INDOORS = "garden kitchen school city office forest house hotel station"
PLACES = {  # English preposition of a place (dative): the German one and the nouns it goes with
    "in": ("in", INDOORS), "on": ("auf", "table chair bed box"), "under": ("unter", "table chair bed tree"),
    "behind": ("hinter", "house school hotel station tree door car"),
    "in front of": ("vor", "house school hotel station door window"),
    "next to": ("neben", "table bed door car tree house window chair"),
}  # fmt: skip
GOALS = {"into": ("in", INDOORS), "on": ("auf", "table chair bed box")}  # the accusative of direction

# The endings for masculine, feminine, neuter and plural; "-" is no ending.
DEFINITE = {"nom": "der die das die", "acc": "den die das die", "dat": "dem der dem den"}
INDEFINITE = {"nom": "- e - e", "acc": "en e - e", "dat": "em er em en"}
WEAK = {"nom": "e e e en", "acc": "en e e en", "dat": "en en en en"}
MIXED = {"nom": "er e es en", "acc": "en e es en", "dat": "en en en en"}
STRONG_PLURAL = {"nom": "e", "acc": "e", "dat": "en"}

# 1 to 19, then the tens from 20 to 90.
ENGLISH_NUMBERS = """- one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"""
GERMAN_NUMBERS = """- ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn
    siebzehn achtzehn neunzehn zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig"""
