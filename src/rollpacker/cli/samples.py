"""``rollpacker samples``: responses of a run with their rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rollpacker.cli.output import Note, Shown, print_note, run_in, shown
from rollpacker.errors import visible
from rollpacker.report.reading.conversations import Message, conversation, parsed, turns_of

_RULE = "─" * 72


@shown
def samples(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Only this prompt, by its id.")] = None,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest rewards first.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Highest rewards first.")] = False,
    longest: Annotated[bool, typer.Option("--longest", help="Most tokens first.")] = False,
    random: Annotated[bool, typer.Option("--random", help="Drawn anew at each call.")] = False,
    grep: Annotated[
        str | None,
        typer.Option(help="Only with this text in response or conversation (case-sensitive)."),
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Most responses (0 for all).")] = 10,
) -> Shown:
    """Print responses of a run with their rewards, even while it runs (latest step first).

    Example: rollpacker samples runs/demo/exact --step 3 --worst --limit 3
    """
    from rollpacker.report.reading.responses import Order, find

    flags: dict[Order, bool] = {"worst": worst, "best": best, "longest": longest, "random": random}
    given: list[Order] = [order for order, chosen in flags.items() if chosen]
    if len(given) > 1:
        raise ValueError(f"--{given[0]} and --{given[1]}: choose one of them")
    order = given[0] if given else "newest"
    run = run_in(run)
    found = find(run, print_note, step=step, prompt=prompt, grep=grep, order=order, limit=limit)
    rows = [
        row | {"messages": parsed(row["messages"])} if "messages" in row else row
        for row in found.rows
    ]
    lines = [*map(_text, found.rows)]
    if found.matching and not found.texts:
        lines.append(Note("their texts were not kept: samples.texts=true keeps them"))
    hint = ": steps are counted from 0" if step is not None else ""
    count = f"{len(found.rows)} of {found.matching} responses (--limit)"
    lines.append(count if found.matching else f"no response matches{hint}")
    return Shown({"samples": rows, "matching": found.matching}, lines)


def _text(row: dict[str, Any]) -> str:
    rewards = [f"{name} {_number(value)}" for name, value in row["rewards"].items()]
    turns = turns_of(row)
    about = (
        f"step {row['step']}",
        f"prompt {visible(row['prompt'], kept='')}",
        f"response {row['sample_index']}",
        f"reward {_number(row['reward'])}",
        *(rewards if len(rewards) > 1 else ()),
        f"{row['tokens']} tokens" + (", cut off" if row["truncated"] else ""),
        *([turns] if turns else ()),
        row["state"],
    )
    logged = [f"{visible(name, kept='')}: {visible(text)}" for name, text in row["extra"].items()]
    prompt, completion = row["prompt_text"], row["completion"]
    texts = [] if prompt is None else [f"[prompt]\n{visible(prompt)}"]
    messages = conversation(row)
    if messages is not None:
        texts += map(_said, messages)
    elif completion is not None:
        texts.append(f"[response]\n{visible(completion)}")
    if row["answer"] is not None:
        texts.append(f"[answer of the data]\n{visible(row['answer'])}")
    return "\n".join([_RULE, " · ".join(about), *logged, *texts, ""])


def _said(message: Message) -> str:
    head = " ".join(visible(part, kept="") for part in (message.role, message.name) if part)
    turn = f" turn {message.turn}: {message.about}" if message.turn else ""
    lines = [f"[{head}]{turn}", *([visible(message.content)] if message.content else ())]
    for call in message.calls:
        lines.append(f"-> {visible(call.name, kept='')} {visible(call.arguments)}")
    lines += [f"-> not understood: {visible(error)}" for error in message.errors]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"
