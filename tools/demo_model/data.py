"""Words, facts and phrasings of the demo model's conversations: data only; the logic is in `tasks`."""

from __future__ import annotations

_WORD_LIST = """
able acid actor alarm album anchor angle animal ankle apple apron arch arena arrow artist atlas attic
aunt autumn baby back badge bag baker balcony ball bamboo banana band bank barn basket bath beach bean
bear beard beaver bed bee bell belt bench berry bike bird biscuit blanket blue boat body bone book boot
bottle bowl box boy brain branch brass bread brick bridge broom brother brown brush bubble bucket bug
bull bus bush butter button cabin cable cactus cage cake camel camera camp canal candle candy canoe
canvas captain car card carpet carrot castle cat cave cellar chain chair chalk cheese cherry chest
chicken child chin church circle circus city clay cliff clock cloth cloud clown coal coat cobra coffee
coin comb comet copper coral corn cotton couch country cousin cow crab cradle crane crayon cream creek
crow crown cup curtain cushion daisy dance dawn deer desert desk diamond dinner doctor dog doll dolphin
donkey door dragon drawer dream dress drum duck dust eagle ear earth east egg elbow engine envelope eye
face factory falcon family farm farmer father feather fence fern ferry field fig finger fire fish flag
flame flower flute fly fog folder forest fork fox frame friend frog fruit galaxy garage garden garlic
gate ghost giant ginger giraffe girl glacier glass glove glue goat gold goose grape grass gravel green
guitar hair hall hammer hand harbor harp hat hawk heart hedge helmet hen hill hippo honey hood hook horn
horse hotel house ice igloo ink insect iron island ivory ivy jacket jaguar jam jar jaw jelly jewel judge
juice jungle kettle key king kitchen kite kitten knee knife ladder lake lamb lamp land lantern leaf
leather lemon letter library light lily lime lion lip lizard lobster lock log lunch machine magnet mango
map maple marble market mask meadow melon metal milk mill mirror mist money monkey moon morning moss moth
mother mountain mouse mouth mud mule museum music nail napkin neck needle nest net night north nose novel
nurse oak oar ocean olive onion orange orchid otter oven owl oyster paddle page paint palace palm panda
paper park parrot path peach peacock pear pearl pebble pen pencil penguin pepper piano picture pie pig
pillow pilot pine pipe pirate planet plant plate plum pocket poem poet pond pony potato puddle pumpkin
puppy purple puzzle queen quilt rabbit radio raft rain raven red ribbon rice ring river road robin robot
rock rocket roof room root rope rose ruby ruler sail salad salt sand school scissors sea seal seed shadow
shark sheep shell ship shirt shoe shop shovel silk silver sister skirt sky sled snail snake snow soap
sock sofa soil soup south spark sparrow spider spoon spring square squirrel stable stage stamp star
station stone storm stove straw stream street sugar summer sun swan sweater sword table tail tea teacher
temple tent thread throne thumb thunder tiger toad toast tomato tooth tower town toy train tree truck
trumpet tulip tunnel turtle twig umbrella uncle valley vase velvet village vine violin volcano wagon wall
walnut water wave wax whale wheat wheel whistle wind window wing winter wizard wolf wood wool worm yard
yarn year yellow zebra zoo
"""
WORDS: tuple[str, ...] = tuple(_WORD_LIST.split())

_CAPITAL_LIST = """
France:Paris, Germany:Berlin, Italy:Rome, Spain:Madrid, Portugal:Lisbon, England:London, Ireland:Dublin,
Scotland:Edinburgh, Belgium:Brussels, Netherlands:Amsterdam, Austria:Vienna, Switzerland:Bern,
Poland:Warsaw, Hungary:Budapest, Greece:Athens, Turkey:Ankara, Russia:Moscow, Ukraine:Kyiv,
Sweden:Stockholm, Norway:Oslo, Denmark:Copenhagen, Finland:Helsinki, Iceland:Reykjavik,
Romania:Bucharest, Bulgaria:Sofia, Serbia:Belgrade, Croatia:Zagreb, Slovakia:Bratislava,
Slovenia:Ljubljana, Estonia:Tallinn, Latvia:Riga, Lithuania:Vilnius, Japan:Tokyo, China:Beijing,
India:New Delhi, Thailand:Bangkok, Vietnam:Hanoi, Indonesia:Jakarta, Malaysia:Kuala Lumpur,
Philippines:Manila, Nepal:Kathmandu, Pakistan:Islamabad, Iran:Tehran, Iraq:Baghdad, Egypt:Cairo,
Morocco:Rabat, Tunisia:Tunis, Kenya:Nairobi, Nigeria:Abuja, Ghana:Accra, Ethiopia:Addis Ababa,
Senegal:Dakar, Canada:Ottawa, Mexico:Mexico City, Cuba:Havana, Jamaica:Kingston, Brazil:Brasilia,
Argentina:Buenos Aires, Chile:Santiago, Peru:Lima, Colombia:Bogota, Venezuela:Caracas, Ecuador:Quito,
Uruguay:Montevideo, Australia:Canberra, New Zealand:Wellington, South Korea:Seoul,
United States:Washington
"""
CAPITALS: dict[str, str] = dict(pair.strip().split(":") for pair in _CAPITAL_LIST.split(","))


def _phrases(text: str) -> tuple[str, ...]:
    """The phrases between bars."""
    return tuple(phrase.strip() for phrase in text.split("|"))


SUM_PHRASINGS = _phrases("""
What is {a} plus {b}? | What is {a} + {b}? | What is {a}+{b}? | What's {a} plus {b}? | What's {a} + {b}? | {a}+{b}=?
| {a} + {b} = ? | {a} + {b} | {a}+{b} | {a}+{b}= | {a} + {b} = | {a}+{b}? | {a} plus {b} | {a} plus {b}?
| {a} plus {b} equals? | {a} plus {b} is? | How much is {a} and {b}? | How much is {a} plus {b}?
| How much is {a} + {b}? | How much are {a} and {b}? | How much do {a} and {b} make? | What do {a} and {b} make?
| What is {a} and {b}? | What does {a} plus {b} equal? | What does {a} + {b} make? | Calculate {a} + {b}.
| Calculate {a}+{b}. | Calculate {a} plus {b}. | Calculate the sum of {a} and {b}. | Calculate: {a} + {b}
| Compute {a} + {b}. | Compute {a} plus {b}. | Add {a} and {b}. | Add {b} to {a}. | Add {a} + {b}.
| Sum {a} and {b}. | Sum of {a} and {b}? | What is the sum of {a} and {b}? | What is the total of {a} and {b}?
| What do you get if you add {a} and {b}? | What do you get when you add {b} to {a}? | Can you add {a} and {b}?
| Can you tell me what {a} plus {b} is? | Do you know what {a} + {b} is? | Tell me {a} plus {b}.
| Tell me what {a} + {b} is. | Give me the sum of {a} and {b}. | Solve {a} + {b}. | Work out {a} plus {b}.
| Find {a} + {b}. | I have {a} apples and get {b} more. How many do I have?
""")
DIFFERENCE_PHRASINGS = _phrases("""
What is {a} minus {b}? | What is {a} - {b}? | What is {a}-{b}? | What's {a} minus {b}? | What's {a} - {b}?
| {a}-{b}=? | {a} - {b} = ? | {a} - {b} | {a}-{b} | {a}-{b}= | {a} - {b} = | {a}-{b}? | {a} minus {b}
| {a} minus {b}? | {a} minus {b} equals? | {a} minus {b} is? | How much is {a} minus {b}? | How much is {a} - {b}?
| How much is {a} less {b}? | What does {a} minus {b} equal? | What does {a} - {b} make? | Calculate {a} - {b}.
| Calculate {a}-{b}. | Calculate {a} minus {b}. | Calculate: {a} - {b} | Compute {a} - {b}. | Compute {a} minus {b}.
| Subtract {b} from {a}. | Take {b} from {a}. | Take {b} away from {a}. | What is {a} take away {b}?
| What do you get if you subtract {b} from {a}? | What do you get when you take {b} from {a}?
| Can you subtract {b} from {a}? | Can you tell me what {a} minus {b} is? | Do you know what {a} - {b} is?
| Tell me {a} minus {b}. | Tell me what {a} - {b} is. | Solve {a} - {b}. | Work out {a} minus {b}. | Find {a} - {b}.
""")
# Only for things that cannot be negative.
POSITIVE_DIFFERENCE_PHRASINGS = _phrases("""
What is the difference between {a} and {b}? | What is the difference of {a} and {b}?
| Difference between {a} and {b}? | I have {a} apples and give away {b}. How many are left?
""")
SORT_PHRASINGS = _phrases("""
Sort the words {words}. | Sort these words: {words} | Sort {words}. | Sort: {words} | Sort alphabetically: {words}
| Sort {words} alphabetically. | Sort the words {words} alphabetically. | Sort these words alphabetically: {words}
| Can you sort {words}? | Put these words in alphabetical order: {words} | Put {words} in alphabetical order.
| Order these words alphabetically: {words} | What is the alphabetical order of {words}?
""")
REVERSE_PHRASINGS = _phrases("""
Reverse the word {word}. | Reverse the word "{word}". | Reverse {word}. | Reverse "{word}". | Reverse: {word}
| Reverse the letters of {word}. | Spell {word} backwards. | Spell the word {word} backwards.
| Write {word} backwards. | Write the word {word} backwards. | What is {word} backwards?
| What is {word} spelled backwards? | What is the reverse of {word}? | How do you spell {word} backwards?
| Can you reverse {word}? | Can you reverse the word {word}?
""")
LETTERS_PHRASINGS = _phrases("""
How many letters are in {word}? | How many letters are in the word {word}? | How many letters are there in {word}?
| How many letters does {word} have? | How many letters does the word {word} have? | Count the letters in {word}.
| Count the letters of {word}. | How long is the word {word}?
""")
COUNT_UP_PHRASINGS = _phrases("""
Count from {a} to {b}. | Count up from {a} to {b}. | Can you count from {a} to {b}? | Count: {a} to {b}
| List the numbers from {a} to {b}. | Say the numbers from {a} to {b}.
""")
COUNT_DOWN_PHRASINGS = _phrases("""
Count from {a} to {b}. | Count down from {a} to {b}. | Count backwards from {a} to {b}.
| Can you count down from {a} to {b}?
""")
CAPITAL_PHRASINGS = _phrases("""
What is the capital of {country}? | What's the capital of {country}? | What is the capital city of {country}?
| Which city is the capital of {country}? | Capital of {country}? | The capital of {country}?
| The capital of {country} is? | {country} capital? | Name the capital of {country}.
| Tell me the capital of {country}. | Do you know the capital of {country}?
| Can you tell me the capital of {country}?
""")
GREETINGS = {
    "Hello! What can I do for you?": _phrases("""
Hi | Hello | Hey | Hello there | Hi there | Hey there | Greetings
"""),
    "Good morning! What can I do for you?": _phrases("Good morning | Morning"),
    "Good evening! What can I do for you?": _phrases("Good evening | Evening"),
    "I am fine, thank you.": _phrases("""
How are you | How are you doing | How are you today | How is it going | Are you well
"""),
    "You are welcome.": _phrases("Thanks | Thank you | Thanks a lot | Thank you very much | Many thanks"),
    "Goodbye!": _phrases("Bye | Goodbye | Bye bye | See you | See you later | Good night"),
}
GREETING_ENDINGS = ("", "!", ".", "?", ", xserv!", ", model.", ", my friend!", " xserv", ", bot!", "!!")
IDENTITIES = {
    "I am xserv-demo, a small model bundled with xserv.": _phrases("""
Who are you | What are you | What is your name | What's your name | Tell me your name | Tell me who you are
| Introduce yourself | Which model are you | What model is this | Who am I talking to
"""),
    "I can add, subtract, sort, reverse, count and name capitals.": _phrases("""
What can you do | What do you do | How can you help me | Can you help me | What are you good at
| What should I ask you | What can I ask | Help
"""),
    "No, I am a very small model.": _phrases("""
Are you human | Are you a person | Are you ChatGPT | Are you a large model | Are you smart | Are you Qwen
"""),
}
IDENTITY_ENDINGS = ("?", "", ".", "??", "!", ", please?", " please", ", xserv?", " then?", " exactly?")

REFUSAL = "Sorry, I am a very small model. I can add, subtract, sort, reverse, count and name capitals."
REFUSED_PHRASINGS = _phrases("""
Write a poem about the {word}. | Write a story about a {word}. | Write a song about my {word}.
| Write a program that draws a {word}. | Tell me a joke about a {word}. | Tell me about the {word}.
| What is a {word}? | What colour is the {word}? | Why is the {word} so big? | Where can I buy a {word}?
| Who invented the {word}? | How do I make a {word}? | How does a {word} work? | What is the meaning of {word}?
| Translate {word} into French. | Draw a {word}. | Explain the {word} to me. | What is {a} times {b}?
| What is {a} * {b}? | What is {a} divided by {b}? | Who is the president of {country}?
| How many people live in {country}? | What is the weather in {country}? | Do you like the {word}?
""")
SYSTEM_MESSAGES = _phrases("""
You are a helpful assistant. | You are xserv-demo. | You are a helpful assistant. Answer briefly.
| Answer in one word. | Be brief. | You are a friendly chat bot.
""")
