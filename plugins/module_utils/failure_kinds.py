"""What a kind of server failure is: its name, cause and remedy, and how a log tells it.

The catalogue itself is data in the ``failure_catalogue*`` files; this file holds only its vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

AREAS = ("build-env", "version", "capacity", "config", "network", "files", "permission", "drafter", "engine", "runtime")


class Stage(Enum):
    """The part of a server's life in which a kind of failure can strike."""

    START = "start"
    """Only before the server answers. The same words later come from a request and say nothing."""
    SERVE = "serve"
    """Only while it serves."""
    ANY = "any"


class Effect(Enum):
    """What a failure does to the server, once it shows in the log."""

    STOPS = "stops"
    """The server cannot go on, but the line alone does not prove it: a server that became ready outlived it."""
    KILLS = "kills"
    """The line alone proves that the engine is lost (a CUDA fault poisons its process)."""
    SPARES = "spares"
    """The server lives on; the failure is the user's to see all the same."""


@dataclass(frozen=True)
class Matcher:
    """One wording by which a log line points to a kind.

    Attributes:
        text: lower-case words that the line must contain; a cheap sieve before any pattern is tried.
        pattern: regular expression, letter case ignored, that the line must match as well; empty accepts all.
        near: regular expression that a line close by must match: at most ``REACH`` lines away.
        apart: regular expression that no line close by may match.
        never: regular expression that must not match the line.
        absent: lower-case words that must occur nowhere in the log of this start.
        after: lower-case words of which one must occur earlier in the log of this start; empty accepts all.
        hint: the words are also found beside other failures: they decide only when nothing stronger was found.
        any_level: a line logged as information or warning counts like an error.
    """

    text: str
    pattern: str = ""
    near: str = ""
    apart: str = ""
    never: str = ""
    absent: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    hint: bool = False
    any_level: bool = False


@dataclass(frozen=True)
class Kind:
    """One kind of failure.

    Attributes:
        id: stable name, ``lower-case-with-hyphens``.
        area: one of ``AREAS``.
        cause: one sentence, what went wrong.
        remedy: one sentence, what to do, in the names of firstlight's variables.
        matchers: the wordings that point here.
        yields_to: kinds that are the better explanation when the log shows them as well; ``ANY_OTHER`` for all.
        stage: when the failure can strike.
        effect: what it does to the server.
    """

    id: str
    area: str
    cause: str
    remedy: str
    matchers: tuple[Matcher, ...] = field(default=())
    yields_to: tuple[str, ...] = ()
    stage: Stage = Stage.START
    effect: Effect = Effect.STOPS


REACH = 60
"""How many lines away a ``near`` pattern may match."""
ANY_OTHER = "*"
"""In ``yields_to``: every other kind explains the failure better."""
