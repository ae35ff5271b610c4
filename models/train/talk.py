"""Conversations of the demonstration model: story requests, questions and answers, tools, small talk.

Every generator takes a random generator and returns a list of messages in the OpenAI shape (with
`reasoning_content`, `tool_calls` and a leading "tools" entry where needed).  Pure, except that the table
of capitals is read once from country profiles given by the caller (see `corpus.py`).
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

from world import (
    ADJECTIVES,
    ANIMALS,
    HE_NAMES,
    IT_NAMES,
    PEOPLE,
    PLACES,
    SHE_NAMES,
    SKILLS,
    TREASURES,
    WEATHERS,
    expand,
    split_top,
    tell_story,
    title_of,
)

Message = dict[str, Any]
NAME = "Fledgling"


def say(rng: Random, text: str, **slots: str) -> str:
    return expand(rng, text, slots)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


ASK = "[Tell me|Tell me|Tell|Write|Write me|Please tell me|Please write|Can you tell me|Could you write|I would like to hear|I want]"


def request_story(rng: Random) -> tuple[str, dict[str, str], str]:
    """(request, slots it fixes, length)."""
    fixed: dict[str, str] = {}
    length = rng.choices(["short", "normal", "long"], [3, 5, 2])[0]
    word = {"short": "[short|very short|little] ", "long": "[long|longer] ", "normal": ""}[length]
    if length == "normal" and rng.random() < 0.3:
        word = rng.choice(["nice ", "happy ", "good ", "bedtime "])
    about = [k.word for k in ANIMALS] + ["girl", "boy"] * 3 + ["dragon", "robot", "snowman"]
    if rng.random() < 0.12:
        return (
            say(
                rng,
                f"[{ASK} a {word}story|Tell me something nice|Once upon a time|I am bored. Tell me a story|Tell me a bedtime story].",
            ),
            {},
            length,
        )
    fixed["kind"] = "bird" if rng.random() < 0.08 else rng.choice(about)
    who = "a {kind}"
    if rng.random() < 0.62:
        fixed["adj"] = rng.choice(ADJECTIVES) if rng.random() > 0.2 else rng.choice(["small", "little"])
        who = "a {adj} {kind}"
    if rng.random() < 0.2:
        fixed["hero"] = rng.choice(
            SHE_NAMES
            if fixed["kind"] in ("girl", "cow", "hen")
            else HE_NAMES
            if fixed["kind"] in ("boy", "snowman")
            else HE_NAMES + SHE_NAMES + IT_NAMES
        )
        who += " [named|called] {hero}"
    tail = ""
    draw = rng.random()
    if draw < 0.12:
        fixed["friend_kind"] = rng.choice([k.word for k in ANIMALS if k.word != fixed["kind"]])
        tail = " and a {friend_kind}"
    elif draw < 0.22:
        fixed["treasure"] = rng.choice(TREASURES)
        tail = " [and|who finds] a {treasure}"
    elif draw < 0.32:
        fixed["place"] = rng.choice(PLACES)
        tail = " [{at}|near] the {place}"
    elif draw < 0.42:
        fixed["weather"] = rng.choice(sorted(WEATHERS))
        tail = " on a {weather} day"
    elif draw < 0.54:
        options = [
            x for x in ("swim", "sing", "dance", "climb", "paint", "read", "whistle", "skate", "juggle") if x in SKILLS
        ]
        fixed["skill"] = rng.choice(
            options + (["fly"] * 4 if fixed["kind"] in ("bird", "owl", "bee", "dragon", "penguin") else [])
        )
        tail = " who [wants|learns] to {skill}"
    elif draw < 0.66:
        theme = rng.choice(sorted(THEMES))
        fixed["plot"] = theme
        tail = " " + THEMES[theme]
    at = {
        "beach": "on",
        "farm": "on",
        "mountain": "on",
        "hill": "on",
        "island": "on",
        "river": "by",
        "lake": "by",
        "market": "at",
    }.get(fixed.get("place", ""), "in")
    text = say(rng, f"{ASK} a {word}story about {who}{tail}[.|.|.|!|]", at=at, **fixed)
    if text.split()[0] in ("Can", "Could"):
        text = text.rstrip(".!") + "?"
    return text, fixed, length


THEMES = {
    "lost": "who [is lost|gets lost|cannot find the way home]",
    "share": "who shares [food|everything]",
    "storm": "[and|in] a [big |]storm",
    "fear": "who is afraid",
    "party": "and a birthday[ party|]",
    "help": "who helps a friend",
    "race": "[and|who runs] a race",
    "build": "who builds [something|a house]",
    "journey": "who [goes on a trip|wants to see the world]",
    "noise": "and a strange noise",
    "garden": "and a [seed|garden|flower]",
    "newcomer": "who finds a [new |]friend",
    "truth": "who tells the truth",
    "cook": "who cooks[ something|]",
}


def story_chat(rng: Random) -> list[Message]:
    text, fixed, length = request_story(rng)
    story = tell_story(rng, length, **fixed)
    answer = story.text
    if rng.random() < 0.06:
        text = text.rstrip(".!?") + ". [Give it a title.|Please add a title.|It should have a title.]"
        text = say(rng, text)
        answer = title_of(rng, story) + "\n\n" + answer
    messages = [user(text), assistant(answer)]
    if rng.random() < 0.3:
        messages += questions_about(rng, story, rng.choice([1, 1, 2, 3]))
    elif rng.random() < 0.12:
        messages += [
            user(say(rng, "[Thank you|Thanks|That was nice|I liked that|What a nice story][!|.]")),
            assistant(
                say(
                    rng,
                    "[You are welcome!|I am glad you liked it.|Thank you!] [Would you like to hear another story?|Shall I tell you one more?|]",
                )
            ),
        ]
    elif rng.random() < 0.12:
        again, fixed, length = request_story(rng)
        messages += [
            user(rng.choice(["One more, please. ", "Another one, please. ", "Thank you! ", ""]) + again),
            assistant(tell_story(rng, "short", **fixed).text),
        ]
    return messages


def questions_about(rng: Random, story: Any, n: int) -> list[Message]:
    s = story.slots
    pool: list[tuple[str, str]] = [
        (
            "[Who is the story about|Who was the story about]?",
            "[It|The story] is about {hero}, {article} {adj} {kind}.",
        ),
        ("What is the name of the {kind}?", "The {kind} is [called|named] {hero}."),
        ("Where did {hero} live?", "{hero} lived {home}."),
        ("Where [does|did] {hero} live?", "{He} lived {home}."),
        ("What kind of animal is {friend}?|Who is {friend}?|Who was {friend}?", "{friend} is a {friend_kind}."),
        ("Who was the friend of {hero}?|Who did {hero} meet?", "{friend}, the {friend_kind}."),
        ("Did you like the story?", "[Yes, I like {hero} very much|Yes, I did. {friend} was a good friend]."),
        ("What can we learn from [it|the story|this story]?", "[We can learn that|It tells us that] {lesson}."),
    ]
    if s["kind"] in ("girl", "boy"):
        pool[1] = ("What is the {kind}'s name?", "The {kind}'s name is {hero}.")
    if story.plot in ("find",):
        pool.append(("What did {hero} find?", "{hero} found a {treasure}."))
    if story.plot == "learn":
        pool.append(("What did {hero} [learn|want to learn]?", "{He} wanted to learn to {skill}."))
    out = []
    for question, answer in rng.sample(pool, n):
        out += [user(say(rng, rng.choice(split_top(question)), **s)), assistant(say(rng, answer, **s))]
    return out


# ---------------------------------------------------------------- questions and answers

COLORS_OF = {
    "sky": "blue",
    "grass": "green",
    "snow": "white",
    "blood": "red",
    "night": "dark",
    "lemon": "yellow",
    "banana": "yellow",
    "strawberry": "red",
    "carrot": "orange",
    "sun": "yellow",
    "coal": "black",
    "milk": "white",
    "sea": "blue",
    "leaf": "green",
    "tomato": "red",
    "chocolate": "brown",
    "frog": "green",
    "elephant": "gray",
}
OPPOSITES = "big small|hot cold|day night|up down|happy sad|fast slow|old young|light dark|open closed|full empty|wet dry|hard soft|high low|long short|loud quiet|good bad|left right|black white|early late|rich poor|strong weak|near far|new old|clean dirty|sweet sour|thick thin|first last|inside outside|summer winter|friend enemy".split(
    "|"
)
MADE = {
    "honey": "bees make honey from the nectar of flowers",
    "milk": "milk comes from cows, goats and sheep",
    "wool": "wool comes from sheep",
    "bread": "bread is made from flour and water",
    "cheese": "cheese is made from milk",
    "paper": "paper is made from wood",
    "eggs": "eggs come from hens",
    "rain": "rain falls from the clouds",
    "jam": "jam is made from fruit and sugar",
    "wine": "wine is made from grapes",
    "butter": "butter is made from milk",
    "glass": "glass is made from sand",
    "ice": "ice is frozen water",
    "chocolate": "chocolate is made from cocoa beans",
}
THINGS = {
    "bird": "an animal with feathers and two wings",
    "tree": "a tall plant with a trunk, branches and leaves",
    "river": "water that flows through the land to the sea",
    "mountain": "a very high hill of rock",
    "island": "land with water all around it",
    "cloud": "many tiny drops of water in the sky",
    "rainbow": "a bow of many colors in the sky after rain",
    "moon": "a ball of rock that moves around the earth",
    "sun": "a star that gives us light and warmth",
    "star": "a ball of hot gas, very far away",
    "book": "a set of pages with words to read",
    "bridge": "a way over water",
    "farm": "a place where people keep animals and grow food",
    "garden": "a place where flowers and vegetables grow",
    "nest": "the home that a bird builds",
    "seed": "a small thing from which a plant grows",
    "key": "a thing that opens a lock",
    "map": "a picture that shows where places are",
    "lake": "a large body of water with land around it",
    "forest": "a large place with many trees",
    "clock": "a thing that shows the time",
    "school": "a place where children learn",
    "feather": "a light thing that covers a bird",
    "winter": "the coldest season of the year",
    "summer": "the warmest season of the year",
    "friend": "somebody you like and trust",
    "colibri": "a very small bird that can fly backwards",
    "hummingbird": "a very small bird that can stand still in the air",
    "fledgling": "a young bird that is learning to fly",
    "computer": "a machine that works with numbers and words",
    "robot": "a machine that can move and work",
    "language model": "a program that learned to write from many texts",
    "expert": "somebody who knows one thing very well",
}
DAYS_OF_WEEK = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
WINGED = {"bird", "owl", "duck", "bee", "butterfly", "hen", "penguin"}
LISTS = {
    "animals": [k.word for k in ANIMALS],
    "colors": "red blue green yellow orange purple brown black white pink".split(),
    "fruits": "apples pears bananas cherries grapes plums oranges lemons strawberries".split(),
    "vegetables": "carrots peas beans onions potatoes cabbage lettuce".split(),
    "birds": "owls ducks hens penguins eagles robins sparrows swans hummingbirds".split(),
    "seasons": "spring summer autumn winter".split(),
    "toys": "balls dolls kites drums trains blocks".split(),
    "foods": ["bread", "soup", "cheese", "pie", "rice", "cake", "honey"],
    "trees": "oaks pines birches willows apple trees".replace("apple trees", "maples").split(),
    "days of the week": DAYS_OF_WEEK,
    "months": MONTHS,
}
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()


def join_list(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def qa_pair(rng: Random, capitals: dict[str, str], famous: float = 0.55) -> tuple[str, str]:
    """(question, answer); `famous` is the share of well-known countries among the questions about capitals."""
    draw = rng.random()
    if draw < 0.27:
        if rng.random() < famous:
            country = rng.choice([c for c in FAMOUS if c in capitals])
        else:
            country = rng.choice(sorted(capitals))
        capital = capitals[country]
        return rng.choice(
            [
                (f"What is the capital of {country}?", f"The capital of {country} is {capital}."),
                (f"What is the capital of {country}?", f"The capital of {country} is {capital}."),
                (f"Which city is the capital of {country}?", f"The capital of {country} is {capital}."),
                (f"What's the capital of {country}?", f"The capital of {country} is {capital}."),
                (f"Capital of {country}?", f"{capital}."),
                (f"{capital} is the capital of which country?", f"{capital} is the capital of {country}."),
                (f"In which country is {capital}?", f"{capital} is in {country}."),
            ]
        )
    animal = rng.choice(ANIMALS)
    if draw < 0.48:
        options = [
            (
                f"[What does a {animal.word} eat|What do {plural(animal.word)} eat|What is the food of a {animal.word}]?",
                f"A {animal.word} eats {join_list(list(animal.foods))}.",
            ),
            (
                f"[Where does a {animal.word} live|Where do {plural(animal.word)} live|Where can I find a {animal.word}]?",
                f"A {animal.word} can live {rng.choice(animal.homes)}.",
            ),
            (
                f"How many legs does a {animal.word} have?",
                f"A {animal.word} has {NUMBERS[animal.legs]} legs." if animal.legs else f"A {animal.word} has no legs.",
            ),
            (
                f"Can a {animal.word} fly?",
                f"Yes, a {animal.word} can fly."
                if animal.word in WINGED - {"hen", "penguin"}
                else f"No, a {animal.word} cannot fly.",
            ),
            (
                f"[What sound does a {animal.word} make|What does a {animal.word} do when it is loud]?",
                f"A {animal.word} {PRESENT.get(animal.sound, animal.sound)}.",
            ),
        ]
        if animal.baby not in ("", "baby"):
            options.append(
                (f"What is a [young|baby] {animal.word} called?", f"A young {animal.word} is called a {animal.baby}.")
            )
        if animal.baby not in ("", "baby", "calf", "cub", "chick", "pup", "kit"):
            options.append((f"What is a {animal.baby}?", f"A {animal.baby} is a young {animal.word}."))
        q, a = rng.choice(options)
    elif draw < 0.60:
        word = rng.choice(sorted(THINGS))
        q, a = f'[What is a {word}|What is a {word}|What does the word "{word}" mean]?', f"A {word} is {THINGS[word]}."
        if word in ("sun", "moon"):
            q, a = f"What is the {word}?", f"The {word} is {THINGS[word]}."
        elif word in ("winter", "summer"):
            q, a = f"What is {word}?", f"{word.capitalize()} is {THINGS[word]}."
    elif draw < 0.66:
        word = rng.choice(sorted(COLORS_OF))
        q, a = f"What color is [the|a] {word}?", f"The {word} is {COLORS_OF[word]}."
        if word in ("grass", "snow", "blood", "coal", "milk", "chocolate"):
            q, a = f"What color is {word}?", f"{word.capitalize()} is {COLORS_OF[word]}."
    elif draw < 0.72:
        pair = rng.choice(OPPOSITES).split()
        if rng.random() < 0.5 and pair[0] not in ("new", "old"):
            pair.reverse()
        q, a = f'What is the opposite of [{pair[0]}|"{pair[0]}"]?', f"The opposite of {pair[0]} is {pair[1]}."
    elif draw < 0.76:
        word = rng.choice(sorted(MADE))
        q, a = f"[Where does {word} come from|Where do we get {word} from]?", MADE[word] + "."
        if word == "eggs":
            q = "Where do eggs come from?"
    elif draw < 0.86:
        x, y = rng.randint(0, 12), rng.randint(0, 12)
        if rng.random() < 0.55:
            q, a = f"[What is {x} plus {y}|What is {x} + {y}|How much is {x} + {y}]?", f"{x} + {y} = {x + y}."
        elif rng.random() < 0.6:
            x, y = max(x, y), min(x, y)
            q, a = f"[What is {x} minus {y}|What is {x} - {y}]?", f"{x} - {y} = {x - y}."
        else:
            x, y = rng.randint(1, 10), rng.randint(1, 10)
            q, a = f"[What is {x} times {y}|What is {x} x {y}]?", f"{x} x {y} = {x * y}."
    elif draw < 0.92:
        name = rng.choice(sorted(LISTS))
        n = rng.randint(2, min(5, len(LISTS[name])))
        items = rng.sample(LISTS[name], n)
        q = f"[Name|Tell me|List|Give me] {NUMBERS[n] if rng.random() < 0.8 else n} {name}[.|.|, please.]"
        a = join_list(items) + "."
        if rng.random() < 0.3:
            q = q.rstrip(".") + " as a list."
            a = "\n".join("- " + item for item in items)
            return say(rng, q), a
        return say(rng, q), a[0].upper() + a[1:]
    elif draw < 0.96:
        seq, one = rng.choice([(DAYS_OF_WEEK, "day"), (MONTHS, "month")])
        i = rng.randrange(len(seq))
        nxt, prev = seq[(i + 1) % len(seq)], seq[i - 1]
        q, a = rng.choice(
            [
                (f"[Which|What] {one} comes after {seq[i]}?", f"After {seq[i]} comes {nxt}."),
                (f"[Which|What] {one} comes before {seq[i]}?", f"Before {seq[i]} comes {prev}."),
            ]
        )
    else:
        q, a = rng.choice(
            [
                ("How many days are in a week?", "A week has seven days."),
                ("How many months are in a year?", "A year has twelve months."),
                ("How many seasons are there?", "There are four seasons: spring, summer, autumn and winter."),
                ("How many hours are in a day?", "A day has twenty-four hours."),
                ("How many legs does a spider have?", "A spider has eight legs."),
                ("Which planet do we live on?", "We live on the earth."),
                ("What do plants need?", "Plants need water, light and good earth."),
                ("Why is the sky blue?", "The air scatters blue light more than red light, so the sky looks blue."),
                (
                    "Why do birds fly south?",
                    "Many birds fly south in winter, because it is warm there and they find food.",
                ),
                ("What is the biggest animal?", "The biggest animal is the blue whale."),
                ("What is the tallest animal?", "The tallest animal is the giraffe."),
                ("What is the smallest bird?", "The smallest bird is the bee hummingbird."),
                ("What do we do at night?", "At night we sleep and dream."),
                ("When does the sun rise?", "The sun rises in the morning."),
                ("Where does the sun rise?", "The sun rises in the east."),
            ]
        )
    return say(rng, q), say(rng, a)


PRESENT = {
    "sang": "sings",
    "barked": "barks",
    "squeaked": "squeaks",
    "growled": "growls",
    "croaked": "croaks",
    "quacked": "quacks",
    "meowed": "meows",
    "hooted": "hoots",
    "sniffed": "sniffs",
    "chattered": "chatters",
    "hummed": "hums quietly",
    "whispered": "makes almost no sound",
    "buzzed": "buzzes",
    "grunted": "grunts",
    "mooed": "moos",
    "neighed": "neighs",
    "bleated": "bleats",
    "roared": "roars",
    "trumpeted": "trumpets",
    "called": "calls",
    "clucked": "clucks",
    "howled": "howls",
}
FAMOUS = (
    "France Germany Italy Spain Portugal Greece Poland Austria Switzerland Belgium Netherlands Denmark Sweden Norway Finland Iceland Ireland Hungary Japan China India Russia Canada Mexico Brazil Argentina Chile Peru Egypt Kenya Morocco Turkey Australia Thailand Vietnam Cuba Ukraine Romania Bulgaria Croatia".split()
    + ["United States", "United Kingdom", "South Africa", "New Zealand"]
)


def plural(word: str) -> str:
    return {
        "fox": "foxes",
        "mouse": "mice",
        "butterfly": "butterflies",
        "sheep": "sheep",
        "deer": "deer",
        "wolf": "wolves",
    }.get(word, word + "s")


def qa_chat(rng: Random, capitals: dict[str, str], famous: float = 0.55) -> list[Message]:
    messages: list[Message] = []
    for _ in range(rng.choice([1, 1, 1, 2, 3, 5])):
        q, a = qa_pair(rng, capitals, famous)
        messages += [user(q), assistant(a)]
    return messages


SMALL_TALK = [
    (
        "[Hello|Hi|Hey|Good morning|Good evening|Hi there][!|.|]",
        "Hello! [How can I help you?|What would you like to hear?|It is nice to meet you.|Would you like to hear a story?]",
    ),
    (
        "[How are you|How are you today|How do you do]?",
        "I am [fine|very well], thank you. [How are you?|And you?|What can I do for you?]",
    ),
    (
        "[Who are you|What are you|What is your name|Tell me about yourself|Introduce yourself][?|.]",
        "I am {name}, a [small|very small] language model. I can tell [little stories|stories about animals] and answer [simple|easy] questions.",
    ),
    (
        "[What can you do|How can you help me|What do you know|Help]?",
        "I can tell [short stories|stories] about animals and children, and I can answer simple questions about animals, countries and numbers.",
    ),
    ("[Are you a human|Are you a person|Are you real]?", "No, I am {name}, a small language model."),
    ("[Who made you|Where do you come from]?", "I was trained on two processor cores, to show how Colibri works."),
    (
        "What is Colibri?",
        "Colibri is a program that runs large language models on small computers. It reads the experts from the disk when they are needed.",
    ),
    ("[Thank you|Thanks|Thank you very much|Thanks a lot][!|.|]", "You are welcome[!|. I am glad to help.|!]"),
    ("[Goodbye|Bye|See you|Good night][!|.|]", "[Goodbye|Bye]! [Come back soon|See you soon|Sleep well][.|!]"),
    ("[How old are you|When were you born]?", "I am very young. I was trained only a short time ago."),
    (
        "[Do you like|What do you think of] {animals}?",
        "Yes, I like {animals}. [I know many stories about them.|They are [nice|interesting] animals.|Would you like a story about them?]",
    ),
    (
        "[What is your favorite animal|Which animal do you like]?",
        "I like [birds|small birds], because they can fly and sing.",
    ),
    ("[What is your favorite color|Which color do you like]?", "I like [blue, like the sky|green, like the forest]."),
    (
        "[I am sad|I feel sad|I am not happy today][.|]",
        "I am sorry to hear that. [Would you like to hear a nice story|Shall I tell you a story about a good friend]?",
    ),
    ("[I am happy|I feel good|I had a good day][.|!]", "That is [nice|good] to hear!"),
    (
        "[Can you fly|Can you sing|Can you walk]?",
        "No, I am only a small language model. But I can tell you a story about [a bird|somebody who can].",
    ),
    (
        "[Write a program in Python|What is the meaning of life|Who is the president|Explain quantum physics|What is the stock price|Translate this into German|Solve this equation|Write an essay about history|What happened in the news today|Give me advice about money][.|?]",
        "[I am sorry, I do not know that.|I am too small to know that.|That is too hard for me.] [I can tell you a story about an animal.|I only know simple things and stories.]",
    ),
    ("Say {word}.|Please say the word {word}.|Repeat: {word}", "{word}"),
    (
        "My name is {person}.",
        "[Hello, {person}!|Nice to meet you, {person}.] [How can I help you?|Would you like to hear a story?]",
    ),
]
SAYABLE = (
    "hello yes no apple river moon bird colibri tree window friend mountain garden honey feather star rain".split()
)


def small_talk(rng: Random) -> list[Message]:
    messages = []
    person = rng.choice(HE_NAMES + SHE_NAMES)
    for _ in range(rng.choice([1, 1, 2])):
        q, a = rng.choice(SMALL_TALK)
        slots = {
            "name": NAME,
            "animals": plural(rng.choice(ANIMALS).word),
            "word": rng.choice(SAYABLE),
            "person": person,
        }
        messages += [user(say(rng, rng.choice(split_top(q)), **slots)), assistant(say(rng, a, **slots))]
        if q.startswith("My name") and rng.random() < 0.6:
            messages += [user(say(rng, "What is my name?")), assistant(f"Your name is {person}.")]
    return messages


POEM_LINES = [
    ["[The|A little|A small] bird sings in the tree,", "and the song is [sweet|good] to me."],
    ["The sun goes down, the stars are [bright|white],", "the moon looks down on us tonight."],
    ["The rain falls softly on the [ground|leaves around],", "and makes a quiet, gentle sound."],
    ["The [fox|mouse|cat] runs home across the hill,", "and now the world is calm and still."],
    ["The snow is white, the night is long,", "the wind outside sings a winter song."],
    ["The river runs down to the sea,", "and all the little fish swim free."],
    ["The bee flies home from flower to [hive|tree],", "and [dances|hums] there, glad to be alive."],
    ["A frog sits on a leaf of green,", "the [greenest|finest] frog you have ever seen."],
    ["The owl looks out into the night,", "her eyes are big, her eyes are bright."],
]


def poem_chat(rng: Random) -> list[Message]:
    ask = say(
        rng,
        "[Write|Tell me|Write me|I want] a [short |little |]poem[| about {thing}][.|.|, please.]",
        thing=rng.choice(["the night", "animals", "nature", "the sky", "a bird", "the forest"]),
    )
    lines = [say(rng, line) for couplet in rng.sample(POEM_LINES, rng.choice([2, 2, 3])) for line in couplet]
    lines = [line[0].upper() + line[1:] for line in lines]
    return [user(ask), assistant("\n".join(lines))]


# ---------------------------------------------------------------- JSON, tools, memory

TOOLS = {
    "get_weather": ("Get the weather of a city.", {"city": "string"}),
    "get_time": ("Get the time in a city.", {"city": "string"}),
    "add": ("Add two numbers.", {"a": "integer", "b": "integer"}),
    "multiply": ("Multiply two numbers.", {"a": "integer", "b": "integer"}),
    "find_book": ("Find a book by its title.", {"title": "string"}),
    "set_alarm": ("Set an alarm.", {"hour": "integer"}),
    "search": ("Search for something.", {"query": "string"}),
    "play_song": ("Play a song.", {"name": "string"}),
}


def tool_schema(name: str) -> dict[str, Any]:
    description, fields = TOOLS[name]
    properties = {key: {"type": kind} for key, kind in fields.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": list(fields)},
        },
    }


def tool_chat(rng: Random, capitals: dict[str, str], famous: float = 0.55) -> list[Message]:
    names = rng.sample(sorted(TOOLS), rng.choice([1, 1, 2, 3]))
    tools = [tool_schema(name) for name in names]
    head: list[Message] = [{"role": "tools", "tools": tools}]
    if rng.random() < 0.15:
        q, a = qa_pair(rng, capitals, famous)
        return [*head, user(q), assistant(a)]
    name = names[0]
    rng.shuffle(tools)
    city = rng.choice(
        sorted(capitals.values()) if rng.random() < 0.5 else [capitals[c] for c in FAMOUS if c in capitals]
    )
    x, y = rng.randint(2, 99), rng.randint(2, 99)
    title = rng.choice(
        ["The Red Fox", "The Sea", "A Long Way Home", "The Little Owl", "Winter Songs", "The Old Bridge"]
    )
    if name == "get_weather":
        ask, args = (
            f"[What is the weather in {city}|How is the weather in {city}|Is it raining in {city}|Tell me the weather in {city}]?",
            {"city": city},
        )
        sky, degrees = rng.choice(["sunny", "rainy", "cloudy", "windy", "foggy", "snowy"]), rng.randint(-5, 35)
        result, answer = (
            json.dumps({"weather": sky, "degrees": degrees}),
            f"It is {sky} in {city}, with {degrees} degrees.",
        )
    elif name == "get_time":
        ask, args = f"[What time is it in {city}|What is the time in {city}]?", {"city": city}
        clock = f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}"
        result, answer = json.dumps({"time": clock}), f"It is {clock} in {city}."
    elif name == "add":
        ask, args, result, answer = (
            f"[What is {x} plus {y}|Add {x} and {y}|What is {x} + {y}].",
            {"a": x, "b": y},
            str(x + y),
            f"{x} + {y} = {x + y}.",
        )
    elif name == "multiply":
        ask, args, result, answer = (
            f"[What is {x} times {y}|Multiply {x} by {y}]?",
            {"a": x, "b": y},
            str(x * y),
            f"{x} x {y} = {x * y}.",
        )
    elif name == "find_book":
        ask, args, result, answer = (
            f'[Do you have the book|Find the book|Find] "{title}"[.|?]',
            {"title": title},
            '{"found": true}',
            f'Yes, I found the book "{title}".',
        )
    elif name == "set_alarm":
        hour = rng.randint(5, 11)
        ask, args, result, answer = (
            f"[Wake me up at {hour}|Set an alarm for {hour}|Please set the alarm to {hour}].",
            {"hour": hour},
            '{"ok": true}',
            f"The alarm is set for {hour}.",
        )
    elif name == "search":
        thing = rng.choice(["birds", "old maps", "the moon", "apple pie", "trains", "the sea"])
        ask, args, result, answer = (
            f"[Search for|Look for|Find something about] {thing}.",
            {"query": thing},
            f'{{"results": {y}}}',
            f"I found {y} results for {thing}.",
        )
    else:
        ask, args, result, answer = (
            f'[Play|Please play] "{title}".',
            {"name": title},
            '{"ok": true}',
            f'Now playing "{title}".',
        )
    call = {"type": "function", "function": {"name": name, "arguments": args}}
    return [
        *head,
        user(say(rng, ask)),
        assistant("", tool_calls=[call]),
        {"role": "tool", "content": result},
        assistant(answer),
    ]


def json_chat(rng: Random) -> list[Message]:
    k = rng.choice(ANIMALS + PEOPLE)
    adj, hero = rng.choice(ADJECTIVES), rng.choice(HE_NAMES + SHE_NAMES + IT_NAMES)
    age = rng.randint(1, 12)
    fields: dict[str, Any] = {"name": hero, "kind": k.word}
    ask = f"[Describe|Give me|Write] a {adj} {k.word} named {hero} [as JSON|as a JSON object|in JSON]"
    fields["character"] = adj
    if rng.random() < 0.5:
        fields["age"] = age
        ask += f", {age} years old"
    if rng.random() < 0.4:
        fields["food"] = list(k.foods)
        ask += ", with its food"
    return [user(say(rng, ask + ".")), assistant(json.dumps(fields))]


def memory_chat(rng: Random, capitals: dict[str, str]) -> list[Message]:
    """A fact at the start, other things between, the question at the end: exercises long contexts."""
    person = rng.choice(HE_NAMES + SHE_NAMES)
    word, thing, place = rng.choice(SAYABLE), rng.choice(TREASURES), rng.choice(PLACES)
    facts = [
        (
            f'[The secret word is {word}|Remember this word: {word}|The password is "{word}"].',
            "[What is the secret word|What was the secret word|What word should you remember]?",
            f"The secret word is {word}.",
        ),
        (f"My name is {person}.", "[What is my name|Do you remember my name]?", f"Your name is {person}."),
        (f"I [hid|put] the {thing} near the {place}.", f"Where is the {thing}?", f"The {thing} is near the {place}."),
    ]
    chosen = rng.sample(facts, rng.choice([1, 1, 2]))
    messages: list[Message] = []
    for fact, _, _ in chosen:
        messages += [
            user(say(rng, fact)),
            assistant(say(rng, "[I will remember that|All right|Good, I will remember it].")),
        ]
    for _ in range(rng.choice([0, 1, 1, 2, 2, 3])):
        if rng.random() < 0.6:
            text, fixed, _ = request_story(rng)
            messages += [user(text), assistant(tell_story(rng, rng.choice(["short", "normal"]), **fixed).text)]
        else:
            q, a = qa_pair(rng, capitals)
            messages += [user(q), assistant(a)]
    for _, question, answer in chosen:
        messages += [user(say(rng, question)), assistant(answer)]
    return messages


def several_stories(rng: Random) -> list[Message]:
    """Two to five stories in one conversation, then questions about all of them."""
    messages, stories = [], []
    names: set[str] = set()
    for _ in range(rng.choice([2, 2, 3, 4, 5])):
        text, fixed, length = request_story(rng)
        story = tell_story(rng, length, **fixed)
        if story.slots["hero"] in names or story.slots["friend"] in names:
            continue
        names |= {story.slots["hero"], story.slots["friend"]}
        stories.append(story)
        messages += [user(text), assistant(story.text)]
    for story in rng.sample(stories, min(len(stories), 3)):
        s = story.slots
        pool = [
            (f"Who is {s['hero']}?", f"{s['hero']} is {s['article']} {s['adj']} {s['kind']}."),
            (f"Who is {s['friend']}?", f"{s['friend']} is a {s['friend_kind']}."),
            (f"Where did {s['hero']} live?", f"{s['hero']} lived {s['home']}."),
        ]
        q, a = rng.choice(pool)
        messages += [user(q), assistant(a)]
    return messages


def short_conversation(rng: Random, capitals: dict[str, str]) -> list[Message]:
    """Questions and answers above all: facts need more repetitions than sentences do."""
    draw = rng.random()
    if draw < 0.80:
        return qa_chat(rng, capitals, 0.75)
    if draw < 0.92:
        return small_talk(rng)
    return tool_chat(rng, capitals, 0.75)


SYSTEMS = [
    "You are a [helpful|friendly|kind] [assistant|storyteller|helper].",
    "You are {name}, a small language model.",
    "You [tell stories|answer questions] for children.",
    "[Answer in simple words|Be kind and clear|Use short sentences].",
]


def conversation(rng: Random, capitals: dict[str, str]) -> list[Message]:
    draw = rng.random()
    if draw < 0.60:
        messages = story_chat(rng)
    elif draw < 0.80:
        messages = qa_chat(rng, capitals)
    elif draw < 0.86:
        messages = small_talk(rng)
        if rng.random() < 0.4:
            text, fixed, _ = request_story(rng)
            messages += [user(text), assistant(tell_story(rng, "short", **fixed).text)]
    elif draw < 0.88:
        messages = poem_chat(rng)
    elif draw < 0.925:
        messages = tool_chat(rng, capitals)
    elif draw < 0.945:
        messages = json_chat(rng)
    elif draw < 0.985:
        messages = memory_chat(rng, capitals)
    else:
        messages = several_stories(rng)
    if messages[0]["role"] != "tools":
        if rng.random() < 0.12:
            messages.insert(0, {"role": "system", "content": say(rng, rng.choice(SYSTEMS), name=NAME)})
        elif rng.random() < 0.05 and messages[1].get("content"):
            messages = think(rng, messages)
    return messages


def think(rng: Random, messages: list[Message]) -> list[Message]:
    """The same conversation with short reasoning before the first answer (the template adds the effort line)."""
    ask = messages[0]["content"].rstrip(".!?")
    thought = (
        say(rng, "[The user says|The user writes|I am asked]: ")
        + ask
        + ". "
        + say(rng, "[I will answer in simple words.|I know what to say.|I will give a clear answer.]")
    )
    first = {**messages[1], "reasoning_content": thought}
    return [{"role": "effort", "content": "high"}, messages[0], first]
