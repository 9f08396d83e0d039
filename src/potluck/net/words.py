"""Lists of words: to name nodes, and to recognise passphrases that are easily guessed."""

from __future__ import annotations

__all__ = ["ADJECTIVES", "ANIMALS", "KNOWN_DIGITS", "KNOWN_WORDS", "LITTLE_WORDS", "USUAL_PAIRS"]

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
"""

# What passwords are made of, and what somebody who guesses a namespace would try first.
_KNOWN_WORDS = """
pass password passwort passwd secret geheim login admin administrator root user guest test demo
welcome hello hallo bonjour hola love liebe iloveyou letmein trustno changeme default master
monkey dragon sunshine princess shadow football baseball soccer hockey superman batman starwars
pokemon matrix freedom whatever computer internet server network cluster potluck training model
python torch pytorch nvidia linux windows apple google samsung microsoft android home house office
work school family mother father mama papa baby honey angel friend summer winter spring autumn
january february march april june july august september october november december monday tuesday
wednesday thursday friday saturday sunday red green blue black white yellow orange purple silver
gold happy lucky magic power money tiger eagle horse dog cat bird fish bear wolf lion flower
cookie chocolate pepper ginger banana cheese coffee pizza michael jennifer jessica thomas daniel
robert james john david andrew ashley michelle anna maria peter alexander charlie jordan hunter
killer ranger buster maggie access cheer qwerty qwertz azerty asdf zxcv correct battery staple one
two three four five six seven eight nine ten zero hundred thousand first last best good new old
big small time year day night world life live king queen star moon sun water fire earth
"""

# The pairs of letters that make up most of a text, in English and its neighbours.
_USUAL_PAIRS = """
th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me
de hi ri ro ic ne ea ra ce li ch ll be ma si om ur ca el ta la ns di fo ho pe ec pr no ct us ac ot
il tr ly nc et ut ss so rs un lo wa ge ie wh ee wi em ad ol rt po we na ul ni ts mo ow pa im mi ai
sh ir su id os iv ia am fi ci vi pl ig tu ev ld ry mp fe bl ab gh ty op wo sa ay ke fr oo av ag ap
gr od bo sp rd do uc bu ei ov rm ep tt oc fa cu rn sc da cr cl du ga qu ue ba um up lu go ru ug lt
pi rr au ck ew mu br bi ui ki rk ob fu ph ub gu dr sl fl sm tw wn sk eu ik nk ff ft pf ah if ef af
lf tz zu
"""

KNOWN_DIGITS = (
    "3141592653589793238462643383279502884197169399375105820974944592307816406286208998628034825342",
    "2718281828459045235360287471352662497757247093699959574966967627724076630353547594571382178525",
    "1414213562373095048801688724209698078569671875376948073176679737990732478462107038850387534327",
)
"""Pi, e and the square root of two, without the point."""

ADJECTIVES = tuple(_ADJECTIVES.split())
ANIMALS = tuple(_ANIMALS.split())
LITTLE_WORDS = frozenset(_LITTLE_WORDS.split())
KNOWN_WORDS = frozenset(_KNOWN_WORDS.split())
USUAL_PAIRS = frozenset(_USUAL_PAIRS.split())
