"""The words by which an answer is stated, language by language: one table each, one grammar for all
(`lemma/grading/statements.py`).

Words and phrases are in lower case, separated by `|`. A word may play several parts; the grammar takes the one
that fits its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias


class Wording(NamedTuple):
    """What the words of one language do around an answer."""

    answer: str
    """What is stated: the answer, the final answer, a label."""
    be: str
    """Between the answer and its value."""
    light: str = ""
    """Skipped before a value: adverbs, articles, pronouns."""
    ends: str = ""
    """A clause begins that says no more what the answer is: because, which, where."""
    so: str = ""
    """A conclusion begins."""
    no: str = ""
    """What follows is denied."""
    at: str = ""
    """A value after it is a circumstance: in 5 days, for 3 people."""
    joins: str = ""
    """Between the members of a list."""
    asks: str = ""
    """A sentence that begins with it is a question or a task."""
    supposes: str = ""
    """A clause that begins with it states nothing."""
    chooses: str = ""
    """A letter after it is an option."""
    correct: str = ""
    """A value that is said to be this is the answer."""
    aside: str = ""
    """A sentence that begins with it explains what has been said."""
    has: str = ""
    """Verbs that are followed by a result: has 5, costs 5."""
    numbered: str = ""
    """A value after it is its number: step 3, question 5."""


ENGLISH = Wording(
    answer="answer|answers|ans|final_answer|final result|final value",
    be="is|are|was|were|be|been|equals|equal|equal to|equals to|becomes|remains|given by|comes to|comes out to|"
    "comes out as|comes out at|turns out|works out|works out to|works out at|would be|will be|must be|should be|"
    "has to be|can only be|can be written as|results in|result in|leads to|gives us|simplifies to|"
    "reduces to|evaluates to|adds up to|add up to|sums to|drops to|falls to|rises to|increases to|decreases to|"
    "goes up to|rounds to|left with|leaves us with|leave us with|ends up with|end up with|"
    "it's|that's|there's|they're|i'm|amounts to|reads|stands at|seen to be|"
    "ought to be|that is|i get|we get|we obtain|found to be|confirmed to be|determined to be|calculated to be",
    light="for sure|for certain|without a doubt|none other than|no other than|well|okay|ok|alright|"
    "the|a|an|to|be|it|that|this|these|there|they|we|i|you|so|then|thus|hence|therefore|of course|in fact|"
    "after all|definitely|simply|exactly|precisely|clearly|indeed|obviously|actually|certainly|always|also|"
    "still|just|only|surely|probably|likely|really|finally|again|approximately|about|roughly|around|number|"
    "value|option|choice|letter|integer|fraction|now|consequently|accordingly|ultimately|evidently|"
    "undoubtedly|necessarily|in the end|in total|as follows|as expected|at least|at most|"
    "no more and no less than|believe|think|guess|say|would|must|should|following|interval|set|pair|point|"
    "maybe|perhaps|i'd|i'd say|expression|polynomial|formula|equation|percentage|amount|"
    "neither more nor less than|answer|matrix",
    ends="because|since|as|which|for which|at which|in which|where|who|whose|while|whereas|when|if|though|although|"
    "even though|but|given|"
    "given that|provided|provided that|assuming|considering|seeing that|after|before|until|unless|once|due to|"
    "owing to|thanks to|making|meaning|giving|leaving|showing|obtained|found|attained|reached|achieved|"
    "based on|according to|by|for|from|with|using|i.e|e.g|i.e.|e.g.|that is|namely|rather than|instead of|not|"
    "except|unlike|as opposed to|compared to|so that|in order to|however|hence|therefore|thus|so|then|"
    "inasmuch as|seeing|out of|than|via|corresponding|depending|derived|computed|calculated|as long as|"
    "such that|on account of|for the reason that|and not|and hence|and so|and therefore|and thus|in view of|"
    "equivalently|in light of|without|in contrast to|contrary to|despite|excluding",
    so="so|thus|hence|therefore|consequently|accordingly|finally|altogether|in total|in all|then|overall|"
    "in conclusion|to conclude|ultimately|in summary|together|and so|and hence|and thus|and therefore|"
    "this means|this gives|that means|as a result|we conclude|it follows|which means|this leaves|conclusion|"
    "which gives|which leaves|which makes|giving|making|leaving|spending|earning|yielding|totaling|totalling|"
    "for a total of|in short|in brief|all in all",
    no="not|isn't|aren't|wasn't|never|cannot|can't|neither|couldn't|won't|isnt|shouldn't|wouldn't|can not|hardly|"
    "anything but|differs from|different from",
    at="in|of|for|from|per|by|with|at|on|after|before|within|over|under|below|above|between|among|than|each|every|"
    "during|"
    "out of|to|into|times|through|across|until|as|using|another|without|against|via|since|beside|besides|"
    "except|near|nearly",
    joins="and|or|&|and also",
    asks="will now|problem says|question says|problem states|question states|are told|"
    "what|how|why|who|find|count|list|identify|compute|calculate|determine|evaluate|solve|simplify|express|suppose|"
    "asks|asked|asking|see|how many|how much|want to find|need to find|is to|let|given|prove|show|"
    "consider|write|round|give|enter|state|choose|select|pick|assume|can|could|do|does|would|is|are|which",
    supposes="if|suppose|supposing|assume|assuming|whether|unless|imagine|were|might|may|could|perhaps|maybe|check|"
    "find|guess|what|which|how|why|express|give|write|put|enter|provide|round|report|verify|doubt|until|"
    "before|had|say|thought|believed|guessed|assumed|expected|claimed|"
    "don't think|do not think|don't believe|nobody|no one|wrong to say|no way|by no means",
    chooses="left with|going with|going for|choose|chose|pick|select|option|choice|go with|letter|choosing|selecting|"
    "picking",
    correct="correct|right|true|best|works|fits|satisfies|suits|fits best|holds true|better",
    aside="note|check|verify|verification|because|explanation|reason|reasons|recall|remember|indeed|justification|"
    "why|this is because|to check|to verify|as a check|notice|observe|since|proof|this follows from|"
    "in detail|for example|for comparison|this is|this uses|this holds|i used|we used|details|alternatively|"
    "hint|that is because|that's because|it's because|steps|reasoning|i hope|hope|it follows from|"
    "source|sanity check|checking|confirming|this ensures|this confirms|this satisfies|this matches",
    numbered="step|case|part|equation|figure|question|problem|method|page|chapter|example|exercise|day|week|year|"
    "grade|number|q|line|row|column|section|stage|round|level|room|class|group|version|theorem|lemma",
    has="has|have|had|gets|get|got|needs|need|costs|cost|gives|makes|make|contains|holds|pays|pay|earns|owes|keeps|"
    "totals|takes|receives|spends|spent|saves|saved|weighs|lasts|yields|obtain|sold|exist|exists|measures|"
    "scores|wins|produces|requires|travels|find|finds|conclude|remain|reaches|buys|bought|leaves|earned|paid|made|"
    "collected|raised|charged",
)  # fmt: skip

CHINESE = Wording(
    answer="答案|答|最终答案|正确答案|解答|最終答案|正確答案|故答案",
    be="是|为|為|等于|等於|有|共有|应为|应是|應為|即为|就是|共|得到|得|还剩|剩下|剩|即",
    light="应该|應該|一定|必定|就|当然|其实|约|大约|约为|只能|恰好|正好|总共|的|了|数|数字|选项|共计",
    ends="因为|因為|由于|由於|也就是|其中|而是|而不是|而非|不是|但是|但|如果|当|其实是|理由|原因|而|即|所以|因此|既然|若|并不是",
    so="所以|因此|故|因而|综上|综上所述|于是|从而|可得|可知|則|则|那么|最后|最终|总之|一共|答|得|即|总共",
    no="不是|不等于|并非|不为|非|并不是|不可能是",
    at="每|第|在|从|用|过|经过|到|以|比|超过|除以|乘以|对于",
    joins="和|或|或者|与|及|以及|還是|且",
    asks="求|计算|問|问|请|已知|求出|若|设|多少|試求|判断|化简",
    supposes="如果|若|假设|假如|是否|求|给出|假定",
    chooses="选|選|应选|故选|选择|选项|選擇|項|项",
    correct="正确|正確|对的|正确的|正确答案|对",
    aside="因为|注意|检验|验证|注|理由|原因|解释|说明|验算|这是因为",
    numbered="步骤|第|问题",
    has="剩|还剩|共|有|得|需要|花|等于|共有|得到|需",
)  # fmt: skip
JAPANESE = Wording(
    answer="答え|答えは|正解|正解は|解答|最終的な答え|こたえ|解答は",
    be="は|が|です|である|になる|となる",
    light="約|ちょうど|求める",
    ends="です|である|だ|なぜなら|なので|ので|から|ではなく|となる|になります|になる|となります|つまり|すなわち|でした",
    so="したがって|よって|だから|ゆえに|つまり|従って|以上より|以上から|すると",
    no="ではなく|でない|じゃなく|でなく",
    at="毎|第",
    joins="と|または|や|か",
    asks="求めよ|求めなさい|求めてください|いくつ",
    supposes="もし",
    correct="正しい|正解",
    aside="なぜなら|理由|検算|注意|ここで",
)  # fmt: skip
KOREAN = Wording(
    answer="답|답은|정답|정답은|최종 답|최종 답은|답이",
    be="은|는|이|가",
    light="약",
    ends="입니다|이다|이며|입니다만|왜냐하면|이므로|이고|가|이|개입니다|개이다|때문에|아니라",
    so="따라서|그러므로|그래서|즉|결국|총|모두|합계",
    no="아니라|아닙니다|아니고",
    joins="와|과|또는|그리고",
    asks="구하시오|구하라",
    supposes="만약",
    aside="왜냐하면|참고|검산",
)  # fmt: skip
RUSSIAN = Wording(
    answer="ответ|ответом|ответ таков|окончательный ответ|отв|решение|відповідь|адказ",
    be="является|равен|равна|равно|равны|есть|это|будет|составляет|таков|получаем|получим|будут|є|дорівнює",
    light="что|число|точно|ровно|именно|просто|значит|итак|здесь|около|примерно|вариант|конечно|только|всего|под|"
    "буквой",
    ends="потому|потому что|так как|поскольку|ведь|который|которая|которое|где|а|но|если|когда|то есть|т.е|т.к|"
    "хотя|при|не|вместо|ибо|следовательно|поэтому|тому|бо",
    so="итак|значит|следовательно|поэтому|таким образом|тогда|отсюда|всего|в итоге|итого|получаем|тем самым|отже|"
    "стало быть",
    no="не",
    at="через|за|в|из|на|по|для|от|до|с|со|при|к|между|после|каждый|каждые|каждого|из них|во",
    joins="и|или|або|та",
    asks="найдите|вычислите|сколько|решите|определите|чему|каков|какой|найти|вычислить|упростите|какова|пусть",
    supposes="если|пусть|предположим|допустим|запишите",
    chooses="вариант|выбираем|выбираю|вариант ответа",
    correct="верно|верный|правильный|правильно|верна|верен",
    aside="потому|так как|проверка|проверим|заметим|примечание|действительно|пояснение|объяснение|решение|поскольку",
    numbered="шаг|пункт|случай|вопрос|задача|номер",
    has="осталось|останется|стоит|равен|равна|равно|получаем|нужно|имеет|всего|получил|заплатил|заплатит|получится|"
    "составляет",
)  # fmt: skip
ARABIC = Wording(
    answer="الجواب|الإجابة|الاجابة|إجابة|جواب|الناتج|ناتج|الجواب النهائي|الإجابة النهائية|الحل|النتيجة|والجواب|"
    "فالجواب|پاسخ|جواب نهایی",
    be="هو|هي|يساوي|تساوي|يكون|تكون|هما|است|برابر",
    light="إذن|العدد|بالضبط|الصحيحة|الصحيح|النهائي|النهائية|أي|حوالي|فقط|القيمة|هذا|الرقم|عدد",
    ends="بل|لأن|لان|لأنه|لأنها|حيث|بما|إذ|وليس|لا|بينما|إذا|عندما|بسبب|ولكن|لكن|مما|أي|ليس|زیرا|چون|بدلا|بعد|وذلك|"
    "بدلاً",
    so="إذن|لذلك|وبالتالي|بالتالي|إذًا|اذن|فإن|لذا|ومن ثم|إذاً|أخيرا|ولذلك|بنابراین|ومنه",
    no="ليس|ليست|وليس|لا",
    at="في|من|على|إلى|لكل|بعد|قبل|خلال|كل|عن|بين|در|از|مع",
    joins="و|أو|یا|او",
    asks="ما|كم|أوجد|احسب|جد|حل|هل|أحسب|ماهو|چند",
    supposes="إذا|لو|افترض|نفترض|هل",
    chooses="الخيار|خيار|اختر|الاختيار",
    correct="صحيح|صحيحة|الصحيح|الصحيحة|درست",
    aside="لأن|ملاحظة|التحقق|للتحقق|حيث|السبب|الشرح",
    has="يساوي|تساوي|بقي|تبقى|يبقى|يتبقى|لديه|لديها",
)  # fmt: skip
HINDI = Wording(
    answer="उत्तर|जवाब|अंतिम उत्तर|सही उत्तर|उत्तरः|हल|उत्तर है",
    be="है|हैं|होगा|होगी",
    light="केवल|लगभग|ठीक|विकल्प|संख्या|कुल",
    ends="है|हैं|होगा|होगी|क्योंकि|क्यूंकि|जो|जहाँ|जहां|चूंकि|न|नहीं|इसलिए|जबकि|यदि|लेकिन|कि",
    so="अतः|इसलिए|इस प्रकार|अत|तो|इस तरह|अंततः|कुल मिलाकर|फलतः",
    no="नहीं|न",
    at="प्रति|हर|प्रत्येक",
    joins="और|या|तथा|एवं",
    asks="क्या|कितने|कितना|कितनी|ज्ञात",
    supposes="यदि|अगर|मान",
    chooses="विकल्प",
    correct="सही",
    aside="क्योंकि|ध्यान|जाँच|जांच|कारण|व्याख्या",
)  # fmt: skip
FRENCH = Wording(
    answer="réponse|la réponse finale|réponses|rép|réponse finale|reponse",
    be="on trouve|on obtient|est|est de|est donc de|est alors de|sera de|sont|"
    "égale|égal|vaut|sera|c'est|est égale à|donne|serait|fait|est donc|est égal à|"
    "valent",
    light="donc|la|le|les|l'|un|une|bien|exactement|simplement|alors|que|environ|nombre|valeur|lettre|l'option|"
    "ainsi|égale|égal|à|finalement|il|elle|en|effet|évidemment|tout|ici|bonne|réponse|proposition|choix|"
    "encore|déjà|maintenant",
    ends="car|parce|parce que|puisque|comme|où|qui|alors que|et non|non|mais|si|quand|lorsque|c'est-à-dire|soit|"
    "donc|et pas|plutôt|au lieu|étant donné|avec|pour|pas|dont|par",
    so="donc|ainsi|alors|par conséquent|finalement|en tout|au total|d'où|enfin|en conclusion|on obtient|conclusion",
    no="n'est pas|ne|pas|non|n'est|jamais",
    at="d'ici|après|en|pour|par|de|des|dans|sur|avec|à|chaque|entre|du|d'|sans|pendant|parmi|au|aux|contre|depuis",
    joins="et|ou",
    asks="quel|quelle|combien|trouver|calculer|trouvez|calculez|déterminer|déterminez|résoudre|soit|est-ce",
    supposes="si|supposons|soit|calculer|trouver|est-ce",
    chooses="option|choisis|choisit|l'option|choix|réponse",
    correct="correcte|correct|vrai|juste|bonne|exacte",
    aside="car|parce|en effet|remarque|vérification|note|preuve|explication|puisque",
    numbered="étape|cas|question|partie|problème|exercice|numéro",
    has="il y a|y a|met|reste|coûte|obtient|faut|vaut|ont|restent|paie|aura|doit|gagne|restera",
)  # fmt: skip
GERMAN = Wording(
    answer="antwort|lösung|endergebnis|antworten",
    be="ist|sind|lautet|beträgt|gleich|wäre|wird|ergibt|gibt|betragen|heißt|ist gleich|ist also",
    light="also|die|der|das|ein|eine|genau|somit|einfach|daher|es|er|sie|wir|dann|etwa|zahl|wert|den|buchstabe|dem|"
    "natürlich|eindeutig|damit|offensichtlich|folglich|demnach|richtige|antwort|option",
    ends="weil|da|denn|wobei|welche|wenn|obwohl|während|nicht|und nicht|aber|sondern|also|statt|anstatt|das heißt|"
    "d.h|mit|aus|bei|falls|nämlich|indem",
    so="also|somit|daher|folglich|deshalb|insgesamt|damit|schließlich|demnach|zusammen|ergebnis|fazit",
    no="nicht|kein|keine",
    at="nach|in|für|pro|von|mit|bei|auf|an|aus|zu|je|um|zwischen|über|unter|vor|jeder|jede|jedes|im|am|durch|als",
    joins="und|oder",
    asks="wie|was|berechne|bestimme|finde|wieviel|löse|welche|berechnen|bestimmen|sei",
    supposes="wenn|falls|angenommen|ob|sei",
    chooses="option|wähle|wählen",
    correct="richtig|korrekt|wahr",
    aside="weil|denn|probe|hinweis|begründung|erklärung|bemerkung|da|kontrolle",
    numbered="schritt|fall|frage|teil|aufgabe|nummer",
    has="hat|haben|kostet|bleiben|bleibt|braucht|beträgt|bekommt|erhält|zahlt|gibt|verdient|erhalten|brauchen",
)  # fmt: skip
SPANISH = Wording(
    answer="respuesta|resposta|risposta|la respuesta final|solución|resp|respuestas|soluzione|solução|"
    "risultato finale",
    be="es|son|é|è|são|sono|sería|será|igual|es igual a|vale|equivale|es la|sarà|fue|dá|da|è la",
    light="la|el|los|las|lo|un|una|o|il|exactamente|simplemente|por lo tanto|entonces|pues|que|quindi|dunque|"
    "portanto|então|número|valor|opción|opção|opzione|letra|igual|a|uguale|claramente|así|correcta|final|"
    "correta|le|gli|per|pertanto|em|numero|valore|luego|giusta|aproximadamente|circa",
    ends="porque|ya que|pues|dado|donde|que|cuando|si|aunque|mientras|y no|no|pero|sino|es decir|perché|poiché|"
    "dove|non|ma|cioè|pois|já que|não|mas|onde|puesto|debido|con|para|per|como|siccome|e non|e não|em vez|"
    "en lugar|quando|ou seja|dato",
    so="así que|por tanto|así|entonces|luego|en total|finalmente|quindi|dunque|pertanto|in totale|portanto|"
    "assim|logo|então|no total|por consiguiente|en conclusión|perciò|infine|de modo que|conclusión|conclusão|"
    "por isso|por lo tanto",
    no="no|non|não|nunca",
    at="en|de|por|para|con|cada|del|después|entre|sobre|desde|hasta|di|dopo|ogni|tra|em|após|com|dos|das|do|nel|"
    "nella|in|da|per|su|al|dei|delle|durante|sin",
    joins="y|o|e|u|ou",
    asks="cuál|cuánto|cuántos|calcula|encuentra|halla|determina|qué|cuántas|calcular|hallar|quanto|quanti|quantos|"
    "trova|encontre",
    supposes="si|se|supongamos|sea|supponiamo|suponha|calcular",
    chooses="opción|opzione|opção|elijo|scelgo|alternativa",
    correct="correcta|correcto|corretta|corretto|correta|correto|cierto|giusta",
    aside="porque|nota|perché|comprobación|verificación|verifica|pois|explicación|verificação|spiegazione|poiché|"
    "ya que",
    numbered="paso|caso|passo|pregunta|parte|problema|etapa|domanda|pergunta",
    has="quedan|queda|tiene|tienen|cuesta|hay|restano|resta|ha|hanno|costa|tem|têm|restam|há|necesita|paga|"
    "obtenemos|ci sono|sobram|sobraram",
)  # fmt: skip
OTHERS = Wording(
    answer="đáp án|đáp số|câu trả lời|cevap|yanıt|sonuç|odpowiedź|odpověď|jibu|jawaban|jawabannya|jawapan|antwoord|"
    "svar|"
    "svaret|vastaus|απάντηση|η απάντηση|válasz|a válasz|răspuns|răspunsul|תשובה|התשובה|คำตอบ|คำตอบคือ|উত্তর|"
    "பதில்|விடை|జవాబు|సమాధానం|eindantwoord|eredmény",
    be="là|bằng|is|jest|wynosi|ni|adalah|ialah|är|er|on|είναι|este|הוא|היא|คือ|to|je|az|é",
    light="het|de|tylko|dokładnie|vì vậy|liczba|số|sayı|nummer|doğru|cevap|ο|η|το|angka|precis",
    ends="vì|bởi vì|do|çünkü|ponieważ|bo|want|omdat|eftersom|fordi|karena|sebab|koska|επειδή|γιατί|mert|deoarece|"
    "pentru|כי|เพราะ|কারণ|kwa|kwa sababu|protože|neboť|chứ|değil|nie|niet|inte|ikke|bukan|för|olduğu|dır|dir|"
    "dur|dür|tır|tir|tur|tür",
    so="vậy|do đó|dus|więc|zatem|alltså|jadi|maka|altså|tehát|deci|siis|sonuç olarak|dolayısıyla|tedy|לכן|ดังนั้น|"
    "অতএব|άρα|bu nedenle",
    no="không|değil|nie|niet|inte|ikke|bukan|ikkje|nem|nu|לא|ไม่",
    chooses="chọn|jawabannya",
    has="zostało|pozostało|còn lại",
    joins="và|hoặc|ve|veya|lub|albo|en|of|och|eller|og|dan|atau|ja|tai|και|ή|és|vagy|și|sau|או|และ|nebo",
)  # fmt: skip

LANGUAGES = (
    ENGLISH, FRENCH, GERMAN, SPANISH, OTHERS, CHINESE, JAPANESE, KOREAN, RUSSIAN, ARABIC, HINDI,
)  # fmt: skip
"""Spanish stands for Italian and Portuguese too; OTHERS for languages of which little more is known than how they label
an answer. The first five share an alphabet."""

Table: TypeAlias = Mapping[str, frozenset[str]]
_LATIN = re.compile(r"[a-z]")


def _words(language: Wording) -> set[str]:
    return {word for words in language for word in words.split("|") if _LATIN.search(word)}


def _table(latin: Wording) -> dict[str, frozenset[str]]:
    """The words of a language, and of all that are written in other scripts: what parts each can play."""
    parts: dict[str, set[str]] = {}
    for language in LANGUAGES:
        for part, words in language._asdict().items():
            for word in words.split("|"):
                if word and (language is latin or not _LATIN.search(word)):
                    parts.setdefault(word, set()).add(part)
    return {word: frozenset(found) for word, found in parts.items()}


TABLES: tuple[Table, ...] = tuple(_table(language) for language in LANGUAGES[:5])
_VOCABULARIES = tuple(_words(language) for language in LANGUAGES[:5])


def language_of(said: Iterable[str]) -> Table:
    """The table of the language, of those that share the Latin alphabet, to which most of these words belong."""
    words = set(said)
    counts = [len(words & vocabulary) for vocabulary in _VOCABULARIES]
    return TABLES[counts.index(max(counts))]


UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""The letters of scripts that write words without spaces, or attach endings to them."""


def _longest_first(words: Iterable[str]) -> str:
    return "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in sorted(words, key=lambda w: (-len(w), w)))


_ATTACHED = re.compile(f"[{UNSPACED}]")


def is_unspaced(word: str) -> bool:
    """Whether a word begins in such a script."""
    return not word.isascii() and _ATTACHED.match(word) is not None


_ALL = {word for language in LANGUAGES for words in language for word in words.split("|") if word}
ATTACHED = _longest_first(word for word in _ALL if _ATTACHED.search(word))
"""A pattern of the words of such scripts, longest first."""
PHRASES = _longest_first(word for word in _ALL if (" " in word or "." in word) and not _ATTACHED.search(word))
"""A pattern of the phrases of several words, longest first."""
FIRST_WORDS = frozenset(word.split()[0] for word in _ALL if " " in word)
"""The words with which such a phrase begins."""
_NOUNS = tuple({word for language in LANGUAGES for word in language.answer.split("|")})
_ASCII_NOUNS = tuple(word for word in _NOUNS if word.isascii())


def nouns_in(lower: str) -> list[tuple[int, int]]:
    """Where a text in lower case may name an answer: begin and end of each noun that is a word of its own, in order."""
    found: dict[int, int] = {}
    for noun in _ASCII_NOUNS if lower.isascii() else _NOUNS:
        place = lower.rfind(noun)
        while place >= 0:
            end = place + len(noun)
            if end > found.get(place, -1) and _is_whole(lower, place, end, noun):
                found[place] = end
            place = lower.rfind(noun, 0, place)
    return sorted(found.items())


def _is_whole(lower: str, begin: int, end: int, noun: str) -> bool:
    before = lower[begin - 1] if begin else " "
    if is_unspaced(noun):
        return len(noun) > 1 or before.isspace()
    after = lower[end] if end < len(lower) else " "
    return not before.isalpha() and before != "_" and not after.isalpha()
