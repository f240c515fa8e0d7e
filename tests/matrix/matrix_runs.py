"""Real runs by name, and what each of them left behind.

A run is the small job of ``runtime_jobs`` (tests/runtime/support) with one worker, one epoch and
the rewards below, changed by dotted keys (``rewards.0.batch``). It is made when somebody looks at
it, once a session.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import yaml
from matrix_tree import is_key_of
from runtime_jobs import REWARDS, Workshop, cli_here, metrics, run, table

from rollpacker import config
from rollpacker.config import RunConfig

JUDGES = """
import hashlib

FIELDS = ("Cpus_allowed_list", "VmHWM", "Threads")

def status(pid):
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return {k: v.strip() for k, _, v in (line.partition(":") for line in lines) if k in FIELDS}

def note(function, prompts, ids, texts, scores, answer, options):
    row = {"function": function, "pid": os.getpid(), "prompts": prompts, "ids": ids}
    row |= {"texts": texts, "scores": scores, "answer": answer, "options": options}
    if options.get("probe"):
        row["workers"] = [status(pid) for pid in workers()]
    with open(pathlib.Path(__file__).with_suffix(".log"), "a") as file:
        file.write(json.dumps(row) + "\\n")

def seen(prompts, completions, completion_ids, answer=None, pause_s=0.0, broken="", hangs="",
         sends="", after_s=0.0, slow="", flat=(), scale=1.0, freezes="", **rest):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    scores = [scale * ((sum(ids) + ids[0]) % 5) / 4 for ids in completion_ids]
    scores = [0.0 if p in flat else s for p, s in zip(prompts, scores)]
    options = {k: v for k, v in rest.items() if isinstance(v, str | bool | int | float)}
    note("seen", prompts, completion_ids, texts, scores, answer, options)
    marker = pathlib.Path(__file__).with_suffix(".hung")
    if freezes in prompts and not marker.exists():
        marker.touch()
        os.kill(workers()[-1], signal.SIGSTOP)
    if broken in prompts:
        raise RuntimeError("broken on purpose")
    if hangs in prompts and not marker.exists():
        marker.touch()
        time.sleep(1000)
    if sends and not marker.exists():
        marker.touch()
        os.kill(driver(), getattr(signal, sends))
        time.sleep(after_s)
    time.sleep(1.0 if slow in prompts else pause_s)
    return scores

def ill(prompts, completions, completion_ids, answer=None, **_):
    note("ill", prompts, completion_ids, [], [], answer, {})
    raise RuntimeError("ill on purpose")

def bonus(prompts, completions, completion_ids, answer=None, **_):
    scores = [len(ids) / 8 for ids in completion_ids]
    note("bonus", prompts, completion_ids, [], scores, answer, {})
    return scores
"""

Manager = Callable[[Path], AbstractContextManager[dict[str, Any]]]
"""What a run needs around it, from the workshop's folder; gives words for its keys, and keeps what
an effect looks at."""


def alone(_folder: Path) -> AbstractContextManager[dict[str, Any]]:
    """Nothing."""
    return nullcontext({})


def in_process(chosen: RunConfig) -> tuple[Path, str]:
    """``rollpacker train`` without the command line."""
    return run(chosen)


def by_command(chosen: RunConfig) -> tuple[Path, str]:
    """``rollpacker train``, which may be told to stop; its code is said last."""
    file = Path(chosen.output).with_suffix(".yaml")
    file.write_text(yaml.safe_dump(chosen.model_dump(mode="json")), encoding="utf-8")
    done = cli_here("train", file)
    return Path(chosen.output), f"{done.stdout}{done.stderr}\nexit {done.returncode}"


@dataclass(frozen=True, kw_only=True)
class Described:
    """A run that can be made.

    Args:
        name: of its folder.
        keys: dotted keys and their values; in a text, ``{here}`` is the workshop's folder,
            ``{name}`` the run's, and others come from ``around``.
        slow: not in the default suite.
        refused: it does not come to its end, and says why.
        around: what it needs while it runs.
        train: how it is run.
    """

    name: str
    keys: Mapping[str, Any]
    slow: bool = False
    refused: bool = False
    around: Manager = alone
    train: Callable[[RunConfig], tuple[Path, str]] = in_process

    def without(self, leaf: str, **instead: Any) -> Described:
        """The same run but for one leaf, which has its default, or another value ``instead``."""
        kept = {key: value for key, value in self.keys.items() if not is_key_of(key, leaf)}
        assert len(kept) < len(self.keys), f"run {self.name} does not set {leaf}"
        name = "".join(c if c.isalnum() else "-" for c in f"{self.name}-without-{leaf}")
        return replace(self, name=name, keys=kept | instead, slow=True)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a run left behind.

    Args:
        folder: the run's; nothing may be there when it was refused.
        said: to the user.
        error: why it was refused or broke off; empty for a run that came to its end.
        config: what it was run with; None when that was refused.
        here: the workshop's folder.
        described: what was run.
        seconds: that it took.
        extra: what ``Described.around`` left here.
        other: gives another run of the table.
    """

    folder: Path
    said: str
    error: str
    config: RunConfig | None
    here: Path
    described: Described
    seconds: float
    extra: dict[str, Any]
    other: Callable[[str], Ran]

    @property
    def broken(self) -> str:
        """Why it did not come to its end, where it should have."""
        return "" if self.described.refused else self.error

    @functools.cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One object a step."""
        return metrics(self.folder)

    @functools.cached_property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))

    @functools.cached_property
    def table(self) -> pl.DataFrame:
        """All attempts."""
        return table(self.folder)

    @functools.cached_property
    def kept(self) -> pl.DataFrame:
        """Attempts that were trained on."""
        return self.table.filter(pl.col("state") == "kept")

    def trained(self, step: int) -> set[str]:
        """Prompts of a step's update."""
        return set(self.kept.filter(pl.col("step") == step)["prompt"])

    @functools.cached_property
    def calls(self) -> list[dict[str, Any]]:
        """Every call of a reward function, in order."""
        log = self.here / f"{self.described.name}.log"
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        return [json.loads(line) for line in lines]

    def called(self, function: str) -> list[dict[str, Any]]:
        return [call for call in self.calls if call["function"] == function]

    @functools.cached_property
    def steps(self) -> list[list[dict[str, Any]]]:
        """Events and decisions of each step, as they came; each is an object with its ``kind``."""
        found: list[list[dict[str, Any]]] = []
        for line in (self.folder / "journal.jsonl").read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if entry.get("event", {}).get("kind") == "StepStarted":
                found.append([])
            if "event" in entry and found:
                found[-1] += [entry["event"], *entry["decisions"]]
        return found

    @property
    def silence(self) -> float:
        """Seconds in which nothing happened before the first loss."""
        lines = (self.folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()
        entries = [entry for entry in map(json.loads, lines) if "event" in entry]
        lost = [entry["event"]["kind"] for entry in entries].index("DevicesLost")
        return entries[lost]["t"] - entries[lost - 1]["t"]

    def count(self, kind: str) -> list[int]:
        """How often something was in the journal of each step."""
        return [sum(item["kind"] == kind for item in step) for step in self.steps]

    def places(self, step: int, kind: str) -> list[int]:
        """Where it is among the events and decisions of a step."""
        return [place for place, item in enumerate(self.steps[step]) if item["kind"] == kind]

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint holds besides tensors."""
        path = self.folder / f"checkpoint-{step}" / "state.json"
        return json.loads(path.read_text(encoding="utf-8"))

    def tensors(self, step: int) -> dict[str, Any]:
        """Weights of a checkpoint."""
        return loaded(self.folder / f"checkpoint-{step}")

    def optimizer(self, step: int, part: str) -> dict[str, Any]:
        """``master``, ``exp_avg`` or ``exp_avg_sq`` of a checkpoint, by the weight's name."""
        import torch
        from torch.distributed.checkpoint import FileSystemReader, load

        folder = self.folder / f"checkpoint-{step}" / "optimizer"
        assert folder.exists(), folder
        known: Any = FileSystemReader(folder).read_metadata().state_dict_metadata
        names = [name for name in known if name.startswith(f"{part}.")]
        state = {n: torch.empty(known[n].size, dtype=known[n].properties.dtype) for n in names}
        load(state, checkpoint_id=folder, no_dist=True)
        return {name.removeprefix(f"{part}."): tensor for name, tensor in state.items()}

    @functools.cached_property
    def first_weights(self) -> dict[str, Any]:
        """What the run began with."""
        assert self.config is not None
        return loaded(Path(self.config.model.path))


def loaded(folder: Path) -> dict[str, Any]:
    """All tensors of a folder's safetensors files."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    assert files, folder
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


class Matrix:
    """The workshop in which the runs are made.

    Args:
        folder: of everything.
        table: the runs by name.
        prepare: writes models and data files into it, once.
    """

    def __init__(
        self, folder: Path, table: Mapping[str, Described], prepare: Callable[[Workshop], None]
    ) -> None:
        self._shop = Workshop(folder)
        self._table = table
        prepare(self._shop)
        self._made: dict[str, Ran] = {}

    @property
    def seconds(self) -> dict[str, float]:
        """Of each run that was made."""
        return {name: ran.seconds for name, ran in self._made.items()}

    def get(self, described: Described) -> Ran:
        """The run; made when it is asked for the first time."""
        if described.name not in self._made:
            self._made[described.name] = self._make(described)
        return self._made[described.name]

    def _make(self, described: Described) -> Ran:
        here, name = self._shop.folder, described.name
        (here / f"{name}.py").write_text(REWARDS + JUDGES, encoding="utf-8")
        start = time.monotonic()
        with described.around(here) as more:
            tree = self.tree(name, filled(described.keys, more | {"here": str(here), "name": name}))
            chosen, said, error = None, "", ""
            folder = here / name
            try:
                chosen = config.parse(tree)
                folder, said = described.train(chosen)
            except (ValueError, RuntimeError, OSError) as refused:
                error = str(refused) or type(refused).__name__
        return Ran(
            folder=folder,
            said=said,
            error=error,
            config=chosen,
            here=here,
            described=described,
            seconds=time.monotonic() - start,
            extra=more,
            other=lambda wanted: self.get(self._table[wanted]),
        )

    def tree(self, name: str, keys: Mapping[str, Any]) -> dict[str, Any]:
        """A run's whole configuration."""
        reward = {"function": f"{self._shop.folder}/{name}.py:seen"}
        tree = self._shop.tree(name, epochs=1, devices__per_node=1, rewards=[reward])
        for key, value in keys.items():
            put(tree, key.split("."), value)
        return tree


def filled(value: Any, words: Mapping[str, Any]) -> Any:
    """With ``{here}`` and the other words replaced, wherever a text stands."""
    if isinstance(value, str):
        for word, text in words.items():
            value = value.replace(f"{{{word}}}", str(text))
        return value
    if isinstance(value, Mapping):
        return {key: filled(each, words) for key, each in value.items()}
    return [filled(each, words) for each in value] if isinstance(value, list) else value


def put(tree: Any, path: list[str], value: Any) -> None:
    """Set one dotted key; a number is a place in a list, which grows by one."""
    for part, following in itertools.pairwise(path):
        if part.isdigit():
            tree = tree[int(part)]
        else:
            tree = tree.setdefault(part, [] if following.isdigit() else {})
        if following.isdigit() and int(following) == len(tree):
            tree.append({})
    tree[int(path[-1]) if path[-1].isdigit() else path[-1]] = value
