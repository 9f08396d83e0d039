"""One-time pairing codes such as ``7-guitar-harbor``: made, shown, and read as people type them.

The number is a slot: it finds the right listener when two people pair at once.  The two words are
the password, 18 bits.  That is enough because a guess costs one of three tries: the chance to guess
the code is 3 in 262,144.  The whole code is hashed into the key, so a mistyped slot fails too.
Capitals and any separators are accepted, and four letters of a word are enough.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from potluck.errors import DistributedError

# --------------------------------------------------------------------------------------------------
# The 512 words of pairing codes: common, friendly English words that are hard to confuse.
#
# The rules of the list, kept by its test: the first four letters tell every word apart (so they are
# enough to type), at least three letters differ between any two (so a slip of one letter has
# exactly one correction), and no two sound alike.  512 is a power of two, so nine random bits pick
# a word without bias; two words carry 18 bits.  Codes live five minutes, so the list may change
# freely.

WORDS: tuple[str, ...] = tuple(
    """
acorn admiral agenda airport alarm almond alphabet anchor anthem antique apple apricot apron
arcade artist asparagus astronaut athlete atlas attic auction autumn avenue avocado backpack
badger bakery ballad bamboo banana bandage barrel basket bathtub beacon beaver bedroom beetle
blossom blueberry bonfire bookcase bowling bracelet branch breakfast breeze brick bridge
brother bubble buffalo builder bumper bungalow button cabbage cabin cactus calendar camera
campfire candle canvas canyon captain caramel carnival carpet cashew ceiling celery cello
ceramic cereal chalk champion charcoal cheese cherry chicken chimney chipmunk chocolate chorus
cinema circus citizen clarinet classroom clever cliff climate clock coach cobweb coconut coffee
collar compass concert cookie copper cousin coyote crater crocodile crown crystal cupboard
cyclone cymbal daffodil dairy dancer dandelion delta dentist desk detective diamond diploma
doctor dolphin domino donkey doorbell dragon dream dresser drummer eagle earring earth echo
eclipse editor eggplant elbow elephant elevator empire engine envelope equator escalator
evening evergreen explorer eyebrow fabric factory falcon family farmer fern festival fiddle
finger firefly flamingo flannel flashlight flavor foam folder football forest fortune fossil
freckle friend frog fruit furnace future galaxy garage garden garlic gazebo gift giraffe
glacier glass glider globe goblet goldfish gorilla granite greenhouse grocery guitar gumdrop
haircut hallway hamburger hammock hamster harbor harmony harp harvest hazelnut headphone
hedgehog helicopter helmet herald hexagon hiccup highway hobby holiday hopscotch horizon horse
hospital hurricane husky iceberg icicle idea igloo iguana indigo inkwell insect island ivory
jaguar jersey jester jewel jubilee jungle juniper justice kangaroo kennel ketchup kilogram
kingdom kitten knapsack knee ladybug lagoon language lantern laptop laser laundry lavender
leather lecture legend lentil leopard lesson library lilac linen lizard lobster locket
locomotive lodge lotus lullaby lunch lyric machine magazine magnet magpie mailbox mandolin
mango marble marigold marmalade mascot mattress meadow medicine melody mercury mermaid meteor
microphone midnight mineral mirror molecule morning mosaic mountain muffin museum mushroom
mustard mystery napkin necklace nectar neighbor neptune nickel noodle notebook nugget nutmeg
oasis oatmeal oboe ocean octopus office olive onion opera orange orchard origami ostrich otter
outfit oxygen package pajamas palace pamphlet papaya parachute parrot parsley passport pastry
pelican penguin perfume phantom pickle picnic pineapple pizza planet plum polka poncho popcorn
porcupine portrait postcard potato pretzel prince prism propeller pudding pumpkin purple
pyramid quartz quilt quiver rabbit radish railroad rainbow raisin raspberry rectangle reef
reindeer relay restaurant ribbon rodeo rosemary ruby rudder safari saffron sandal sapphire
sardine satellite sauce saxophone scarf school science scissors scooter seagull secret shepherd
sheriff shovel silver skateboard skeleton sketch skillet sleeve slipper sloth smile sneaker
snowflake soccer spaceship spaghetti spatula spinach spiral sponge spring squash squirrel
stadium stapler starfish statue stereo sticker storm strawberry student subway sugar suitcase
sunflower sunset surfboard symphony syrup tadpole tailor talent tambourine tangerine tapestry
tavern teapot telescope temple tennis terrace thermos timber toast topaz tornado tortoise
toucan tractor trampoline triangle trombone trophy trousers trumpet tugboat tundra turkey
turnip turquoise tuxedo twig typhoon umbrella unicorn universe upstairs utensil vacation vacuum
valley vegetable village violet visitor vitamin volleyball voyage waffle waiter walnut
warehouse watermelon wave weekend wheat whisker widget willow windmill wisdom wombat woodpecker
worker world yardstick yesterday yogurt zebra zigzag zodiac
""".split()
)


# --------------------------------------------------------------------------------------------------

SLOTS = 99  # two digits are easy to say
_EXAMPLE = "7-guitar-harbor"
_PREFIX = 3  # letters: fewer would make slips of the finger look like words
_LONGEST = 100  # characters that could be meant as a code
_CUTOFF = 0.7  # similarity from which a word is worth suggesting: one slip in three letters


class InvalidCode(DistributedError, ValueError):
    """What was typed is not a pairing code; the text says what it could have been."""


@dataclass(frozen=True, slots=True, repr=False)
class PairingCode:
    """A slot and two words; ``str()`` is what a person sees and types."""

    slot: int
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.slot}-{self.first}-{self.second}"

    def __repr__(self) -> str:
        return f"PairingCode({self.slot}-…)"  # the words are a password: they stay out of logs

    @property
    def password(self) -> bytes:
        """What both sides feed into the key exchange."""
        return str(self).encode()


def new_code(entropy: Callable[[int], bytes], taken: Collection[int] = ()) -> PairingCode:
    """A fresh code; ``taken`` are slots that other listeners in the network show already."""
    free = [slot for slot in range(1, SLOTS + 1) if slot not in taken] or [SLOTS]
    number = int.from_bytes(entropy(8), "big")
    first, number = number % len(WORDS), number // len(WORDS)
    second, number = number % len(WORDS), number // len(WORDS)
    return PairingCode(free[number % len(free)], WORDS[first], WORDS[second])


def parse_code(text: str) -> PairingCode:
    """The code that a person typed.

    >>> str(parse_code(" 7 Guitar HARB "))
    '7-guitar-harbor'
    >>> try:
    ...     parse_code("7-gitar-harbor")
    ... except InvalidCode as error:
    ...     print(error)
    There is no code word "gitar". Did you mean 7-guitar-harbor?
    """
    parts = re.findall(r"[0-9]+|[^\W\d_]+", text[:_LONGEST].casefold())
    numbers = [part for part in parts if part.isdecimal()]
    if len(text) > _LONGEST or len(parts) != len(("slot", "first", "second")) or len(numbers) != 1:
        raise InvalidCode(
            "A pairing code is a number and two words",
            got=text[:_LONGEST],
            hint=f"It looks like {_EXAMPLE}.",
        )
    slot = int(numbers[0])
    if not 1 <= slot <= SLOTS:
        raise InvalidCode(
            f"A pairing code starts with a number from 1 to {SLOTS}, not {slot}", got=slot
        )
    words = [part for part in parts if not part.isdecimal()]
    found = [_candidates(word) for word in words]
    for word, candidates in zip(words, found, strict=True):
        if len(candidates) != 1 or not candidates[0].startswith(word):
            raise _unknown(word, slot, found)
    return PairingCode(slot, found[0][0], found[1][0])


def _candidates(word: str) -> list[str]:
    """The words that may be meant: itself, those it begins, or those it resembles; best first."""
    if word in WORDS:
        return [word]
    begun = [known for known in WORDS if len(word) >= _PREFIX and known.startswith(word)]
    return begun or difflib.get_close_matches(word, WORDS, n=3, cutoff=_CUTOFF)


def _unknown(word: str, slot: int, found: list[list[str]]) -> InvalidCode:
    """The error for a word, with every code that could be meant (at most three for each word)."""
    codes = [f"{slot}-{first}-{second}" for first in found[0][:3] for second in found[1][:3]]
    hint = f"Did you mean {' or '.join(codes[:3])}?" if codes else "Read the code once more."
    return InvalidCode(f'There is no code word "{word}"', got=word, hint=hint)
