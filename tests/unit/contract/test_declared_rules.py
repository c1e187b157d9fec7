"""Rules of a declared job: each place that breaks one is told with the user's own class, file and line."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rlplace.contract.job import Job
from rlplace.contract.rules import of_job, order_warnings
from rlplace.contract.stages import Channel, Stage, full, weights
from rlplace.errors import Problem
from rlplace.workers.worker import Worker


class Player(Worker):
    """Methods as a stage calls them."""

    def play(self, iteration: int) -> None: ...

    def score(self, episodes: int) -> None: ...


class Bare(Worker):
    """No method of its own."""


class Saved(Player):
    """Half of what a checkpoint needs."""

    def save_state(self, state: Any) -> Any: ...


class Loaded(Player):
    """The other half."""

    def load_state(self, state: Any) -> Any: ...


class Server(Player):
    """Puts from a thread that no stage calls."""

    def setup(self) -> None:
        super().setup()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        def put() -> None:
            self.channel("moves").put(1)

        put()


class ServerChild(Server):
    """Inherits the thread, and extends what starts it."""

    def setup(self) -> None:
        super().setup()


class Late(Player):
    """Uses a channel in a method that only a stage would call."""

    def setup(self) -> None:
        self.rank_squared = self.rank**2

    def serve(self) -> None:
        self.channel("moves").put(1)


class Calls(Job):
    """Says its calls by itself."""

    def work(self, config: Any, needs: Any) -> Any: ...


class Greedy(Player):
    """Asks for the value of a key."""

    def __init__(self, epochs: int) -> None: ...


class Strange(Player):
    """Asks for what nothing gives."""

    def __init__(
        self, config: Any, context: Any, depth: Any, *, width: Any
    ) -> None: ...


class Crowded(Player):
    """Says with a text how many ranks it may have."""

    most_ranks: Any = "1"


PLAYER = Player.__new__(Player)
PLAY = Stage("work", full("player").calls("play"))


def problems(
    stages: tuple[Stage, ...] = (PLAY,),
    channels: tuple[Channel, ...] = (),
    **components: Any,
) -> list[Problem]:
    job = Job(
        components=components or {"player": Player}, stages=stages, channels=channels
    )
    return list(of_job(job, {"player": {"epochs": 3}}))


def test_a_whole_job_breaks_no_rule() -> None:
    channel = Channel("moves", "player", "judge")
    both = Stage("work", full("player").calls("play"), full("judge").calls("play"))
    assert problems((both,), (channel,), player=Player, judge=Player) == []


JUDGE_IDLE = (PLAY, Stage("idle", full("judge")))
MOVES = (Channel("moves", "judge", "player"),)


@pytest.mark.parametrize("kind", [Server, ServerChild])
def test_a_component_that_puts_by_itself_needs_no_call(kind: type[Worker]) -> None:
    assert problems(JUDGE_IDLE, MOVES, player=Player, judge=kind) == []


def test_a_method_that_puts_needs_a_call_of_a_stage() -> None:
    (found,) = problems(JUDGE_IDLE, MOVES, player=Player, judge=Late)
    assert found.code == "channel-end-never-called"


def test_a_job_that_says_its_calls_by_itself_needs_no_stage_for_them() -> None:
    both = {"player": Player, "judge": Player}
    job = Calls(components=both, stages=JUDGE_IDLE, channels=MOVES)
    assert list(of_job(job, {})) == []


@pytest.mark.parametrize(
    ("order", "warned"), [(("judge", "player"), False), (("player", "judge"), True)]
)
def test_a_target_that_comes_before_its_source_is_a_warning(
    order: tuple[str, str], warned: bool
) -> None:
    stages = [Stage(f"of {name}", full(name).calls("play")) for name in order]
    both = {"player": Player, "judge": Player}
    job = Job(components=both, stages=stages, channels=MOVES)
    found = list(order_warnings(job))
    assert bool(found) == warned
    for warning in found:
        assert (warning.code, warning.key) == ("taken-before-put", "channels.moves")
        assert warning.what == (
            "player takes in stage of player, and judge puts in stage of judge, which is behind it"
        )
        assert warning.source is not None
        assert warning.source.file.endswith("test_declared_rules.py")


def test_a_target_that_is_called_again_behind_its_source_is_no_warning() -> None:
    stages = [
        Stage("before", full("player").calls("play")),
        Stage("judge", full("judge").calls("play")),
        Stage("after", full("player").calls("play")),
    ]
    both = {"player": Player, "judge": Player}
    job = Job(components=both, stages=stages, channels=MOVES)
    assert list(order_warnings(job)) == []


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "not a worker": (
        {"player": "Player"},
        "components.player: is no class of workers | 'Player' | each rank of a component is an object of a class "
        "derived from rlplace.Worker | class Player(Worker): ...",
    ),
    "an object": (
        {"player": PLAYER},
        f"components.player: is an object, where the class of the workers is asked for | {PLAYER!r} | "
        "the engine makes an object of the class in the process of each rank | "
        'components={..., "player": Player}',
    ),
    "most ranks": (
        {"player": Crowded},
        "components.player: is no number of ranks | most_ranks = '1' | most_ranks is a whole number from 1 on, or None "
        "for any number of ranks | most_ranks = 1",
    ),
    "weights twice": (
        {
            "stages": (
                PLAY,
                Stage("sync", weights("player", to="judge")),
                Stage("again", weights("player", to="critic")),
            ),
            "player": Player,
            "judge": Player,
            "critic": Player,
        },
        'stages.again: player sends its weights in stage sync already | weights("player", ...) | weights have one '
        "version in an iteration: they are sent once, to all that take them | "
        'weights("player", to=["judge", "critic"])        (in stage sync alone)',
    ),
    "saved only": (
        {"player": Saved},
        "components.player: Saved has save_state and no load_state | None | what a checkpoint has of a component is "
        "written by one of the two and read by the other | def load_state(self, ...): ...",
    ),
    "loaded only": (
        {"player": Loaded},
        "components.player: Loaded has load_state and no save_state | None | what a checkpoint has of a component is "
        "written by one of the two and read by the other | def save_state(self, ...): ...",
    ),
    "no stages": (
        {"stages": (), "player": Player},
        "stages: the job has no stage | [] | an iteration is made of stages; each calls methods of components | "
        'stages=[Stage("work", full("<component>").calls("<method>"))]',
    ),
    "equal stages": (
        {"stages": (PLAY, PLAY)},
        "stages.work: two stages have this name | work | metrics, the timeline and errors call a stage by its name | "
        'Stage("work_2", ...)',
    ),
    "never called": (
        {"player": Player, "judge": Bare},
        "components.judge: no stage names this component | None | its workers would start and do nothing | "
        'full("judge").calls("<method>") in a stage        (or leave the component out)',
    ),
    "unknown in a stage": (
        {"stages": (PLAY, Stage("more", full("teacher")))},
        "stages.more: the job has no component 'teacher' | teacher | components: player | "
        'components={..., "teacher": <class of its workers>}',
    ),
    "misspelt in a stage": (
        {"stages": (PLAY, Stage("more", full("plaier")))},
        "stages.more: the job has no component 'plaier', did you mean 'player'? | plaier | components: player | "
        'full("player")',
    ),
    "misspelt target": (
        {
            "stages": (PLAY, Stage("sync", weights("player", to=["judge", "juge"]))),
            "player": Player,
            "judge": Player,
        },
        "stages.sync: the job has no component 'juge', did you mean 'judge'? | juge | components: player, judge | "
        'weights("player", to="judge")',
    ),
    "unknown target near its sender": (
        {"stages": (PLAY, Stage("sync", weights("player", to="plaier")))},
        "stages.sync: the job has no component 'plaier' | plaier | components: player | "
        'components={..., "plaier": <class of its workers>}',
    ),
    "weights to itself": (
        {"stages": (PLAY, Stage("sync", weights("player", to="player")))},
        'stages.sync: player cannot send its weights to itself | weights("player", to="player") | '
        "ranks of one component have their process group to exchange weights | "
        'weights("player", to="<another component>")',
    ),
    "weights to itself and others": (
        {
            "stages": (PLAY, Stage("sync", weights("player", to=["judge", "player"]))),
            "player": Player,
            "judge": Player,
        },
        'stages.sync: player cannot send its weights to itself | weights("player", to="player") | '
        "ranks of one component have their process group to exchange weights | "
        'weights("player", to="judge")',
    ),
    "constructor that asks for a key": (
        {"player": Greedy},
        "components.player: its constructor asks for keys of the block: epochs | def __init__(self, epochs) | "
        "a worker gets the whole block of its component as one mapping, which is self.config too | "
        'def __init__(self, config):      (and config["epochs"])',
    ),
    "constructor with other arguments": (
        {"player": Strange},
        "components.player: its constructor has arguments that the engine does not know: depth, width | "
        "def __init__(self, config, context, depth, *, width) | "
        "a worker is made from the block of its component, as a mapping, and its place | "
        'def __init__(self, config):      (and config["depth"], a key of the block)',
    ),
    "empty stage": (
        {"stages": (PLAY, Stage("more"))},
        "stages.more: the stage names no component | None | nothing would happen in it | "
        'Stage("more", full("<component>").calls("<method>"))',
    ),
    "missing method": (
        {"stages": (Stage("work", full("player").calls("rehearse")),)},
        "stages.work: Player has no method 'rehearse' | player.calls(\"rehearse\") | methods of Player: play, score | "
        "def rehearse(self, iteration): ...",
    ),
    "missing method of none": (
        {"player": Bare},
        "stages.work: Bare has no method 'play' | player.calls(\"play\") | methods of Bare: none of its own | "
        "def play(self, iteration): ...",
    ),
    "misspelt method": (
        {"stages": (Stage("work", full("player").calls("playy")),)},
        "stages.work: Player has no method 'playy', did you mean 'play'? | player.calls(\"playy\") | methods of "
        'Player: play, score | .calls("play")',
    ),
    "unfilled argument": (
        {"stages": (Stage("work", full("player").calls("score")),)},
        'stages.work: Player.score asks for episodes | player.calls("score") | a stage fills in iteration and '
        "version; all else has a default, or comes by the config | def score(self, iteration): ...",
    ),
    "scales": (
        {"stages": (Stage("work", full("player").calls("play", scales="batch")),)},
        'stages.work: seconds of play cannot scale so | scales="batch" | "ranks": the ranks share the work; '
        '"constant": each rank does all of it | .calls("play", scales="ranks")',
    ),
    "equal channels": (
        {"channels": (Channel("moves", "player", "player"),) * 2},
        "channels.moves: two channels have this name | moves | a worker finds a channel by its name: "
        'self.channel(name) | Channel("moves_2", ...)',
    ),
    "unknown end": (
        {"channels": (Channel("moves", "player", "teacher"),)},
        'channels.moves: the job has no component \'teacher\' | Channel("moves", "player", "teacher") | '
        "components: player; a channel without a reader fills up | "
        'components={..., "teacher": <class of its workers>}',
    ),
    "misspelt end": (
        {"channels": (Channel("moves", "plaier", "player"),)},
        "channels.moves: the job has no component 'plaier', did you mean 'player'? | "
        'Channel("moves", "plaier", "player") | components: player; a channel without a reader fills up | player',
    ),
    "a source that no stage calls": (
        {
            "stages": (PLAY, Stage("idle", full("judge"))),
            "channels": (Channel("moves", "judge", "player"),),
            "player": Player,
            "judge": Player,
        },
        "channels.moves: judge is to put into it, and no stage calls a method of judge | "
        'Channel("moves", "judge", "player") | each get would wait until its deadline; judge is in idle, without '
        'calls | full("judge").calls("play")        (in a stage beside or before the one that takes)',
    ),
    "a target that no stage calls": (
        {
            "stages": (PLAY, Stage("idle", full("judge"))),
            "channels": (Channel("moves", "player", "judge"),),
            "player": Player,
            "judge": Bare,
        },
        "channels.moves: judge is to take from it, and no stage calls a method of judge | "
        'Channel("moves", "player", "judge") | each put would wait until its deadline once the channel is full; judge '
        'is in idle, without calls | full("judge").calls("<method>")        (in a stage beside or behind the one that '
        "puts)",
    ),
    "no room": (
        {"channels": (Channel("moves", "player", "player", items=0),)},
        "channels.moves: must be >= 1 | items=0 | a put waits until there is room for its item | items=64",
    ),
}


@pytest.mark.parametrize(("job", "text"), CASES.values(), ids=CASES)
def test_each_rule_has_its_words(job: dict[str, Any], text: str) -> None:
    found = problems(**job)[0]
    assert (
        f"{found.key}: {found.what} | {found.got} | {found.why} | {found.fix}" == text
    )


@pytest.mark.parametrize(("job", "text"), CASES.values(), ids=CASES)
def test_each_error_names_the_line_of_the_user(job: dict[str, Any], text: str) -> None:
    source = problems(**job)[0].source
    assert source is not None
    assert source.file.endswith("test_declared_rules.py")
    assert source.line
