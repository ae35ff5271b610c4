"""The narrow world the demonstration model speaks of: animals, children, weather, food, small adventures.

Owns the vocabulary and the story grammar; `tell_story` returns a finished text together with the facts
it was made from, so that questions about it can be asked (see `talk.py`).  Pure: everything follows
from the random generator passed in.

Grammar notation: `[one|two|]` chooses an alternative (they nest), `{slot}` is filled in afterwards.
Capitals at the start of a sentence and "an" before a vowel are repaired at the end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

CHOICE = re.compile(r"\[([^\[\]]*)\]")
SENTENCE_START = re.compile(r"(^|[.!?] +|\.\" +|\n)([a-z])")
ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")


def expand(rng: Random, text: str, slots: dict[str, str]) -> str:
    """Resolve the choices of `text`, fill its slots, repair spaces, capitals and articles."""
    while match := CHOICE.search(text):
        options = match.group(1).split("|")
        text = text[: match.start()] + rng.choice(options) + text[match.end() :]
    text = text.format_map(slots)
    text = re.sub(r" +", " ", text).strip()
    text = text.replace(" .", ".").replace(" ,", ",")
    text = SENTENCE_START.sub(lambda m: m.group(1) + m.group(2).upper(), text)
    return ARTICLE.sub(r"\1n ", text)


@dataclass(frozen=True)
class Kind:
    """A sort of character: where it lives, what it eats, how it moves and speaks."""

    word: str
    homes: tuple[str, ...]
    foods: tuple[str, ...]
    moved: tuple[str, ...]
    sound: str
    baby: str = ""
    legs: int = 4


def kind(word: str, homes: str, foods: str, moved: str, sound: str, baby: str = "", legs: int = 4) -> Kind:
    return Kind(word, tuple(homes.split("|")), tuple(foods.split("|")), tuple(moved.split("|")), sound, baby, legs)


ANIMALS = [
    kind(
        "bird",
        "in a nest in a tall tree|in a nest in an old oak|in a nest near the window",
        "seeds|berries|worms",
        "flew|hopped",
        "sang",
        "chick",
        2,
    ),
    kind("fox", "in a den under a hill|in a den in the woods", "berries|eggs|fish", "ran|trotted", "barked", "cub"),
    kind(
        "rabbit",
        "in a burrow under a hill|in a burrow near the garden",
        "carrots|lettuce|clover",
        "hopped|jumped",
        "squeaked",
        "kit",
    ),
    kind(
        "mouse",
        "in a hole in the wall|in a tiny house under the roots",
        "cheese|crumbs|seeds",
        "ran|scurried",
        "squeaked",
        "pup",
    ),
    kind(
        "bear",
        "in a cave in the mountains|in a warm cave in the forest",
        "honey|berries|fish",
        "walked|stomped",
        "growled",
        "cub",
    ),
    kind("frog", "by a green pond|by a pond full of lilies", "flies|bugs", "jumped|hopped", "croaked", "tadpole"),
    kind(
        "duck",
        "by a pond near the farm|in a nest by the lake",
        "bread|grass|snails",
        "waddled|swam",
        "quacked",
        "duckling",
        2,
    ),
    kind("cat", "in a cozy house|in a house at the end of the street", "fish|milk", "walked|crept", "meowed", "kitten"),
    kind("dog", "in a house with a red door|on a farm", "bones|meat", "ran|trotted", "barked", "puppy"),
    kind("owl", "in a hole in an old oak|on the top of a tall tree", "mice|bugs", "flew|glided", "hooted", "owlet", 2),
    kind(
        "hedgehog",
        "in a pile of leaves|in a hole under a hedge",
        "apples|bugs|worms",
        "walked|rolled",
        "sniffed",
        "hoglet",
    ),
    kind(
        "squirrel", "in a hole in a tall tree|in an old oak", "nuts|acorns|seeds", "climbed|jumped", "chattered", "kit"
    ),
    kind(
        "turtle",
        "by a quiet pond|on the bank of the river",
        "leaves|grass|berries",
        "crawled|walked slowly",
        "hummed",
        "hatchling",
    ),
    kind(
        "snail",
        "in a garden|on a green leaf in the garden",
        "leaves|lettuce",
        "crawled|slid slowly",
        "whispered",
        "",
        0,
    ),
    kind("bee", "in a hive in the meadow|in a hive near the garden", "honey|nectar", "flew|buzzed", "buzzed", "", 6),
    kind(
        "butterfly",
        "in a meadow full of flowers|in a sunny garden",
        "nectar|sweet juice",
        "flew|fluttered",
        "whispered",
        "caterpillar",
        6,
    ),
    kind("pig", "on a farm|in a pen behind the barn", "corn|apples|turnips", "ran|trotted", "grunted", "piglet"),
    kind("cow", "on a farm|in a barn near the village", "grass|hay", "walked|trotted", "mooed", "calf"),
    kind("horse", "on a farm|in a barn on a hill", "hay|oats|apples", "galloped|trotted", "neighed", "foal"),
    kind("sheep", "on a green hill|on a farm", "grass|clover", "walked|trotted", "bleated", "lamb"),
    kind("goat", "on a rocky hill|on a farm in the mountains", "grass|leaves", "climbed|jumped", "bleated", "kid"),
    kind("lion", "on the wide grassland|in a cave near the river", "meat", "walked|ran", "roared", "cub"),
    kind(
        "elephant", "in the jungle|on the wide grassland", "leaves|fruit|bananas", "walked|stomped", "trumpeted", "calf"
    ),
    kind(
        "monkey",
        "in the jungle|in a tall tree in the jungle",
        "bananas|nuts|fruit",
        "climbed|swung",
        "chattered",
        "baby",
    ),
    kind("deer", "in the forest|in a quiet forest", "grass|leaves|berries", "ran|walked", "called", "fawn"),
    kind("hen", "on a farm|in a small house behind the barn", "corn|seeds", "walked|ran", "clucked", "chick", 2),
    kind("penguin", "on a cold island|on the ice near the sea", "fish", "waddled|slid", "called", "chick", 2),
    kind("wolf", "in the dark forest|in a den in the mountains", "meat", "ran|walked", "howled", "pup"),
]
PEOPLE = [
    kind(
        "girl",
        "in a small house|in a village by the sea|in a house near the forest",
        "bread|soup|pancakes|apples",
        "ran|walked",
        "said",
        "",
        2,
    ),
    kind(
        "boy",
        "in a small house|in a village by the river|on a farm on a hill",
        "bread|soup|cookies|apples",
        "ran|walked",
        "said",
        "",
        2,
    ),
]
MAGIC = [
    kind(
        "dragon", "in a cave on a high mountain|in an old castle", "soup|apples|hot peppers", "flew|stomped", "roared"
    ),
    kind("robot", "in a workshop|in an old barn", "oil", "rolled|walked", "beeped", "", 2),
    kind("snowman", "in a snowy garden|in a white field", "snow", "walked|slid", "laughed", "", 0),
]
KINDS = {k.word: k for k in ANIMALS + PEOPLE + MAGIC}

HE_NAMES = "Tom Ben Max Sam Tim Leo Oscar Finn Jack Hugo Otto Bruno Felix Milo Toby Rusty Fred Barney Nico Theo".split()
SHE_NAMES = (
    "Lily Mia Anna Rosie Daisy Ella Lucy Ruby Nora Molly Bella Clara Hazel Ivy Tilly Wanda Zoe Emma Greta Luna".split()
)
IT_NAMES = "Pip Dot Bobo Kiki Pebble Sunny Coco Bibi Mimi Button".split()

ADJECTIVES = "small little tiny brave shy clever kind happy lonely curious gentle lazy young old sleepy proud quiet funny hungry".split()
COLORS = "red blue green yellow brown white black gray orange golden".split()
PLACES = "forest|meadow|garden|village|beach|farm|river|lake|mountain|hill|park|town|island|field|market".split("|")
FRIEND_ADJ = "old kind wise friendly little big gentle cheerful".split()
TREASURES = "ball|key|ring|red scarf|blue hat|bell|shiny coin|basket|kite|lantern|drum|map|silver spoon|small book|music box|wooden boat|glass bottle|golden feather".split(
    "|"
)
FOODS = "cake|pie|bread|soup|cookies|jam|pancakes|salad|porridge".split("|")
WEATHERS = {
    "sunny": "the sun was [shining|warm and bright]|the sky was [blue|clear and blue]",
    "rainy": "it was raining|[soft rain|rain] was falling|the rain tapped on the leaves",
    "windy": "the wind was [strong|blowing hard]|the wind blew through the trees",
    "snowy": "[snow|soft snow] was falling|everything was white with snow",
    "cloudy": "[gray clouds|big clouds] covered the sky|the sky was gray",
    "foggy": "a thick fog lay over the land|it was hard to see in the fog",
}
SKILLS = {
    "swim": ("swam", "in the lake|in the pond", "water"),
    "sing": ("sang", "for everyone {at} the {place}", "song"),
    "dance": ("danced", "under the stars|{at} the {place}", "dance"),
    "climb": ("climbed", "to the top of the tallest tree", "tree"),
    "paint": ("painted", "a picture of the {place}", "picture"),
    "read": ("read", "a whole book to {friend}", "book"),
    "whistle": ("whistled", "a happy tune", "tune"),
    "skate": ("skated", "across the frozen pond", "ice"),
    "juggle": ("juggled", "three apples|three red balls", "apples"),
}
FLYERS = {"bird", "owl", "bee", "butterfly", "dragon"}
LESSONS = {
    "lost": "[it is good to ask for help|it is wise to stay close to home|a friend can show you the way]",
    "find": "[it feels good to be honest|giving things back makes two hearts happy|honest friends are the best friends]",
    "learn": "[it takes time to learn something new|you should never give up|practice makes you better every day]",
    "share": "[food tastes better when you share it|kindness always comes back|sharing is better than having it all]",
    "storm": "[even the worst storm ends|it is easier to be brave together|a small house is big enough for friends]",
    "fear": "[being brave does not mean that you have no fear|a friend makes the dark less dark|everybody is afraid sometimes]",
    "party": "[nobody is forgotten by true friends|the best gift is a good friend|a surprise is best when it is shared]",
    "help": "[small friends can be a big help|two are stronger than one|you should always help when you can]",
    "race": "[winning is not everything|it is better to be kind than to be first|a friend is worth more than a prize]",
    "build": "[things go better when you work together|you can always start again|good work takes time]",
    "journey": "[the world is big, but home is best|the way is as nice as the place|far away is not so far with a friend]",
    "noise": "[it is good to look before you are afraid|the thing you fear may need your help|a small noise can be a new friend]",
    "garden": "[good things need time|you have to wait for the best things|a little care every day works wonders]",
    "newcomer": "[one kind word can change a day|everyone was new once|a smile is a good beginning]",
    "truth": "[it is best to tell the truth|a mistake is not so bad when you say sorry|true friends forgive]",
    "cook": "[a meal is best with friends|many hands make good food|neighbors should help each other]",
}

OPENINGS = [
    "[Once upon a time|Once|Long ago|One day], there was a {adj} {kind} [named|called] {hero}. {He} lived {home}.",
    "[Once upon a time|Once|Long ago], a {adj} {kind} [named|called] {hero} lived {home}.",
    "{hero} was a {adj} {kind}. {He} lived {home}[ with {his} [mother|family|grandmother]|].",
    "{home} [there lived|lived] a {adj} {kind}. {His} name was {hero}.",
    "Near the {place} there lived a {adj} {kind} [named|called] {hero}.[ {He} had a home {home}.|]",
    "[There once was|Once there was] a {adj} {kind} [named|called] {hero} who lived {home}.",
]
HABITS = [
    "{He} liked to [eat {food}|look at the clouds|play {at} the {place}|sit in the sun|count the stars] [every day|in the morning|all day long].",
    "Every morning {he} {moved} to the {place} and [looked for {food}|said hello to the sun|played with {his} friends].",
    "{hero} loved {food} [more than anything|very much|and long, quiet evenings].",
    "{hero} was often {mood}, [and everyone {at} the {place} knew {him}|but {he} had few friends|and {he} had many dreams].",
    "{He} had [soft {color} {skin}|a {color} {thing} that {he} took everywhere|big, bright eyes and a warm heart].",
    "",
    "",
]
DAYS = [
    "One [{season} |]{day}, {weather}.",
    "It was a [{season} |quiet |cold |nice |]{day2}, and {weather}.",
    "One {day}, {hero} woke up early[. {weather}|, and {weather}].",
    "On a [quiet|bright|cold|warm|long|strange] {day}, {hero} went out.[ {weather}.|]",
]
ENDINGS = [
    "From that day on, {hero} and {friend} were [best friends|good friends|always together].",
    "{hero} [smiled|was very happy|felt warm inside]. {He} [knew now|had learned] that {lesson}.",
    "And {hero} [never forgot|always remembered] that {lesson}.",
    "That night, {hero} [fell asleep with a smile|slept well|dreamed of the {place}].[ {He} knew that {lesson}.|]",
    '"[You see|Now I know]," said {hero}, "{lesson}."[ {friend} [nodded|laughed].|]',
    "[They lived happily ever after|They stayed friends for many years|They were friends for the rest of their lives].",
    "When the [moon|first star] came up, they said good night and went home. {hero} [thought|whispered to the moon]: {lesson}.",
    "And if you walk {along} the {place} [today|on a quiet evening], you may [still see|hear] {hero} and {friend} [play|laugh|sing] [together|there].",
]
MEETINGS = [
    "Then {he} met {friend_long}.",
    "[Just then|After a while|Soon], {friend_long} came along[ the path|].",
    "Behind a [bush|big stone|tree], {he} [saw|found] {friend_long}.",
    "[Suddenly|All at once], {he} heard a voice. It was {friend_long}.",
]
GREETINGS = [
    '"[Hello|Good {greet}|Hi], {hero}," said {friend}. "[Why do you look so {sad}|What is the matter|What are you doing here|Why are you so {sad}]?"',
    '"[Hello|Good {greet}]," said {friend}[ with a smile|]. "My name is {friend}. [Who are you|What is your name]?" "I am {hero}," said the {kind}.',
    '{friend} [looked at {him}|tilted {fhis} head] and asked, "[Can I help you|Are you all right|What is wrong]?"',
]

PLOTS: dict[str, list[list[str]]] = {
    "lost": [
        [
            "{hero} {moved} [far|very far|too far] [from home|{to} the {place}]. [{He} followed a {color} butterfly|{He} was looking for {food}|{He} wanted to see what was behind the trees]. [Soon|When {he} looked around], [everything looked strange|{he} did not know the way back].",
            "{He} [wanted|went out] to find {food}. [{He} {moved} this way and that way|{He} {moved} and {moved}], until {he} [could not see {his} home anymore|was lost {at} the {place}].",
        ],
        [
            '"Oh no," said {hero}. "I am lost. [How will I get home|What should I do]?"[ A tear ran down {his} face.|]',
            "{hero} [felt small and alone|was scared and sat down]. {He} [called out|called for help], but [nobody answered|only the wind answered].",
        ],
        ["@meet"],
        ["@greet"],
        [
            '"I cannot find my way home," said {hero}. "[I live {home}|My home is {home}]."',
            "{hero} told {friend} [everything|that {he} was lost and wanted to go home].",
        ],
        [
            '"[Do not worry|Do not be sad|Do not cry]," said {friend}. "I know [the way|that place]. [Come with me|Follow me]." [Together they {moved} [over the hill|along the river|past the big stones|through the trees].|They walked along the river, over a bridge and past a big stone.]',
            '{friend} [thought for a moment|pointed to the sky]. "[Look at the sun|Follow the river|Look for the tall tree]," {fhe} said. "It will lead us to your home." So they went together.',
        ],
        [
            'At last, {hero} saw {his} home. "[There it is|I am home]!" {he} [cried|shouted]. "Thank you, {friend}."',
            "Before the sun went down, they [reached|came to] {his} home. {hero} [hugged {friend}|thanked {friend} again and again].",
        ],
    ],
    "find": [
        [
            'On the path, {hero} found a {treasure}. [It was lying in the grass|It lay under a leaf|It shone in the sun]. "[How pretty|What is this|Who lost this]," {he} said.',
            "{hero} {moved} {along} the {place} and [saw something shiny|stepped on something hard]. It was a {treasure}.",
        ],
        [
            '{He} [wanted to keep it|liked it very much]. But then {he} thought, "[Somebody must be looking for it|It is not mine]."',
            '["It is mine now," {he} thought. But it did not feel right.|{He} looked around, but nobody was there.]',
        ],
        [
            'So {he} asked [everyone|all the animals] {at} the {place}. "Is this your {treasure}?" {he} asked the {other}. "No," said the {other}, "it is not mine."',
            '{He} went from door to door. [The {other} shook its head. "Not mine," it said.|The {other} did not know it.]',
        ],
        ["@meet"],
        [
            '{friend} was [looking under every leaf|crying|very sad]. "I lost my {treasure}," {fhe} said. "[My mother gave it to me|I had it since I was little|I cannot sleep without it]."',
            '"[Have you seen|Did you find] my {treasure}?" asked {friend}. "I [lost it this morning|have looked for it everywhere]."',
        ],
        [
            '"[Here it is|I found it]," said {hero}, and gave {friend} the {treasure}. {friend} [jumped for joy|could not believe it|laughed and danced].',
            '{hero} held out the {treasure}. ["Is this it?" {he} asked. "Yes!" cried {friend}. "Thank you!"|{friend} was so happy that {fhe} began to sing.]',
        ],
        [
            "[As a thank you|To thank {him}], {friend} [gave {him} some {food2}|invited {him} for {food2}|gave {him} a big hug].",
            "",
        ],
    ],
    "learn": [
        [
            "More than anything, {hero} wanted to learn to {skill}. [All the others could do it|The {other} could do it so well], but {he} could not.",
            "{hero} had one wish: {he} wanted to {skill}. [Every night {he} dreamed of it.|But {he} did not know how.]",
        ],
        [
            '{He} tried [once|again and again|all morning], but [it did not work|{he} fell down|it went wrong]. [The {other} laughed at {him}.|"I will never learn it," {he} said.|{He} felt very sad.]',
            'The first time, {he} [fell on {his} nose|made a big mess|was too afraid]. "This is too hard for me," {he} [sighed|said].',
        ],
        ["@meet"],
        [
            '"[I can teach you|Let me show you how]," said {friend}. "[You only have to try a little every day|First you must believe in yourself|Start slowly and do not hurry]."',
            '{friend} [had seen everything|smiled]. "Nobody can do it the first time," {fhe} said. "[When I was young, I could not do it either|Try again, and I will help you]."',
        ],
        [
            'So they practiced [every day|day after day|from morning until evening]. [Sometimes {hero} wanted to stop, but {friend} said, "One more time."|It was hard, but {hero} did not give up.]',
            "For many days, {hero} practiced. [On the first day it was bad. On the second day it was better.|Little by little, it became easier.]",
        ],
        [
            'Then, one {day}, it happened. {hero} {skilled} {skillplace}! "[I did it|I can do it]!" {he} [shouted|cried].',
            "At last {he} tried once more, and {he} {skilled} {skillplace}. Everybody [clapped|cheered|was amazed].",
        ],
        ['{friend} was [so proud|very proud of {him}]. "[I knew you could do it|Well done, {hero}]," {fhe} said.', ""],
    ],
    "share": [
        [
            '{hero} had [a basket full of {food}|some {food} for dinner|found a lot of {food}]. "[What a good day|I will eat it all]," {he} said.',
            "It was a hard [week|time], and there was not much to eat. {hero} had only some [{food}|bread] left.",
        ],
        ["@meet"],
        [
            '{friend} looked [thin|tired|cold and hungry]. "I have not eaten [today|for two days]," {fhe} said.[ "Do you have some food for me?"|]',
            '"I am so hungry," said {friend}[ in a weak voice|]. "[I could not find anything to eat|My house is empty]."',
        ],
        [
            '{hero} [thought about it|looked at {his} food]. [There was not much|It was only enough for one]. But [{he} had a kind heart|{he} felt sorry for {friend}]. "[Come and eat with me|Half of it is for you]," {he} said.',
            "{hero} did not [wait|think long]. {He} gave {friend} [half of everything|the biggest piece]. They sat down and ate together.",
        ],
        [
            '"[Thank you|You are very kind]," said {friend}. "I will never forget it."',
            '{friend} ate every crumb and smiled. "[One day I will help you, too|Now I feel strong again]," {fhe} said.',
        ],
        [
            "[Some time later|A few days later|The next week], {hero} [was in trouble|became sick|had nothing to eat]. [There was a knock at the door|Somebody called {his} name]. It was {friend}, with [a big pot of soup|a basket full of {food2}|a warm blanket and some {food2}].",
            'The next morning, {hero} found [a big basket|a surprise] at {his} door. It was full of {food2}, and there was a note: "From your friend {friend}."',
        ],
    ],
    "storm": [
        [
            "Suddenly, dark clouds came over the {place}. [The wind began to howl|Thunder rolled|Lightning flashed]. A [big|terrible] storm was coming.",
            "In the afternoon, the sky turned [black|dark]. [First came the wind, then came the rain.|Big drops began to fall.]",
        ],
        [
            "{hero} [ran|hurried] to find a dry place. [The rain was cold|{He} was wet and cold|The wind was so strong that {he} could hardly stand].",
            '"I must hurry," said {hero}. But [the path was full of mud|the rain came faster and faster].',
        ],
        ["@meet"],
        [
            '{friend} was [shaking|wet and cold], too. "[My house was blown away|I am so scared of the thunder|I have no place to go]," {fhe} [cried|said].',
            '"Quick, come in," said {friend}. "There is [a dry cave|a little hut|an empty barn] here."',
        ],
        [
            "They [sat close together|held each other] [in a small cave|under a big rock|in the dry hay] and listened to the rain. [To forget their fear, they told each other stories.|{hero} began to sing, and {friend} sang along.]",
            "Together they found [an old barn|a cave|a hollow tree]. Inside it was [warm and dry|quiet]. They shared some {food2} and waited.",
        ],
        [
            "[After an hour|At last], the storm was over. They looked outside. [A big rainbow stood over the {place}|The sun came out, and every leaf was shining|The air smelled fresh and sweet].",
            'When the rain stopped, they saw a rainbow with all its colors, red, orange, yellow, green and blue. "[How beautiful|Look at that]," said {hero}.',
        ],
        ["Some [trees|houses] were broken, so {hero} and {friend} helped [to repair them|everyone].", ""],
    ],
    "fear": [
        [
            "{hero} was afraid of [the dark|thunder|deep water|the night]. [When evening came, {he} hid under a blanket.|The others did not know it.|{He} never told anyone.]",
            "There was one thing that {hero} feared: [the dark|the big forest|deep water|loud thunder].",
        ],
        [
            "One night, {he} [heard a strange sound|had to go out alone|could not sleep]. {His} heart beat fast.",
            "One evening, {his} [mother|grandmother] asked {him} to [bring some water from the well|get wood from the forest]. {hero} [began to shake|wanted to say no].",
        ],
        ["@meet"],
        [
            '"[Are you afraid|You are shaking]," said {friend}[ softly|]. "[I was afraid, too, when I was small|That is all right|Everyone is afraid of something]."',
            '{hero} told {friend} about {his} fear. {friend} did not laugh. "[Hold my hand|Stay close to me]," {fhe} said.',
        ],
        [
            '{friend} showed {him} [the stars|the moon|how the fireflies danced]. "Look," {fhe} said, "[the night is full of little lights|there is nothing bad here|the dark is only the other side of the light]."',
            'Step by step, they went on. ["That is only an owl," said {friend}. "And that is only the wind."|With every step, {hero} felt a little braver.]',
        ],
        [
            "After that, {hero} was not so afraid anymore. {He} even [laughed|went out alone the next night].",
            '"It is not so bad," said {hero}[, and {he} took a deep breath|]. {His} heart was calm again.',
        ],
    ],
    "party": [
        [
            'It was {hero}\'s birthday, but [nobody said anything|nobody seemed to know]. [Even {friend} walked by without a word.|"Maybe they forgot," {he} thought.]',
            '"Tomorrow is my birthday," thought {hero}. [But nobody spoke about it.|"Will anybody think of me?"]',
        ],
        [
            "{He} went to the {place} and [sat down alone|thought for a long time]. The {other} [ran past and giggled|whispered something and hurried away].",
            "{He} [asked|went to] the {other}, but the {other} [had no time|only smiled and hurried away]. {His} heart was heavy.",
        ],
        [
            'In the evening, there was a light in the window. [{hero} opened the door slowly|{hero} looked inside]. "Surprise!" everyone shouted.',
            "When the sun went down, all the animals came together. There were lights in the trees and a big table.",
        ],
        [
            'There were lights and {a_dish} and [a lot of|plenty of] {food2}. {friend} gave {him} a {treasure}. "[Happy birthday|This is for you], {hero}," {fhe} said.',
            "They ate {dish} and danced [until midnight|until the stars came out]. {friend} played the drum, and the {other} sang a song.",
        ],
        [
            '"This is the best day of my life," said {hero}.',
            "{hero} and {friend} laughed so much that their bellies hurt.",
            "",
        ],
    ],
    "help": [
        [
            '[On the way to the {place}|While {he} was looking for {food}], {hero} heard a [cry|small voice]. "Help! [Please help me|Is anybody there]!"',
            "{hero} was [playing {at} the {place}|eating {food}] when {he} heard someone cry.",
        ],
        [
            "It was {friend_long}. {Fhe} was [stuck in the mud|caught in a net|stuck between two rocks|sitting high in a tree and could not get down].",
            "There was {friend_long}, [stuck in a deep hole|with a thorn in {fhis} foot|caught in the thorns].",
        ],
        [
            '"[Do not move|Stay calm]," said {hero}. "I will [help you|get you out]." {He} [pulled with all {his} strength|tried and tried], but {he} was [too small|not strong enough].',
            '{hero} [looked around|had an idea]. {He} found a [long stick|strong rope]. "[Hold on to this|Take this]," {he} said.',
        ],
        [
            "So {he} called the {other}, and the {other} called the {other2}. Together they pulled: one, two, three! And {friend} was free.",
            "{He} pulled and pulled. [One, two, three|With a loud pop], {friend} was free.",
        ],
        [
            '"You saved me," said {friend}. "[How can I thank you?|You are so brave.|What can I do for you?]" "[You do not have to|Just be my friend]," said {hero}.',
            '{friend} [hugged {him}|took a deep breath]. "[Thank you so much|I will never forget this], {hero}," {fhe} said.',
        ],
        ["Later, they [ate {food2} together|went to the river to wash|sat in the sun and talked].", ""],
    ],
    "race": [
        [
            "Every year, there was a big race {at} the {place}. This year, {hero} wanted to win. [The prize was a {treasure}.|Everyone came to watch.]",
            '"I am [faster|better] than you," said {friend_long} to {hero}. "Let us have a race to the {place}." "[All right|Good]," said {hero}.',
        ],
        [
            '"Ready, steady, go!" cried the {other}. They all [ran|started] as fast as they could. [Soon {hero} was in front.|{hero} was the last one at first.]',
            "The {other} gave the sign, and off they went. {hero} {moved} [over stones and roots|faster than ever before].",
        ],
        [
            "But then {hero} [saw that {friend} had fallen down|heard a cry behind {him}. {friend} had hurt {fhis} leg]. {He} stopped. [The others ran past {him}.|What should {he} do?]",
            "Near the end, {friend} fell into a hole. {hero} could see the finish. [It was so close!|But {he} turned around.]",
        ],
        [
            '"[Come|Take my hand]," said {hero}, "we will [finish together|go on together]." And they crossed the line side by side, [as the very last ones|slowly, but happily].',
            "{He} helped {friend} up, and they [walked the rest of the way|went on] together.",
        ],
        [
            'Everyone [clapped|cheered] louder for them than for the winner. "[You are the real winner|That was a good thing to do]," said the {other}.',
            "[They did not win the prize. But they won a friend.|The {other} gave them both a {treasure}.]",
        ],
    ],
    "build": [
        [
            "{hero} wanted to build a [new house|little boat|bridge over the stream|house in a tree]. {He} [looked for|collected] wood, leaves and stones[ all day long|].",
            'Winter was coming, and {hero} needed a [warm home|better house]. "I will build one," {he} said.',
        ],
        [
            "{He} worked [from morning until night|hard for three days]. But then [the wind came and blew it all down|a big rain washed it away|everything fell apart].",
            "[It was hard work. At noon it was half done, but in the evening it fell down.|Just when it was done, it broke in two.]",
        ],
        ['"[All my work is gone|It is no use]," [cried|said] {hero}, and [sat down on a stone|kicked a stone].'],
        ["@meet"],
        [
            '"[You need a better plan|Two can do it better than one|I know how to make it strong]," said {friend}. "[Let us do it together|I will help you]."',
            '{friend} looked at the broken wood. "[Use stones at the bottom|Let us use some rope and clay]," {fhe} said. "Then it will hold."',
        ],
        [
            "So they worked together. {hero} [carried|brought] the wood, and {friend} [tied it with rope|put the stones in the right place]. [The {other} came to help, too.|They sang while they worked.]",
            "One held and the other [tied|hammered]. [Day by day, it grew.|By evening, it was done.]",
        ],
        [
            "It was [strong and beautiful|better than before]. The wind came again, but [this time nothing moved|it could not break it].",
            "When it was ready, they [sat inside|looked at it] and ate {food2}. They were [tired but happy|very proud].",
        ],
    ],
    "journey": [
        [
            '{hero} had never seen [the sea|a high mountain|the big city|snow]. "I want to [go and see the world|see it with my own eyes]," {he} said[ one day|].',
            "[Behind the {place}|Far away], there was a [high mountain|deep blue lake|tower that touched the clouds]. {hero} wanted to see it [more than anything|once in {his} life].",
        ],
        [
            "{He} packed some {food2} and [left before sunrise|said goodbye to {his} family|went on {his} way].",
            "So {he} took {his} [little bag|{color} bag] and a [bottle of water|map] and started to walk.",
        ],
        ["@meet"],
        [
            '"[Where are you going|May I come with you]?" asked {friend}. ["I have always wanted to see it, too."|"It is a long way for someone so small."] "Come along," said {hero}.',
            '"I am going on a long trip," said {hero}. "[Do you want to come|Come with me]." {friend} [was happy to go|did not need to think about it].',
        ],
        [
            "They crossed a [river|wide field] and climbed over [rocks|a hill]. At night, they slept [under the stars|in a hollow tree]. [Sometimes they were tired, but they went on.|They told each other funny stories.]",
            "The way was long. [First it rained, then the sun burned.|On the second day, they lost the map.] But [they did not turn back|together it was not so hard].",
        ],
        [
            '[On the third day|At last], they were there. [They stood still and said nothing.|"Oh," whispered {hero}.] It was [the most beautiful thing they had ever seen|bigger than {he} had dreamed].',
            'And then they saw it. [The sun was going down, and everything was golden.|"We made it!" shouted {friend}.]',
        ],
        [
            "[After some days|When it was time], they went home and told everyone about their adventure.",
            "{hero} took home a small [stone|shell|flower], so that {he} would never forget it.",
        ],
    ],
    "noise": [
        [
            'That night, {hero} heard a [strange|funny] noise. "[Tap, tap, tap|Whoo, whoo|Scratch, scratch|Hum, hum]," it went. It came from [the roof|behind the door|the bushes|the old well].',
            'In the middle of the night, something made a noise [outside|under the floor]. "[Bump, bump|Tap, tap, tap]," it went.',
        ],
        [
            '"[Who is there|What is that]?" asked {hero}. [Nobody answered.|The noise stopped. Then it came again.]',
            '{hero} [held {his} breath|pulled the blanket over {his} head]. [Was it a monster?|"It must be a ghost," {he} thought.]',
        ],
        [
            "But {he} was also curious. {He} took a [lantern|candle|stick] and [went outside|opened the door slowly|looked].",
            "At last {he} [took all {his} courage|jumped up] and went to see.",
        ],
        [
            "It was not a monster at all. It was only {friend_long}. {Fhe} [was cold and wanted to come in|had lost {fhis} way|was looking for food].",
            'There sat {friend_long}[ in the rain|]. "[I am sorry|Please do not be angry]," {fhe} said. "I [only wanted to get warm|was so alone]."',
        ],
        [
            '{hero} [laughed|had to laugh]. "[I thought you were a monster|You scared me]," {he} said. "[Come in|Come inside] and have some {food2}."',
            '"You poor thing," said {hero}. {He} gave {friend} [a blanket|some warm milk|some {food2}] and a place to sleep.',
        ],
        [
            "They [talked|told stories] until the sun came up.",
            "After that, {hero} was never afraid of strange noises again.",
            "",
        ],
    ],
    "garden": [
        [
            '{hero} found a [small|tiny|strange] seed[ on the path|]. "I will plant it," {he} said. {He} made a hole in the [ground|earth] and put the seed in.',
            'An old {other} gave {hero} a seed. "[Take good care of it|Plant it and wait]," the {other} said.',
        ],
        [
            'Every [day|morning], {he} gave it water. But nothing happened. [One day passed, then two, then a week.|"Maybe it is asleep," {he} thought.]',
            "{He} watered it and sang to it. [The first day, nothing happened. The second day, nothing happened.|But it did not grow.]",
        ],
        ["@meet"],
        [
            '"[It will never grow|It is only a dead seed]," said {hero}[ sadly|]. "[Be patient|You have to wait]," said {friend}. "[A seed needs sun, water and time|Good things grow slowly]."',
            '{friend} looked at the ground. "[It needs more sun|It is growing where you cannot see it]," {fhe} said.',
        ],
        [
            'So they [waited together|took care of it together]. Then, one {day}, there was a tiny green [leaf|plant]! "[Look|It is growing]!" {hero} [cried|shouted].',
            "They waited, and the rain came and the sun came. And one {day}, a small green leaf [looked out of|came out of] the ground.",
        ],
        [
            "It grew and grew, until it was [taller than {hero}|a big {color} flower|a tree full of apples]. [Everyone {at} the {place} came to see it.|They picked the fruit and made {a_dish}.]",
            "In summer, it had [a big {color} flower|sweet red fruit]. {hero} [gave the first one to {friend}|shared it with everyone].",
        ],
    ],
    "newcomer": [
        [
            "One day, {friend_long} [came to live in|moved to] the {place}. {Fhe} did not know anyone. [The others only looked and whispered.|{Fhe} sat alone under a tree.]",
            "There was somebody new {at} the {place}: {friend_long}. [Nobody talked to {fhim}.|{Fhe} was very quiet.]",
        ],
        [
            '"{Fhe} looks strange," said the {other}. But {hero} thought, "{Fhe} [looks lonely|must feel sad]."',
            "{hero} [remembered how it was to be alone|wanted to say hello, but {he} was shy].",
        ],
        [
            'So {hero} [went to {fhim}|took a deep breath and went over]. "[Hello|Hi], I am {hero}," {he} said. "[Do you want to play with me|Would you like some {food2}]?"',
            '{hero} picked a {color} flower and gave it to {friend}. "Welcome," {he} said.',
        ],
        [
            '{friend} [smiled for the first time|looked up]. "[Yes, please|I would like that]," {fhe} said. "[I know a good game|My name is {friend}]."',
            '"Nobody has talked to me until now," said {friend}. [{Fhis} eyes were shining.|"You are very kind."]',
        ],
        [
            "They [played hide and seek|built a tower of stones|ran down the hill] all afternoon. {friend} knew [many games|funny songs|how to make boats from leaves]. [Soon the {other} wanted to play, too.|Everybody could hear them laugh.]",
            "They shared their {food2} and told each other about their homes. [{friend} came from a land behind the mountains.|{friend} had lived far away by the sea.]",
        ],
        [
            "In the evening, all the others came and said hello, too.",
            "Soon, {friend} had many friends {at} the {place}.",
            "",
        ],
    ],
    "truth": [
        [
            "{hero} was playing with a ball in the house of {friend_long}. Crash! The [blue vase|big bowl|{treasure}] [fell down and broke|was broken].",
            "{friend_long} had a beautiful {treasure}. {hero} wanted to [touch it|play with it], only for a moment. But it fell down and broke.",
        ],
        [
            '"Oh no," [whispered|said] {hero}. Nobody had seen it. {He} [hid it under a blanket|ran away and hid behind a tree].',
            '{hero} looked around. ["I will say that the {other} did it," {he} thought.|{He} wanted to run away.]',
        ],
        [
            "But {he} could not [eat|sleep|play]. [{His} belly felt heavy, like a stone.|{He} thought of {friend} all the time.]",
            'All night long {he} [could not sleep|lay awake]. "It was my fault," {he} thought.',
        ],
        [
            'The next morning, {he} went to {friend}. "[I have to tell you something|I am so sorry]," {he} said. "I broke it."[ A tear rolled down {his} face.|]',
            'At last {he} told {friend} everything. "[I am sorry|Please forgive me]," {he} said.',
        ],
        [
            '{friend} was quiet for a moment. Then {fhe} [smiled|took {his} hand]. "[It was only a thing|I am glad that you told me]," {fhe} said. "[Let us fix it together|You are more important to me]."',
            '"[I am a little sad|It was dear to me]," said {friend}, "but [I am happy that you told the truth|you were brave to tell me]."',
        ],
        [
            "They [took some glue and put it together again|made a new one out of clay]. [It looked even better than before.|It was not perfect, but they both liked it.]",
            "",
        ],
    ],
    "cook": [
        [
            "{hero} wanted to make {a_dish}. {He} had [flour|a big pot] and [water|milk], but [there was no sugar|one thing was missing: salt|there was no honey left].",
            '"Today I will make {a_dish}," said {hero}. {He} put on a {color} apron. But when {he} looked around, there [were no eggs|was no butter|was no milk].',
        ],
        [
            'So {he} went to the {other}. "Do you have some for me?" {he} asked. "No," said the {other}, "but [ask {friend}|{friend} may have some]."',
            "{He} asked the {other}, but the {other} had nothing. {He} asked the {other2}, but the {other2} [was asleep|was not at home].",
        ],
        ["@meet"],
        [
            '"[Of course|I have plenty]," said {friend}. "[Take as much as you need|I will bring it to you]. [May I help you|What are you cooking]?"',
            '{friend} had just what {he} needed. "[Can I help you cook|Let us cook together]," {fhe} said.',
        ],
        [
            "They mixed everything in a big bowl. [Flour flew through the air, and soon both of them were white like snow.|{friend} stirred, and {hero} tasted.] [Then they put it in the oven.|It smelled so good.]",
            "{hero} [stirred the pot|cut the apples], and {friend} [made the fire|set the table]. They sang a cooking song.",
        ],
        [
            "Soon the whole {place} smelled of {dish}. [The {other} came, and the {other2} came|One by one, the neighbors came]. There was enough for everyone.",
            'When it was done, they [ate it while it was warm|invited all the neighbors]. "[Delicious|This is the best {dish} in the world]!" said the {other}.',
        ],
    ],
}

TITLES = "[{hero} and {friend}|The {adj} {kind}|{hero} the {kind}|{hero} and the {treasure}|A {day} {at} the {place}]"


@dataclass(frozen=True)
class Story:
    text: str
    plot: str
    slots: dict[str, str]


def pronouns(gender: str, prefix: str = "") -> dict[str, str]:
    he, him, his = {"he": ("he", "him", "his"), "she": ("she", "her", "her"), "it": ("it", "it", "its")}[gender]
    forms = {"he": he, "him": him, "his": his}
    slots = {prefix + key: value for key, value in forms.items()}
    slots.update({(prefix + key).capitalize(): value.capitalize() for key, value in forms.items()})
    return slots


def choose_name(rng: Random, word: str) -> tuple[str, str]:
    """(name, gender) that fits a kind."""
    if word == "girl" or word in ("cow", "hen"):
        gender = "she"
    elif word == "boy" or word == "snowman":
        gender = "he"
    else:
        gender = rng.choice(["he", "she", "he", "she", "it"])
    return rng.choice({"he": HE_NAMES, "she": SHE_NAMES, "it": IT_NAMES}[gender]), gender


def make_slots(rng: Random, plot: str, fixed: dict[str, str]) -> dict[str, str]:
    """Every slot of the grammar; `fixed` gives those that a request named (kind, adj, hero, place, friend_kind)."""
    word = fixed.get("kind") or rng.choice(rng.choices([ANIMALS, PEOPLE, MAGIC], [14, 4, 1])[0]).word
    who = KINDS[word]
    hero, gender = choose_name(rng, word)
    if "hero" in fixed:
        hero = fixed["hero"]
        gender = "she" if hero in SHE_NAMES else "he" if hero in HE_NAMES else "it"
    friend_word = fixed.get("friend_kind") or rng.choice([k.word for k in ANIMALS + MAGIC if k.word != word])
    friend, friend_gender = choose_name(rng, friend_word)
    while friend == hero:
        friend, friend_gender = choose_name(rng, friend_word)
    friend_adj = rng.choice(FRIEND_ADJ)
    others = rng.sample([k.word for k in ANIMALS if k.word not in (word, friend_word)], 2)
    skills = sorted(SKILLS) + ["fly"]
    if word in FLYERS:
        skills.remove("climb")
        skills += ["fly"] * 4
    elif word not in ("penguin", "hen"):
        skills.remove("fly")
    if word in ("duck", "frog", "penguin"):
        skills.remove("swim")
    skill = fixed.get("skill") or rng.choice(skills)
    skilled, skill_place, _ = SKILLS.get(
        skill, ("flew", "over the {place}|high over the trees|once around the tree", "air")
    )
    day = rng.choice("morning|afternoon|evening|day|day|morning".split("|"))
    slots = {
        "kind": word,
        "adj": fixed.get("adj") or rng.choice(ADJECTIVES),
        "hero": hero,
        "home": rng.choice(who.homes),
        "food": rng.choice(who.foods),
        "moved": rng.choice(who.moved),
        "place": fixed.get("place") or rng.choice(PLACES),
        "friend": friend,
        "friend_kind": friend_word,
        "friend_long": f"a {friend_adj} {friend_word} named {friend}",
        "other": others[0],
        "other2": others[1],
        "treasure": fixed.get("treasure") or rng.choice(TREASURES),
        "skill": skill,
        "skilled": skilled,
        "dish": rng.choice(FOODS),
        "food2": rng.choice(
            ["bread", "apples", "soup", "warm milk", "cookies", "nuts", "berries", "honey", "cheese", "pie"]
        ),
        "color": rng.choice(COLORS),
        "skin": {
            "bird": "feathers",
            "owl": "feathers",
            "duck": "feathers",
            "hen": "feathers",
            "penguin": "feathers",
        }.get(
            word,
            "hair"
            if word in ("girl", "boy")
            else "fur"
            if word
            not in ("frog", "turtle", "snail", "bee", "butterfly", "dragon", "robot", "snowman", "pig", "elephant")
            else "eyes",
        ),
        "thing": rng.choice(["scarf", "bag", "hat", "blanket", "stone"]),
        "mood": rng.choice(["cheerful", "busy", "quiet", "friendly", "full of ideas", "a little lonely"]),
        "season": rng.choice(["spring", "summer", "autumn", "winter"]),
        "day": day,
        "day2": {"day": "Sunday"}.get(day, day),
        "greet": day if day != "day" else "morning",
        "sad": rng.choice(["sad", "worried", "unhappy", "tired"]),
    }
    place = slots["place"]
    slots["at"] = (
        "on"
        if place in ("beach", "farm", "mountain", "hill", "island")
        else "by"
        if place in ("river", "lake")
        else "at"
        if place == "market"
        else "in"
    )
    slots["along"] = (
        "over"
        if place in ("mountain", "hill", "field", "meadow")
        else "along"
        if place in ("beach", "river", "lake")
        else "across"
        if place in ("island", "farm", "market")
        else "through"
    )
    slots["to"] = "into" if place in ("forest", "garden", "village", "town", "park") else "to"
    dish = slots["dish"]
    slots["a_dish"] = (
        f"a {rng.choice(['big', 'good', 'fine'])} {dish}" if dish in ("cake", "pie", "salad") else f"some {dish}"
    )
    slots.update(pronouns(gender))
    slots.update(pronouns(friend_gender, "f"))
    season = slots["season"]
    sky = fixed.get("weather") or rng.choice([w for w in WEATHERS if w != "snowy" or season == "winter"])
    if sky == "snowy":
        slots["season"] = "winter"
    slots["sky"] = sky
    slots["weather"] = expand_plain(rng, rng.choice(split_top(WEATHERS[sky])))
    slots["skillplace"] = expand(rng, rng.choice(skill_place.split("|")), slots)
    slots["skillplace"] = slots["skillplace"][0].lower() + slots["skillplace"][1:]
    slots["lesson"] = expand_plain(rng, LESSONS[plot])
    return slots


def expand_plain(rng: Random, text: str) -> str:
    while match := CHOICE.search(text):
        text = text[: match.start()] + rng.choice(match.group(1).split("|")) + text[match.end() :]
    return text


def split_top(text: str) -> list[str]:
    """Split at the bars outside brackets."""
    parts, depth = [""], 0
    for ch in text:
        depth += (ch == "[") - (ch == "]")
        if ch == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += ch
    return parts


def tell_story(rng: Random, length: str = "normal", **fixed: str) -> Story:
    """A story of about 60 ("short"), 150 ("normal") or 190 ("long") words; `fixed` slots are kept."""
    plots = list(PLOTS)
    plot = fixed.pop("plot", "") or rng.choice(plots)
    if "skill" in fixed:
        plot = "learn"
    if "treasure" in fixed and plot not in ("find", "party", "truth"):
        plot = "find"
    if fixed.get("weather") in ("rainy", "windy") and rng.random() < 0.5 and "treasure" not in fixed:
        plot = "storm"
    slots = make_slots(rng, plot, fixed)
    beats = [rng.choice(OPENINGS)]
    if length != "short":
        beats.append(rng.choice(HABITS))
    if length == "long":
        beats.append(rng.choice(HABITS[:5]))
    if length != "short" or rng.random() < 0.5 or "weather" in fixed:
        beats.append(rng.choice(DAYS[:3] if "weather" in fixed else DAYS))
    is_met = False
    for options in PLOTS[plot]:
        if options == ["@meet"]:
            beats.append(rng.choice(MEETINGS))
            if length != "short" and rng.random() < 0.3 and plot != "noise":
                beats.append(rng.choice(GREETINGS[:1] + GREETINGS[2:]))
                is_met = True
            continue
        if options == ["@greet"]:
            if not is_met:
                beats.append(rng.choice(GREETINGS))
            continue
        beats.append(rng.choice(options))
    if plot == "party" and not any("friend_long" in b for b in beats):
        beats.insert(1, "{His} best friend was {friend_long}.")
    beats.append(rng.choice(ENDINGS))
    breaks = set()
    if rng.random() < 0.45 and len(beats) > 6:
        breaks = {rng.choice([2, 3]), len(beats) - rng.choice([2, 3])}
    text = ""
    for i, beat in enumerate(beats):
        part = expand(rng, beat, slots)
        if not part:
            continue
        text += ("\n\n" if i in breaks and text else " " if text else "") + part
    # a name introduced by its first mention is not introduced again
    long = slots["friend_long"]
    for form in (long, long.replace("a ", "an ", 1), "A" + long[1:], "An" + long[1:]):
        first = text.find(form)
        if first >= 0:
            text = text[: first + len(form)] + text[first + len(form) :].replace(form, slots["friend"])
    slots["article"] = "an" if slots["adj"][0] in "aeiou" else "a"
    return Story(text, plot, slots)


def title_of(rng: Random, story: Story) -> str:
    title = expand(rng, TITLES, story.slots)
    return " ".join(
        w if w in ("and", "the", "in", "of", "a") and i else w[0].upper() + w[1:] for i, w in enumerate(title.split())
    )


if __name__ == "__main__":
    import sys

    generator = Random(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    for size in ("short", "normal", "normal", "long"):
        print(tell_story(generator, size, kind="bird", adj="small").text, "\n----")
    for name in PLOTS:
        print(name, ":", tell_story(generator, plot=name).text, "\n----")
