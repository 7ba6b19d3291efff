"""The constants of the draft policy, each with its reason. docs/speculation.md says what they bound."""

from __future__ import annotations

PRIOR, PRIOR_WEIGHT, SEQUENCE_WEIGHT = 0.6, 4.0, 24.0
"""A kind of drafts counts at first as so many tokens with this rate of acceptance, a sequence as so many with the rate
of the kind."""
FADING, SEQUENCE_FADING = 0.985, 0.95
"""The share of such counts that is left after each further draft: the latest 70 drafts of a kind count, and 20 of a
sequence."""

KEPT_TIMES = 8
"""Times of one kind that are kept. Their lower quartile is used, since others use the machine, too."""
STALE_STEPS = 512
"""Steps after which a time is forgotten, as contexts have grown; also the longest back-off."""
BACK_OFF_AGE = 1 / 8
"""The age of a time in steps that one step of a back-off adds: nothing is measured there, and most steps are."""
DRAFTED_S = 1.5e-4
"""Seconds that any draft adds to a step, until measured: mostly Python's."""
TOKEN_COST, SHARED_BY = 0.5, 16
"""The part of its cost that a token beyond the measured ones is taken for, so that what is promising is tried: of one
token's between the two longest steps, or, until these are measured, of a plain step's over its sequences, at least
over so many, since a step of few mostly reads weights."""
DOUBT = 0.5
"""The part of a step's excess over a plain one that is not believed after one measurement, its square after two: a
disturbed one is repeated."""
NEAR = 0.15
"""Relative distance in tokens within which a time counts as measured: less than a tile of products."""
WIDTHS = (*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8), *range(80, 257, 16))
"""Draft tokens that a step may have in all: few, since each shape is recorded."""

CREDIT_S, CREDIT_STEPS = 0.02, 2.0
"""The first loss that trials may make: so many seconds, or steps of the first length, whichever is more."""
ALLOWANCE, LOOKING = 0.008, 0.004
"""The parts of the time that trials, and fruitless questions to the drafter, may take."""
ASKED_S = 5e-5
"""The cost of a question beside the drafter's time: cold code of the engine."""
MOST_SETUP_STEPS = 100.0
"""The first step of a shape, which is recorded, is charged at most so many plain steps: the machine may have slept."""
DISTURBED = 4.0
"""A step with drafts counts as at most so many times what plain steps take for its tokens: others use the machine."""

SHORT_S = 2e-3
"""Recording a shape takes dozens of plain steps shorter than this. There all sequences have the same length, one of
`USUAL`, and `EVIDENCE` draft tokens are compared with samples before any is tried."""
USUAL, EVIDENCE = (1, 3, 7, 15, 31), SEQUENCE_WEIGHT
COLD, COLD_FADING = 1.6, 0.75
"""The excess of the first of such steps in a run, as a multiple of later ones', and what is left of that a step later:
code and memory are cold."""
FIRST = 3
"""The draft length that is tried first; then up to twice as many tokens as ever."""
CHANGE = 1.05
"""The gain that another length, or a new shape, has to promise over the present one: times are noisy. In long steps
so much is added for an untimed length below the longest: times rise in leaps, which interpolation does not show."""
COMES_TRUE = 0.8
"""The part of a promised gain that the budget counts on."""
RUN_STEPS = 8
"""Short steps for which a choice is kept, as choosing takes a part of one; its loss counts as often."""

BACK_OFF_STEPS = 8
"""Steps of the first back-off; each is at most half as long again as the one before."""
PAUSE_STEPS = 4
"""Plain steps in a pause while drafts pay, which times them: the last two are timed, as at the end of a back-off."""
PLAIN_EVERY = 64
"""Steps with drafts before a pause."""
