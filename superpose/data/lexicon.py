"""The words of the embedded stories: who, what, where, and sentences that lead nowhere."""

NAMES = tuple(
    """
    Ada Adam Agnes Alan Amos Anna Arthur Bella Ben Carl Clara Cora Daisy David Dora Edith Ella
    Emma Eva Felix Fiona Frank Grace Greta Hanna Harry Helen Henry Hugo Ida Irene Ivan Jack Jane
    Karl Kate Laura Leo Lucy Mark Max Mia Nina Nora Otto Paul Peter Rosa Ruth Sam Sara Simon
    Stella Theo Thomas Tom Vera Walter
    """.split()
)

SURNAMES = tuple(
    """
    Abbott Baxter Bishop Bolton Briggs Carter Cole Cooper Dalton Ellis Fisher Foster Grant Hayes
    Holt Hunt Kent Lloyd Marsh Nash Parker Pierce Quinn Reed Stone Tate Ward Webb West York
    """.split()
)

COMPANIONS = tuple(
    """
    chief coach colleague comrade cousin deputy friend mayor neighbor partner pupil sheriff
    """.split()
)

JOBS = tuple(
    """
    actor artist baker banker barber butcher captain carpenter cook dancer doctor driver farmer
    gardener hunter judge miner nurse painter pilot poet porter sailor singer soldier tailor
    teacher waiter writer
    """.split()
)

RANKS = tuple(
    """
    admiral colonel commander corporal envoy general governor major marshal minister officer
    president sergeant
    """.split()
)

ANIMALS = tuple(
    """
    bear bird calf cat cow crow deer dog donkey duck fish fox goat goose hen horse lamb lion
    monkey mouse owl parrot pig pony rabbit sheep snake turtle wolf
    """.split()
)

VESSELS = tuple(
    """
    barge boat canoe ferry raft ship steamer tug yacht
    """.split()
)

HOUSES = tuple(
    """
    bakery bank cafe castle cinema factory farm garage hotel inn library museum palace school
    shop station theater tower
    """.split()
)

CITIES = tuple(
    """
    Athens Berlin Boston Cairo Dublin Lisbon London Madrid Milan Oslo Paris Prague Rome Tokyo
    Vienna Warsaw Bergen Bremen Genoa Hamburg Kyoto Lima Naples Quebec Salzburg Seville Sydney
    Verona
    """.split()
)

SIGNS = tuple(
    """
    Arrow Comet Dawn Eagle Flower Glory Lily Pearl Pride Queen Rose Spirit Star Victory
    """.split()
)

COLORS = tuple(
    """
    black blue brown gold gray green beige pink purple red silver white yellow
    """.split()
)

QUALITIES = tuple(
    """
    big broken cheap clean cold dark dirty dry simple fine heavy hot little long narrow new modern
    plain poor rare round short soft strange warm wide
    """.split()
)

MATERIALS = tuple(
    """
    brass clay copper cotton glass iron leather marble oak paper pine plastic rubber silk steel
    stone tin velvet wax wool
    """.split()
)

OBJECTS = tuple(
    """
    basket bell blanket book bottle box brush button candle carpet chair clock coat coin comb
    cup doll drum feather flag fork hammer hat kettle key kite ladder lamp lantern letter map
    mirror needle pen pillow plate ring rope scarf shovel spoon sword table tent towel umbrella
    watch whistle
    """.split()
)

TASTES = tuple(
    """
    bitter burnt creamy fresh frozen hot mild plain rich ripe salty sour spicy stale sweet warm
    """.split()
)

INGREDIENTS = tuple(
    """
    almond apple banana barley bean carrot cherry chicken corn ginger lemon mint mushroom nut
    onion peach plum potato pumpkin tomato
    """.split()
)

FOODS = tuple(
    """
    bread broth butter cake candy cider cream flour jam juice milk noodles oil paste pie pudding
    salad sauce soup stew sugar syrup tea wine
    """.split()
)

FILLERS = tuple(
    line.strip()
    for line in """
    It rained all night.
    The wind was cold.
    Nobody said a word.
    The sun came out.
    A bell rang far away.
    The street was empty.
    Then it began to snow.
    The moon was bright.
    They all laughed for a while.
    Time went by slowly.
    The days grew short.
    It was a quiet morning.
    A train passed in the distance.
    The lights went out for a moment.
    Everyone was tired but happy.
    Clouds moved over the hills.
    The children were asleep.
    The river was high that year.
    There was music in the air.
    The old road was full of mud.
    Nothing happened for a long time.
    The air smelled of smoke and rain.
    Far away a door was closed.
    It was warmer than the day before.
    The stars came out one by one.
    A stranger walked past the window.
    The fire burned low.
    Soon the whole town knew about it.
    The leaves turned and fell.
    Somebody sang an old song.
    They waited until it was dark.
    The news came late that week.
    """.strip().splitlines()
)
