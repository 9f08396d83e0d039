"""The 512 words of pairing codes: common, friendly English words that are hard to confuse.

The rules of the list, kept by its test: the first four letters tell every word apart (so they are
enough to type), at least three letters differ between any two (so a slip of one letter has exactly
one correction), and no two sound alike.  512 is a power of two, so nine random bits pick a word
without bias; two words carry 18 bits.  Codes live five minutes, so the list may change freely.
"""

from __future__ import annotations

__all__ = ["WORDS"]

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
