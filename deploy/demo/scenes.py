"""What the demo asks: a chat of two users, and few-shot prompts with one fixed head.

Rules
  - Every text is composed here from a fixed seed, so that each process asks exactly the same.
  - A scene is a generator: it yields a Request and is sent the model's answer, which a chat puts into its next
    prompt. Equal answers therefore mean equal prompts.
  - Lengths are in tokens of the model's own tokenizer and hold within one sentence.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Final

Scene = Generator["Request", str, None]


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, as token ids."""

    scene: str
    name: str
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths in tokens. hbm_tokens: what the bounded "HBM" holds."""

    chat_first: int
    chat_page: int
    few_shot_head: int
    hbm_tokens: int
    answer: int


FULL: Final = Sizes(chat_first=2250, chat_page=420, few_shot_head=3850, hbm_tokens=4352, answer=24)
QUICK: Final = Sizes(chat_first=600, chat_page=200, few_shot_head=950, hbm_tokens=1280, answer=8)

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
WINDS = ("south-west", "west", "north", "north-east", "light southerly", "gusty westerly")
SKIES = ("rain before noon", "fog until nine", "a clear morning", "low cloud all day", "sleet in the evening")
SHIPS = ("Marigold", "Silver Tern", "Old Patience", "Kittiwake", "Northern Lass", "Corentine", "Pelican", "Two Sisters")
CARGOES = ("crates of herring", "barrels of oil", "sacks of barley", "boxes of mackerel", "pallets of roof tiles")
PILOTS = ("Anna Brandt", "Joao Reis", "Meg Holloway", "Piet de Wit", "Ines Carvalho")
REMARKS = (
    "The crane on the east quay stood still for two hours because of a torn belt.",
    "A child's red boat was found drifting by the slip and is kept in the office.",
    "The lamp on the north mole was changed after dark; it had failed the night before.",
    "Two visitors asked for the tide table and were given the last printed copy.",
    "The harbour master measured the silt at berth three: forty centimetres since autumn.",
    "A rope was cut at berth six; nobody saw who did it.",
    "Fresh water was short in the afternoon, so ships were asked to fill up at night.",
)
VARIETIES = ("Gravenstein", "Belle de Boskoop", "Bramley", "Cox's Orange", "Egremont Russet", "Discovery")
TASKS = ("pruned", "thinned", "mulched with straw", "sprayed with sulphur", "checked for canker", "picked")
FINDINGS = (
    "Two trees showed canker and were marked with white paint.",
    "The ladder with the blue rungs is broken and must not be used.",
    "Bees were busy from ten o'clock; the hives were moved closer to the hedge.",
    "Deer had been at the young bark again, so the fence was raised by a wire.",
    "The ground was too wet for the cart and everything was carried by hand.",
    "Half of the fruit was small, and it was set aside for juice.",
    "The pump at the lower well lost pressure and was primed twice.",
)
TOPICS: dict[str, tuple[str, ...]] = {
    "delay": (
        "The {time} to {town} left {minutes} minutes late and nobody told us why.",
        "I missed my connection in {town} because the {time} waited {minutes} minutes outside the station.",
    ),
    "refund": (
        "Please pay back the ticket to {town} that I bought for the {time}; the train was cancelled.",
        "I was charged twice for the {time} to {town} and would like {minutes} euros back.",
    ),
    "lost property": (
        "I left a green umbrella on the {time} to {town}, near seat {minutes} of the first coach.",
        "Has anybody handed in a brown satchel? I got off in {town} at about {time}.",
    ),
    "praise": (
        "The conductor of the {time} to {town} helped my mother with {minutes} bags; please thank her.",
        "For once the {time} was early, the coach was warm, and {town} looked lovely. Well done.",
    ),
    "access": (
        "Is there a ramp in {town}? I use a wheelchair and plan to take the {time}.",
        "The lift in {town} was out of order, so I needed {minutes} minutes for the stairs before the {time}.",
    ),
}
TOWNS = ("Alderford", "Bremwick", "Castle Rill", "Dunmere", "Eastholm", "Fernley", "Garrow", "Hollin Bridge")


def harbour_log(rng: random.Random) -> Iterator[str]:
    """Day after day of a small harbour's log."""
    for number in range(1, 1000):
        yield (
            f"Day {number}, {DAYS[number % 7]}. Wind {rng.choice(WINDS)}, force {rng.randint(2, 8)}, "
            f"{rng.choice(SKIES)}. The {rng.choice(SHIPS)} came in at {rng.randint(5, 20):02}:{rng.randint(0, 59):02} "
            f"with {rng.randint(8, 90)} {rng.choice(CARGOES)} and lay at berth {rng.randint(1, 7)}; the pilot was "
            f"{rng.choice(PILOTS)}. {rng.choice(REMARKS)}\n"
        )


def orchard_notes(rng: random.Random) -> Iterator[str]:
    """Entry after entry of an orchard's notebook."""
    for number in range(1, 1000):
        yield (
            f"Entry {number}. Row {rng.randint(1, 40)}, {rng.choice(VARIETIES)}: {rng.randint(5, 30)} trees were "
            f"{rng.choice(TASKS)} by {rng.choice(PILOTS)} and {rng.choice(PILOTS).split()[0]}, in {rng.randint(1, 6)} "
            f"hours, under {rng.choice(SKIES)}. {rng.choice(FINDINGS)}\n"
        )


def letter(rng: random.Random) -> tuple[str, str]:
    """A traveller's letter to a railway, and its topic."""
    topic = rng.choice(list(TOPICS))
    sentence = rng.choice(TOPICS[topic])
    time = f"{rng.randint(5, 22):02}:{rng.choice((5, 12, 20, 35, 48)):02}"
    return sentence.format(time=time, town=rng.choice(TOWNS), minutes=rng.randint(11, 59)), topic


def solved_letters(rng: random.Random) -> Iterator[str]:
    """Examples for the few-shot head."""
    while True:
        text, topic = letter(rng)
        yield f"Letter: {text}\nTopic: {topic}\n\n"


class Writer:
    """Turns texts, and messages with the model's chat template, into prompts; cuts texts to a number of tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prompt(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        """The token ids of a conversation, up to where the assistant speaks."""
        return self.plain(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def plain(self, text: str) -> tuple[int, ...]:
        """The token ids of a text that the model is to continue."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, sentences: Iterator[str], tokens: int) -> str:
        """Whole sentences, together about `tokens` tokens."""
        taken: list[str] = []
        while tokens > 0:
            taken.append(next(sentences))
            tokens -= len(self.plain(taken[-1]))
        return "".join(taken)


class _Conversation:
    def __init__(self, name: str, role: str, sentences: Iterator[str], writer: Writer, sizes: Sizes) -> None:
        self._name, self._sentences, self._writer, self._sizes = name, sentences, writer, sizes
        self._messages = [{"role": "system", "content": role + writer.text(sentences, sizes.chat_first)}]
        self._turns = 0

    def turn(self, question: str) -> Scene:
        """The user asks, after the first turn with another page; the answer joins the conversation."""
        page = self._writer.text(self._sentences, self._sizes.chat_page) if self._turns else ""
        self._turns += 1
        self._messages.append({"role": "user", "content": page + question})
        answer = yield Request("chat", f"{self._name}, turn {self._turns}", self._writer.prompt(self._messages))
        self._messages.append({"role": "assistant", "content": answer})


def chat(writer: Writer, sizes: Sizes) -> Scene:
    """Two users in turn, each with a growing conversation: together more than "HBM" holds."""
    role = "You are a helpful clerk. Answer in one short sentence, from these notes.\n"
    harbour = _Conversation("harbour", role, harbour_log(random.Random(11)), writer, sizes)
    orchard = _Conversation("orchard", role, orchard_notes(random.Random(12)), writer, sizes)
    yield from harbour.turn("Which ship came in on day 2, and with what?")
    yield from orchard.turn("What was found in entry 3?")
    yield from harbour.turn("Who was the pilot on the last day of this page?")
    yield from orchard.turn("Which variety is named in the last entry?")
    yield from harbour.turn("What happened to the lamp on the north mole?")


def few_shot(writer: Writer, sizes: Sizes) -> Scene:
    """The same long head of solved examples before each of three letters."""
    rng = random.Random(13)
    task = f"Name the topic of each letter: {', '.join(TOPICS)}.\n\n"
    head = task + writer.text(solved_letters(rng), sizes.few_shot_head)
    for number in range(1, 4):
        prompt = writer.plain(f"{head}Letter: {letter(rng)[0]}\nTopic:")
        yield Request("few-shot", f"letter {number}", prompt)


SCENES: Final[tuple[Callable[[Writer, Sizes], Scene], ...]] = (chat, few_shot)
