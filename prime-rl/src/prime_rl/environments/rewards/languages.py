"""Language identification by script and most frequent words: enough for IFEval's thirty languages."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

COMMON_WORDS = {
    "en": "the of and to in is that it for was with as on are this be at by not have you or from his an they which",
    "es": "de la que el en y los se del las un por con una su para es al lo como más pero sus le ya o este sí porque",
    "pt": "de que o e do da em um para é com não uma os no se na por mais as dos como mas foi ao ele das tem à seu",
    "fr": "de la le et les des en un du une que est pour qui dans a par plus pas au sur ne se ce il sont avec ont cette",
    "de": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es an werden aus er hat",
    "it": "di che e la il un a per è in una sono mi non si le lo da con ho ma i come più del della gli nel anche questo",
    "pl": "w i z na się do nie jest to że o jak po od za przez co dla tym są był przy czy jego oraz tego może być",
    "vi": "và của là có không một được trong cho các với những này người đã để khi từ tôi về nhiều ra cũng như",
    "sw": "ya na wa kwa ni katika za la cha kuwa hii watu kama hivyo lakini yake au kila hiyo pia sana wao vya moja",
    "fi": "ja on ei se että oli hän en ovat mutta myös kun niin tai joka mitä olen kuin sen ole voi tämä hänen minä",
    "nl": "de het een van en in is dat op te zijn met voor niet aan er om ook als die bij door maar naar wordt",
    "sv": "och i att det som en på är av för med den till inte om ett han men var jag sig från vi så kan",
    "tr": "ve bir bu için de da ile çok daha olarak gibi en ne ama sonra kadar olan var ki her o",
    "ru": "и в не на что он с как это по но из у за от так же для вы бы то все она мы был его",
    "bg": "и на да се в за не е от че са с по като но той тя това ще който беше си или до съм",
    "uk": "і в не на що з як це до та у за від що для але він його є також які бути або про ми",
    "hi": "के में है की और से का को पर यह कि एक हैं नहीं भी लिए कर था तो इस वह ने हो",
    "mr": "आणि आहे आहेत हे मध्ये नाही व या तो ते एक करून त्या साठी होते पण च्या की",
    "ne": "छ र को मा हो पनि गर्न छन् एक लागि यो गरेको तथा भएको थियो हुन्छ हरू",
    "ar": "في من على إلى أن هذا التي عن مع كان هذه الذي لا ما هو و كل بعد كما قد",
    "fa": "در به از که این را با است برای آن یک می های بر تا شده کرد هم خود اما نیز",
    "ur": "کے میں کی ہے اور سے کا کو پر یہ کہ ہیں نے ایک نہیں بھی لیے تھا وہ گیا اس",
}
SCRIPTS = {
    "DEVANAGARI": ("hi", "mr", "ne"), "ARABIC": ("ar", "fa", "ur"), "CYRILLIC": ("ru", "bg", "uk"),
    "LATIN": ("en", "es", "pt", "fr", "de", "it", "pl", "vi", "sw", "fi", "nl", "sv", "tr"),
    "BENGALI": ("bn",), "THAI": ("th",), "TAMIL": ("ta",), "TELUGU": ("te",), "HANGUL": ("ko",), "HEBREW": ("he",),
    "GREEK": ("el",), "KANNADA": ("kn",), "GUJARATI": ("gu",), "GURMUKHI": ("pa",), "MALAYALAM": ("ml",),
    "HIRAGANA": ("ja",), "KATAKANA": ("ja",), "CJK": ("zh",),
}  # fmt: skip
"""Languages of a script. Kana decide for Japanese against Chinese."""
KANA_SHARE = 0.1
OWN_LETTERS = {
    "uk": "іїєґ",
    "ur": "ےٹڈڑںھہ",
    "fa": "پچژگک",
    "mr": "ळ",
    "pl": "ąęłśżź",
    "vi": "ạảấầẩậắằặẹẻếềểệỉịọỏốồổộớờởợụủứừửựỳỵđơư",
}
"""Letters that no other language of the same script has."""
_SAMPLE_CHARS = 20_000


def is_in(text: str, language: str) -> bool:
    """Whether a text is in a language (`en`, `pt-BR`). One without letters may be in any."""
    found = detected(text)
    return found is None or found == language.lower().partition("-")[0].partition("_")[0]


def detected(text: str) -> str | None:
    """The code of the language, or None for a text without letters."""
    text = text[:_SAMPLE_CHARS]
    # The first word of a letter's Unicode name is its script: LATIN SMALL LETTER A.
    scripts = Counter(unicodedata.name(each, "UNKNOWN").split(" ")[0] for each in text if each.isalpha())
    if not scripts:
        return None
    if scripts["HIRAGANA"] + scripts["KATAKANA"] > KANA_SHARE * scripts["CJK"]:
        scripts["HIRAGANA"] += scripts.pop("CJK", 0)
    languages = SCRIPTS.get(scripts.most_common(1)[0][0], ())
    if len(languages) < 2:
        return languages[0] if languages else "und"
    used = Counter(re.findall(r"[^\W\d_]+(?:[\u0900-\u097f]+)*", text.lower()))
    letters = Counter(text.lower())
    return max(languages, key=lambda code: _score(code, used, letters))


def _score(code: str, used: Counter[str], letters: Counter[str]) -> float:
    common = sum(used[word] for word in set(COMMON_WORDS[code].split()))
    return common + 0.5 * sum(letters[each] for each in OWN_LETTERS.get(code, ""))
