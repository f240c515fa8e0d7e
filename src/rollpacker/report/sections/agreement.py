"""The report's section on how far sampler and trainer agree."""

from __future__ import annotations

from rollpacker.config import RunConfig
from rollpacker.report.drawing.figures import number, present
from rollpacker.report.drawing.page import Section, plain, share
from rollpacker.report.reading.run_folder import RunFolder
from rollpacker.runtime.record.alarms import EXPLAINED, MEASURED, AgreementAlarm


def agreement_section(run: RunFolder) -> list[Section]:
    """What was measured, and what the run warned of; nothing where it was not measured."""
    steps = [each for each in run.metrics if all(name in each for name in MEASURED)]
    if not steps:
        return []
    apart, effective = (present(steps, name) for name in MEASURED)
    text = ""
    if apart and effective:
        text = (
            f"The log-probabilities that sampler and trainer give a token are {_short(apart)} nats "
            f"apart in the mean of a step, {max(apart):.2g} in the worst one; effective sample "
            f"size {share(min(effective))} at least, probability ratios {_ends(run)}."
        )
    if odd := sum(any(number(each, name) is None for name in MEASURED) for each in steps):
        text += f" In {odd} of {len(steps)} steps these are no finite numbers."
    try:
        config = RunConfig.model_validate(run.config)
    except ValueError:  # of another version
        return [Section("agreement", "Sampler and trainer", text)]
    alarm = AgreementAlarm.of(config)
    if alarm is not None:
        said = [line for each in run.metrics if (line := alarm.check(each))]
        text += "".join(f" {line}." for line in said) or (
            f" {config.model.dtype} explains {EXPLAINED[config.model.dtype]:g} nats: they agree."
        )
    return [Section("agreement", "Sampler and trainer", text)]


def _short(values: list[float]) -> str:
    return f"{sum(values) / len(values):.2g}"


def _ends(run: RunFolder) -> str:
    smallest, largest = (present(run.metrics, f"sampler/ratio_{end}") for end in ("min", "max"))
    return f"{plain(min(smallest, default=None))} to {plain(max(largest, default=None))}"
