"""Lists of words: to name nodes, and to recognise passphrases that are easily guessed."""

from __future__ import annotations

__all__ = ["ADJECTIVES", "ANIMALS", "KNOWN_DIGITS", "LITTLE_WORDS"]

# 128 each, short and easily told apart when read out; any change renames nodes.
_ADJECTIVES = """
able agile amber ample apt azure basic bold brave breezy brief bright brisk broad bronze busy calm
candid careful cheery chief civil clear clever cosmic cosy crimson crisp curious dapper daring
dear deep deft eager early earnest easy equal fair fancy fast fearless fine firm fluent fond frank
free fresh friendly frosty gentle glad golden good grand green handy happy hardy hearty honest
humble ideal jolly jovial keen kind lively logical loyal lucid lucky lunar mellow merry mighty
mild modest neat nice nimble noble novel olive open patient plucky polite prime proud punctual
quick quiet rapid ready regal robust rosy royal rustic scarlet serene sharp shiny silent silver
simple sincere sleek smart snug solar solid speedy stable steady sunny swift tidy trusty upbeat
vivid warm wise witty zesty
"""
_ANIMALS = """
adder alpaca ant antelope badger bat bear beaver bee beetle bison boar bobcat buffalo bunny camel
canary caribou carp cat cheetah chipmunk cicada cobra condor cougar cow crab crane cricket crow
deer dingo dolphin donkey dove dragonfly duck eagle eel egret elephant elk emu falcon ferret finch
firefly flamingo fox frog gazelle gecko gibbon giraffe goat goose gopher grouse gull hamster hare
hawk hedgehog heron hornet horse hyena ibex ibis iguana impala jackal jaguar jay kangaroo kestrel
kiwi koala ladybug lark lemur leopard lion lizard llama lobster lynx magpie mantis marmot marten
mink mole moose mouse mule newt ocelot octopus orca ostrich otter owl panda panther parrot peacock
pelican penguin pigeon pony puffin puma quail rabbit raccoon raven robin salmon seal sparrow swan
tiger toad turtle walrus zebra
"""

# What every sentence is full of.
_LITTLE_WORDS = """
a an and are as at be but by can do for from had has have he her him his how i if in is it its me
my no not of on or our she so that the their them they this to too us was we were what when who
why will with you your der die das und ist ein eine le la les de et un une el los y
am auf aus bei bin bis da dass dein den dem des dich dir doch du er es für hat ich ihr im mein mich
mir mit nach nicht nur sein sich sie sind so uns unser von vom war was wer werde wie wir zu zum zur
au aux ce dans des du elle en est il ils je ma mes moi mon ne nous on ou où par pas pour qu que qui
sa se ses son sur ta te toi ton tu vous al con cuyo del ella ellos en es la las lo mi mis muy ni que
quiero se sin su sus te tus una yo che chi ci col da dal dei del della di era gli ho il io la ma mi
ne nel nella noi non nostra nostro per più quel si sono tra vi ao as com do dos em eu já mas na nas
nos não o os para sem seu sua um uma ad amet cum dolor ergo et ex id ipsum lorem nec non pro quam
qui quod sed sit sum tu ut vel
"""

# What passwords are made of, and what somebody who guesses a namespace would try first.

# The pairs of letters that make up most of a text, in English and its neighbours.

KNOWN_DIGITS = (
    "3141592653589793238462643383279502884197169399375105820974944592307816406286208998628034825342",
    "2718281828459045235360287471352662497757247093699959574966967627724076630353547594571382178525",
    "1414213562373095048801688724209698078569671875376948073176679737990732478462107038850387534327",
)
"""Pi, e and the square root of two, without the point."""

ADJECTIVES = tuple(_ADJECTIVES.split())
ANIMALS = tuple(_ANIMALS.split())
LITTLE_WORDS = frozenset(_LITTLE_WORDS.split())
