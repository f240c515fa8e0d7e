"""``rollpacker doctor``: checks this machine, or whether a job fits into memory."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from rollpacker.cli.output import Json, Overrides, console, print_json, print_plain, table_of

if TYPE_CHECKING:
    from rollpacker.job.ask.doctor import MemoryFit
    from rollpacker.sim.memory.needs import JobMachine, MemoryNeeds, Part
    from rollpacker.sim.memory.settings import Changes

_GB = 1e9
_REPORT = Path("rollpacker-doctor.json")
_OTHERWISE = {
    "model.dtype": "computed in bfloat16",
    "model.lora_rank": "trains adapters instead of all weights",
}


def doctor(
    path: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="YAML file: does its job fit?")
    ] = None,
    overrides: Overrides = None,
    device: Annotated[
        str | None, typer.Option(help="With CONFIG: a GPU by name, instead of this machine.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="How many of --device.", min=1)] = None,
    run: Annotated[
        bool, typer.Option("--run", help="With CONFIG: try engine, drafts and a step here.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check this machine and print the fix for each failure, or with CONFIG a job's memory.

    Example: rollpacker doctor job.yaml trainer.kind=fsdp --device H100 --gpus 8
    """
    if gpus is not None and device is None:
        raise ValueError(f"--gpus {gpus}: add --device, such as --device H100")
    if run:
        if path is None or device is not None:
            raise ValueError("--run tries a job on this machine: doctor job.yaml --run")
        _try(path, overrides or [], as_json)
    elif path is not None:
        _job(path, overrides or [], device, gpus or 1, as_json)
    elif device is not None:
        raise ValueError(f"--device {device}: name the job for it: doctor job.yaml")
    else:
        _installation(as_json)


def _try(path: Path, overrides: list[str], as_json: bool) -> None:
    """Try a job's parts here, and write the findings as JSON for a bug report."""
    from rollpacker import config
    from rollpacker.job.ask.doctor import trial, versions
    from rollpacker.job.plan.defaults import with_gpu_defaults
    from rollpacker.runtime.record.progress import Progress

    found: list[dict[str, Any]] = []
    for finding in trial(with_gpu_defaults(config.load(path, overrides), Progress())):
        found.append(asdict(finding))
        _REPORT.write_text(json.dumps({"versions": versions(), "steps": found}, indent=1) + "\n")
        if not as_json and finding.ok is not None:
            _mark(finding.ok, f"{finding.step}: {finding.detail} ({finding.seconds:.1f} s)")
        elif not as_json:
            print_plain(f"--  {finding.step}: {finding.detail}")
    if as_json:
        print_json({"versions": versions(), "steps": found})
    else:
        print_plain(f"written to {_REPORT}, to attach to a report")
    if not all(each["ok"] for each in found):
        raise typer.Exit(1)


def _installation(as_json: bool) -> None:
    from rollpacker.runtime.cluster.machine_checks import checks

    found = checks()
    if as_json:
        print_json({"checks": [asdict(check) for check in found]})
    else:
        for check in found:
            fix = "" if check.ok else f"\n      fix: {check.fix}"
            _mark(check.ok, f"{check.name}: {check.detail}{fix}")
    if not all(check.ok for check in found):
        raise typer.Exit(1)


def _mark(ok: bool, text: str) -> None:
    mark = "[green]ok[/]  " if ok else "[red]no[/]  "
    console.print(mark + escape(text), highlight=False, soft_wrap=True)


def _job(path: Path, overrides: list[str], device: str | None, gpus: int, as_json: bool) -> None:
    from rollpacker import config

    loaded = config.load(path, overrides)
    from rollpacker.job.ask.doctor import look

    found = look(loaded, device, gpus)
    if as_json:
        print_json(_as_json(found))
    else:
        _print(found)
    if not found.fits:
        raise typer.Exit(1)


def _print(found: MemoryFit) -> None:
    needs, machine = found.needs, found.needs.machine
    print_plain(_headline(found))
    if found.defaults:
        from rollpacker.sim.memory.settings import in_words

        print_plain(f"chosen for keys that the job leaves out: {in_words(found.defaults)}")
    _table("each that decodes" if needs.trainer else "each device", needs.worker)
    if needs.trainer:
        _table("each that trains", needs.trainer)
    print_plain(
        f"KV cache of an engine: {needs.sequences:,} responses of full length ({needs.longest:,} "
        "tokens) at a time, prompts aside"
    )
    if machine.on_device > 1 or needs.shared:
        devices = _count(machine.on_device, "device")
        also = f" and once {_listed(needs.shared)}" if needs.shared else ""
        print_plain(f"on {'each GPU' if machine.cuda else 'this machine'}: {devices}{also}")
    _mark(needs.fits, _verdict(needs))
    if not needs.fits:
        print_plain(f"      fix: {_fix(found)}")
        if found.otherwise is not None:
            print_plain(f"       or: {_changed(*found.otherwise, needs)}")
    _print_host(found)
    _print_missing(found.config.engine.kind)
    print_plain("~ marks estimates. No model was loaded, and no prompt was read")


def _table(title: str, parts: tuple[Part, ...]) -> None:
    view = table_of(title, "GB", "")
    view.columns[2].justify = "left"
    for part in parts:
        view.add_row(part.name, _amount(part), part.note)
    view.add_section()
    view.add_row("together", f"{sum(part.size for part in parts) / _GB:.2f}", "")
    console.print(view)


def _print_host(found: MemoryFit) -> None:
    needs = found.needs
    if found.free_host is not None:
        _mark(found.host_fits, _host(found))
        if not found.host_fits:
            print_plain("      fix: fewer devices (devices.per_node) or a machine with more memory")
    elif needs.host:
        print_plain(_host(found))
    if not needs.shared_weights:
        return
    text = f"weights for the engines: {needs.shared_weights / _GB:.2f} GB in /dev/shm"
    if not found.folders:
        print_plain(f"{text}: check that it has as much (in a container: --shm-size)")
        return
    free = ", ".join(f"{folder} has {size / _GB:.1f} GB free" for folder, size in found.folders)
    _mark(found.weights_fit, f"{text}, or in a file ({free})")
    if not found.weights_fit:
        print_plain("      fix: make /dev/shm larger (in a container: --shm-size), or set TMPDIR")


def _print_missing(engine: str) -> None:
    """The job may run on another machine, so this is not a failure."""
    if engine == "vllm" and find_spec("vllm") is None:
        from rollpacker.engine.configured import GET_VLLM

        print_plain(f"vLLM is not installed here. Where the job is to run, {GET_VLLM}")


def _count(number: int, what: str) -> str:
    many = "es" if what.endswith("s") else "s"
    return f"{number} {what}{'' if number == 1 else many}"


def _headline(found: MemoryFit) -> str:
    config, machine, division = found.config, found.needs.machine, found.needs.division
    place = _gpus(machine) if machine.cuda else "CPU"
    lora = f", LoRA rank {config.model.lora_rank}" if config.model.lora_rank else ""
    devices = _count(machine.workers, "device")
    if found.needs.trainer:
        devices = f"{division.decoding} + {_count(division.training, 'device')} (decode + train)"
    sizes = " and ".join(str(size) for size in division.sizes)
    over = f" (tensor parallel {sizes})" if division.sizes != (1,) else ""
    return (
        f"{config.model.path}: {found.shape.count.words}, "
        f"{config.model.dtype}{lora}; {devices} on {place}, "
        f"{_count(division.processes, 'process')}, trainer {config.trainer.kind}, "
        f"engine {config.engine.kind}{over}"
    )


def _verdict(needs: MemoryNeeds) -> str:
    machine = needs.machine
    place = f"each {machine.name}" if machine.cuda else machine.name
    size = machine.device_bytes / _GB
    free = f"{size:.1f} GB" if machine.cuda else f"{size:.1f} GB free"
    said = f"{place}: {needs.total / _GB:.1f} of {free}"
    if needs.sequences < 1 and needs.total <= machine.device_bytes:
        return f"{said}, but the KV cache holds no response of {needs.longest:,} tokens"
    return f"{said}, which is tight, since fragments come on top" if needs.tight else said


def _host(found: MemoryFit) -> str:
    total = sum(part.size for part in found.needs.host) / _GB
    free = "" if found.free_host is None else f" of {found.free_host / _GB:.1f} GB free"
    return f"the machine's own memory: {total:.1f} GB{free} ({_listed(found.needs.host)})"


def _fix(found: MemoryFit) -> str:
    if found.changes is not None and found.changed is not None:
        return _changed(found.changes, found.changed, found.needs)
    more = "larger devices" if found.needs.machine.cuda else "more memory, or GPUs"
    levers = f"a smaller model, shorter responses or {more}"
    if found.nearest is None:
        return f"no layout was found: choose {levers}"
    changes, changed = found.nearest
    missing = (changed.total - changed.machine.device_bytes) / _GB
    why = f"still {missing:.1f} GB too much" if missing > 0 else "no room for one response"
    nearest = _changed(changes, changed, found.needs)
    return f"no tried layout fits. The nearest was {nearest}, {why}. Choose {levers}"


def _changed(changes: Changes, changed: MemoryNeeds, needs: MemoryNeeds) -> str:
    machine = changed.machine
    from rollpacker.sim.memory.settings import in_words

    keys = in_words(changes)
    more = machine.workers > needs.machine.workers
    place = f" on {_gpus(machine)}" if more else ""
    size = f"{changed.total / _GB:.1f} of {machine.device_bytes / _GB:.1f} GB"
    learned = "".join(f", {text}" for key, text in _OTHERWISE.items() if key in changes)
    return f"{keys or 'the same job'}{place} ({size}){learned}"


def _gpus(machine: JobMachine) -> str:
    each = f"{machine.devices} x {machine.name}"
    return each if machine.nodes == 1 else f"{machine.nodes} nodes of {each}"


def _amount(part: Part) -> str:
    return f"{'~' if part.estimated else ''}{part.size / _GB:.2f}"


def _listed(parts: tuple[Part, ...]) -> str:
    return ", ".join(f"{part.name} {_amount(part)}" for part in parts)


def _as_json(found: MemoryFit) -> dict[str, Any]:
    needs, machine = found.needs, found.needs.machine
    return {
        "model": found.config.model.path,
        "parameters": found.shape.parameters,
        "active_parameters": found.shape.active,
        "device": machine.name,
        "nodes": machine.nodes,
        "devices": machine.devices,
        "workers": machine.workers,
        "workers_on_device": machine.on_device,
        "memory_gb": machine.device_bytes / _GB,
        "needed_gb": needs.total / _GB,
        "fits": found.fits,
        "processes": needs.division.processes,
        "tensor_parallel": list(needs.division.sizes),
        "worker": [_part(part) for part in needs.worker],
        "trainer": [_part(part) for part in needs.trainer],
        "shared": [_part(part) for part in needs.shared],
        "host": [_part(part) for part in needs.host],
        "shared_weights_gb": needs.shared_weights / _GB,
        "kv_tokens": needs.kv_tokens,
        "sequences": needs.sequences,
        "change": None if found.changes is None else dict(found.changes),
        "change_devices": None if found.changed is None else found.changed.machine.devices,
    }


def _part(part: Part) -> dict[str, Any]:
    return {
        "name": part.name,
        "gb": part.size / _GB,
        "note": part.note,
        "estimated": part.estimated,
    }
