"""``rollpacker mux demo``."""

from __future__ import annotations

import shlex
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from rollpacker.cli.output import Json, errors, print_json, print_plain, table_of
from rollpacker.cli.output import console as screen


def demo(
    out: Annotated[Path, typer.Option(help="Folder of daemon and runs.")] = Path("runs/mux-demo"),
    steps: Annotated[int, typer.Option(help="Steps of each job.", min=1)] = 12,
    as_json: Json = False,
) -> None:
    """Run two jobs on this machine that share a rollout node and a training node.

    Starts a daemon, two agents and two small training jobs, shows the dashboard while they take
    turns, and prints the gain from sharing. On a terminal the daemon stays until Enter. If the
    folder is in use, it takes the next one: mux-demo-2.

    Example: rollpacker mux demo
    """
    from rollpacker.demo.mux import run_jobs, service, write_jobs
    from rollpacker.demo.run import free_folder, told_warm_start

    model = told_warm_start(errors.print)
    out = free_folder(out)
    with service(out) as here:
        if sys.stdout.isatty():
            webbrowser.open(here.page)
        words = ("rollpacker", "mux", "status", "--state", f"{out / 'daemon'}", "--url", here.url)
        for line in (f"dashboard: {here.page}", f"ask it: {shlex.join(words)}"):
            errors.print(line, soft_wrap=True, highlight=False)
        jobs = write_jobs(out, steps, model)
        found = run_jobs(here, jobs, lambda text: errors.print(text, highlight=False))
        if as_json:
            print_json(found)
            return
        view = table_of("job", "steps", "rollout, s", "training, s")
        for name, job in found["jobs"].items():
            times = (f"{job[key]:.1f}" for key in ("rollout_s", "train_s"))
            view.add_row(name, f"{job['iterations']}", *times)
        screen.print(view)
        busy = ", ".join(f"{pool} {share:.0%}" for pool, share in found["busy"].items())
        print_plain(
            f"together {found['together_s']:.1f} s, their phases one after the other "
            f"{found['one_after_other_s']:.1f} s; nodes busy: {busy}"
        )
        if sys.stdin.isatty():
            input("Enter ends the daemon. ")
