"""Short openers from which the target writes its own user messages.

A draft has to match what the target says, so the data is the target's own. The openers only
spread it over the kinds of request that people send; everything after them is sampled.
"""

from __future__ import annotations

import random

STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."

_TOPICS = (
    "the ocean, a bakery, ancient Rome, electric cars, photosynthesis, a school trip, the moon, "
    "chess, climate, a lost dog, coffee, the human heart, music, volcanoes, a train journey, "
    "bread, democracy, bees, a small village, football, mountains, the internet, gardening, "
    "dinosaurs, sleep, painting, a robot, tea, rivers, money, a library, winter, cooking, "
    "the stars, health, friendship, trade, insects, history, a detective, languages, exercise, "
    "rain, cities, birds"
).split(", ")

_CHAT = (
    "What is {t}",
    "Explain how {t}",
    "Tell me about {t}",
    "Why is {t}",
    "How do I {v}",
    "Can you help me {v}",
    "What are the benefits of {t}",
    "Give me five tips",
    "Summarize",
    "Compare {t} and",
    "I am writing an email to",
    "Who was",
    "When did",
    "List the main",
    "What is the difference between",
    "Describe {t}",
    "Please rewrite the following sentence:",
    "Translate the following",
    "Hi! ",
    "Is it true that",
    "What should I",
    "Define",
    "",
)
_VERBS = "learn, write, plan, fix, cook, find, make, understand, prepare, build".split(", ")
_MATHS = (
    "{n} has {a}",
    "A store sells {a}",
    "Solve for x:",
    "What is {a} + {b}",
    "Find the value of",
    "{n} buys {a}",
    "A train travels {a} miles",
    "Calculate",
    "If {a}",
    "Simplify the expression $",
    "What is the area of",
    "Let $f(x) =",
    "How many ways",
    "{n} earns ${a} an hour",
    "There are {a} students",
    "Compute $\\",
    "A recipe needs {a} cups",
    "Find all",
    "In a class of {a}",
)
_NAMES = "Anna, Tom, Maria, James, Lily, Sam, Priya, Carlos, Emma, Ben, Mr. Lee, Sarah".split(", ")
_CODE = (
    "Write a Python function to",
    "Write a function that",
    "Write a python function",
    "Implement",
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\ndef ",
    "Write a SQL query",
    "Fix this code:\n```python\n",
    "Write a JavaScript",
    "Explain this code:\n",
    "How do I use",
    "Write a class",
    "Write a program that",
    "What does this Python",
    "Write a function to find",
    "Write a function to check",
    "Write a bash script",
)
_PROSE = (
    "Write a short story about {t}",
    "Write a poem about {t}",
    "Write an essay on {t}",
    "Continue the story:",
    "Write a letter",
    "Write a dialogue between",
    "Write a blog post about {t}",
    "Write a paragraph about {t}",
    "Once upon a time",
    "Describe a day",
    "Write a speech about {t}",
)
KINDS: dict[str, tuple[str, ...]] = {
    "chat": _CHAT,
    "maths": _MATHS,
    "code": _CODE,
    "prose": _PROSE,
}


def sample_opener(rng: random.Random) -> tuple[str, str, str]:
    """One (kind, opener, suffix). The suffix is put behind the message that the target wrote."""
    kind = rng.choice(tuple(KINDS))
    opener = rng.choice(KINDS[kind])
    values = {
        "t": rng.choice(_TOPICS),
        "v": rng.choice(_VERBS),
        "n": rng.choice(_NAMES),
        "a": str(rng.randint(2, 60)),
        "b": str(rng.randint(2, 99)),
    }
    for key, value in values.items():
        opener = opener.replace("{" + key + "}", value)
    suffix = STEP_BY_STEP if kind == "maths" and rng.random() < 0.5 else ""
    return kind, opener, suffix
