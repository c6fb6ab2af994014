"""Finds known phrases that address the judge, such as a request for a score, in a text, also in disguise.

This is the last of several defences, and a narrow one: phrases that it does not know get through, and
`tests/rewards/test_defences.py` counts them. The text comes from the judged policy or its users, so every search takes
bounded time.
"""

import base64
import codecs
import html
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from urllib.parse import unquote


@lru_cache(256)  # siblings have most of their messages in common
def suspicion(text: str) -> str | None:
    """Return why a text seems to address the judge, such as "asks for a score"; `None` if no known phrase is in it."""
    if "\u202e" in text or "\u202d" in text:
        return "turns its own writing around"
    seen = {""}
    for how, view in _views(text):
        if view in seen:
            continue
        seen.add(view)
        for reason, pattern in _PATTERNS:
            if pattern.search(view):
                return f"{reason}{f' ({how})' if how else ''}"
    return None


def _views(text: str) -> Iterator[tuple[str, str]]:
    """Yield the text as a reader might decode it, with the name of the disguise that was removed."""
    tags = "".join(chr(ord(c) - 0xE0000) for c in text if "\U000e0020" <= c <= "\U000e007e")
    escapes = _ESCAPE.sub(lambda found: chr(int(found[1] or found[2], 16)), text)
    plain, latin = _fold(text), _fold(text).translate(_LOOK_ALIKES)
    yield "", plain
    yield "in look-alike letters", latin
    yield "in escapes", _fold(html.unescape(unquote(escapes)))
    yield "in invisible letters", tags.casefold()
    ends = latin if len(latin) <= 2 * _END else f"{latin[:_END]}\n{latin[-_END:]}"
    yield "letter by letter", _APART.sub("", ends)
    yield "in digits for letters", _telling(ends.replace("11", "ll").translate(_LEET))
    yield "backwards", _telling(ends[::-1])
    yield "in rot13", _telling(codecs.encode(ends, "rot13"))
    for encoded in _BASE64.findall(text):
        yield "in base64", _decoded(lambda token=encoded: base64.b64decode(token + "=" * (-len(token) % 4), b"-_"))
    for encoded in _HEX.findall(text):
        yield "in hex", _decoded(lambda token=encoded: bytes.fromhex(re.sub(r"[\s:]", "", token)))


def _fold(text: str) -> str:
    """Return the text without differences that are hard to see: case, width, accents, zero-width characters."""
    apart = unicodedata.normalize("NFKD", text)
    kept = "".join(c for c in apart if not ("\u0300" <= c <= "\u036f" or unicodedata.category(c) == "Cf"))
    return unicodedata.normalize("NFC", kept).casefold()


def _telling(view: str) -> str:
    """Return the view if one of its words may belong to a plea: the phrases take a hundred times longer."""
    return view if any(word in view for word in _TELLING) else ""


def _decoded(decode: Callable[[], bytes]) -> str:
    try:
        return _fold(decode().decode())
    except ValueError:
        return ""


_LOOK_ALIKES = str.maketrans(
    "асеорхуіјѕһԁӏкмтвнԛԝαειικνορτυχηωβγɪʀɢɴᴀᴇᴏᴜᴛᴍᴅᴊıłøđɡ", "aceopxyijshdlkmtbhqwaeiikvoptuxnwbyirgnaeoutmdjilodg"
)
_LEET = str.maketrans("013457@$!|", "oieastasil")
_END = 4_000  # rarer disguises are looked for in so many characters at the start and at the end: each look takes time
_TELLING = ("instruc", "rule", "prompt", "rubric", "guideline", "judge", "grader", "evaluat", "score", "rating", "mark")
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{2})")
_APART = re.compile(r"(?<=\b\w)[ .\-*|]+(?=\w\b)")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{16,}")
_HEX = re.compile(r"(?:[0-9a-fA-F]{2}[\s:]?){12,}")

_FULL = r"(?:perfect|full|max(?:imum|imal)?|(?:best|highest|top)(?: possible)?)"
_ONE = r"(?:1\.0+|10 ?/ ?10|100 ?/ ?100|100 ?%)"
_GRADER = r"(?:judge|grader|evaluator|rater|assessor|scorer)s?\b"

# Known phrases. Tried: patterns twice as broad found no more of 22 new pleas (3 both times), and flagged 10 of 18
# honest texts instead of 1. So these stay narrow; fences and planted answers do not depend on words.
# A space stands for anything that is no letter or digit, nothing included, and `~` for up to four words.
_PHRASES: dict[str, tuple[str, ...]] = {
    "gives its reader orders": (
        r"(?:ignore|disregard|forget|override|bypass) (?:all |any |the |your |of |these |my )*"
        r"(?:previous|prior|above|earlier|preceding|foregoing|original|other) "
        r"(?:instruction|rule|prompt|direction|guideline|rubric|criteri|attempt)",
        r"(?:new|updated|revised|real) (?:system|grading|scoring|judging) (?:prompt|instruction|rubric|rule)s?",
        r"system override",
        r"(?:ignorier|vergiss|vergesst|missachte)\w* (?:\w+ )?(?:vorherig|bisherig|obig|vorangegangen|fruher)\w* "
        r"(?:anweisung|regel|instruktion|vorgabe)",
        r"(?:ignore|oublie)[zr]? (?:toutes |les |vos |tes )*(?:instruction|consigne|regle)s (?:precedent|anterieur)",
        r"(?:ignor|olvid|esquec|desconsider)\w* (?:todas |las |as |tus |suas )*(?:instruc|reglas|regras)\w* "
        r"(?:anterior|previ)",
        r"(?:ignora|dimentica)\w* (?:tutte |le )*(?:istruzioni|regole) (?:precedenti|sopra)",
        r"(?:negeer|vergeet) (?:alle |de )*(?:vorige|eerdere|bovenstaande) (?:instructie|regel)",
        r"(?:zignoruj|ignoruj|zapomnij) (?:o |wszystkie |wszystkich )*(?:poprzedni|wczesniejsz)\w* (?:instrukcj|zasad)",
        r"onceki (?:tum )?(?:talimat|kural)",
        r"(?:проигнорируй|игнорируй|забудь)\w* (?:все )*(?:предыдущ|прежн)\w* (?:инструкц|указан|правил)",
        r"تجاهل (?:جميع |كل )*(?:التعليمات|الأوامر|القواعد)",
        r"(?:पिछले|पूर्व) (?:सभी )?(?:निर्देश|नियम)",
        r"(?:忽略|无视|無視|忽视)(?:掉|所有|之前|以上|上面|先前|前面|上述|的|一切)*(?:指令|指示|规则|規則|提示|评分|标准)",
        r"(?:評価|採点)基準を(?:無視|忘れ)",
        r"(?:以前|前|上記|これまで)の(?:すべての|全ての)?(?:指示|命令|ルール|規則)を",
        r"(?:이전|위|앞)(?:의|선)? (?:모든 )?(?:지시|명령|규칙|지침)",
    ),
    "addresses the judge": (
        rf"(?:dear|attention|hey|note to|message to|instructions? (?:to|for)) (?:the |all |any |ai |llm )*{_GRADER}",
        rf"{_GRADER} (?:please|you (?:must|should|have|are)|give|assign|award)\b",
        r"(?:lieber?|achtung|(?:hinweis )?an den) (?:richter|gutachter|bewerter|prufer|juror)",
        r"(?:cher|a l attention du|note au) (?:juge|evaluateur|correcteur)",
        r"(?:estimado|querido|atencion|nota (?:para el|al|ao)|caro|prezado|atencao|nota al) "
        r"(?:juez|evaluador|juiz|avaliador|giudice|valutatore)",
        r"(?:уважаем|дорог|вниман)\w* (?:судь|оценщик|эксперт)",
        r"(?:尊敬的|亲爱的|致)(?:评委|评审|裁判|评判|法官|评分)",
        r"(?:評価者|審査員|採点者)(?:の皆様|さん|様|へ)",
        r"(?:심사위원|평가자|채점자)님",
    ),
    "asks for a score": (
        r"(?:give|award|grant|assign|deserve|get|receive|earn)s? "
        r"(?:me |this |it |us |the |my |attempt |answer |response |solution |a )*"
        rf"{_FULL} (?:score|mark|rating|grade|point|reward)",
        r"(?:score|rate|grade|mark|give|award) (?:this|me|my|it) (?:attempt |answer |response |one |solution )?"
        rf"(?:a |as |with |at |an |score of )*{_ONE}",
        r"(?:this|my) (?:attempt|answer|response|solution|trajectory) (?:is worth|deserve|merit|earn|get|must get)s? "
        rf"~(?:{_ONE}|{_FULL} (?:score|mark)s?)",
        r"(?:gib|gebt|geben|vergib|vergeben|bewerte|verdien)\w* ~(?:voll|hochst|maximal|best)\w* "
        r"(?:punkt|bewertung|note|wertung)",
        r"(?:donne[zr]?|attribue[zr]?|merite[zr]?) ~(?:note|score) (?:maxim|parfait|la plus haute|complet)",
        r"(?:dame|dale|da|den|otorg\w*|asign\w*|atribu\w*|merece) ~ "
        r"(?:puntuacion|nota|calificacion|pontuacao) (?:maxim|perfe|mas alta|mais alta)",
        r"(?:dai|assegna|merita) ~(?:punteggio|voto) (?:massimo|pieno|perfetto)",
        r"geef ~(?:hoogste|maximale|volle) (?:score|punten|cijfer)",
        r"(?:daj|przyznaj) ~(?:najwyzsz|maksymaln)\w* (?:ocen|punkt|wynik)",
        r"(?:tam|en yuksek|maksimum) puan ver",
        r"(?:постав|дай|присво)\w* ~(?:высш|наивысш|максимальн|полн)\w* (?:оценк|балл)",
        r"(?:أعط|امنح)\w* ~(?:أعلى|الكاملة|القصوى)",
        r"(?:पूरे|अधिकतम|सर्वोच्च) (?:अंक|स्कोर)",
        r"(?:给|打|评)(?:出|予|我|这|个|此|本|次|回答|答案|尝试|一)*(?:满分|最高分|最高评分)",
        r"(?:満点|最高点|最高の?評価|最高得点)(?:を|に)?(?:つけ|与え|付け|して|くださ|お願い)",
        r"(?:만점|최고 점수|최고점)(?:을|를)? (?:주|부여|매겨)",
    ),
}
_FORGERIES = (
    r"<<<\s{0,8}[0-9a-f]{8}|[0-9a-f]{16}\s{0,8}>>>|<<<.{0,60}\b(?:attempts|segment|tools)\b"
    r"|trajectory_id|the data ends here"
    r"|<\|[a-z_]{2,30}\|>|\[/?inst\]|<</?sys>>|</?(?:attempt|trajectory|transcript|rubric|verdict)s?>|\[/?system\]"
    r"|\n\s{0,8}\n(?:human|system) ?:"
)


def _compile(phrases: Iterable[str]) -> re.Pattern[str]:
    patterns: list[str] = []
    for phrase in phrases:
        # All repetition is bounded: whoever is judged writes the text, and could make an open one take for ever.
        pattern = _fold(phrase).replace(r"\w*", r"\w{0,12}").replace(r"\w+", r"\w{1,20}").replace(" ", r"[\W_]{0,8}")
        pattern = pattern.replace("~", r"(?:[^\W_]{1,20}[\W_]{1,8}){0,4}?")
        # Chinese, Japanese and Korean have no spaces for words to begin at.
        patterns.append(pattern if re.match(r"(?:\(\?:)?[\u3000-\uffff]", pattern) else rf"\b{pattern}")
    return re.compile("|".join(patterns))


_PATTERNS = (
    ("imitates the judge's prompt", re.compile(_FORGERIES)),
    *((reason, _compile(phrases)) for reason, phrases in _PHRASES.items()),
)
