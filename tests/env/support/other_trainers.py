"""Environments as they are written for other trainers, without these trainers."""

import random
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from rollpacker.env.base import Turn


class Ours:
    """A native one, of plain methods."""

    def __init__(self, greeting: str = "Hello") -> None:
        self.greeting = greeting

    def reset(self, row: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"{self.greeting}, {row['name']}"}]

    def step(self, reply: Any) -> Turn:
        return Turn(done=True, reward=float(len(reply["content"])))


class Counter:
    """TRL's: public methods are tools."""

    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.closed = False

    def reset(self, goal: int, **_: Any) -> str:
        self.goal = goal
        return f" Count to {goal}."

    def increment(self, by: int = 1) -> int:
        """Count on.

        Args:
            by: How far.
        """
        self.count += by
        return self.count

    async def look(self) -> str:
        """Look at the count."""
        return str(self.count)

    def get_reward(self) -> float:
        return float(self.count == self.goal)

    def close(self) -> None:
        self.closed = True

    def _hidden(self) -> None:
        """Not a tool."""


class Silent(Counter):
    """TRL's, without a reward or anything to say."""

    get_reward = None

    def reset(self) -> None:
        return None


class Guess:
    """gem's: text in, five things out."""

    def __init__(self, most: int = 100) -> None:
        self.most = most
        self.closed = False

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        random.seed(seed)
        self.number = random.randint(1, self.most)
        return f"Guess from 1 to {self.most}.", {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == "stop":
            return "", 0.0, False, True, {}
        right = str(self.number) in action
        return {"hint": "no"}, 1.0 if right else -0.5, right, False, {}

    def close(self) -> None:
        self.closed = True


class Squares:
    """skyrl-gym's: made of its row."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        self.goal = extras["goal"]
        self.config = env_config
        self.turns = 0

    def init(self, prompt: Any) -> Any:
        if self.config == "plain":
            return prompt, {}
        return [*prompt, {"role": "user", "content": f"The goal is {self.goal}."}], {}

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        done = str(self.goal) in action
        observations = [{"role": "user", "content": "No."}]
        return {"observations": observations, "reward": float(done), "done": done, "metadata": {}}

    def get_metrics(self) -> dict[str, Any]:
        return {"steps": self.turns, "name": "squares"}

    def close(self) -> None:
        self.turns = -1


@dataclass
class StepResult:
    observation: Any
    reward: float | None = None
    done: bool = False


class Move(BaseModel):
    text: str
    speed: int = 1
    metadata: dict[str, Any] = {}


class Seen(BaseModel):
    said: str
    done: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = {}


Action, Observation, State = TypeVar("Action"), TypeVar("Observation"), TypeVar("State")


class Client(Generic[Action, Observation, State]):
    """OpenEnv's, without a server."""

    def __init__(self, base_url: str = "") -> None:
        self.url = base_url
        self.actions: list[Any] = []
        self.closed = False

    async def reset(self, **kwargs: Any) -> StepResult:
        self.kwargs = kwargs
        return StepResult(Seen(said="Say something."))

    async def step(self, action: Any, **_: Any) -> StepResult:
        self.actions.append(action)
        last = len(self.actions) == 2
        return StepResult(Seen(said="Go on."), reward=0.5, done=last)

    def _step_payload(self, action: Any) -> Any:
        return action

    async def close(self) -> None:
        self.closed = True


class MoveClient(Client[Move, Seen, Any]):
    pass


def made_by_a_function(most: int = 7) -> Guess:
    return Guess(most)


async def made_later(most: int = 7) -> Guess:
    return Guess(most)


async def tools_made_later() -> Counter:
    return Counter()


def made_of_a_row(extras: Any) -> Squares:
    return Squares("plain", extras)


def broken() -> Guess:
    raise KeyError("no server")


class NoEnvironment:
    def act(self) -> None:
        pass
